"""One line that is redrawn in place on a terminal, and printed now and then into anything else."""

import logging
import os
import shutil
import sys
from collections.abc import Callable
from time import monotonic
from typing import Any, TextIO

LOGGERS = (None, "pytorch_lightning", "lightning_fabric", "lightning.pytorch", "py.warnings")
"""Loggers whose handlers may write to the terminal while the line is shown; None is the root."""


class Above:
    """A stream whose output appears above a status line: the line is taken away first, and drawn again later.

    Args:
        line: the status line.
        stream: where the output goes.
    """

    def __init__(self, line: "StatusLine", stream: TextIO) -> None:
        self.line, self.stream = line, stream

    def write(self, text: str) -> int:
        self.line.clear()
        if text:
            self.line.torn = not text.endswith("\n")
        return self.stream.write(text)

    def writelines(self, lines: list[str]) -> None:
        for text in lines:
            self.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


class StatusLine:
    """Shows a text on standard output, no more often than asked.

    Args:
        interval: least seconds between two drawings on a terminal.
        log_interval: least seconds between two printed lines elsewhere; in a long run 1 % of the time so far.
    """

    def __init__(self, interval: float, log_interval: float) -> None:
        self.interval, self.log_interval = interval, log_interval
        self.stream = sys.stdout
        self.interactive = self.stream.isatty() and os.environ.get("TERM") != "dumb"
        self.colour = self.interactive and not os.environ.get("NO_COLOR")
        self.start = monotonic()
        self.due = self.start + (0 if self.interactive else log_interval)
        self.drawn = False
        self.torn = False
        """True while the cursor stands behind unfinished output of somebody else."""
        self._replaced: list[tuple[logging.StreamHandler[Any], Any]] = []
        if self.interactive:
            self._stand_above()

    @property
    def unicode(self) -> bool:
        """True where the stream can take characters beyond ASCII."""
        try:
            "━".encode(self.stream.encoding or "ascii")
        except (UnicodeEncodeError, LookupError):
            return False
        return True

    @property
    def width(self) -> int:
        """Columns that a text may have."""
        return shutil.get_terminal_size().columns - 1 if self.interactive else 100

    def update(self, text: Callable[[], str]) -> None:
        """Draw the text if it is time to; else this costs next to nothing."""
        now = monotonic()
        if now >= self.due:
            self.draw(text())
            self.due = now + (self.interval if self.interactive else max(self.log_interval, (now - self.start) / 100))

    def draw(self, text: str) -> None:
        if self.interactive:
            self.stream.write(("\n" if self.torn else "\r\x1b[2K") + text)
            self.drawn, self.torn = True, False
        else:
            self.stream.write(text + "\n")
        self.stream.flush()

    def clear(self) -> None:
        """Take the line away, so that other output can be written in its place."""
        if self.drawn:
            self.stream.write("\r\x1b[2K")
            self.drawn = False

    def close(self, text: str) -> None:
        """Draw the text a last time and leave it there."""
        self.draw(text)
        if self.interactive:
            self.stream.write("\n")
            self.stream.flush()
        for name in ("stdout", "stderr"):
            own = getattr(sys, name)
            if isinstance(own, Above) and own.line is self:
                setattr(sys, name, own.stream)
        for handler, stream in self._replaced:
            handler.setStream(stream)
        self._replaced = []

    def _stand_above(self) -> None:
        """Let what others write to the terminal meanwhile appear above the line."""
        handlers = [handler for name in LOGGERS for handler in logging.getLogger(name).handlers]
        for handler in handlers:
            if (
                type(handler) is logging.StreamHandler
                and handler.stream in (sys.stdout, sys.stderr)
                and handler.stream.isatty()
            ):
                self._replaced.append((handler, handler.stream))
                handler.setStream(Above(self, handler.stream))
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream.isatty():
                setattr(sys, name, Above(self, stream))
