"""Watch over the processes of a run, which ends all of them, with one report, if one ends, fails or hangs."""

import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener, wait
from time import monotonic
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

from fl_lightning.utils.life import LIFE, Sign
from fl_lightning.utils.tracebacks import module_of

TICK = 0.5
"""Seconds between two messages."""

GRACE = 10.0
"""Seconds in which a process that was told to end may do so by itself."""

BEAT = "beat"
BYE = "bye"
END = "end"
SIGNAL = getattr(signal, "SIGUSR2", None)  # not on Windows, where a process ends when its next collective fails
LOCAL = ("127.0.0.1", "localhost", "::1")


class RemoteError(RuntimeError):
    """Error for a failure in another process, with its rank and the cause."""


class Verdict(NamedTuple):
    """Reason for which a run ends.

    Args:
        text: a sentence; empty after Ctrl-C.
        rank: at fault.
    """

    text: str
    rank: int

    def error(self) -> BaseException:
        """Make the error that the processes raise."""
        return RemoteError(self.text) if self.text else KeyboardInterrupt()


class Peer:
    """Another process, as far as it is known here.

    Args:
        connection: to it; None: it is this process.
        rank: of it.
        host: that it runs on.
        pid: its process id there.
    """

    def __init__(self, connection: Connection | None, rank: int, host: str, pid: int) -> None:
        self.connection = connection
        self.rank = rank
        self.host = host
        self.pid = pid
        self.sign = Sign()
        self.left = False
        self.changed = self.heard = monotonic()

    def note(self, sign: Sign) -> None:
        """Take in its sign of life."""
        self.heard = monotonic()
        if sign != self.sign:
            self.sign = sign
            self.changed = self.heard

    def leave(self) -> None:
        """Mark it as no longer taking part."""
        self.left = True

    def kill(self) -> None:
        """End it, where it runs on this host."""
        if self.host == socket.gethostname() and self.pid != os.getpid():
            with suppress(OSError):
                os.kill(self.pid, getattr(signal, "SIGKILL", signal.SIGTERM))


class Watch:
    """Exchanges signs of life with the other processes, in a thread, where rank 0 judges, and the others judge rank 0.

    A process that must end raises in its main thread, at once where that runs Python, else when its collective fails
    for want of a process; one that does not end in `GRACE` seconds is ended.

    Args:
        timeout: seconds between two signs of life of a process for which others wait.
        last_word: called with the error, where the main thread does not get to raise it.
        starter: id of the process that has started this one and waits for it; None: there is none.
    """

    def __init__(self, timeout: float, last_word: Callable[[BaseException], None], starter: int | None = None) -> None:
        self.rank, self.world = rank, world = dist.get_rank(), dist.get_world_size()
        self.timeout = timeout
        self.last_word = last_word
        self._starter = starter
        self.verdict: Verdict | None = None
        self._decided = threading.Event()
        self._closed = threading.Event()
        self._notified = False
        self._lock = threading.Lock()
        me = Peer(None, rank, socket.gethostname(), os.getpid())
        self._me = me
        self._peers = {rank: me}
        host = os.environ.get("MASTER_ADDR", LOCAL[0])
        listener: Listener | None = None
        place: list[Any] = [0, b""]
        if rank == 0:
            key = secrets.token_bytes(32)
            listener = Listener((LOCAL[0] if host in LOCAL else "", 0), backlog=world, authkey=key)
            place = [listener.address[1], key]
        dist.broadcast_object_list(place, 0)
        if listener is None:
            there = Client((host, place[0]), authkey=place[1])
            there.send((rank, me.host, me.pid))
            self._peers[0] = Peer(there, 0, *there.recv())
        if SIGNAL is not None and threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(SIGNAL, self._raise)
        threading.Thread(target=self._run, args=(listener,), name="watch", daemon=True).start()

    # --- called by the main thread -----------------------------------------------------------------------------

    def explain(self, error: BaseException) -> BaseException:
        """Tell the others of an error that ends this process, and return the run's first error to be raised."""
        self._notified = True
        of_a_collective = isinstance(error, RuntimeError) and module_of(error).startswith("torch.distributed")
        if self.verdict is None and of_a_collective:
            self._decided.wait(GRACE / 2)  # another process has ended, and the watch will tell which and why
        if self.verdict is not None:
            return self.verdict.error()
        if isinstance(error, KeyboardInterrupt):
            self._tell(Verdict("", self.rank))
        elif not isinstance(error, RemoteError):
            sentence = " ".join(str(error).split())
            sentence = f"rank {self.rank} of {self.world} failed: {type(error).__name__}: {sentence}"
            self._tell(Verdict(sentence, self.rank))
        return error

    @property
    def reports(self) -> bool:
        """Tell whether this process reports why the run ended: rank 0, or where that has gone, rank 1."""
        return self.rank == 0 or (self.rank == 1 and self._peers[0].left)

    def close(self) -> None:
        """End the watch: this process takes part in no collective any more."""
        self._closed.set()
        self._notified = True
        for peer in self._others():
            self._send(peer, BYE)
        if SIGNAL is not None and threading.current_thread() is threading.main_thread():
            ends = self._handler in (signal.SIG_DFL, None)  # and a signal may be on its way
            signal.signal(SIGNAL, signal.SIG_IGN if ends else self._handler)

    # --- the thread --------------------------------------------------------------------------------------------

    def _run(self, listener: Listener | None) -> None:
        while listener is not None and len(self._peers) < self.world:
            there = listener.accept()
            peer = Peer(there, *there.recv())
            there.send((self._me.host, self._me.pid))
            self._peers[peer.rank] = peer
        next_beat = monotonic()
        while not self._closed.is_set() and self._others():
            connections = {peer.connection: peer for peer in self._others()}
            for ready in wait([c for c in connections if c is not None], max(0.0, next_beat - monotonic())):
                self._receive(connections[ready])  # type: ignore[index]
            if monotonic() < next_beat:
                continue
            next_beat = monotonic() + TICK
            self._me.note(LIFE.sign())  # before it is judged
            for peer in self._others():
                self._send(peer, (BEAT, self._me.sign))
            if self._starter is not None and os.getppid() != self._starter:
                self._decide(Verdict("the process that has started the run is gone", self.rank))
            if self.verdict is None and not self._notified:
                self._judge()

    def _receive(self, peer: Peer) -> None:
        """Take a message, or without one the end of its process."""
        try:
            message = peer.connection.recv() if peer.connection is not None else BYE
        except (EOFError, OSError):
            peer.leave()
            if not self._closed.is_set():
                happened = f"rank {peer.rank} of {self.world} ended without a word, last seen {peer.sign}"
                self._decide(Verdict(f"{happened}; was it killed, or was there no memory left", peer.rank))
            return
        if message == BYE:
            peer.leave()
        elif message[0] == END:
            self._decide(Verdict(*message[1]))
        else:
            peer.note(Sign(*message[1]))

    def _judge(self) -> None:
        """End the run where a process gives no sign of life while others wait for it."""
        root = self._peers[0]
        peers = list(self._peers.values())
        now = monotonic()
        if self.rank:  # rank 0 judges itself as long as its thread runs
            if now - root.heard > self.timeout + GRACE:
                self._end(root, f"rank 0 of {self.world} has given no sign of life")
            return
        silent = [peer for peer in peers if not peer.left and now - peer.changed > self.timeout]
        busy = [peer for peer in silent if not peer.sign.waits or now - peer.heard > self.timeout]  # or frozen
        if busy and any(peer.sign.waits for peer in peers):
            self._end(busy[0], f"rank {busy[0].rank} of {self.world} has given no sign of life")
        elif not busy and len(silent) == self.world:
            self._end(root, f"all {self.world} processes have waited for each other")

    def _end(self, peer: Peer, happened: str) -> None:
        """End the run since a process is silent."""
        remedy = "raise process_timeout of ClientParallelStrategy if it needs longer"
        self._decide(Verdict(f"{happened} for {self.timeout:g} s, last seen {peer.sign}; {remedy}", peer.rank))
        peer.kill()

    def _tell(self, verdict: Verdict) -> None:
        """Pass a verdict on: rank 0 to all, the others to rank 0."""
        for peer in self._others():
            self._send(peer, (END, tuple(verdict)))

    def _decide(self, verdict: Verdict) -> None:
        """End this process, and by rank 0 all others."""
        if self.verdict is not None:
            return
        self.verdict = verdict
        self._decided.set()
        if self.rank == 0:
            self._tell(verdict)
        if not self._notified:
            threading.Thread(target=self._insist, daemon=True).start()

    def _insist(self) -> None:
        """Raise in the main thread, or end the process where that is stuck."""
        if SIGNAL is not None and not self._closed.is_set():
            with suppress(OSError):
                signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
        if not self._closed.wait(GRACE) and not self._notified and self.verdict is not None:
            self.last_word(self.verdict.error())
            os._exit(1)

    def _raise(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal that `_insist` sends."""
        if self.verdict is not None and not self._notified:
            self._notified = True
            raise self.verdict.error()

    def _others(self) -> list[Peer]:
        return [peer for peer in self._peers.values() if peer is not self._me and not peer.left]

    def _send(self, peer: Peer, message: Any) -> None:
        with self._lock, suppress(OSError):
            if peer.connection is not None:
                peer.connection.send(message)
