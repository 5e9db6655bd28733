"""The files of experiments: the experiments that come with the package, and reading and writing a file."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import ArgumentError, ArgumentParser, Namespace

from fl_lightning.cli.configs import HOME
from fl_lightning.cli.yaml_keys import check_keys
from fl_lightning.experiments.composing import is_file_name
from fl_lightning.experiments.experiment import Experiment, Runs, Tables
from fl_lightning.papers import Drawing
from fl_lightning.utils.suggestions import suggestion

FOLDER = "papers"
"""Folder of the papers' experiments within the configurations, with a folder for each paper."""

DRAWINGS = ("draw", "draw_full")
"""Parts of a file that are drawings."""


def experiment_names() -> list[str]:
    """Return the names of all experiments of the papers, such as `fedntd/2`, in the order of papers and numbers."""
    folder = HOME / FOLDER
    names = [path.relative_to(folder).with_suffix("").as_posix() for path in folder.glob("*/*.yaml")]
    return sorted(names, key=experiment_order)


def experiment_order(name: str) -> tuple[str, bool, int, str]:
    """Return the key that sorts experiments by paper and number, tables last.

    >>> sorted(["fedntd/10", "fedntd/table2", "fedntd/2"], key=experiment_order)
    ['fedntd/2', 'fedntd/10', 'fedntd/table2']
    """
    paper, _, number = name.partition("/")
    digits = "".join(letter for letter in number if letter.isdigit())
    return paper, not number.isdigit(), int(digits or 0), name


def shipped_path(name: str) -> Path:
    """Return the path of an experiment that comes with the package."""
    return HOME / FOLDER / f"{name}.yaml"


def paths_of(asked: Sequence[str]) -> list[Path]:
    """Find the files of experiments.

    Args:
        asked: Names: the path of a file, an experiment of the package, or a paper, which has all its experiments.

    Returns:
        The files, each once.

    Raises:
        ValueError: A name has no file. The sentence names the nearest name.
    """
    paths: dict[Path, None] = {}
    for name in asked:
        paths |= dict.fromkeys(_paths_of_one(name))
    return list(paths)


def _paths_of_one(name: str) -> list[Path]:
    """Find the files of one name, see `paths_of`."""
    if is_file_name(name):
        if not Path(name).is_file():
            raise ValueError(f"the file of an experiment must exist, got {name}")
        return [Path(name).resolve()]
    known = experiment_names()
    found = [shipped_path(other) for other in known if name in (other, other.partition("/")[0])]
    if not found:
        near = suggestion(name, known)
        raise ValueError(f"an experiment is one that fl-lightning reproduce lists, or a file, got {name!r}{near}")
    return found


def read_experiment(path: Path) -> Experiment:
    """Read the file of an experiment.

    Raises:
        ValueError: The file is wrong. The sentence names the file and what is wrong in it.
    """
    try:
        check_parts(path)
        experiment = made_of(path, read_drawings(path))
        experiment.check()
    except (ArgumentError, TypeError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} must say what an experiment needs and how it is drawn, but {error}") from error
    return experiment


def check_parts(path: Path) -> None:
    """Refuse a file with equal keys, or with a part that no experiment has.

    Raises:
        ValueError: A key stands twice, or a part is unknown.
    """
    text = path.read_text(encoding="utf-8")
    check_keys(text, str(path))
    known = [part.name for part in fields(Experiment)]
    for name in yaml.safe_load(text):
        if name not in known:
            raise ValueError(f"its parts are {', '.join(known)}, got {name!r}{suggestion(str(name), known)}")


def read_drawings(path: Path) -> dict[str, dict[str, Drawing]]:
    """Check the types of a file's content, and make its drawings.

    Returns:
        The drawings by the letter of their panel, for each name in `DRAWINGS`.

    Raises:
        ArgumentError: A value has another type, or a drawing cannot be made.
    """
    checks = ArgumentParser(exit_on_error=False)
    checks.add_class_arguments(Experiment)
    parsed = checks.parse_path(path)
    drawings = ArgumentParser(exit_on_error=False)
    for name in DRAWINGS:
        drawings.add_argument(f"--{name}", type=dict[str, Drawing])
    given = Namespace({name: parsed[name] for name in DRAWINGS})  # type: ignore[no-untyped-call]
    drawn = drawings.instantiate(given)
    return {name: drawn[name] for name in DRAWINGS}


def read_runs(path: Path) -> Experiment:
    """Read an experiment of the package without its drawings, which take most of the time, and without a check."""
    return made_of(path, {name: {} for name in DRAWINGS})


def made_of(path: Path, drawings: dict[str, dict[str, Drawing]]) -> Experiment:
    """Make an experiment of a file and of drawings, without a check.

    Args:
        path: Path of the file. The runs make the classes that its settings name.
        drawings: Drawings for each name in `DRAWINGS`.
    """
    content: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    content["runs"] = [Runs(**row) for row in content["runs"]]
    if content.get("start"):
        content["start"] = Runs(**content["start"])
    # An empty mapping asks for the tables with all defaults.
    if content.get("tables") is not None:
        content["tables"] = Tables(**content["tables"])
    return Experiment(**{**content, **drawings})


def as_text(experiment: Experiment) -> str:
    """Write an experiment without drawings as the text of its file."""
    written = {name: value for name, value in asdict(experiment).items() if value not in (None, [], {}, {"": {}})}
    rows = []
    for row in written["runs"]:
        rows.append({name: value for name, value in row.items() if value not in (None, [], {})})
    written["runs"] = rows
    text: str = yaml.safe_dump(written, sort_keys=False, allow_unicode=True, width=120)
    return text
