"""The file of a figure: which runs it needs, and how they are drawn."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml  # type: ignore[import-untyped]
from jsonargparse import ArgumentError, ArgumentParser

from fl_lightning.cli.compare.grid import Case, Cell, Composer, Held, seeded, slug
from fl_lightning.cli.configs import HOME
from fl_lightning.cli.suggestions import nearest
from fl_lightning.cli.yaml_keys import check_keys
from fl_lightning.papers import Drawing

FOLDER = "figure"
"""Folder of the figures' files within the configurations: one below it for each paper."""


@dataclass
class Runs:
    """Methods × cases.

    Attributes:
        methods: files in configs/method by name; A+B takes both.
        cases: settings of each case by its name; a value is YAML, as on the command line.
        settings: of all of them.
        label: name in the figure of the one method; None: its own.
        seeds: of each; None: those of the figure.
    """

    methods: list[str]
    cases: dict[str, dict[str, Any]] = field(default_factory=lambda: {"": {}})
    settings: dict[str, Any] = field(default_factory=dict)
    label: str | None = None
    seeds: list[int] | None = None


@dataclass
class FigureFile:
    """Content of a figure's file.

    Attributes:
        minutes: that its runs take on two cores.
        base: configurations of `fit`, by name, that all runs share; the later one wins.
        runs: that are drawn.
        draw: drawings by the letter of their panel, or their name.
        config: of `fit`, over the base.
        seeds: each varies partition, cohorts, weights and batches.
        hold: what a seed does not vary.
        start: one run whose last weights all others start from.
    """

    minutes: float
    base: list[str]
    runs: list[Runs]
    draw: dict[str, Drawing]
    config: dict[str, Any] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [0])
    hold: list[Held] = field(default_factory=list)
    start: Runs | None = None


class FigureCell(NamedTuple):
    """A cell's place in its figure."""

    method: str
    case: str
    cell: Cell


def names() -> list[str]:
    """Names of all figures, such as `fedntd/2`, in the order of their papers and numbers."""
    paths = (HOME / FOLDER).glob("*/*.yaml")
    return sorted((path.relative_to(HOME / FOLDER).with_suffix("").as_posix() for path in paths), key=order)


def order(name: str) -> tuple[str, bool, int]:
    """Key that sorts figures by paper and number, tables last.

    >>> sorted(["fedntd/10", "fedntd/table2", "fedntd/2"], key=order)
    ['fedntd/2', 'fedntd/10', 'fedntd/table2']
    """
    paper, _, number = name.partition("/")
    return paper, not number.isdigit(), int("".join(letter for letter in number if letter.isdigit()) or 0)


def shipped_path(name: str) -> Path:
    """Path of a figure that comes with the package."""
    return HOME / FOLDER / f"{name}.yaml"


def paths_of(asked: Sequence[str]) -> list[Path]:
    """Find the files of figures: one's own, else the package's of that name, or all of a paper.

    Raises:
        ValueError: there is none, with the nearest name.
    """
    paths, known = list[Path](), names()
    for name in asked:
        if name.endswith((".yaml", ".yml")) and Path(name).is_file():
            paths.append(Path(name).resolve())
        elif figures := [figure for figure in known if name in (figure, figure.partition("/")[0])]:
            paths += map(shipped_path, figures)
        else:
            near = nearest(name, known)
            raise ValueError(f"a figure is one that fl-lightning figure lists, or a file, got {name!r}{near}")
    return list(dict.fromkeys(paths))


def read(path: Path) -> FigureFile:
    """Read the file of a figure.

    Raises:
        ValueError: naming the file and what is wrong in it.
    """
    checks, drawings = ArgumentParser(exit_on_error=False), ArgumentParser(exit_on_error=False)
    checks.add_class_arguments(FigureFile)
    drawings.add_argument("--draw", type=dict[str, Drawing])
    try:
        check_keys(path.read_text(encoding="utf-8"), str(path))
        checks.parse_path(path)
        content = yaml.safe_load(path.read_text(encoding="utf-8"))  # classes within settings are made by the runs
        draw = drawings.instantiate(drawings.parse_object({"draw": content["draw"]})).draw
    except (ArgumentError, TypeError, ValueError, yaml.YAMLError) as error:
        raise ValueError(f"{path} must say what a figure needs and how it is drawn, but {error}") from error
    runs, start = [Runs(**given) for given in content["runs"]], content.get("start")
    return FigureFile(**{**content, "draw": draw, "runs": runs, "start": start and Runs(**start)})


def minutes_of(name: str) -> float:
    """Read the minutes that a shipped figure's runs take: checking the whole file would take twenty times as long."""
    return float(yaml.safe_load(shipped_path(name).read_text(encoding="utf-8"))["minutes"])


def composer_of(figure: FigureFile, more: Sequence[str] = ()) -> Composer:
    """Compose the figure's configurations: its base, what it sets, and the user's."""
    return Composer([*figure.base, *([json.dumps(figure.config)] if figure.config else []), *more])


def places_of(
    composer: Composer, runs: Runs, figure: FigureFile, more: Case = (), seeds: Sequence[int] | None = None
) -> list[FigureCell]:
    """Compose the cells of methods × cases × seeds.

    Args:
        composer: of the figure.
        runs: methods and cases.
        figure: that they are of.
        more: settings of the user, which win.
        seeds: in place of the file's; None: those.

    Raises:
        ValueError: a label for several methods.
    """
    if runs.label is not None and len(runs.methods) > 1:
        raise ValueError(f"a label names one method, got {runs.label!r} for {', '.join(runs.methods)}")
    places = []
    for method in runs.methods:
        for case, settings in runs.cases.items():
            given = (*as_settings(runs.settings), *as_settings(settings), *more)
            config, label = composer.compose(method, given), runs.label or method
            for seed in seeds or runs.seeds or figure.seeds:
                whole = seeded(config, seed, figure.hold)
                places.append(FigureCell(label, case, Cell(method, given, seed, name_of(method, seed, whole), whole)))
    return places


def as_settings(given: Mapping[str, Any]) -> Case:
    """Write settings as on the command line, which takes YAML (JSON has no infinity).

    >>> as_settings({"model.client.mu": 0.1, "data.partition": {"class_path": "IID"}, "data.partition.alpha": math.inf})
    (('model.client.mu', '0.1'), ('data.partition', '{class_path: IID}'), ('data.partition.alpha', '.inf'))
    """
    return tuple((name, value if isinstance(value, str) else as_yaml(value)) for name, value in given.items())


def as_yaml(value: Any) -> str:
    """Write a value as YAML, on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, sort_keys=False, width=math.inf, allow_unicode=True)
    return text.strip().removesuffix("\n...")  # the end of a document, after a plain value


def name_of(method: str, seed: int, config: Mapping[str, Any], start: str = "") -> str:
    """Name of a cell's files: equal configurations, of one figure or several, have one run.

    Args:
        method: as it was named.
        seed: of the figure.
        config: whole configuration, without the weights of the start.
        start: name of the cell whose weights it begins with.
    """
    content = json.dumps([config, start], sort_keys=True, default=str)
    return slug(f"{method}-seed{seed}-{hashlib.sha256(content.encode()).hexdigest()[:8]}")
