"""Suppresses log messages and warnings that users cannot act on."""

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from fl_lightning.utils.text import printable

WARNINGS = (
    r"LightningCLI's args parameter is intended",  # main() is called with arguments by tests and notebooks
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # Lightning's own use of torch.utils._pytree
    r"The '\w+' does not have many workers",  # the data lie in memory: there are no workers to add
    r"The number of training batches \(1\) is smaller than the logging interval",  # a round is one batch
    r"Total length of `list` across ranks is zero",  # the server of a federation may have no samples
    r"Checkpoint directory .* exists and is not empty",  # a continued run keeps its folder
    r"Be aware that when using `ckpt_path`, callbacks used to create",  # validate and test write nothing
    r"Couldn't infer the batch indices",  # predictions are written in the order of the samples
    r"The dirpath has changed from",  # a checkpoint that is continued in another folder
)
"""Beginnings of warnings, each with the reason why it is not shown."""

INFOS = (
    "💡 Tip:",
    "GPU available: False",
    "TPU available: False",
    "Seed set to",
    "Restor",
    "Loaded model weights",
    "Received SIGTERM",
    "Terminating process",
    "Unable to shutdown process",
)
"""Beginnings of notes of Lightning and torch that say nothing about the run; of its processes the first error does."""


def worth_showing(record: logging.LogRecord) -> bool:
    """Return False for the notes in `INFOS`, and escape what others would tell the terminal, such as a file's name."""
    message = record.getMessage()
    text = printable(message, keep="\n\t")
    if text != message:
        record.msg = text
        record.args = ()
    without_rank = re.sub(r"^\[rank: \d+\] ", "", text)
    return not without_rank.startswith(INFOS)


def loggers_of_lightning() -> list[logging.Logger]:
    """Return the loggers of both packages of Lightning that give notes, and of torch's processes.

    The package that was imported last has the notes.
    """
    names = ["torch.multiprocessing.spawn"]
    for package in ("pytorch_lightning", "lightning_fabric", "lightning.pytorch", "lightning.fabric"):
        for place in ("", ".utilities.rank_zero", ".utilities.seed", ".trainer.connectors.signal_connector"):
            names.append(package + place)
    return [logging.getLogger(name) for name in names]


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Suppress the warnings in `WARNINGS` and the notes in `INFOS` within the block."""
    loggers = loggers_of_lightning()
    with warnings.catch_warnings():
        for message in WARNINGS:
            warnings.filterwarnings("ignore", message=rf"\s*{message}")
        for logger in loggers:
            logger.addFilter(worth_showing)
        try:
            yield
        finally:
            for logger in loggers:
                logger.removeFilter(worth_showing)
