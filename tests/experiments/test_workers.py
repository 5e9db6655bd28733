"""How cells are handed out to processes; the processes themselves are those of test_compare.py."""

from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace

import pytest

from fl_lightning.experiments import workers
from fl_lightning.experiments.cell_files import CellFiles
from fl_lightning.experiments.run import Outcome


@pytest.fixture
def run(monkeypatch):
    """Run cells by name in pretended processes; gives back their ends, and what ran beside each start."""

    def run(names, processes, outcome):
        started = []
        ended = []
        made = []

        class Pretended:
            def __init__(self, processes):
                self.pipe, self.other = Pipe()
                self.cell = None
                self.process = SimpleNamespace(is_alive=lambda: True)
                made.append(self)

            def start(self, cell):
                self.cell = cell
                beside = sum(worker.cell is not None for worker in made) - 1
                started.append((cell.name, beside))
                self.other.send(1)
                self.other.send(outcome(cell.name, [name for name, _ in started].count(cell.name)))

            def finish(self):
                self.cell = None

            def stop(self):
                self.pipe.close()

        monkeypatch.setattr(workers, "Worker", Pretended)
        cells = [CellFiles(Path("grid"), name) for name in names]
        workers.run_all(cells, processes, lambda cell, done: None, lambda cell, o: ended.append((cell.name, o.error)))
        return started, ended, len(made)

    return run


@pytest.mark.parametrize("processes", [1, 2, 5])
def test_every_cell_is_run_once_by_at_most_so_many_processes(run, processes):
    names = ["a", "b", "c", "d"]
    started, ended, made = run(names, processes, lambda name, times: Outcome("broken" if name == "b" else ""))
    assert sorted(name for name, _ in started) == names
    assert sorted(ended) == [("a", ""), ("b", "broken"), ("c", ""), ("d", "")]
    assert made == min(processes, 4)
    assert max(beside for _, beside in started) == made - 1


def test_a_cell_that_runs_out_of_memory_beside_others_is_run_again_alone(run):
    full = Outcome("out of memory", memory=True)
    started, ended, _ = run(
        ["big", "a", "b"], 2, lambda name, times: full if name == "big" and times == 1 else Outcome()
    )
    assert started[-1] == ("big", 0)
    assert sorted(ended) == [("a", ""), ("b", ""), ("big", "")]
    started, ended, _ = run(["big", "a"], 2, lambda name, times: full if name == "big" else Outcome())
    assert [name for name, _ in started] == ["big", "a", "big"]
    assert sorted(ended) == [("a", ""), ("big", "out of memory")]
