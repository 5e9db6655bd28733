"""Collects no file whose package of the extra `third-party` is missing."""

from importlib.util import find_spec

collect_ignore = [] if find_spec("lightly") else ["contrastive.py"]
