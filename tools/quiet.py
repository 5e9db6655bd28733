"""Runs of tools that write nothing to the terminal or to files."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pytorch_lightning import Trainer


def quiet_trainer(rounds: int, **settings: Any) -> Trainer:
    """Make a Trainer on the CPU that logs nothing, stores nothing and shows nothing.

    Args:
        rounds: Number of rounds.
        settings: Further arguments of the Trainer.
    """
    return Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )


@contextmanager
def silent() -> Iterator[None]:
    """Suppress warnings and log messages within the block."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
