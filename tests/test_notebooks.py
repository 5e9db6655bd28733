"""Every notebook runs from top to bottom, and its kept outputs are those of a run: `make notebooks` renews them.

`make smoke` runs the first one, the slow tests all.
"""

import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
NUMBER = re.compile(r"-?\d+\.\d+")
LARGEST = 200_000
"""Bytes of a notebook with its outputs."""

spec = spec_from_file_location("refresh_notebooks", ROOT / "tools/refresh_notebooks.py")
refresh = module_from_spec(spec)
spec.loader.exec_module(refresh)


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.fixture(scope="module", params=[pytest.param(path, id=path.stem, marks=pytest.mark.slow) for path in NOTEBOOKS])
def both(request, tmp_path_factory):
    """A notebook as it is kept and as it is now, and the folder in which it was run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        patch.setenv("PYTHONPATH", str(ROOT))
        work = tmp_path_factory.mktemp("anywhere")
        return request.param, refresh.cleaned(refresh.executed(request.param, work)), work


def outputs(notebook):
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def texts(notebook):
    """What the cells print."""
    return ["".join(output["text"]) for output in outputs(notebook) if "text" in output]


def test_a_notebook_runs_cleanly(both):
    _, now, work = both
    assert any("image/png" in output.get("data", {}) for output in outputs(now))
    assert not [output for output in outputs(now) if output.get("name") == "stderr"]
    assert not list(work.iterdir())  # a notebook leaves nothing behind where it is run


def test_the_kept_outputs_are_fresh(both):
    """Words are equal, and numbers as far as another machine's arithmetic lets them be."""
    path, now, _ = both
    kept = nbformat.read(path, as_version=4)
    renew = f"make notebooks renews the outputs of {path.name}"
    kinds = [[(output.output_type, sorted(output.get("data", ()))) for output in outputs(one)] for one in (kept, now)]
    assert kinds[0] == kinds[1], renew
    for old, new in zip(texts(kept), texts(now), strict=True):
        assert re.sub(r"[\s\d.-]+", " ", old) == re.sub(r"[\s\d.-]+", " ", new), renew
        numbers = [[float(value) for value in NUMBER.findall(text)] for text in (old, new)]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.1, abs=10), renew  # percentages


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_and_names_no_machine(path):
    assert path.stat().st_size < LARGEST
    kept = nbformat.read(path, as_version=4)
    assert [cell.execution_count for cell in kept.cells if cell.cell_type == "code"] == [
        i + 1 for i, _ in enumerate(cell for cell in kept.cells if cell.cell_type == "code")
    ]
    said = "".join(texts(kept)) + "".join(str(output.get("data", {}).get("text/plain")) for output in outputs(kept))
    assert not re.search(r"/home/|/root/|/tmp/|0x[0-9a-f]{6}", said), said
    assert kept.metadata == {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
