"""A fixture that the tests of the grid's commands share."""

import pytest

from fl_lightning.cli.compare import running
from fl_lightning.cli.compare.cells import Outcome, fit
from fl_lightning.cli.errors import one_line


@pytest.fixture
def cells_here(monkeypatch):
    """Runs a grid's cells one after the other in this process; gives their names, as they are begun."""
    begun = []

    def run_all(cells, processes, on_round, on_end):
        for files in cells:
            begun.append(files.name)
            try:
                fit(files, lambda done, files=files: on_round(files, done))
                on_end(files, Outcome())
            except ValueError as error:
                on_end(files, Outcome(one_line(str(error))))

    monkeypatch.setattr(running, "run_all", run_all)
    return begun
