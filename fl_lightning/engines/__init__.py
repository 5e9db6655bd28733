"""Engines train clients, one after the other or several at once."""

from fl_lightning.engines.cohort import CohortEngine as CohortEngine
from fl_lightning.engines.local import local_engine as local_engine
from fl_lightning.engines.sequential import SequentialEngine as SequentialEngine
from fl_lightning.engines.settings import LocalSettings as LocalSettings
from fl_lightning.engines.training import LocalTrainer as LocalTrainer
