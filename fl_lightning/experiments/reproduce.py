"""`fl-lightning reproduce`: lists the papers' figures and tables, or runs what one needs and draws it."""

from collections.abc import Sequence
from pathlib import Path

from fl_lightning.cli.configs import title
from fl_lightning.cli.errors import PROG
from fl_lightning.cli.parser import CommandParser
from fl_lightning.cli.suggestions import OF_FIT
from fl_lightning.experiments import experiment as files
from fl_lightning.experiments.cells import Cells, Request
from fl_lightning.experiments.composing import as_settings, parse_settings, split_overrides
from fl_lightning.experiments.making import Maker
from fl_lightning.experiments.merging import check_source
from fl_lightning.experiments.planning import plan
from fl_lightning.experiments.reference import check_reference
from fl_lightning.experiments.results import PictureFormat
from fl_lightning.experiments.running import duration
from fl_lightning.experiments.starting import check_starts
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
        argv: options of the command.

    Raises:
        SystemExit: with 2 for a wrong option, 0 after the help.
        ValueError: there is no such experiment, a setting is wrong, or naming the runs that failed.
        KeyboardInterrupt: naming how to go on.
    """
    words, overrides = split_overrides(argv)
    given = command_parser().parse_args(words)
    check_at_least(0, "0 makes the runs in this process", processes=given.processes)
    if given.rounds is not None and not (0 < given.rounds < 1 or (given.rounds >= 1 and given.rounds.is_integer())):
        raise ValueError(
            f"--rounds must be a whole number from 1 on, or a share in (0, 1) of the experiment's, got {given.rounds:g}"
        )
    files.check_seeds(given.seeds or ())
    if not given.names:
        if argv:
            raise ValueError(
                f"options are of an experiment, whose name comes first, got {' '.join(argv)} without one; "
                f"fl-lightning reproduce lists all"
            )
        print(listed())
        return
    check_output(given.output, writes=not given.plan)  # others' runs can be planned, too
    for folder in given.merge:
        check_source(folder)
    settings = parse_settings(given.set, "--set")
    if several := next((name for name, values in settings.items() if len(values) > 1), None):
        count = len(settings[several])
        raise ValueError(
            f"--set takes one value of each setting, got {count} of {several}; several are cases of a file"
        )
    more = (*as_settings({name: value for name, (value,) in settings.items()}), *overrides)
    makers = list[Maker]()
    refused = list[str]()
    paths = files.paths_of(given.names)
    for path in paths:
        experiment = files.read_experiment(path)
        name = f"{path.parent.name}/{path.stem}"
        if given.full:
            experiment.enlarge()
        try:
            experiment.select(given.methods, given.cases)
        except ValueError as error:  # of a paper's experiments those that have the rows and columns
            refused.append(name)
            if len(refused) == len(paths):
                raise ValueError(f"{name}: {error}" if len(paths) > 1 else str(error)) from None
            continue
        cells = Cells(experiment, Request(given.config or (), more, given.seeds, given.rounds))
        check_reference(cells, option="tables.reference")
        if given.plan:
            print(printable(plan(name, cells, [given.output, *given.merge]), keep="\n"))
            continue
        heading = path.read_text(encoding="utf-8").split("\n", 1)[0].lstrip("# ")
        makers.append(Maker(cells, given.output, given.processes, name, heading, given.format))
    check_files(makers)
    if refused:
        print(printable(f"left out for lack of these rows or columns: {', '.join(refused)}"))
    check_starts([maker.cells for maker in makers], given.processes, [given.output, *given.merge])
    for maker in makers:
        maker.make(sources=given.merge)


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
    return parser


def listed() -> str:
    """List all experiments: name, time, what each shows."""
    names = files.experiment_names()
    width = max(map(len, names))
    times = {name: time_of(files.read_runs(files.shipped_path(name))) for name in names}
    lines = (f"{name:{width}}  {time:>11}  {title(f'{files.FOLDER}/{name}')}" for name, time in times.items())
    return "\n".join(lines)


def time_of(experiment: files.Experiment) -> str:
    """Write how long the runs of an experiment take on two cores, empty where it does not tell.

    >>> time_of(files.Experiment([], [], minutes=0.5))
    '0.5 min'
    """
    if experiment.minutes is not None:
        return f"{experiment.minutes:g} min"
    hours = experiment.core_hours()
    return "" if hours is None else duration(3600 * hours / 2)


def check_files(makers: Sequence[Maker]) -> None:
    """Refuse experiments whose results would be written over each other's.

    Raises:
        ValueError: naming the file.
    """
    written = list[str]()
    for maker in makers:
        experiment = maker.cells.experiment
        written += dict.fromkeys([maker.name, *(f"{maker.name}{letter}" for letter in experiment.draw)])
        written += ["results.csv"] * bool(experiment.tables)
    if twice := next((name for name in written if written.count(name) > 1), None):
        raise ValueError(
            f"each experiment needs result files of its own, and two write {twice}; make them by two commands, each "
            f"with its own --output"
        )
