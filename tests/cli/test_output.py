"""Every command prints in any encoding of the output, which writes a missing letter by the nearest ones."""

import contextlib
import io
import shlex
import sys
from pathlib import Path

import pytest

from fl_lightning.__main__ import COMMANDS, RUNS, main
from fl_lightning.cli.output import HANDLER, any_encoding
from tests.commands import CONFIGS, TINY, empty_pictures, say

ENCODINGS = (  # ascii, the smallest, is in the others
    "ascii",
    pytest.param("latin-1", marks=pytest.mark.slow),
    pytest.param("cp1252", marks=pytest.mark.slow),
)
QUIET = "--trainer.enable_progress_bar false --trainer.max_epochs 1"
GRID = f"compare {TINY} --trainer.max_epochs 1 --methods FedAvg FedNTD --seeds 0 --output there"

LINES = {
    "--help": ["--help"],
    "fit": ["fit --help", f"fit {TINY} {QUIET}"],
    "validate": ["validate --help"],
    "test": ["test --help", "test -c own.yaml --ckpt_path last"],
    "predict": ["predict --help"],
    "methods": ["methods", "methods --output json"],
    "new": ["new method Mine --output EMPTY"],
    "configs": ["configs", "configs method/fedntd", f"configs {CONFIGS}/experiment/digits_fedntd.yaml"],
    "check": ["check there"],
    "split": ["split --help"],
    "partition": ["partition --help", f"partition {TINY}"],
    "compare": ["compare --help", GRID],
    "reproduce": ["reproduce", "reproduce --help"],
    "report": ["report --help", "report there"],
    "--print_shtab": ["--print_shtab bash"],
}
"""Command lines by command. A new command needs some here."""


def test_every_command_has_lines():
    assert {*COMMANDS, *RUNS, "--help"} == LINES.keys()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a finished comparison."""
    made = tmp_path_factory.mktemp("output")
    with contextlib.chdir(made), empty_pictures():
        said = say(GRID)
    assert said.code == 0, said
    return made


def printed(line, encoding):
    """Return what a command prints to streams of an encoding, which refuse letters that they lack."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors="strict") for _ in range(2)]
    code = 0
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            main(shlex.split(line))
        except SystemExit as stop:
            code = int(stop.code or 0)
    texts = []
    for stream in streams:
        stream.flush()
        assert stream.errors == "strict"
        texts.append(stream.buffer.getvalue().decode(encoding))
    return code, *texts


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("command", LINES)
def test_a_command_prints_in_any_encoding(folder, tmp_path, command, encoding):
    for line in LINES[command]:
        with contextlib.chdir(folder), empty_pictures():
            expected = say(line.replace("EMPTY", str(tmp_path / "one")))
            code, out, err = printed(line.replace("EMPTY", str(tmp_path / "other")), encoding)
        assert code == expected.code, (line, err)
        assert bool(out) == bool(expected.out), line
        assert "UnicodeEncodeError" not in err


def test_letters_are_written_by_their_nearest():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    with contextlib.redirect_stdout(stream), any_encoding():
        print("α ≥ 0.5 × Ω … é – “x” 日 ŵ")
    stream.flush()
    assert stream.buffer.getvalue() == b'alpha >= 0.5 x Omega ... e - "x" \\u65e5 w\n'


def test_an_encoding_keeps_the_letters_that_it_has():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    with contextlib.redirect_stdout(stream), any_encoding():
        print("é … β")
    stream.flush()
    assert stream.buffer.getvalue().decode("cp1252") == "é … beta\n"


def test_utf_8_is_left_alone(capsys):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="surrogateescape")
    with contextlib.redirect_stdout(stream), any_encoding():
        assert stream.errors == "surrogateescape"
        print("α")
    stream.flush()
    assert stream.buffer.getvalue() == "α\n".encode()


def test_a_closed_or_absent_output_is_no_error(monkeypatch):
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", None)
    with any_encoding():
        assert stream.errors == HANDLER
        stream.close()


def test_nothing_else_decides_about_encodings_of_the_output():
    """One place decides how every command prints."""
    package = Path(main.__globals__["__file__"]).parent
    others = [path for path in package.rglob("*.py") if path.name != "output.py"]
    assert not [str(path) for path in others if ".reconfigure(" in path.read_text(encoding="utf-8")]
