"""Names that others chose do no harm in a terminal, a table or a spreadsheet, and are read back as they were."""

import csv
import io
import re
from itertools import product

import pytest

from fl_lightning.reports.comparison_tables import as_csv
from fl_lightning.reports.result_tables import Table, TableCell, as_html, as_latex, as_markdown
from fl_lightning.reports.results import compare
from fl_lightning.reports.saved import Group, read_columns, read_partition, read_run
from fl_lightning.runs.loggers import RoundCSVLogger
from fl_lightning.runs.partition import write_partition
from fl_lightning.utils.files import write_table
from fl_lightning.utils.round_table import RoundTable
from fl_lightning.utils.text import as_cell, drawable, of_cell, printable
from tests.reports.saved_runs import settings, write_run

STARTS = ("=", "+", "-", "@", "\t", "\r")
NAMES = [a + b + "x(1)" for a, b in product(("", "'", "''"), STARTS)]
NAMES += ['=HYPERLINK("http://x","y")', "@SUM(1,2)|cmd", "-1+1", "+1 + 2", "--1", "-x", "=", "'", "'a", "a=b", "a-b"]


def runs_in_a_spreadsheet(cell):
    """True for a cell that is run as a formula: it begins like one, and is no number."""
    return cell.startswith(STARTS) and not re.fullmatch(r"[+-]?[\d.]+(e[+-]?\d+)?", cell)


def cells_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return [cell for row in csv.reader(file) for cell in row]


@pytest.mark.parametrize("name", NAMES)
def test_a_cell_is_no_formula_and_is_read_back(name):
    assert not runs_in_a_spreadsheet(as_cell(name))
    assert of_cell(as_cell(name)) == name


@pytest.mark.parametrize("number", ["-1", "-1.5", "-1e-05", "+2", "0", "nan"])
def test_numbers_and_ordinary_names_stay(number):
    assert as_cell(number) == of_cell(number) == number
    assert as_cell("global/acc") == of_cell("global/acc") == "global/acc"


def test_tables_of_a_run_hold_no_formulas_and_are_read_back(tmp_path):
    logger = RoundCSVLogger(tmp_path)
    for r in range(2):
        logger.log_metrics({**dict.fromkeys(NAMES, -0.5), f"new{r}": 1.0}, r)  # the second row widens the table
    logger.finalize("success")
    again = RoundCSVLogger(tmp_path)
    again.log_metrics({"=late": -1.0}, 2)
    again.finalize("success")
    rows = RoundCSVLogger(tmp_path).rows_on_disk()
    assert rows[0].keys() == {*NAMES, "new0"}
    assert rows[1]["=x(1)"] == -0.5
    assert rows[2] == {"=late": -1.0}

    write_partition(tmp_path / "partition.csv", [[1] * len(NAMES)], NAMES, ["0"])
    assert read_partition(tmp_path / "partition.csv").names == NAMES

    table = RoundTable(tmp_path / "clients.csv", ["round", *NAMES])
    table.append([[r, *NAMES] for r in range(2)])
    before = (tmp_path / "clients.csv").read_text("utf-8")
    table.begin(2)
    assert (tmp_path / "clients.csv").read_text("utf-8") == before
    assert read_columns(tmp_path / "clients.csv").keys() == {"round", *NAMES}

    write_table(tmp_path / "cells.csv", [NAMES, NAMES, [-1.5, "=1", None]])
    for file in tmp_path.glob("*.csv"):
        cells = cells_of(file)
        assert len(cells) > len(NAMES)
        assert not any(map(runs_in_a_spreadsheet, cells))
    assert "-0.5" in cells_of(tmp_path / "metrics.csv")


def test_results_hold_no_formulas(tmp_path):
    run = read_run(write_run(tmp_path / "0", [0.1, 0.2], settings("FedAvg", 0)))
    groups = [Group("=1+1", [run]), Group("@x", [run])]
    cells = list(csv.reader(io.StringIO(as_csv([compare(groups, "global/acc", "@x", case="-a")]))))
    assert not any(runs_in_a_spreadsheet(cell) for row in cells for cell in row)


HOSTILE = "\\ { } $ & # ^ _ ~ % < > | \n\n[a] * \x1b[2J \ud800"


def table():
    row = [TableCell(HOSTILE), TableCell(HOSTILE, mark="bold")]
    return Table(
        HOSTILE,
        [HOSTILE, HOSTILE],
        [row, [TableCell("[a]"), TableCell("*")], [TableCell("a\\|b"), TableCell("|")]],
        HOSTILE,
    )


def test_latex_shows_every_letter_as_it_is():
    text = as_latex(table())
    body = [line for line in text.splitlines() if " & " in line]
    assert len(body) == 4
    escaped = r"\\textbackslash\{\}|\\textasciitilde\{\}|\\textasciicircum\{\}|\\textless\{\}|\\textgreater\{\}"
    escaped += r"|\\textbar\{\}|\\textbf\{|\\[&%$#_{}]| & | \\\\$|\{\}(?=[[*])|(?<=\{\})\}|\}(?= )"
    for line in body:
        assert not re.search(r"[\\{}$#^_~%<>|&]", re.sub(escaped, "", line)), line
        assert not line.lstrip().startswith(("[", "*"))
    assert text.isprintable() or all(letter == "\n" or letter.isprintable() for letter in text)


def test_markdown_keeps_its_cells():
    """As GitHub reads a row: a letter after a backslash is a letter."""
    lines = [line for line in as_markdown(table()).splitlines() if line.startswith("|")]
    assert len(lines) == 5
    assert all(len(re.findall(r"\|", re.sub(r"\\.", "", line))) == 3 for line in lines)
    assert "\x1b" not in as_markdown(table())


def test_html_shows_every_letter_as_it_is():
    text = as_html(Table("<i>", ["<i>", "&"], [[TableCell("<i>"), TableCell("<i>\ud800\x1b", mark="bold")]], "<i>'\""))
    assert "<i>" not in text
    assert "\x1b" not in text
    text.encode("utf-8")


def test_what_is_printed_cannot_be_seen_as_something_else():
    for text in ("\x1b]0;x\x07", "\x9b2J", "a\r\nb", "\udcff", "\u202ea", "\u2028", "\x00\x7f"):
        assert printable(text).isprintable()
        printable(text).encode("utf-8")
        assert printable(printable(text)) == printable(text)
    assert printable("Klasse ‘é’ 犬 👩‍🔬") == "Klasse ‘é’ 犬 👩‍🔬"
    assert len(drawable("x" * 10_000)) == 200
