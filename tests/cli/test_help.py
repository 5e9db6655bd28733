"""Help texts: what they name is there, and a narrow terminal keeps them readable."""

import re
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from fl_lightning.__main__ import COMMANDS, HELP, RUN_HELP, fitted
from fl_lightning.cli.completion import OptionsOnly
from fl_lightning.cli.parser_only import BuiltError
from fl_lightning.reports.terminal import print_classes
from tests.commands import say

OPTION = re.compile(r"^  --(\S+) (?:[A-Z]\w*|last\|best\|FILE)  .*?(?:\((\S+)\))?$", re.MULTILINE)


@pytest.mark.parametrize("command", ["fit", "test"])
@pytest.mark.parametrize("ending", ["--help", "-h", "-c experiment/digits_fedavg --help"])
def test_help_of_a_run_shows_the_options_that_most_set(command, ending):
    said = say(f"{command} {ending}")
    assert said.code == 0
    assert said.out == fitted(RUN_HELP.read_text(encoding="utf-8"))
    assert 15 < len(said.out.splitlines()) < 60
    assert "--help all" in said.out


@pytest.mark.parametrize("flag", ["-h", "--help"])
@pytest.mark.parametrize("command", [name for name in COMMANDS if name[0] != "-"])
def test_every_command_has_a_help(command, flag):
    said = say(f"{command} {flag}")
    assert said.code == 0, said.err
    assert said.out.startswith("usage: fl-lightning ")
    assert not said.err


def test_the_options_of_the_help_are_there_with_these_defaults():
    said = say("fit --help all")
    assert said.code == 0
    assert len(said.out.splitlines()) > 500
    parsers = []
    with suppress(BuiltError):
        OptionsOnly(parsers)
    there = parsers[0].get_defaults()
    options = dict(OPTION.findall(RUN_HELP.read_text(encoding="utf-8")))
    assert len(options) == 23
    for option, default in options.items():
        if option not in ("model.client.net", "model.client.optimizer"):
            assert f"--{option} " in said.out, option
            assert not default.replace(".", "").isdigit() or str(there[option]) == default, option


@pytest.mark.parametrize("file", [HELP, RUN_HELP], ids=lambda path: path.stem)
@pytest.mark.parametrize("columns", [40, 80, 200])
def test_a_help_text_fits_the_terminal_and_loses_no_word(file: Path, columns, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = file.read_text(encoding="utf-8")
    shown = fitted(text)
    assert max(map(len, shown.splitlines())) <= columns
    assert "".join(shown.split()) == "".join(text.split())
    if columns == 200:
        assert shown == text


def test_a_narrow_terminal_has_the_table_in_parts_with_whole_headings(monkeypatch, capsys):
    columns = ("class", "samples", "accuracy", "precision", "F1", "best", "forgetting")
    scores = {"precision": torch.full((4,), 0.25), "recall": torch.ones(4), "F1": torch.ones(4)}
    for width in (40, 100):
        monkeypatch.setenv("COLUMNS", str(width))
        accuracy = torch.tensor([0.5, 1.0])
        print_classes("Classes", ["cat", "dog"], torch.tensor([3, 4]), accuracy, accuracy, scores, 10)
        shown = capsys.readouterr().out
        assert "…" not in shown
        assert all(heading in shown.split() for heading in columns)
        assert shown.count("cat  ") == (2 if width == 40 else 1)
        assert max(map(len, shown.splitlines())) <= width


def test_a_long_line_is_broken_below_itself(monkeypatch):
    monkeypatch.setenv("COLUMNS", "50")
    sentence = "    an indented sentence that is longer than the terminal is wide"
    option = f"  --a_rather_long_name_of_an_option{' ' * 4}what it does, in several words"
    lines = fitted(
        f"{sentence}\n{option}\n  --short  what it does, in more words than the terminal has room for\n"
    ).splitlines()
    assert lines == [
        "    an indented sentence that is longer than the",
        "    terminal is wide",
        "  --a_rather_long_name_of_an_option",
        "      what it does, in several words",
        "  --short  what it does, in more words than the",
        "           terminal has room for",
    ]
