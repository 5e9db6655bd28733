"""Runs the notebooks and stores their outputs in them: `make notebooks`. `tests/test_notebooks.py` tells when to.

A reader on the web sees the outputs. Nothing of the machine that ran a notebook is stored.
"""

import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parents[1] / "notebooks"


def executed(path: Path, work: Path) -> NotebookNode:
    """Run a notebook in the folder `work`, from top to bottom.

    Raises:
        nbclient.exceptions.CellExecutionError: A cell failed. The error has its traceback.
    """
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=300,
        kernel_name="python3",
        resources={"metadata": {"path": work}},
        record_timing=False,
    )
    client.execute()
    return notebook


def cleaned(notebook: NotebookNode) -> NotebookNode:
    """Remove all that another run or machine would change, except the outputs themselves."""
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for cell in notebook.cells:
        cell.metadata = {}
        for output in cell.get("outputs", ()):
            output.get("metadata", {}).clear()
    return notebook


def main() -> None:
    """Renew all notebooks."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as work:
            nbformat.write(cleaned(executed(path, Path(work))), path)
        print(f"{path.name}: {path.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
