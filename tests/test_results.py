"""The page of results is what the stored results say."""

from pathlib import Path

import pytest

from docs.write_results import PAGE, tables, text
from fl_lightning.papers.stored import read_stored

STORED = sorted((Path(__file__).resolve().parents[1] / "results").glob("*/*.csv"))


def test_the_page_is_written_of_the_stored_results():
    assert PAGE.read_text(encoding="utf-8") == text(), "run python docs/write_results.py"


@pytest.mark.parametrize("path", STORED, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_stored_results_are_those_of_an_experiment_with_a_table(path):
    name = f"{path.parent.name}/{path.stem}"
    known = {experiment: (file, drawn) for experiment, file, drawn in tables()}
    experiment, drawn = known[name]
    rows = {(c, row.label or m) for row in experiment.runs for m in row.methods for c in experiment.cases_of(row)}
    for series in read_stored(path):
        assert (series.case, series.method) in rows
        for run in series.group.runs:
            assert set(run.history.names) <= {key for table in drawn for key in table.log_keys()}
