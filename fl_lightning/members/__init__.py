"""Members of a round that have a file of their own. A run without a feature has no member for it."""

from fl_lightning.members.faults import FaultPolicy as FaultPolicy
