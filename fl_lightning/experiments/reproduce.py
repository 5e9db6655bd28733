"""`fl-lightning reproduce`: lists the papers' figures and tables, or runs what one needs and draws it."""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fl_lightning.cli.configs import title
from fl_lightning.cli.errors import PROG
from fl_lightning.cli.meant_options import OF_FIT
from fl_lightning.cli.parser import CommandParser
from fl_lightning.experiments import experiment_files as files
from fl_lightning.experiments.cells import Cells, Request
from fl_lightning.experiments.experiment import Experiment, check_seeds
from fl_lightning.experiments.making import KEPT, Maker
from fl_lightning.experiments.merging import check_source
from fl_lightning.experiments.overrides import (
    SettingPairs,
    as_settings,
    parse_settings,
    split_overrides,
    values_together,
)
from fl_lightning.experiments.planning import plan
from fl_lightning.experiments.progress import duration
from fl_lightning.experiments.reference import check_reference
from fl_lightning.experiments.results import PictureFormat
from fl_lightning.experiments.starting import check_starts
from fl_lightning.runs.folder import Keep
from fl_lightning.utils.files import check_output
from fl_lightning.utils.settings import check_at_least
from fl_lightning.utils.text import printable

DESCRIPTION = (
    "Reproduce a figure or table of a paper: run what it needs and write its pictures and tables. Without a name: list "
    "all of them. Runs that are done are kept, and other experiments use them too: the same command goes on where it "
    "was stopped, by several processes at once, too. Options of fit, such as --trainer.precision bf16-mixed, hold for "
    "all runs, and win."
)


def run(argv: list[str]) -> None:
    """List the papers' experiments, or make some.

    Args:
        argv: Options of the command.

    Raises:
        SystemExit: An option is wrong, with code 2, or the help was printed, with code 0.
        ValueError: There is no such experiment, a setting is wrong, or runs failed. The sentence names them.
        KeyboardInterrupt: The command was interrupted. The sentence tells how to go on.
    """
    words, overrides = split_overrides(argv)
    given = command_parser().parse_args(words)
    check_numbers(given)
    if not given.names:
        if argv:
            raise ValueError(
                f"options are of an experiment, whose name comes first, got {' '.join(argv)} without one; "
                f"fl-lightning reproduce lists all"
            )
        print(listed())
        return
    # The folder of others can be planned, too.
    check_output(given.output, writes=not given.plan)
    for folder in given.merge:
        check_source(folder)
    folders = [given.output, *given.merge]
    settings = (*single_settings(given.set), *overrides)
    experiments, refused = selected(given)
    makers = []
    for path, experiment in experiments.items():
        name = name_of(path)
        cells = Cells(
            experiment, Request(given.config or (), settings=settings, seeds=given.seeds, rounds=given.rounds)
        )
        check_reference(cells, option="tables.reference")
        if given.plan:
            print(printable(plan(name, cells, folders), keep="\n"))
            continue
        maker = Maker(
            cells,
            output=given.output,
            processes=given.processes,
            name=name,
            heading=path.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# "),
            forms=given.format,
            command=shlex.join([PROG, "reproduce", *argv]),
            keep=given.keep_checkpoints,
        )
        makers.append(maker)
    check_files(makers)
    if refused:
        print(printable(f"left out for lack of these rows or columns: {', '.join(refused)}"))
    check_starts([maker.cells for maker in makers], given.processes, folders)
    for maker in makers:
        maker.make(sources=given.merge)


def check_numbers(given: Any) -> None:
    """Refuse wrong numbers of processes and rounds, and wrong seeds.

    Args:
        given: Options of the command.

    Raises:
        ValueError: One of these is wrong.
    """
    check_at_least(0, "0 makes the runs in this process", processes=given.processes)
    rounds = given.rounds
    if rounds is not None:
        is_share = 0 < rounds < 1
        is_number = rounds >= 1 and rounds.is_integer()
        if not is_share and not is_number:
            raise ValueError(
                f"--rounds must be a whole number from 1 on, or a share in (0, 1) of the experiment's, got {rounds:g}"
            )
    check_seeds(given.seeds or ())


def single_settings(given: Sequence[str]) -> SettingPairs:
    """Read the values of `--set`, one of each setting.

    Args:
        given: Texts such as `NAME=VALUE`.

    Raises:
        ValueError: A text is none of these, or a setting has several values.
    """
    settings: dict[str, str] = {}
    for name, values in parse_settings(given, "--set").items():
        if len(values) > 1:
            raise ValueError(
                f"--set takes one value of each setting, got {len(values)} of {name}; several are cases of a file"
            )
        settings |= values_together(name, values[0])
    return as_settings(settings)


def selected(given: Any) -> tuple[Mapping[Path, Experiment], list[str]]:
    """Read the experiments that the command names, with the rows and columns that it asks for.

    Args:
        given: Options of the command.

    Returns:
        The experiments by path, and the names of experiments without such rows or columns.

    Raises:
        ValueError: There is no such experiment, or no experiment has these rows and columns.
    """
    experiments: dict[Path, Experiment] = {}
    refused: list[str] = []
    paths = files.paths_of(given.names)
    for path in paths:
        experiment = files.read_experiment(path)
        if given.full:
            experiment.enlarge()
        try:
            experiment.select(given.methods, given.cases)
        except ValueError as error:
            refused.append(name_of(path))
            if len(refused) == len(paths):
                raise ValueError(f"{name_of(path)}: {error}" if len(paths) > 1 else str(error)) from None
            continue
        experiments[path] = experiment
    return experiments, refused


def name_of(path: Path) -> str:
    """Return the name of an experiment, `paper/number`, by which its results are filed."""
    return f"{path.parent.name}/{path.stem}"


def command_parser() -> CommandParser:
    """Build the parser of the command."""
    parser = CommandParser(prog=f"{PROG} reproduce", description=DESCRIPTION)
    parser.further = OF_FIT
    add = parser.add_argument
    add("names", nargs="*", type=str, help="paper/number, a paper for all that it has, or a file; none: list all")
    add("-c", "--config", action="append", help="a YAML file over the experiment's own, such as data/cifar10")
    add("--set", nargs="+", action="extend", type=str, default=[], help="NAME=VALUE: a setting of all runs")
    add("--methods", nargs="+", type=str, default=[], help="rows, by patterns such as 'FedED*'")
    add("--cases", nargs="+", type=str, default=[], help="columns, by patterns such as '*0.05'")
    add("--seeds", nargs="+", type=int, default=None, help="in place of the experiment's")
    rounds = "the first ones of each run, which the full number continues later; below 1 a share of them"
    add("--rounds", type=float | None, default=None, help=rounds)
    add("--full", action="store_true", help="a figure at the size of the paper's runs")
    add("--plan", action="store_true", help="list the runs and what they take; run nothing")
    add("--merge", nargs="+", type=Path, default=[], help="folders of other machines whose runs are taken over")
    add("--output", type=Path, default=Path("reproduced"), help="folder of the runs, the pictures and the tables")
    add("--format", nargs="+", type=PictureFormat, default=["png"], help="of the pictures; several may be given")
    add("--processes", type=int, default=1, help="runs at once; 0: in this process")
    add("--keep_checkpoints", type=Keep, default="none", help=KEPT)
    return parser


def listed() -> str:
    """List all experiments: their names, their times, and what each shows."""
    names = files.experiment_names()
    width = max(map(len, names))
    lines = []
    for name in names:
        time = time_of(files.read_runs(files.shipped_path(name)))
        lines.append(f"{name:{width}}  {time:>11}  {title(f'{files.FOLDER}/{name}')}")
    return "\n".join(lines)


def time_of(experiment: Experiment) -> str:
    """Write how long the runs of an experiment take on two cores, nothing if it does not tell.

    >>> time_of(Experiment([], [], minutes=0.5))
    '0.5 min'
    """
    if experiment.minutes is not None:
        return f"{experiment.minutes:g} min"
    hours = experiment.core_hours()
    return "" if hours is None else duration(3600 * hours / 2)


def check_files(makers: Sequence[Maker]) -> None:
    """Refuse experiments whose results would be written over each other's.

    Raises:
        ValueError: Two experiments write the same file. The sentence names the file.
    """
    written: list[str] = []
    for maker in makers:
        experiment = maker.cells.experiment
        written += dict.fromkeys([maker.name, *(f"{maker.name}{letter}" for letter in experiment.draw)])
        if experiment.tables:
            written.append("results.csv")
    for name in written:
        if written.count(name) > 1:
            raise ValueError(
                f"each experiment needs result files of its own, and two write {name}; make them by two commands, each "
                f"with its own --output"
            )
