"""Attacks for studies of robust rules, each of which makes some clients of any method malicious."""

from fl_lightning.attacks.attack import Attack as Attack
from fl_lightning.attacks.labels import label_flip as label_flip
from fl_lightning.attacks.weights import noise as noise
from fl_lightning.attacks.weights import sign_flip as sign_flip
