"""The watch of several ranks, step by step: its threads run at once, and its time passes when a test says so."""

import os
import secrets
import signal
import socket
import threading
from multiprocessing import AuthenticationError, Pipe
from types import SimpleNamespace

import pytest

from fl_lightning.distributed import watch as watches
from fl_lightning.distributed.watch import (
    BEAT,
    BYE,
    END,
    GRACE,
    HEARING,
    SIGNAL,
    TICK,
    Peer,
    RemoteError,
    Verdict,
    Watch,
)
from fl_lightning.utils.life import Life, SignOfLife
from tests.distributed.test_stops import handlers_stay, stops_of_the_test_end  # noqa: F401
from tests.distributed.worlds import World

TIMEOUT = 20.0
RUN = Watch._run
INSIST = Watch._insist
NO_PROCESS = 2**30
"""Above every id of a process."""

LONGEST = 10
"""Real seconds after which a message that was sent counts as lost. No test waits for it."""


class Clock:
    """A clock that stands still."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class AtOnce:
    """Stands for a thread: it runs when it is started, in the thread that starts it."""

    def __init__(self, target, args=(), name="", daemon=False):
        assert daemon  # a process whose main thread has ended must end
        self.target = target
        self.args = args

    def start(self):
        self.target(*self.args)


class Waits:
    """Stands for an event that is never set: notes the seconds for which it is waited for.

    Args:
        meanwhile: What happens while it is waited for.
    """

    def __init__(self, meanwhile=lambda: None):
        self.seconds = []
        self.meanwhile = meanwhile

    def is_set(self):
        return False

    def set(self):
        pass

    def wait(self, seconds):
        self.seconds.append(seconds)
        self.meanwhile()
        return False


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(watches, "monotonic", clock)
    return clock


@pytest.fixture(autouse=True)
def life(monkeypatch):
    """What this process does. The ranks share it."""
    life = Life()
    monkeypatch.setattr(watches, "LIFE", life)
    return life


@pytest.fixture(autouse=True)
def threads_run_at_once(monkeypatch):
    """A watch accepts the others, and does nothing more by itself."""
    stand_in = SimpleNamespace(**vars(threading))
    stand_in.Thread = AtOnce
    monkeypatch.setattr(watches, "threading", stand_in)
    monkeypatch.setattr(Watch, "_run", lambda watch, listener: listener and watch._accept_others(listener))


@pytest.fixture(autouse=True)
def insisted(monkeypatch):
    """The watches that make their main thread raise."""
    insisted = []

    def insist(watch):
        insisted.append(watch)

    monkeypatch.setattr(Watch, "_insist", insist)
    return insisted


@pytest.fixture(autouse=True)
def sent(monkeypatch):
    """The signals that were sent, to a thread or a process."""
    sent = []
    monkeypatch.setattr(signal, "pthread_kill", lambda *thread_and_signal: sent.append(thread_and_signal))
    monkeypatch.setattr(os, "kill", lambda *process_and_signal: sent.append(process_and_signal))
    return sent


@pytest.fixture
def exits(monkeypatch):
    """The codes with which the process was ended."""
    exits = []
    monkeypatch.setattr(os, "_exit", exits.append)
    return exits


@pytest.fixture
def last_words():
    return []


@pytest.fixture
def ranks(monkeypatch, last_words):
    """Make the watches of some ranks, by rank. One may be this thread's, which is the main one."""
    made = []
    before = signal.getsignal(SIGNAL)

    def make(size, *, here=0, starter=None):
        world = World(size)
        monkeypatch.setattr(watches, "dist", world)
        made.extend(world.run(lambda rank: Watch(TIMEOUT, last_words.append, starter), here=here))
        assert all(isinstance(each, Watch) for each in made), made
        return made

    yield make
    for each in made:
        each.close()
    signal.signal(SIGNAL, before)
    stops_of_the_test_end()


def hear(watch, condition=None):
    """Let a watch take in messages until a condition holds, by default until it has a verdict."""
    for _ in range(20):
        if condition() if condition else watch.verdict:
            return
        watch._receive_until(watches.monotonic() + LONGEST)
    raise AssertionError("no such message has come")


def told(watch, by):
    """Return the messages that another watch has sent to a watch, and that are not taken in."""
    mark = "nothing was sent after this"
    by._send(by._peers[watch.rank], mark)
    connection = watch._peers[by.rank].connection
    messages = []
    while connection.poll(LONGEST) and (message := connection.recv()) != mark:
        messages.append(message)
    return messages


def raised_in(module, error):
    """Return an error that code of a module has raised."""
    try:
        exec("raise error", {"__name__": module, "error": error})
    except type(error) as raised:
        return raised


# --- the ranks find each other ---


def test_rank_0_knows_all_and_the_others_know_rank_0(ranks):
    made = ranks(3)
    assert [sorted(each._peers) for each in made] == [[0, 1, 2], [0, 1], [0, 2]]
    for each in made:
        assert {(peer.host, peer.pid) for peer in each._peers.values()} == {(socket.gethostname(), os.getpid())}


@pytest.mark.parametrize(
    ("host", "address"),
    [(None, "127.0.0.1"), ("localhost", "127.0.0.1"), ("::1", "127.0.0.1"), ("node7", "")],
)
def test_the_port_is_open_to_other_hosts_only_if_there_are_some(monkeypatch, host, address):
    """With a key of its own, which the process group passes on."""
    opened = []
    passed_on = []

    def listen(place, backlog, authkey):
        opened.append((place, backlog, authkey))
        return SimpleNamespace(address=(place[0], 4321))

    monkeypatch.delenv("MASTER_ADDR", raising=False)
    if host is not None:
        monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setattr(watches, "Listener", listen)
    monkeypatch.setattr(secrets, "token_bytes", lambda count: b"k" * count)
    world = SimpleNamespace(broadcast_object_list=lambda values, source: passed_on.append((list(values), source)))
    monkeypatch.setattr(watches, "dist", world)
    watch = Watch.__new__(Watch)
    watch.rank = 0
    watch.world = 3
    assert watch._connect().address == (address, 4321)
    assert opened == [((address, 0), 3, b"k" * 32)]
    assert passed_on == [([4321, b"k" * 32], 0)]


class Door:
    """Stands for a listener at which others than the ranks come, too."""

    def __init__(self, comers):
        self.comers = comers

    def accept(self):
        comer = self.comers.pop(0)
        if isinstance(comer, Exception):
            raise comer
        return comer


@pytest.mark.parametrize(
    "stranger",
    [
        AuthenticationError("digest received was wrong"),
        OSError("bad message length"),
        EOFError(),
        ConnectionResetError(),
        None,
    ],
)
def test_a_stranger_at_the_port_keeps_no_rank_out(ranks, stranger):
    """As a scan of ports, or a process that ends before it has said its rank, which is None here."""
    (alone,) = ranks(1)
    alone.world = 2
    comers = []
    for _ in range(2):
        ours, theirs = Pipe()
        comers.append(ours)
        if len(comers) == 1:
            theirs.close()
    theirs.send((1, "host", 7))
    if stranger is not None:
        comers[0] = stranger
    alone._accept_others(Door(comers))
    assert theirs.recv() == (socket.gethostname(), os.getpid())
    assert (alone._peers[1].host, alone._peers[1].pid) == ("host", 7)


def test_a_closed_watch_accepts_nobody(ranks):
    """Otherwise its thread would try for ever if a rank never came."""
    (alone,) = ranks(1)
    alone.world = 2
    alone.close()
    alone._accept_others(Door([]))


# --- an error of one rank ---


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_error_of_one_rank_is_the_verdict_of_all_others(ranks, rank):
    made = ranks(3)
    error = ValueError("a bug\n of one's   own")
    assert made[rank].explain(error) is error
    for each in made:
        if each.rank != rank:
            hear(each)
            assert each.verdict == Verdict(f"rank {rank} of 3 failed: ValueError: a bug of one's own", rank)


def test_a_rank_with_a_verdict_raises_it_in_place_of_its_own_error_and_tells_nobody(ranks):
    here, there = ranks(2)
    here.explain(ValueError("a bug"))
    hear(there)
    followed = there.explain(RuntimeError("of the end"))
    assert isinstance(followed, RemoteError)
    assert str(followed) == "rank 0 of 2 failed: ValueError: a bug"
    assert told(here, by=there) == []


def test_the_first_verdict_stays(ranks, insisted):
    here, there = ranks(2)
    here._decide(Verdict("first", 1))
    here._decide(Verdict("second", 1))
    assert here.verdict == Verdict("first", 1)
    assert here._decided.wait(0)  # which wakes a main thread that waits for the reason
    assert insisted == [here]
    assert told(there, by=here) == [(END, ("first", 1))]


def test_only_rank_0_passes_a_verdict_on(ranks):
    here, there = ranks(2)
    there._decide(Verdict("a reason", 0))
    assert told(here, by=there) == []


def test_an_error_that_all_ranks_have_is_not_told(ranks):
    """A RemoteError comes of a collective, in which every rank has heard of the failure."""
    here, there = ranks(2)
    error = RemoteError("rank 2 of 3 failed: ValueError: a bug")
    assert there.explain(error) is error
    assert told(here, by=there) == []


def test_a_verdict_interrupts_the_main_thread_unless_that_has_met_an_error(ranks, insisted):
    here, there = ranks(2)
    here.explain(ValueError("of rank 0"))
    here._decide(Verdict("of rank 1", 1))
    assert insisted == []
    hear(there)
    assert insisted == [there]


OF_TORCH = "torch.distributed.distributed_c10d"


@pytest.mark.parametrize(
    ("module", "error", "seconds"),
    [
        (OF_TORCH, RuntimeError("connection closed by peer"), [GRACE / 2]),
        (OF_TORCH, ValueError("a wrong argument"), []),
        ("torch.nn", RuntimeError("a wrong shape"), []),
        ("anywhere", KeyboardInterrupt(), [2 * HEARING]),
    ],
)
def test_a_rank_waits_for_the_reason_if_its_error_follows_from_another(ranks, module, error, seconds):
    here, there = ranks(2)
    raised = raised_in(module, error)
    there._decided = Waits()
    assert there.explain(raised) is raised  # no reason has come
    assert there._decided.seconds == seconds
    hear(here)
    there._decided = Waits(lambda: there._decide(Verdict("the reason", 0)))
    known = there.explain(raised)
    assert str(known) == ("the reason" if seconds else str(raised))


def test_an_interrupt_is_no_failure(ranks):
    here, there = ranks(2)
    there._decided = Waits()
    there.explain(KeyboardInterrupt())
    hear(here)
    assert here.verdict == Verdict("", 1)
    assert type(here.verdict.error()) is KeyboardInterrupt


def test_rank_1_reports_if_rank_0_has_gone(ranks):
    made = ranks(3)
    assert [each.reports for each in made] == [True, False, False]
    made[0].close()
    for each in made[1:]:
        hear(each, lambda each=each: each._peers[0].left)
    assert [each.reports for each in made[1:]] == [True, False]


# --- a rank ends ---


def test_a_rank_that_ends_without_a_word_ends_all(ranks):
    made = ranks(3)
    made[1]._peers[0].note(SignOfLife(5, client_id=3, round_idx=2))
    made[0]._peers[1].note(SignOfLife(5, client_id=3, round_idx=2))
    made[1]._peers[0].connection.close()
    hear(made[0])
    says = (
        "rank 1 of 3 ended without a word, last seen at client 3 in round 2; was it killed, or was there no memory left"
    )
    assert made[0].verdict == Verdict(says, 1)
    assert made[0]._peers[1].left
    hear(made[2])
    assert made[2].verdict == made[0].verdict


def test_a_rank_that_ends_after_this_one_has_closed_is_not_at_fault(ranks):
    here, there = ranks(2)
    here._closed.set()
    there._peers[0].connection.close()
    hear(here, lambda: here._peers[1].left)
    assert here.verdict is None


def test_a_rank_that_leaves_in_peace_ends_nobody(ranks):
    here, there = ranks(2)
    there.close()
    hear(here, lambda: here._peers[1].left)
    assert here.verdict is None
    assert here._others() == []


def test_a_message_to_a_rank_that_is_gone_is_no_error(ranks):
    here, there = ranks(2)
    there._peers[0].connection.close()
    for _ in range(3):  # the first one may still be sent
        here._send(here._peers[1], (BEAT, here._me.sign))
    here._send(here._me, BYE)


# --- the loop of the thread ---


def test_the_loop_ends_once_all_others_have_left(ranks):
    made = ranks(3)
    for each in made[1:]:
        each.close()
    RUN(made[0], None)
    assert [peer.left for peer in made[0]._peers.values()].count(True) == 2


def test_the_loop_of_rank_0_begins_when_all_have_come(ranks):
    (alone,) = ranks(1)
    alone.world = 2
    ours, theirs = Pipe()
    for message in ((1, "host", NO_PROCESS), (END, ("the reason", 1)), BYE):
        theirs.send(message)
    RUN(alone, Door([ours]))
    assert alone.verdict == Verdict("the reason", 1)
    assert alone._peers[1].left


def test_the_loop_beats_every_tick(ranks, clock, monkeypatch):
    here, _ = ranks(2)
    beats = []
    monkeypatch.setattr(here, "_beat", lambda: beats.append(clock.now))

    def receive_until(next_beat):
        clock.now += TICK / 2
        if clock.now >= 100 + 10 * TICK:
            here._closed.set()

    monkeypatch.setattr(here, "_receive_until", receive_until)
    RUN(here, None)
    assert beats == [100 + TICK / 2 + TICK * tick for tick in range(10)]


def test_messages_are_waited_for_until_the_next_beat(ranks, clock, monkeypatch):
    here, _ = ranks(2)
    waited = []
    monkeypatch.setattr(watches, "wait", lambda sources, seconds: waited.append((len(sources), seconds)) or [])
    here._receive_until(clock.now + 0.25)
    here._receive_until(clock.now - 1)
    assert waited == [(2, 0.25), (2, 0.0)]  # the other rank, and the signals


def test_a_beat_carries_the_sign_of_life(ranks, clock, life):
    here, there = ranks(2)
    life.begin_client(client_id=4, round_idx=1)
    clock.now += 3
    here._beat()
    hear(there, lambda: there._peers[0].sign == SignOfLife(1, client_id=4, round_idx=1))
    assert there._peers[0].heard == clock.now
    assert here._me.sign == there._peers[0].sign


def test_the_same_sign_is_heard_but_is_no_change(clock):
    peer = Peer(None, rank=1, host="", pid=0)
    clock.now += 1
    peer.note(SignOfLife(1))
    clock.now += 1
    peer.note(SignOfLife(1))
    assert (peer.heard, peer.changed) == (102.0, 101.0)


def test_a_rank_ends_with_the_process_that_started_it(ranks):
    here, there = ranks(2, starter=os.getppid())
    here._beat()
    assert here.verdict is None
    here._starter = os.getppid() + 1
    here._beat()
    assert here.verdict == Verdict("the process that has started the run is gone", 0)
    hear(there)


# --- silence ---

WORKS = SignOfLife(1)
WAITS = SignOfLife(1, waits=True)
GOES_ON = SignOfLife(2)
REMEDY = "raise process_timeout of ClientParallelStrategy if it needs longer"
SEEN = f"for 20 s, last seen before its first client; {REMEDY}"


@pytest.fixture
def judged(ranks, clock, sent):
    """What rank 0 of three says of the others, `seconds` after both gave their first sign, and whom it kills."""

    def judge(first, later, seconds=TIMEOUT + 1):
        here = ranks(3)[0]
        for rank in (1, 2):
            here._peers[rank].pid = NO_PROCESS + rank
            here._peers[rank].note(first[rank - 1])
        here._beat()
        clock.now += seconds
        for rank in (1, 2):
            if later[rank - 1] == BYE:
                here._peers[rank].leave()
            elif later[rank - 1] is not None:
                here._peers[rank].note(later[rank - 1])
        here._beat()
        return here.verdict, sent

    return judge


@pytest.mark.parametrize(
    ("first", "later", "at_fault"),
    [
        ((WORKS, WAITS), (WORKS, WAITS), 1),
        ((WAITS, WORKS), (WAITS, WORKS), 2),
        ((WAITS, WAITS), (None, WAITS), 1),  # frozen: it gives no sign at all
        ((WORKS, WORKS), (WORKS, WORKS), None),  # nobody waits
        ((WORKS, WAITS), (GOES_ON, WAITS), None),
        ((WORKS, WAITS), (BYE, WAITS), None),
        ((WORKS, WAITS), (WORKS, BYE), None),  # a rank that has left does not wait
        ((WAITS, WAITS), (WAITS, WAITS), None),  # for rank 0, which goes on
    ],
)
def test_a_silent_rank_for_which_others_wait_is_at_fault(judged, life, first, later, at_fault):
    life_goes_on(life)
    verdict, killed = judged(first, later)
    if at_fault is None:
        assert verdict is None
        assert killed == []
    else:
        assert verdict == Verdict(f"rank {at_fault} of 3 has given no sign of life {SEEN}", at_fault)
        assert killed == [(NO_PROCESS + at_fault, signal.SIGKILL)]


def life_goes_on(life):
    """Let every sign of this process differ."""
    sign = life.sign

    def another():
        life.beat()
        return sign()

    life.sign = another


def test_a_rank_may_be_silent_for_as_long_as_the_timeout(judged, life):
    life_goes_on(life)
    assert judged((WORKS, WAITS), (WORKS, WAITS), seconds=TIMEOUT) == (None, [])


def test_a_rank_that_waits_may_be_unheard_for_as_long_as_the_timeout(ranks, clock, life):
    life_goes_on(life)
    here = ranks(3)[0]
    for _ in range(2):
        clock.now += 1
        for rank in (1, 2):
            here._peers[rank].note(WAITS)
    clock.now += TIMEOUT
    here._beat()
    assert here.verdict is None
    clock.now += 0.5
    here._peers[2].note(WAITS)
    here._beat()
    assert here.verdict == Verdict(f"rank 1 of 3 has given no sign of life {SEEN}", 1)


def test_rank_0_itself_may_be_at_fault_and_does_not_kill_itself(judged):
    verdict, killed = judged((WAITS, WAITS), (WAITS, WAITS))
    assert verdict == Verdict(f"rank 0 of 3 has given no sign of life {SEEN}", 0)
    assert killed == []


def test_ranks_that_wait_for_each_other_end(judged, life):
    with life.waiting():
        verdict, killed = judged((WAITS, WAITS), (WAITS, WAITS))
    assert verdict == Verdict(f"all 3 processes have waited for each other {SEEN}", 0)
    assert killed == []


def test_ranks_that_all_work_without_a_sign_are_left_alone(judged):
    assert judged((WORKS, WORKS), (WORKS, WORKS)) == (None, [])


def test_the_others_end_if_nothing_is_heard_of_rank_0(ranks, clock, sent):
    _, there, _ = ranks(3)
    there._peers[0].pid = NO_PROCESS
    clock.now += TIMEOUT + GRACE
    there._beat()
    assert there.verdict is None
    clock.now += 1
    there._beat()
    assert there.verdict == Verdict(f"rank 0 of 3 has given no sign of life {SEEN}", 0)
    assert sent == [(NO_PROCESS, signal.SIGKILL)]


@pytest.mark.parametrize("ends", ["verdict", "error"])
def test_a_rank_that_ends_judges_nobody(ranks, clock, sent, ends):
    _, there = ranks(2)
    there._peers[0].pid = NO_PROCESS
    if ends == "verdict":
        there._decide(Verdict("another reason", 0))
    else:
        there.explain(ValueError("a bug"))
    clock.now += TIMEOUT + GRACE + 1
    there._beat()
    assert sent == []


def test_only_processes_of_this_host_are_killed(sent, monkeypatch):
    here = socket.gethostname()
    Peer(None, rank=1, host="another", pid=NO_PROCESS).kill()
    Peer(None, rank=1, host=here, pid=os.getpid()).kill()
    assert sent == []
    Peer(None, rank=1, host=here, pid=NO_PROCESS).kill()
    assert sent == [(NO_PROCESS, signal.SIGKILL)]

    def gone(pid, number):
        raise ProcessLookupError

    monkeypatch.setattr(os, "kill", gone)
    Peer(None, rank=1, host=here, pid=NO_PROCESS).kill()


# --- a signal asks to stop ---


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_asked_to_stop_stops_all_unless_it_hears_of_a_reason(ranks, clock, rank):
    """Torch's launcher asks the others to stop as soon as one has ended."""
    made = ranks(2, here=rank)
    asked = made[rank]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    hear(asked, lambda: asked._asked == clock.now)
    clock.now += HEARING
    signal.raise_signal(signal.SIGTERM)  # which changes nothing
    asked._receive_until(clock.now + LONGEST)
    asked._beat()
    assert asked.verdict is None
    clock.now += 0.1
    asked._beat()
    other = made[1 - rank]
    hear(other)
    assert asked.verdict == other.verdict == Verdict("", rank)


def test_a_reason_that_is_heard_in_time_is_the_verdict(ranks, clock):
    here, there = ranks(2)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    hear(here, lambda: here._asked == clock.now)
    there.explain(ValueError("a bug"))
    hear(here)
    clock.now += HEARING + 0.1
    here._beat()
    assert here.verdict == Verdict("rank 1 of 2 failed: ValueError: a bug", 1)
    assert [message for message in told(there, by=here) if message[0] == END] == [(END, tuple(here.verdict))]


def test_a_rank_with_a_verdict_asks_nobody_to_stop(ranks, clock):
    here, there = ranks(2, here=1)
    there._decide(Verdict("the reason", 0))
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    hear(there, lambda: there._asked == clock.now)
    clock.now += HEARING + 0.1
    there._beat()
    assert [kind for kind, _ in told(here, by=there)] == [BEAT]


def test_a_signal_that_asks_nothing_stops_nobody(ranks):
    """The descriptor of signals is told of all of them."""
    here, _ = ranks(2)
    signal.raise_signal(SIGNAL)
    here._receive_until(watches.monotonic() + LONGEST)
    assert here._asked is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("error", [ValueError("a bug"), RemoteError("rank 2 of 3 failed"), KeyboardInterrupt()])
def test_a_rank_that_ends_by_an_error_ignores_the_signal_that_follows(ranks, error, number):
    """Torch's launcher sends it as soon as another rank has ended, while this one writes what it keeps."""
    here, _ = ranks(2)
    here._decided = Waits()
    assert here.explain(error) is error
    signal.raise_signal(number)
    here.close()
    signal.raise_signal(number)  # before the sentence is printed


# --- the main thread raises ---


def test_the_main_thread_raises_the_verdict_once(ranks):
    here, _ = ranks(2)
    signal.raise_signal(SIGNAL)  # there is no verdict
    here._decide(Verdict("the reason", 1))
    with pytest.raises(RemoteError, match=r"^the reason$"):
        signal.raise_signal(SIGNAL)
    signal.raise_signal(SIGNAL)
    signal.raise_signal(signal.SIGTERM)  # while the run ends


@pytest.mark.parametrize("number", [SIGNAL, signal.SIGUSR1])
def test_the_handler_of_the_signal_returns_nothing(ranks, number):
    here, _ = ranks(2)
    assert here._raise(number, None) is None
    here._notified = True
    here._decide(Verdict("the reason", 1))
    assert here._raise(number, None) is None


def test_a_stuck_main_thread_is_signalled_and_then_ended_with_a_last_word(ranks, sent, last_words, exits):
    here, _ = ranks(2)
    here._decide(Verdict("the reason", 1))
    here._closed = waits = Waits(lambda: sent.append("the time for the main thread"))
    INSIST(here)
    here._closed = threading.Event()
    assert sent == [(threading.main_thread().ident, SIGNAL), "the time for the main thread"]
    assert waits.seconds == [GRACE]
    assert [str(error) for error in last_words] == ["the reason"]
    assert exits == [1]


def test_a_main_thread_that_raises_in_time_is_not_ended(ranks, last_words, exits):
    here, _ = ranks(2)
    here._decide(Verdict("the reason", 1))

    def raises():
        with pytest.raises(RemoteError):
            signal.raise_signal(SIGNAL)

    here._closed = Waits(raises)
    INSIST(here)
    here._closed = threading.Event()
    assert last_words == exits == []


def test_a_main_thread_that_has_closed_the_watch_is_left_alone(ranks, sent, last_words, exits):
    here, _ = ranks(2)
    here._decide(Verdict("the reason", 1))
    here.close()
    here._notified = False
    INSIST(here)
    assert sent == last_words == exits == []


def test_a_main_thread_without_the_handler_gets_no_signal(ranks, sent, last_words, exits):
    """The signal would end the process without a word, if a fit runs in another thread."""
    here, _ = ranks(2, here=None)
    here._decide(Verdict("the reason", 1))
    here._closed = Waits()
    INSIST(here)
    here._closed = threading.Event()
    assert sent == []
    assert [str(error) for error in last_words] == ["the reason"]
    assert exits == [1]


def test_a_system_without_the_signal_does_without(ranks, monkeypatch, sent, exits):
    """As Windows."""
    before = signal.getsignal(SIGNAL)
    monkeypatch.setattr(watches, "SIGNAL", None)
    here, _ = ranks(2)
    here._decide(Verdict("the reason", 1))
    here._closed = Waits()
    INSIST(here)
    here._closed = threading.Event()
    here.close()
    assert sent == []
    assert exits == [1]
    assert signal.getsignal(SIGNAL) == before


def test_a_main_thread_that_is_gone_is_no_error(ranks, monkeypatch, exits):
    here, _ = ranks(2)
    here._decide(Verdict("the reason", 1))

    def gone(thread, number):
        raise ProcessLookupError

    monkeypatch.setattr(signal, "pthread_kill", gone)
    here._closed = Waits()
    INSIST(here)
    here._closed = threading.Event()
    assert exits == [1]


# --- the end of the watch ---


def of_a_user(number, frame):
    """A handler that was there before."""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (signal.SIG_IGN, signal.SIG_IGN),
        (signal.SIG_DFL, signal.SIG_IGN),  # which would end the process by a signal that is on its way
        (of_a_user, of_a_user),
        (None, signal.SIG_IGN),  # a handler of a library in C, which Python cannot put back
    ],
)
def test_the_end_puts_the_handler_back_that_was_there(ranks, monkeypatch, before, after):
    ranks(1)  # puts back what this test changes
    signal.signal(SIGNAL, signal.SIG_DFL if before is None else before)
    if before is None:
        set_handler = signal.signal

        def told_nothing(number, handler):
            set_handler(number, handler)

        monkeypatch.setattr(signal, "signal", told_nothing)
    watch = Watch(TIMEOUT, last_word=print)
    during = signal.getsignal(SIGNAL)
    watch.close()
    assert during == watch._raise
    assert signal.getsignal(SIGNAL) == after


def test_the_end_gives_back_the_signals_that_ask_to_stop(ranks):
    before = signal.getsignal(signal.SIGTERM)
    here, _ = ranks(2)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # as Lightning does
    here.listen()
    assert signal.getsignal(signal.SIGTERM) != before
    here.close()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_watch_of_another_thread_changes_no_handler(ranks):
    before = signal.getsignal(SIGNAL)
    made = ranks(2, here=None)
    assert signal.getsignal(SIGNAL) == before
    for each in made:
        each.close()
    assert signal.getsignal(SIGNAL) == before


def test_the_end_is_told_to_all_and_needs_no_signal_any_more(ranks, insisted):
    made = ranks(3)
    made[0].close()
    assert [told(each, by=made[0]) for each in made[1:]] == [[BYE], [BYE]]
    made[0]._decide(Verdict("too late", 1))
    assert insisted == []
