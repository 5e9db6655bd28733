"""Signals that ask a run to stop, seen at once even while the main thread waits for other processes."""

import os
import signal
import socket
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from time import monotonic
from types import FrameType
from typing import Any

NAMES = ("SIGINT", "SIGTERM", "SIGHUP")
"""Ctrl-C, the request of a cluster or of `kill`, and the end of the terminal."""

STOPS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))
"""The signals that ask a run to stop, as far as the system has them."""

LULL = 30.0
"""Seconds after the first signal in which further ones are ignored.

Launchers and impatient people repeat the request while a run writes what it keeps. Torchrun kills after as long.
"""


class StopSignals:
    """Turns the signals of `STOPS` into one KeyboardInterrupt, and tells another thread of them at once.

    Lightning's own handler of SIGTERM begins a collective, which no other process joins if only one has got the signal.
    Python runs handlers between two instructions of the main thread. A main thread that waits in a collective runs
    none, so that a second way is needed: the system writes the number of a signal into `fileno()` at once.

    Outside the main thread, and on Windows, nothing is changed.
    """

    def __init__(self) -> None:
        self._is_open = False
        self._began_to_end: float | None = None
        self._before: dict[int, Any] = {}
        """The handlers that were there before, by signal."""
        self._wakeup_before = -1
        self._reader, self._writer = socket.socketpair()
        self._reader.settimeout(0)
        self._writer.settimeout(0)
        if can_handle():
            self._is_open = True
            for number in STOPS:
                before = signal.getsignal(number)
                # A process that nohup or a shell's background has started ignores a signal on purpose.
                if before is not signal.SIG_IGN:
                    self._before[number] = before
            self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
            OPEN.add(self)
        self.listen()

    def listen(self) -> None:
        """Set the handlers again, because somebody else may have set others in the meantime."""
        if not self._is_open:
            return
        for number in self._before:
            signal.signal(number, self._handle)

    def fileno(self) -> int:
        """Return the descriptor that can be read once a signal has come."""
        return self._reader.fileno()

    def came(self) -> bool:
        """Return whether a signal of `STOPS` has come since the last call."""
        try:
            numbers = self._reader.recv(4096)
        except (BlockingIOError, OSError):
            return False
        return any(number in self._before for number in numbers)

    def end(self) -> None:
        """Ignore further signals for a while, because the run is ending."""
        if self._began_to_end is None:
            self._began_to_end = monotonic()

    def close(self) -> None:
        """Put back the handlers that were there before. While the run is ending, signals stay ignored."""
        if not self._is_open:
            return
        self._is_open = False
        OPEN.discard(self)
        signal.set_wakeup_fd(self._wakeup_before)
        if not self._is_ending():
            self._put_back()

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def forget(self) -> None:
        """Put back the handlers in a process that was forked from this one, and does not take part in the run."""
        self._began_to_end = None
        self.close()
        # The descriptors are shared with the process that takes part.
        self._reader.close()
        self._writer.close()

    def _is_ending(self) -> bool:
        return self._began_to_end is not None and monotonic() - self._began_to_end < LULL

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Raise in the main thread, but only once.

        Lightning puts this handler back after the run, when the signal means again what it did before.
        """
        if self._is_ending():
            return
        if self._is_open:
            self.end()
            raise KeyboardInterrupt
        self._put_back()
        signal.raise_signal(number)


OPEN: "weakref.WeakSet[StopSignals]" = weakref.WeakSet()
"""The objects whose handlers are set in this process."""


def can_handle() -> bool:
    """Return whether handlers can be set here: in the main thread, and not on Windows."""
    return os.name == "posix" and threading.current_thread() is threading.main_thread()


def _forget_in_child() -> None:
    """Let a forked process, such as a worker of a DataLoader, end by the signals that end any process."""
    for stops in list(OPEN):
        with suppress(ValueError, OSError):
            stops.forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)


@contextmanager
def stops_interrupt() -> Iterator[None]:
    """Context in which the signals of `STOPS` raise a KeyboardInterrupt, as Ctrl-C does."""
    if not can_handle():
        yield
        return
    stops = StopSignals()
    try:
        yield
    finally:
        stops.close()


@contextmanager
def hangup_interrupts() -> Iterator[None]:
    """Context in which the end of the terminal raises a KeyboardInterrupt, unless the process treats it in another way.

    A run of one process leaves the other signals of `STOPS` to Lightning.
    """
    number = getattr(signal, "SIGHUP", None)
    if number is None or not can_handle() or signal.getsignal(number) is not signal.SIG_DFL:
        yield
        return
    signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_DFL)
