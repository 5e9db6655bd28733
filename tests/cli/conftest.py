"""A fixture that the tests of the grid's commands share."""

import pytest

from fl_lightning.cli.compare import running, workers


@pytest.fixture
def cells_here(monkeypatch):
    """Runs a grid's cells one after the other in this process; gives their names, as they are begun."""
    begun = []

    def noted(cells):
        for files in cells:
            begun.append(files.name)
            yield files

    monkeypatch.setattr(running, "run_all", lambda cells, _, *told: workers.run_here(noted(cells), *told))
    return begun
