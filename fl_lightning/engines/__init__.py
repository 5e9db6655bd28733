"""Engines, which train clients: one after the other, or a cohort at once."""

from fl_lightning.engines.settings import LocalSettings as LocalSettings
from fl_lightning.engines.training import LocalTrainer as LocalTrainer
