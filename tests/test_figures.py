"""The sentences on the papers' figures name numbers that the stored captions have, or differences of them."""

import re
from pathlib import Path

import pytest
import yaml

from fl_lightning.cli.configs import locate
from fl_lightning.experiments import experiment_files as files
from fl_lightning.experiments.cells import Cells, Request
from fl_lightning.reports.result_tables import Table, TableCell
from tests.reports.saved_runs import write_run
from tools import add_captions
from tools.add_captions import main, text_of
from tools.add_results import csv_rows

TEXT = (Path(__file__).parents[1] / "docs/figures.md").read_text(encoding="utf-8").partition("## What they show")[2]
PARTS = [part.partition("\n### ")[0] for part in re.split(r"\n\*\*(?=Fig|Table)", TEXT)[1:]]
NUMBER = r"(?<![\w.])[-−+]?\d+(?:\.\d+)?"
NO_VALUES = r"`[^`]*`|!\[[^\]]*\]\([^)]*\)|(?:class|client)(?:es|s)? \d+\b(?!\.\d)(?:, \d+)*(?: and \d+)?"
"""Names of figures, pictures, and numbers that name a class or a client."""

SETTING = r"\w+ = [\d.∞]+|\d+ (?:clients|samples|units|rounds)"
"""Numbers of a caption that belong to a name."""


def numbers(*texts):
    return [float(number.replace("−", "-")) for text in texts for number in re.findall(NUMBER, text)]


def is_among(number, known):
    """True where one of the known numbers, rounded as this one, is it."""
    half = 0.5 * 10.0 ** -len(number.partition(".")[2]) + 1e-9
    return any(abs(float(number.replace("−", "-")) - value) <= half for value in known)


def settings_of(name):
    """Numbers in the settings of a figure, without what its drawings hold."""
    figure = files.read_experiment(files.shipped_path(name))
    rows = [text for runs in figure.runs for text in (runs.label, runs.settings, figure.cases_of(runs))]
    below = [path for base in figure.base for path in locate(base)]
    files_below = [re.sub("#.*", "", path.read_text(encoding="utf-8")) for path in below]
    return numbers(str([figure.config, figure.cases, rows]).replace("'", " "), *files_below)


def lacking(part):
    """Numbers of a paragraph that captions and settings lack; points may be the difference of two in a caption."""
    names = re.findall(r"`(\w+/\w+)`", part)
    texts = [row["caption"] for row in csv_rows(add_captions.CAPTIONS) if row["figure"] in names]
    assert {row["figure"] for row in csv_rows(add_captions.CAPTIONS)} >= set(names), (
        f"python -m tools.add_captions reproduced {names[0]}"
    )
    known = numbers(*texts) + [setting for name in names for setting in settings_of(name)]
    values = [numbers(re.sub(SETTING, "", text)) for text in texts]
    apart = [abs(first - second) for of_caption in values for first in of_caption for second in of_caption]
    changes = [abs(value) for of_caption in values for value in of_caption]
    sentences = re.sub(NO_VALUES, "", part.partition("** ")[2])
    for found in re.finditer(NUMBER, sentences):
        in_points = re.match(r"[^;:()%]{0,40}point", sentences[found.end() :])
        if not is_among(found[0], [*known, *changes, *apart] if in_points else known):
            yield found[0]


@pytest.mark.parametrize("part", PARTS, ids=lambda part: re.search(r"`(\S+)`", part)[1])
def test_numbers_of_a_figure_are_those_of_its_captions(part):
    assert not list(lacking(part))


def make_run(folder, cell, curve):
    """Write what a complete run leaves that its drawing needs."""
    run = folder / "runs" / cell.name / "0"
    write_run(run, curve, dict(cell.config))
    (run / "done.json").write_text(f'{{"max_epochs": {cell.config["trainer"]["max_epochs"]}, "rounds": {len(curve)}}}')
    (folder / "cells").mkdir(exist_ok=True)
    (folder / "cells" / f"{cell.name}.yaml").write_text(yaml.safe_dump(dict(cell.config)))


@pytest.mark.slow  # it composes the cells of all experiments, twice
def test_captions_are_stored_of_the_runs_in_a_folder(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(add_captions, "CAPTIONS", tmp_path / "figures.csv")
    cells = Cells(files.read_experiment(files.shipped_path("fedcl/2")), Request()).all()
    for cell in cells[:-1]:
        make_run(tmp_path, cell, [0.8, 0.84, 0.86])
    with pytest.raises(SystemExit):
        main([str(tmp_path), "fedcl/2"])
    assert "lacks runs of fedcl/2; fl-lightning reproduce fedcl/2 makes them" in capsys.readouterr().err
    main([str(tmp_path)])
    assert csv_rows(add_captions.CAPTIONS) == []
    make_run(tmp_path, cells[-1], [0.86, 0.84, 0.8])
    main([str(tmp_path), "fedcl/2"])
    main([str(tmp_path)])
    (row,) = csv_rows(add_captions.CAPTIONS)
    assert (row["figure"], row["panel"], row["seeds"]) == ("fedcl/2", "", "0")
    assert row["caption"].startswith(
        "Rounds to the target, and as a share of FedAvg's. α = 1, 85 %: FedAvg 3, FedProx 3, "
    )
    assert f"{cells[-1].method} 33 %" in row["caption"]
    with pytest.raises(SystemExit):
        main([str(tmp_path), "fedcl/9"])
    assert "got fedcl/9" in capsys.readouterr().err


def test_a_table_is_stored_with_its_cells():
    table = Table("", ["", "accuracy"], [[TableCell("FedAvg"), TableCell("81.2")]])
    assert text_of(table, "In %.") == "In %.  | accuracy; FedAvg | 81.2"
