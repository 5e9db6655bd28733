"""The watch of two ranks with its threads, signals and seconds; tests/distributed/test_watch.py has its laws."""

import hashlib
import os
import signal
import threading
import time

import pytest

from fl_lightning.distributed import watch as watches
from fl_lightning.distributed.watch import RemoteError, Verdict, Watch
from fl_lightning.utils.life import LIFE
from tests.distributed.test_stops import handlers_stay, stops_of_the_test_end  # noqa: F401
from tests.distributed.worlds import World

pytestmark = pytest.mark.slow  # The watch's times are short here, which a busy machine may exceed.


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(watches, "TICK", 0.02)
    monkeypatch.setattr(watches, "HEARING", 0.3)
    monkeypatch.setattr(watches, "GRACE", 2.0)


@pytest.fixture(autouse=True)
def nothing_exits(monkeypatch):
    """A main thread that is late does not end the process of the tests."""
    monkeypatch.setattr(os, "_exit", lambda code: None)


@pytest.fixture
def pair(monkeypatch):
    """Two watches, by rank. One is this thread's, which is the main one."""
    pairs = []
    before = set(threading.enumerate())

    def make(timeout=20.0, here=0):
        world = World(2)
        monkeypatch.setattr(watches, "dist", world)
        made = world.run(lambda rank: Watch(timeout, last_word=print), here=here)
        pairs.append(made)
        until(lambda: 1 in made[0]._peers)
        return made

    yield make
    for made in pairs:
        for each in made:
            each.close()
    # A thread of a watch may send a signal, or end the process, as long as it runs.
    until(lambda: not set(threading.enumerate()) - before)
    if watches.SIGNAL is not None:
        signal.signal(watches.SIGNAL, signal.SIG_DFL)
    stops_of_the_test_end()


def until(condition, seconds=5.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not condition():
        time.sleep(0.01)
    assert condition()


def raised_here():
    """Return what the watch raises in this thread, the main one."""
    with pytest.raises(RemoteError) as caught:
        time.sleep(5)
    return caught.value


def test_an_error_of_one_is_raised_in_the_other_with_rank_and_cause(pair):
    here, there = pair()
    error = ValueError("a bug\n of one's own")
    assert there.explain(error) is error
    assert str(raised_here()) == "rank 1 of 2 failed: ValueError: a bug of one's own"
    assert here.reports
    assert not there.reports


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_one_stops_both(pair, number):
    here, there = pair()
    with pytest.raises(KeyboardInterrupt) as caught:
        signal.raise_signal(number)
    assert isinstance(here.explain(caught.value), KeyboardInterrupt)
    until(lambda: there.verdict is not None)
    assert there.verdict == Verdict("", 0)
    assert isinstance(there.verdict.error(), KeyboardInterrupt)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_is_passed_on_while_the_main_thread_runs_no_python(pair, rank):
    """As in a collective, which waits for the process that must hear of the signal."""
    both = pair(here=rank)
    here = both[rank]
    there = both[1 - rank]
    threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    told = []
    threading.Thread(target=lambda: told.append(there._decided.wait(10))).start()
    with pytest.raises(KeyboardInterrupt):
        hashlib.pbkdf2_hmac("sha256", b"", b"", 8_000_000)  # runs on for seconds
    assert told == [True]
    assert there.verdict == Verdict("", rank)
    assert here.verdict == Verdict("", rank)


def test_a_rank_that_ends_without_a_word_is_named_even_if_this_one_is_asked_to_stop(pair):
    """Torch's launcher asks the others to stop as soon as one has ended."""
    here, there = pair()
    there._closed.set()
    there._peers[0].connection.close()
    with pytest.raises((KeyboardInterrupt, RemoteError)) as caught:  # whichever comes first
        signal.raise_signal(signal.SIGTERM)
    error = here.explain(caught.value)
    assert isinstance(error, RemoteError)
    assert "rank 1 of 2 ended without a word, last seen" in str(error)


def test_a_silent_rank_for_which_others_wait_ends_the_run(pair, monkeypatch):
    here, there = pair(timeout=0.3)
    monkeypatch.setattr(here._peers[1].__class__, "kill", lambda self: None)
    there._closed.set()
    with LIFE.waiting():
        error = raised_here()
    assert str(error).startswith("rank 1 of 2 has given no sign of life for 0.3 s, last seen ")
    assert str(error).endswith("; raise process_timeout of ClientParallelStrategy if it needs longer")
