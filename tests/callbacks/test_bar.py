import io
import itertools
import logging
import re
import sys
import threading
import time
from functools import partial

import pytest
import rich
from torch.optim import SGD

from fl_lightning import FederatedLoop
from fl_lightning.callbacks import RoundProgressBar
from fl_lightning.callbacks.bar import headline
from fl_lightning.methods import FedAvg
from tests.callbacks.toy import At, Regression, data, loop, trainer
from tests.test_resume import SaveIn

pytestmark = pytest.mark.filterwarnings("ignore")


ESCAPES = r"\x1b\[[?\d;]*[A-Za-z]"


class Terminal(io.StringIO):
    """A terminal that refuses what its encoding lacks."""

    encoding = "utf-8"

    def write(self, text):
        text.encode(self.encoding)
        return super().write(text)

    def isatty(self):
        return True

    def written(self):
        """Everything as it was sent, then the lines as one sees them in the end."""
        text = self.getvalue()
        seen = [re.sub(ESCAPES, "", line.split("\x1b[2K")[-1]).rstrip() for line in text.split("\n")]
        return text, [line for line in seen if line]


@pytest.fixture
def terminal(monkeypatch):
    """Makes standard output and error a terminal, from within the test (pytest replaces them before it)."""

    def make(columns=100, encoding="utf-8"):
        stream = Terminal()
        stream.encoding = encoding
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setenv("COLUMNS", str(columns))
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.delenv("NO_COLOR", raising=False)
        rich.reconfigure()
        return stream

    yield make
    monkeypatch.undo()
    rich.reconfigure()


def test_terminal_shows_one_line_that_ends_whole(terminal):
    screen = terminal()
    trainer([RoundProgressBar(refresh_rate=1e6)]).fit(loop(), datamodule=data())
    sent, seen = screen.written()
    bars = [line for line in seen if line.startswith("Round")]
    assert len(bars) == 1
    assert re.fullmatch(r"Round 2/2  acc \d+\.\d %  F \d+\.\d %  0:00:0\d ━{40}", bars[0])
    for piece in ("Round 0/2", "client 2/4", "client 4/4", "evaluation", "Round 1/2"):
        assert piece in sent


def test_terminal_output_of_others_stands_above_the_line(terminal):
    screen = terminal()
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger("py.warnings").addHandler(handler)

    def speak(trainer):
        print("half a line", end="")
        print(" and its end")
        sys.stderr.write("here.py:7: UserWarning: a warning\n")
        logging.getLogger("py.warnings").warning("a record")
        trainer.lightning_module.print("through the module")
        print("no end", end="")

    trainer([RoundProgressBar(refresh_rate=1e6), At(1, speak)]).fit(loop(), datamodule=data())
    logging.getLogger("py.warnings").removeHandler(handler)
    _, seen = screen.written()
    for line in ("half a line and its end", "a record", "through the module", "no end"):
        assert line in seen
    assert any("UserWarning: a warning" in line for line in seen)
    assert seen[-1].startswith("Round 2/2")
    assert sum("Round" in line for line in seen) == 1
    assert handler.stream is screen


def test_errors_that_go_to_a_file_go_there_afterwards_too(terminal, monkeypatch):
    """As with `fl-lightning fit 2> errors.log` on a terminal."""
    terminal()
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    handler = logging.StreamHandler(sys.stderr)
    logging.getLogger("py.warnings").addHandler(handler)
    try:
        trainer([RoundProgressBar()]).fit(loop(), datamodule=data())
        logging.getLogger("py.warnings").warning("after the run")
    finally:
        logging.getLogger("py.warnings").removeHandler(handler)
    assert handler.stream is sys.stderr
    assert "after the run" in sys.stderr.getvalue()


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()])
def test_streams_are_given_back_after_an_error(terminal, error):
    screen = terminal()

    def fail(_):
        raise error

    with pytest.raises((RuntimeError, SystemExit)):
        trainer([RoundProgressBar(), At(1, fail)]).fit(loop(), datamodule=data())
    assert sys.stdout is screen
    assert sys.stderr is screen
    sent, seen = screen.written()
    assert re.sub(ESCAPES, "", sent).endswith("\n")
    assert sent.rfind("\x1b[?25h") > sent.rfind("\x1b[?25l")  # the cursor is seen again
    assert seen[-1].startswith("Round 1/2")


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("columns", [20, 40, 60])
def test_narrow_terminal_is_never_overrun(terminal, columns, encoding):
    screen = terminal(columns, encoding)
    trainer([RoundProgressBar(refresh_rate=1e6)]).fit(loop(), datamodule=data())
    sent, _ = screen.written()
    drawn = re.findall(r"\x1b\[2K([^\r\n]*)", sent)
    assert max(len(re.sub(ESCAPES, "", line)) for line in drawn) == columns
    assert "\x1b[1A" not in sent  # the line is never more than one
    assert all("Round" in line for line in drawn)


def test_log_file_gets_the_last_line_only(capsys):
    trainer([RoundProgressBar()]).fit(loop(), datamodule=data())
    out = capsys.readouterr().out
    assert re.fullmatch(r"Round 2/2  acc \d+\.\d %  F \d+\.\d %  0:00:0\d\n", out)


def test_log_file_gets_a_line_now_and_then(capsys):
    slow = At(0, lambda _: time.sleep(0.12))
    trainer([RoundProgressBar(log_every=0.1), slow]).fit(loop(), datamodule=data())
    lines = capsys.readouterr().out.splitlines()
    assert 2 <= len(lines) <= 5
    assert any("left" in line for line in lines)


def test_resumed_run_starts_at_its_round(tmp_path, terminal):
    screen = terminal()
    trainer([], tmp_path).fit(loop(), datamodule=data())
    bar = RoundProgressBar(refresh_rate=1e6)
    trainer([bar], tmp_path, rounds=5).fit(loop(), datamodule=data(), ckpt_path=tmp_path / "last.ckpt")
    sent, seen = screen.written()
    assert re.findall(r"Round (\d)/4", sent)[0] == "3"
    assert seen[-1].startswith("Round 4/4")
    assert "acc" in sent[: sent.index("client 1/4")]


def test_a_round_that_is_continued_in_its_middle_is_shown(tmp_path, terminal):
    screen = terminal()
    trainer([SaveIn("on_client_end", 1, tmp_path / "cut.ckpt")]).fit(loop(), datamodule=data())
    trainer([RoundProgressBar(refresh_rate=1e6)]).fit(loop(), datamodule=data(), ckpt_path=tmp_path / "cut.ckpt")
    sent, _ = screen.written()
    assert re.findall(r"Round (\d)/2  client (\d/\d)", sent)[:3] == [("1", "0/4"), ("1", "1/4"), ("1", "2/4")]


def test_without_an_end_there_is_no_bar(terminal):
    screen = terminal()
    stop = At(2, lambda trainer: setattr(trainer, "should_stop", True))
    trainer([RoundProgressBar(refresh_rate=1e6), stop], rounds=-1).fit(loop(), datamodule=data())
    sent, seen = screen.written()
    assert re.fullmatch(r"Round 2  acc .*  0:00:0\d", seen[-1])
    assert "━" not in sent


def test_max_steps_is_a_number_of_rounds(capsys):
    trainer([RoundProgressBar()], rounds=-1, max_steps=2).fit(loop(), datamodule=data())
    assert capsys.readouterr().out.startswith("Round 1/1  acc")


def test_schedule_gives_the_cohort_size(terminal):
    screen = terminal()
    schedule = [[0, 1, 2], [3], [1, 2]]
    trainer([RoundProgressBar(refresh_rate=1e6)]).fit(loop(), datamodule=data(schedule=schedule))
    sent, _ = screen.written()
    assert {"client 3/3", "client 1/1", "client 2/2"} <= set(re.findall(r"client \d/\d", sent))


def test_module_client_shows_its_own_keys(capsys):
    federated = FederatedLoop(client=Regression(), seed=0)
    trainer([RoundProgressBar()]).fit(federated, datamodule=data(classes=False))
    assert re.search(r"Round 2/2  mse \S+  val_loss \S+  0:0", capsys.readouterr().out)


@pytest.mark.parametrize("refresh_rate", [0.0, 10.0])
def test_disabled_bar_and_evaluation_are_silent(capsys, refresh_rate):
    bar = RoundProgressBar(refresh_rate)
    runner = trainer([bar])
    runner.validate(loop(), datamodule=data(), verbose=False)
    runner.test(loop(), datamodule=data(), verbose=False)
    bar.disable()
    runner.fit(loop(), datamodule=data())
    assert capsys.readouterr().out == ""
    assert not bar.is_enabled


def test_log_file_gets_no_escape_codes_and_no_unicode(monkeypatch, tmp_path):
    monkeypatch.setenv("FORCE_COLOR", "1")
    rich.reconfigure()
    with open(tmp_path / "log", "w", encoding="ascii") as file:
        monkeypatch.setattr(sys, "stdout", file)
        trainer([RoundProgressBar(log_every=0)]).fit(loop(), datamodule=data())
    monkeypatch.undo()
    rich.reconfigure()
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) > 10
    assert all(re.fullmatch(r"Round \d/2  [ -~]+", line) for line in lines)


def test_dumb_terminal_gets_plain_lines(terminal, monkeypatch):
    screen = terminal()
    monkeypatch.setenv("TERM", "dumb")
    rich.reconfigure()
    trainer([RoundProgressBar()]).fit(loop(), datamodule=data())
    assert re.fullmatch(r"Round 2/2  [ -~]+\n", screen.getvalue())


def test_no_color_is_respected(terminal, monkeypatch):
    screen = terminal()
    monkeypatch.setenv("NO_COLOR", "1")
    rich.reconfigure()
    trainer([RoundProgressBar(refresh_rate=1e6)]).fit(loop(), datamodule=data())
    sent, seen = screen.written()
    assert not re.search(r"\x1b\[[\d;]+m", sent)
    assert seen[-1].endswith("━" * 40)


def test_what_rich_prints_stands_above_the_line(terminal):
    screen = terminal()
    trainer([RoundProgressBar(refresh_rate=1e6), At(1, lambda _: rich.print("from rich"))]).fit(
        loop(), datamodule=data()
    )
    _, seen = screen.written()
    assert "from rich" in seen
    assert sum("Round" in line for line in seen) == 1


def test_live_display_of_the_users_own_is_no_obstacle(terminal):
    screen = terminal()
    with rich.get_console().status("mine"):
        trainer([RoundProgressBar()]).fit(loop(), datamodule=data())
    sent, _ = screen.written()
    assert "mine" in sent
    assert "Round 2/2" in sent
    assert sys.stdout is screen


def test_errors_of_others_stay_in_their_file(terminal, monkeypatch, tmp_path):
    screen = terminal()
    with open(tmp_path / "err", "w") as file:
        monkeypatch.setattr(sys, "stderr", file)
        trainer([RoundProgressBar(), At(1, lambda _: sys.stderr.write("an error\n"))]).fit(loop(), datamodule=data())
    assert (tmp_path / "err").read_text() == "an error\n"
    assert "an error" not in screen.getvalue()


def test_one_bar_serves_two_fits(terminal):
    screen = terminal()
    bar = RoundProgressBar()
    for rounds in (3, 2):
        trainer([bar], rounds=rounds).fit(loop(), datamodule=data())
        assert sys.stdout is screen
    _, seen = screen.written()
    assert [line[:9] for line in seen] == ["Round 2/2", "Round 1/1"]


def test_drawings_are_as_rare_as_asked_and_need_no_thread(terminal):
    screen = terminal()
    threads = []
    look = At(1, lambda _: threads.extend(threading.enumerate()))
    before = threading.enumerate()
    trainer([RoundProgressBar(refresh_rate=0.01), look]).fit(loop(), datamodule=data())
    assert threads == before
    sent, _ = screen.written()
    assert sent.count("Round 0/2") == 1
    assert "Round 1/2" not in sent


def test_second_exchange_counts_its_clients_anew(terminal):
    class Twice(FedAvg):
        exchanges = ("train", "again")

    screen = terminal()
    federated = FederatedLoop(client=Twice(optimizer=partial(SGD, lr=0.1)), seed=0)
    trainer([RoundProgressBar(refresh_rate=1e6)], rounds=1).fit(federated, datamodule=data())
    sent, _ = screen.written()
    counts = re.findall(r"client (\d)/4", sent)
    assert [int(count) for count, _ in itertools.groupby(counts)] == [0, 1, 2, 3, 4, 1, 2, 3, 4]


def test_headline():
    assert headline({"val/acc": 0.5, "val/forgetting": 0.25}) == "acc 50.0 %  F 25.0 %"
    assert headline({"global/acc": 0.5, "train/ce": 1.0}) == "acc 50.0 %"
    assert headline({"train/ce": 1.0, "local/alma": 0.75}) == "alma 75.0 %"
    assert headline({"comm/bytes_up": 1.0, "a": 1.0, "b": 2.5, "c": 3.0}) == "a 1  b 2.5"
    assert headline({}) == ""


@pytest.mark.parametrize("name", ["refresh_rate", "log_every"])
def test_negative_rates_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 0, got -1"):
        RoundProgressBar(**{name: -1})
