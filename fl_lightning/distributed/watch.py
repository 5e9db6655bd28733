"""The watch over the processes of a run, which ends all of them if one ends, fails or hangs."""

import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, wait
from time import monotonic
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist

from fl_lightning.distributed.stops import StopSignals
from fl_lightning.utils.life import LIFE, SignOfLife
from fl_lightning.utils.tracebacks import module_of

TICK = 0.5
"""Seconds between two messages."""

GRACE = 10.0
"""Seconds in which a process that was told to end may do so by itself."""

HEARING = 1.0
"""Seconds in which a process that was asked to stop may hear of another reason for the end of the run.

Torch's launcher asks the other processes to stop as soon as one has ended.
"""

BEAT = "beat"
"""Kind of a message with a sign of life."""

BYE = "bye"
"""The message of a process that takes part no longer."""

END = "end"
"""Kind of a message with a verdict."""

SIGNAL = getattr(signal, "SIGUSR2", None)
"""Signal that makes the main thread raise. None on Windows, where a process ends when its next collective fails."""

LOCAL = ("127.0.0.1", "localhost", "::1")
"""Addresses of this host."""


class RemoteError(RuntimeError):
    """Reports a failure in another process, with its rank and the cause."""


class Verdict(NamedTuple):
    """Says why a run ends.

    Args:
        text: The reason as a sentence. Empty if a process was asked to stop.
        rank: The rank of the process at fault.
    """

    text: str
    rank: int

    def error(self) -> BaseException:
        """Return the error that the processes raise."""
        return RemoteError(self.text) if self.text else KeyboardInterrupt()


class Peer:
    """Holds what is known here of a process of the run.

    Args:
        connection: The connection to the process. None for this process itself.
        rank: The rank of the process.
        host: The host on which the process runs.
        pid: The id of the process on its host.

    Attributes:
        sign: The latest sign of life.
        left: Whether the process takes part no longer.
        heard: When the latest sign of life came.
        changed: When the latest sign of life came that differed from the sign before.
    """

    def __init__(self, connection: Connection | None, *, rank: int, host: str, pid: int) -> None:
        self.connection = connection
        self.rank = rank
        self.host = host
        self.pid = pid
        self.sign = SignOfLife()
        self.left = False
        self.heard = monotonic()
        self.changed = self.heard

    def note(self, sign: SignOfLife) -> None:
        """Take in a sign of life."""
        self.heard = monotonic()
        if sign != self.sign:
            self.sign = sign
            self.changed = self.heard

    def leave(self) -> None:
        """Mark the process as no longer taking part."""
        self.left = True

    def kill(self) -> None:
        """End the process if it runs on this host and is not this process."""
        if self.host == socket.gethostname() and self.pid != os.getpid():
            with suppress(OSError):
                os.kill(self.pid, getattr(signal, "SIGKILL", signal.SIGTERM))


class Watch:
    """Exchanges signs of life with the other processes, in a thread.

    Rank 0 judges the others, and the others judge rank 0. A process that must end raises an error in its main thread,
    at once if that runs Python, or when its collective fails because a process is gone. A process that does not end in
    `GRACE` seconds is ended.

    Args:
        timeout: Seconds between two signs of life of a process for which others wait.
        last_word: Reports an error if the main thread does not get to raise it.
        starter: Id of the process that has started this one and waits for it. None if there is no such process.

    Attributes:
        rank: The rank of this process.
        world: Number of processes.
        verdict: Why the run ends. None while it goes on.
    """

    def __init__(self, timeout: float, last_word: Callable[[BaseException], None], starter: int | None = None) -> None:
        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.timeout = timeout
        self.last_word = last_word
        self.verdict: Verdict | None = None
        self._starter = starter
        self._decided = threading.Event()
        """Set once there is a verdict."""
        self._closed = threading.Event()
        """Set once this process takes part in no collective any more."""
        self._notified = False
        """Whether the main thread has met an error or closed the watch, so that it needs no signal."""
        self._lock = threading.Lock()
        """Held while a message is sent."""
        self._me = Peer(None, rank=self.rank, host=socket.gethostname(), pid=os.getpid())
        self._peers = {self.rank: self._me}
        """Rank 0 knows all processes, the others know rank 0 and themselves."""
        listener = self._connect()
        self._stops = StopSignals()
        self._asked: float | None = None
        """When this process was asked to stop."""
        self._handler: Any = None
        """The handler of `SIGNAL` that was there before."""
        self._handles = SIGNAL is not None and threading.current_thread() is threading.main_thread()
        if SIGNAL is not None and self._handles:
            self._handler = signal.signal(SIGNAL, self._raise)
        threading.Thread(target=self._run, args=(listener,), name="watch", daemon=True).start()

    def _connect(self) -> Listener | None:
        """Connect this process with rank 0.

        Returns:
            On rank 0, what accepts the connections of the others. None on the other ranks.
        """
        host = os.environ.get("MASTER_ADDR", LOCAL[0])
        listener: Listener | None = None
        port_and_key: list[Any] = [0, b""]
        if self.rank == 0:
            address = LOCAL[0] if host in LOCAL else ""
            key = secrets.token_bytes(32)
            listener = Listener((address, 0), backlog=self.world, authkey=key)
            port_and_key = [listener.address[1], key]
        dist.broadcast_object_list(port_and_key, 0)
        if listener is None:
            port, key = port_and_key
            connection = Client((host, port), authkey=key)
            connection.send((self.rank, self._me.host, self._me.pid))
            root_host, root_pid = connection.recv()
            self._peers[0] = Peer(connection, rank=0, host=root_host, pid=root_pid)
        return listener

    # --- called by the main thread ---

    def explain(self, error: BaseException) -> BaseException:
        """Tell the others of an error that ends this process, and return the run's first error.

        The caller raises what is returned.
        """
        self._notified = True
        # Torch's launcher asks this process to stop as soon as another one has ended, and cleaning up must go on.
        self._stops.end()
        of_a_collective = isinstance(error, RuntimeError) and module_of(error).startswith("torch.distributed")
        if self.verdict is None and of_a_collective:
            # Another process has ended, and the watch will tell which and why.
            self._decided.wait(GRACE / 2)
        if self.verdict is None and isinstance(error, KeyboardInterrupt):
            # The watch decides whether there is another reason.
            self._decided.wait(2 * HEARING)
        if self.verdict is not None:
            return self.verdict.error()
        if isinstance(error, KeyboardInterrupt):
            self._tell(Verdict("", self.rank))
        elif not isinstance(error, RemoteError):
            words = " ".join(str(error).split())
            sentence = f"rank {self.rank} of {self.world} failed: {type(error).__name__}: {words}"
            self._tell(Verdict(sentence, self.rank))
        return error

    def listen(self) -> None:
        """Take over the signals that ask a run to stop, again after Lightning has set its own handlers."""
        self._stops.listen()

    @property
    def reports(self) -> bool:
        """Whether this process reports why the run ended: rank 0, or rank 1 if rank 0 has gone."""
        return self.rank == 0 or (self.rank == 1 and self._peers[0].left)

    def close(self) -> None:
        """End the watch, because this process takes part in no collective any more."""
        self._closed.set()
        self._notified = True
        for peer in self._others():
            self._send(peer, BYE)
        self._stops.close()
        if SIGNAL is not None and self._handles:
            # The default handler would end the process, and a signal may be on its way.
            is_default = self._handler in (signal.SIG_DFL, None)
            signal.signal(SIGNAL, signal.SIG_IGN if is_default else self._handler)

    # --- the thread ---

    def _run(self, listener: Listener | None) -> None:
        """Exchange messages until the watch is closed, or all others have left.

        Args:
            listener: Accepts the connections of the others, on rank 0.
        """
        if listener is not None:
            self._accept_others(listener)
        next_beat = monotonic()
        while not self._closed.is_set() and self._others():
            self._receive_until(next_beat)
            if monotonic() >= next_beat:
                next_beat = monotonic() + TICK
                self._beat()

    def _accept_others(self, listener: Listener) -> None:
        """Accept the connections of all other processes."""
        while len(self._peers) < self.world and not self._closed.is_set():
            # A scan of ports does not know the key, and a process may end before it has said its rank.
            with suppress(AuthenticationError, EOFError, OSError):
                self._accept(listener)

    def _accept(self, listener: Listener) -> None:
        """Accept the connection of another process, and exchange what both know of themselves."""
        connection = listener.accept()
        rank, host, pid = connection.recv()
        connection.send((self._me.host, self._me.pid))
        self._peers[rank] = Peer(connection, rank=rank, host=host, pid=pid)

    def _receive_until(self, next_beat: float) -> None:
        """Wait for messages until the next beat, and take in the first that come."""
        peers: dict[Any, Peer] = {}
        for peer in self._others():
            if peer.connection is not None:
                peers[peer.connection] = peer
        seconds = max(0.0, next_beat - monotonic())
        signals = self._stops.fileno()
        for source in wait([*peers, signals], seconds):
            if source != signals:
                self._receive(peers[source])
            elif self._stops.came() and self._asked is None:
                self._asked = monotonic()

    def _beat(self) -> None:
        """Send a sign of life to the others, and judge them."""
        self._me.note(LIFE.sign())  # This process is judged by a fresh sign, too.
        for peer in self._others():
            self._send(peer, (BEAT, self._me.sign))
        if self._starter is not None and os.getppid() != self._starter:
            self._decide(Verdict("the process that has started the run is gone", self.rank))
        if self._asked is not None and monotonic() - self._asked > HEARING:
            self._stop()
        if self.verdict is None and not self._notified:
            self._judge()

    def _receive(self, peer: Peer) -> None:
        """Take in a message of a process, or the end of the process if there is no message."""
        try:
            message: Any = BYE if peer.connection is None else peer.connection.recv()
        except (EOFError, OSError):
            peer.leave()
            if not self._closed.is_set():
                happened = f"rank {peer.rank} of {self.world} ended without a word, last seen {peer.sign}"
                self._decide(Verdict(f"{happened}; was it killed, or was there no memory left", peer.rank))
            return
        if message == BYE:
            peer.leave()
            return
        kind, content = message
        if kind == END:
            self._decide(Verdict(*content))
        else:
            peer.note(SignOfLife(*content))

    def _stop(self) -> None:
        """End the run because this process was asked to stop, unless there is another reason."""
        if self.verdict is not None:
            return
        verdict = Verdict("", self.rank)
        if self.rank != 0:
            self._tell(verdict)
        self._decide(verdict)

    def _judge(self) -> None:
        """End the run if a process gives no sign of life while others wait for it."""
        if self.rank == 0:
            self._judge_all()
        else:
            self._judge_root()

    def _judge_root(self) -> None:
        """End the run if rank 0 sends nothing. Rank 0 judges itself as long as its thread runs."""
        root = self._peers[0]
        if monotonic() - root.heard > self.timeout + GRACE:
            self._end(root, f"rank 0 of {self.world} has given no sign of life")

    def _judge_all(self) -> None:
        """End the run if a process works on without a sign of life, or if all wait for each other."""
        peers = [peer for peer in self._peers.values() if not peer.left]
        now = monotonic()
        silent = [peer for peer in peers if now - peer.changed > self.timeout]
        # A process that waits is not at fault, unless it is frozen: then nothing is heard of it.
        at_fault = [peer for peer in silent if not peer.sign.waits or now - peer.heard > self.timeout]
        if at_fault and any(peer.sign.waits for peer in peers):
            first = at_fault[0]
            self._end(first, f"rank {first.rank} of {self.world} has given no sign of life")
        elif not at_fault and len(silent) == self.world:
            self._end(self._peers[0], f"all {self.world} processes have waited for each other")

    def _end(self, peer: Peer, happened: str) -> None:
        """End the run because a process is silent.

        Args:
            peer: The process.
            happened: What happened, without the time.
        """
        remedy = "raise process_timeout of ClientParallelStrategy if it needs longer"
        self._decide(Verdict(f"{happened} for {self.timeout:g} s, last seen {peer.sign}; {remedy}", peer.rank))
        peer.kill()

    def _tell(self, verdict: Verdict) -> None:
        """Pass a verdict on, from rank 0 to all, and from the others to rank 0."""
        for peer in self._others():
            self._send(peer, (END, tuple(verdict)))

    def _decide(self, verdict: Verdict) -> None:
        """End this process, and on rank 0 all others, unless that was decided before."""
        if self.verdict is not None:
            return
        self.verdict = verdict
        self._decided.set()
        if self.rank == 0:
            self._tell(verdict)
        if not self._notified:
            threading.Thread(target=self._insist, daemon=True).start()

    def _insist(self) -> None:
        """Make the main thread raise the verdict, or end the process if the main thread is stuck."""
        # Without our handler the signal would end the process at once.
        if SIGNAL is not None and self._handles and not self._closed.is_set():
            with suppress(OSError):
                signal.pthread_kill(threading.main_thread().ident or 0, SIGNAL)
        was_closed = self._closed.wait(GRACE)
        if not was_closed and not self._notified and self.verdict is not None:
            self.last_word(self.verdict.error())
            os._exit(1)

    def _raise(self, signum: int, frame: FrameType | None) -> None:
        """Handle the signal that `_insist` sends."""
        if self.verdict is not None and not self._notified:
            self._notified = True
            self._stops.end()
            raise self.verdict.error()

    def _others(self) -> list[Peer]:
        """Return the other processes that are connected with this one and have not left."""
        return [peer for peer in self._peers.values() if peer is not self._me and not peer.left]

    def _send(self, peer: Peer, message: Any) -> None:
        """Send a message to a process. If the process is gone, nothing happens."""
        with self._lock, suppress(OSError):
            if peer.connection is not None:
                peer.connection.send(message)
