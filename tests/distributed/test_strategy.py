"""The strategy that starts processes: how each ends, what it leaves for the one that started it, and who speaks."""

import io
import os
import pickle
import signal
import sys
from datetime import timedelta
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from fl_lightning.distributed import strategy as strategies
from fl_lightning.distributed.strategy import (
    ClientParallelStrategy,
    RemoteTracebackError,
    alive,
    end_all,
    first_error,
    leave,
)
from fl_lightning.distributed.watch import GRACE, RemoteError
from fl_lightning.utils.life import LIFE
from fl_lightning.utils.settings import check_above
from fl_lightning.utils.tracebacks import raised_by_check
from tests.distributed.test_stops import handlers_stay, stops_of_the_test_end  # noqa: F401


class Watched:
    """Stands for the watch.

    Args:
        rank: The rank of this process.
        reports: Whether it reports the error of the run.
        first: The first error of the run. None if it is this process's own.
    """

    def __init__(self, *, rank=0, reports=True, first=None):
        self.rank = rank
        self.reports = reports
        self.first = first
        self.calls = []

    def explain(self, error):
        self.calls.append(("explain", error, signal.getsignal(signal.SIGTERM)))
        return self.first or error

    def listen(self):
        self.calls.append("listen")

    def close(self):
        self.calls.append("close")


class Child:
    """Stands for a process that this one has started.

    Args:
        ends_after: Seconds after which it ends by itself.
    """

    def __init__(self, clock, ends_after=0.0):
        self.clock = clock
        self.ends_at = clock.now + ends_after
        self.calls = []

    def terminate(self):
        self.calls.append("terminate")

    def kill(self):
        self.calls.append(("kill", self.clock.now))


class PopenChild(Child):
    """One of subprocess."""

    def poll(self):
        return None if self.clock.now < self.ends_at else 0


class ProcessChild(Child):
    """One of multiprocessing."""

    def is_alive(self):
        return self.clock.now < self.ends_at


class Clock:
    """A clock that goes on while somebody sleeps."""

    def __init__(self):
        self.now = 0.0

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(strategies, "monotonic", lambda: clock.now)
    monkeypatch.setattr(strategies, "sleep", clock.sleep)
    return clock


@pytest.fixture
def ignored_meanwhile():
    """Give SIGTERM its handler back, which a process that was started ignores at its end."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    ignored = signal.signal(signal.SIGTERM, before) is signal.SIG_IGN
    assert ignored


@pytest.fixture
def mail(tmp_path):
    folder = tmp_path / "mail"
    folder.mkdir()
    return folder


def strategy_with(watch=None, **settings):
    made = ClientParallelStrategy(**settings)
    made.watch = watch
    return made


# --- settings ---


@pytest.mark.parametrize("seconds", [0, -1, float("nan")])
def test_a_timeout_must_be_positive(seconds):
    with pytest.raises(ValueError, match=f"process_timeout must be above 0, got {seconds}"):
        ClientParallelStrategy(process_timeout=seconds)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("client_parallel", "popen"),
        ("client_parallel_spawn", "spawn"),
        ("client_parallel_fork", "fork"),
        ("client_parallel_notebook", "fork"),
    ],
)
def test_every_name_of_the_strategy_starts_processes_by_its_method(name, method):
    made = StrategyRegistry.get(name)
    assert isinstance(made, ClientParallelStrategy)
    assert made.starts_all == (method != "popen")
    assert StrategyRegistry[name]["init_params"] == {"start_method": method}
    assert method in StrategyRegistry[name]["description"]


def test_the_defaults_are_one_script_per_process_ten_minutes_and_a_day():
    """A collective may take longer than a process may be silent: the watch is to end the run, and says why."""
    made = ClientParallelStrategy()
    assert not made.starts_all
    assert made.watch is None
    assert made.process_timeout == 10 * 60
    assert made._timeout == timedelta(hours=24)


def test_statistics_of_clients_are_not_synchronised():
    made = ClientParallelStrategy()
    made._lightning_module = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))
    made.configure_ddp()
    made._lightning_module = torch.nn.SyncBatchNorm.convert_sync_batchnorm(made._lightning_module)
    with pytest.raises(ValueError, match=r"^processes train .* got SyncBatchNorm; leave trainer\.sync_batchnorm unset"):
        made.configure_ddp()


# --- the process that starts the others ---


class Launcher:
    """Stands for Lightning's launcher, whose `launch` may end by an error."""

    def __init__(self, procs=()):
        self.procs = list(procs)
        self.mails = []

    def launch(self, function, *args, error=None, **kwargs):
        mail = function.keywords["mail"]
        self.mails.append(mail)
        assert mail is None or mail.is_dir()
        if error is not None:
            raise error
        return function(*args, **kwargs)


@pytest.fixture(params=["fork", "popen"])
def started(request):
    """A strategy and its launcher, whose `launch` is that of the strategy."""
    made = ClientParallelStrategy(start_method=request.param)
    made._launcher = Launcher()
    return made, made.launcher


def test_the_launcher_runs_the_function_and_returns_its_result(started):
    made, launcher = started
    assert made.launcher.launch is launcher.launch  # it is wrapped once
    assert launcher.launch(lambda *args, **kwargs: (args, kwargs), 1, two=2) == ((1,), {"two": 2})
    assert made._mail == launcher.mails[0]


def test_there_is_no_launcher_before_lightning_has_made_one():
    assert ClientParallelStrategy().launcher is None


def test_no_folder_of_errors_stays(started):
    made, launcher = started
    launcher.launch(lambda: None)
    for error in (ValueError("a bug"), ProcessRaisedException("torch's words", 0, 7)):
        with pytest.raises(type(error)):
            launcher.launch(print, error=error)
    assert [mail is None for mail in launcher.mails] == [not made.starts_all] * 3
    assert not [mail for mail in launcher.mails if mail and mail.exists()]


def test_a_folder_of_errors_that_is_gone_is_no_error(started):
    """As if somebody cleans up the temporary files."""
    made, launcher = started

    def clean_up():
        if made.starts_all:
            made._mail.rmdir()
        return "done"

    assert launcher.launch(clean_up) == "done"


def test_an_interrupt_stops_the_processes(started, clock):
    launcher = started[1]
    launcher.procs = [ProcessChild(clock)]
    with pytest.raises(KeyboardInterrupt):
        launcher.launch(print, error=KeyboardInterrupt())
    assert launcher.procs[0].calls == ["terminate", ("kill", 0.0)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_every_signal_to_the_starting_process_interrupts(started, number):
    made, launcher = started
    with pytest.raises(KeyboardInterrupt):
        made._launch(launcher, lambda function: signal.raise_signal(number), print)
    stops_of_the_test_end()


def test_an_error_of_a_started_process_has_that_process_traceback_as_its_cause():
    def launch(run):
        try:
            raise ZeroDivisionError("there")
        except ZeroDivisionError as error:
            leave(run.keywords["mail"], 1, error)
        raise ProcessRaisedException("torch's words", 1, 0)

    with pytest.raises(ZeroDivisionError, match="there") as caught:
        ClientParallelStrategy(start_method="fork")._launch(None, launch, print)
    assert isinstance(caught.value.__cause__, RemoteTracebackError)
    assert "in launch" in str(caught.value.__cause__)


def test_a_started_process_that_left_no_error_is_named(started):
    made, launcher = started
    ended = ProcessExitedException("process 1 terminated with signal SIGKILL", 1, 7, -9, "SIGKILL")
    with pytest.raises((RemoteError, ProcessExitedException)) as caught:
        launcher.launch(print, error=ended)
    if made.starts_all:
        assert str(caught.value) == "rank 1 ended without a word: process 1 terminated with signal SIGKILL"
    else:
        assert caught.value is ended


# --- one of the processes ---


def fail():
    raise ZeroDivisionError("here")


def test_a_rank_without_a_watch_raises_its_own_error():
    with pytest.raises(ZeroDivisionError) as caught:
        strategy_with()._run_rank(fail, mail=None, starter=0)
    assert not hasattr(caught.value, "reported")


@pytest.mark.parametrize("reports", [True, False])
@pytest.mark.parametrize("first", [None, RemoteError("rank 1 of 2 failed: ValueError: a bug")])
def test_a_rank_raises_the_first_error_of_the_run_and_one_rank_reports_it(first, reports):
    watch = Watched(reports=reports, first=first)
    with pytest.raises((ZeroDivisionError, RemoteError)) as caught:
        strategy_with(watch)._run_rank(fail, mail=None, starter=0)
    ((_, own, handler),) = watch.calls
    assert caught.value is (first or own)
    assert caught.value.reported == (not reports)
    assert caught.value.__suppress_context__ == (first is not None)
    assert handler is signal.SIG_DFL


@pytest.mark.usefixtures("ignored_meanwhile")
@pytest.mark.parametrize("starter", ["there", "gone"])
@pytest.mark.parametrize("rank", [3, None])
def test_a_started_process_leaves_the_first_error_and_ends(mail, rank, starter):
    """It ignores SIGTERM, which the starting process sends once one process has ended."""
    watch = None if rank is None else Watched(rank=rank)
    with pytest.raises(SystemExit) as caught:
        strategy_with(watch)._run_rank(fail, mail=mail, starter=os.getppid() + (starter == "gone"))
    assert caught.value.code == 1
    if watch is not None:
        ((_, _, handler),) = watch.calls
        assert handler is signal.SIG_IGN
    if starter == "gone":
        assert not mail.exists()  # nobody else removes it
    else:
        assert [path.name for path in mail.iterdir()] == [f"{rank or 0}.error"]
        assert isinstance(first_error(mail, Exception()), ZeroDivisionError)


@pytest.fixture
def environment(monkeypatch):
    """Make a strategy of `world` processes, whose watch is a note of what it was made from."""
    groups = []

    def set_up(strategy):
        groups.append(strategy)

    monkeypatch.setattr(DDPStrategy, "setup_environment", set_up)

    def watch(*args, **kwargs):
        assert len(groups) == 1  # the watch needs the process group
        return args, kwargs

    monkeypatch.setattr(strategies, "Watch", watch)

    def make(world, **settings):
        made = ClientParallelStrategy(process_timeout=12.5, **settings)
        made.cluster_environment = SimpleNamespace(world_size=lambda: world)
        made._launcher = Launcher(["a child"])
        return made

    return make


def test_one_process_needs_no_watch(environment):
    made = environment(1)
    made.setup_environment()
    assert made.watch is None
    assert made.launcher.procs == ["a child"]


def test_a_process_that_started_the_others_takes_them_from_lightning(environment):
    """Lightning's observer would kill this process before it can report."""
    made = environment(2)
    observed = made.launcher.procs
    made.setup_environment()
    assert made.watch == ((12.5,), {"last_word": made._last_word, "starter": None})
    assert observed == []
    assert made._children == ["a child"]


def test_a_process_without_a_launcher_has_no_children(environment):
    made = environment(2)
    made._launcher = None
    made.setup_environment()
    assert made._children == []


def test_a_started_process_watches_the_one_that_started_it(environment, mail):
    made = environment(2, start_method="fork")
    made._mail = mail
    made.setup_environment()
    assert made.watch == ((12.5,), {"last_word": made._last_word, "starter": os.getppid()})
    assert made.launcher.procs == ["a child"]


@pytest.mark.parametrize("hook", ["on_train_start", "on_validation_start", "on_test_start", "on_predict_start"])
def test_signals_are_taken_over_after_lightning_has_set_its_handlers(hook, monkeypatch):
    watch = Watched()
    made = strategy_with(watch)
    monkeypatch.setattr(DDPStrategy, hook, lambda strategy: watch.calls.append("Lightning"))
    getattr(made, hook)()
    assert watch.calls == ["Lightning", "listen"]
    made.watch = None
    getattr(made, hook)()


def test_the_end_of_a_run_closes_the_watch_before_lightning_tears_down(monkeypatch):
    watch = Watched()
    made = strategy_with(watch)
    monkeypatch.setattr(DDPStrategy, "teardown", lambda strategy: watch.calls.append("Lightning"))
    made.teardown()
    assert watch.calls == ["close", "Lightning"]
    assert made.watch is None
    made.teardown()
    assert watch.calls == ["close", "Lightning", "Lightning"]


# --- who speaks ---


@pytest.mark.parametrize(
    ("error", "says"),
    [(RemoteError("rank 1 of 2 ended"), "rank 1 of 2 ended"), (KeyboardInterrupt(), "interrupted")],
)
def test_the_last_word_of_a_stuck_process_is_a_sentence(monkeypatch, error, says):
    """The process ends at once, with what is not written by then."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(written))
    strategy_with(Watched())._last_word(error)
    assert written.getvalue() == f"fl-lightning: error: {says}\n".encode()


@pytest.mark.parametrize("watch", [Watched(reports=False), None])
def test_a_process_that_does_not_report_says_nothing(capsys, watch):
    strategy_with(watch)._last_word(RemoteError("rank 1 of 2 ended"))
    assert capsys.readouterr() == ("", "")


def test_a_stuck_process_leaves_its_last_word_for_the_one_that_started_it(capsys, mail):
    made = strategy_with(Watched(rank=2))
    made._mail = mail
    made._last_word(RemoteError("rank 1 of 3 ended"))
    assert capsys.readouterr() == ("", "")
    assert [path.name for path in mail.iterdir()] == ["2.error"]


# --- errors that are left ---


class NeedsTwoError(Exception):
    """An error that can be pickled, but not unpickled."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def own_error():
    class OwnError(Exception):
        """An error that cannot be pickled."""

    return OwnError("of a function")


@pytest.mark.parametrize(
    ("error", "says"),
    [(NeedsTwoError("a", "b"), "NeedsTwoError: a and b"), (own_error(), "OwnError: of a function")],
)
def test_an_error_that_cannot_be_sent_is_told_in_words(mail, error, says):
    leave(mail, 0, error)
    found = first_error(mail, Exception())
    assert type(found) is RuntimeError
    assert str(found) == says
    assert says in str(found.__cause__)


def test_an_error_of_the_users_input_stays_one(mail):
    with pytest.raises(ValueError, match="must be above") as caught:
        check_above(0, tau=-1)
    leave(mail, 0, caught.value)
    leave(mail, 1, ValueError("a bug"))
    assert raised_by_check(first_error(mail, Exception()))
    (mail / "0.error").unlink()
    assert not raised_by_check(first_error(mail, Exception()))


def test_an_error_that_follows_from_another_is_not_the_first(mail):
    leave(mail, 0, RemoteError("rank 1 of 2 failed: ValueError: a bug"))
    leave(mail, 1, ValueError("a bug"))
    assert isinstance(first_error(mail, Exception()), ValueError)


def test_of_several_errors_that_of_the_least_rank_is_raised(mail):
    for rank in (10, 9, 2, 11):
        leave(mail, rank, ValueError(str(rank)))
    assert str(first_error(mail, Exception())) == "2"


def test_an_error_that_cannot_be_read_hides_no_other(mail):
    (mail / "0.error").write_bytes(pickle.dumps("no error")[:-3])
    leave(mail, 1, ValueError("a bug"))
    assert str(first_error(mail, Exception())) == "a bug"
    assert sorted(path.name for path in mail.iterdir()) == ["0.error", "1.error"]  # and no part of one


def test_an_error_that_is_written_only_in_part_is_none(mail):
    (mail / "0.part").write_bytes(b"")
    raised = ProcessRaisedException("torch's words", 0, 7)
    assert first_error(mail, raised) is raised


@pytest.mark.usefixtures("ignored_meanwhile")
def test_a_folder_that_is_gone_is_no_further_error(mail):
    """Of several processes whose starting process is gone the first one removes it."""
    mail.rmdir()
    with pytest.raises(SystemExit):
        strategy_with(Watched())._run_rank(fail, mail=mail, starter=os.getppid() + 1)


# --- children ---


@pytest.mark.parametrize("kind", [PopenChild, ProcessChild])
def test_children_have_time_to_end_and_are_killed_then(clock, monkeypatch, kind):
    errors = []

    def on_exception(strategy, error):
        errors.append(error)

    monkeypatch.setattr(DDPStrategy, "on_exception", on_exception)
    quick = kind(clock, ends_after=0.5)
    stuck = kind(clock, ends_after=1000.0)
    made = strategy_with()
    made._children = [quick, stuck]
    error = ValueError("a bug")
    made.on_exception(error)
    assert errors == [error]
    for child in made._children:
        ((called, when),) = child.calls
        assert called == "kill"
        assert when == pytest.approx(GRACE / 3, abs=0.1)


@pytest.mark.parametrize("kind", [PopenChild, ProcessChild])
def test_nobody_waits_longer_than_the_slowest_child(clock, kind):
    end_all([kind(clock, ends_after=0.2), kind(clock, ends_after=0.5)])
    assert clock.now == pytest.approx(0.5, abs=0.1)
    assert not alive(kind(clock))
    assert alive(kind(clock, ends_after=0.1))


def test_all_children_are_asked_to_stop_before_one_is_waited_for(clock, monkeypatch):
    children = [PopenChild(clock, ends_after=0.5), ProcessChild(clock, ends_after=0.5)]
    asleep = clock.sleep
    asked = []

    def sleep(seconds):
        asked.append([list(child.calls) for child in children])
        asleep(seconds)

    monkeypatch.setattr(strategies, "sleep", sleep)
    end_all(children, stop=True)
    assert asked[0] == [["terminate"], ["terminate"]]


# --- signs of life ---


@pytest.fixture
def alone():
    """A real process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:torch.distributed.nn.functional")
@pytest.mark.parametrize(
    ("collective", "call", "result"),
    [
        ("torch.distributed.barrier", lambda strategy: strategy.barrier(), None),
        ("torch.distributed.broadcast_object_list", lambda strategy: strategy.broadcast({"a": 1}), {"a": 1}),
        ("torch.distributed.all_reduce", lambda strategy: strategy.reduce(torch.ones(2)).tolist(), [1, 1]),
        (
            "torch.distributed.nn.functional.all_gather",
            lambda strategy: strategy.all_gather(torch.ones(2)).tolist(),
            [[1, 1]],
        ),
    ],
)
def test_a_process_in_a_collective_of_lightning_waits(alone, monkeypatch, collective, call, result):
    """Otherwise it would be at fault if another process takes long."""
    real = resolve_name(collective)
    waits = []

    def noted(*args, **kwargs):
        waits.append(LIFE.sign().waits)
        return real(*args, **kwargs)

    monkeypatch.setattr(collective, noted)
    count = LIFE.count
    assert call(ClientParallelStrategy()) == result
    assert waits == [True]
    assert LIFE.count == count + 2
    assert not LIFE.sign().waits
