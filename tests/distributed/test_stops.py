"""A signal that asks a run to stop is one KeyboardInterrupt, and is seen while the main thread runs no Python."""

import os
import signal
import threading
from multiprocessing.connection import wait

import pytest

from fl_lightning.distributed import stops
from fl_lightning.distributed.stops import STOPS, StopSignals, hangup_interrupts, stops_interrupt


@pytest.fixture(autouse=True)
def handlers_stay():
    """Fail if a test leaves other handlers than it found. Those of a program in the foreground are there meanwhile."""
    kept = {number: signal.getsignal(number) for number in STOPS}
    for number in STOPS:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = {number: signal.getsignal(number) for number in STOPS}
    yield
    after = {number: signal.getsignal(number) for number in STOPS}
    for number, handler in kept.items():
        signal.signal(number, handler)
    assert after == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.fixture
def opened():
    made = StopSignals()
    yield made
    made._began_to_end = None  # nobody waits for the lull in a test
    made._put_back()
    made.close()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_every_signal_interrupts(name):
    number = getattr(signal, name, None)
    if number is None:
        pytest.skip(f"this system has no {name}")
    assert number in STOPS
    with pytest.raises(KeyboardInterrupt), stops_interrupt():
        signal.raise_signal(number)
    stops_of_the_test_end()


def stops_of_the_test_end():
    """Put back what stays while a run is ending."""
    for number in STOPS:
        handler = signal.getsignal(number)
        owner = getattr(handler, "__self__", None)
        if isinstance(owner, StopSignals):
            owner._began_to_end = None
            owner._put_back()


def test_a_second_signal_is_ignored_while_the_run_ends(opened):
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    signal.raise_signal(signal.SIGTERM)
    opened.close()
    signal.raise_signal(signal.SIGTERM)  # of torchrun, after the run has closed its watch


def test_after_the_lull_the_signal_means_what_it_did_before(opened, monkeypatch):
    met = []
    monkeypatch.setitem(opened._before, signal.SIGTERM, lambda *_: met.append(True))
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    opened.close()
    monkeypatch.setattr(stops, "LULL", 0.0)
    signal.raise_signal(signal.SIGTERM)
    assert met == [True]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_a_handler_that_comes_back_after_the_run_means_what_was_before():
    """Lightning stores the handlers at the beginning of a run, and puts them back after the strategy's end."""
    met = []
    signal.signal(signal.SIGTERM, lambda *_: met.append(True))
    made = StopSignals()
    ours = signal.getsignal(signal.SIGTERM)
    made.close()
    signal.signal(signal.SIGTERM, ours)
    signal.raise_signal(signal.SIGTERM)
    assert met == [True]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_handlers_of_others_are_replaced_again(opened):
    signal.signal(signal.SIGTERM, lambda *_: None)  # Lightning's, which begins a collective
    opened.listen()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_that_is_ignored_on_purpose_stays_ignored():
    """`nohup` ignores the end of the terminal, and a shell ignores Ctrl-C for its background."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with stops_interrupt():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def test_the_end_of_the_terminal_interrupts_unless_somebody_handles_it():
    with pytest.raises(KeyboardInterrupt), hangup_interrupts():
        signal.raise_signal(signal.SIGHUP)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_DFL
    met = []
    signal.signal(signal.SIGHUP, lambda *_: met.append(True))
    with hangup_interrupts():
        signal.raise_signal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert met == [True]


def test_another_thread_sees_the_signal(opened):
    assert not opened.came()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)
    assert wait([opened], 5) == [opened]
    assert opened.came()
    assert not opened.came()


def test_other_signals_are_no_request(opened):
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    signal.raise_signal(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)
    assert wait([opened], 5) == [opened]
    assert not opened.came()


def test_a_thread_changes_no_handlers():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work():
        with stops_interrupt():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_forked_worker_ends_by_a_signal_and_does_not_stop_the_run(opened):
    child = os.fork()
    if not child:
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
    assert not opened.came()
