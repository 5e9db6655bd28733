"""Members of a round in rooms of their own: absent where nobody asks for them."""

from fl_lightning.members.faults import FaultPolicy as FaultPolicy
