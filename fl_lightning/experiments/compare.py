"""`fl-lightning compare`: an experiment of methods, settings and seeds by the options of a command, and its tables."""

import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, get_args

from fl_lightning.cli.errors import PROG
from fl_lightning.cli.meant_options import OF_FIT
from fl_lightning.cli.parser import CommandParser
from fl_lightning.experiments.cell import Cell
from fl_lightning.experiments.cells import Cells, Request
from fl_lightning.experiments.composing import Held, short_name
from fl_lightning.experiments.experiment import Experiment, Runs, Tables, check_seeds
from fl_lightning.experiments.experiment_files import as_text
from fl_lightning.experiments.making import KEPT, Maker
from fl_lightning.experiments.overrides import (
    SettingPairs,
    in_list,
    parse_settings,
    setting_combinations,
    settings_text,
    single_names,
    split_overrides,
)
from fl_lightning.experiments.reference import check_reference
from fl_lightning.experiments.starting import check_starts
from fl_lightning.experiments.tuning import check_directions
from fl_lightning.federation.configured import flat
from fl_lightning.federation.differences import differences
from fl_lightning.federation.effects import is_data
from fl_lightning.reports.results import COUNTS, TIMED, Column
from fl_lightning.runs.folder import Keep
from fl_lightning.utils.files import check_output, write_file
from fl_lightning.utils.settings import check_above, check_at_least

DESCRIPTION = (
    "Run every method with every seed and setting, and write results.csv, results.md, results.tex and report.html. "
    "Runs that are done are skipped, others continued: the same command goes on where it was stopped. Options of fit, "
    "such as --trainer.max_epochs 20 or --data.partition.alpha 0.1, hold for all runs, and win."
)
FILE = "experiment.yaml"
"""Name of the file with what the options of the command asked for, which `fl-lightning reproduce` takes."""

FOLDER = Path("comparisons")
"""Folder of the experiments that no option names a folder for, as `runs` has the runs of a fit."""

CALLBACKS = "trainer.callbacks+"
"""Option that adds callbacks, and may be given several times."""

PARTS = ("model.aggregator", "model.server_module", "model.server_optimizer", "model.transforms", "model.personal")
"""Settings that make a method, and that the base gives to all of them."""


def run(argv: list[str]) -> None:
    """Run the experiment and write its tables.

    Args:
        argv: Options of the command.

    Raises:
        SystemExit: An option is wrong, with code 2, or the help was printed, with code 0.
        ValueError: The options do not make one table, or settings cannot be run; then nothing was run. Or runs failed;
            then the tables of the others were written.
        KeyboardInterrupt: The command was interrupted. The sentence tells how to go on.
    """
    words, overrides = split_overrides(argv)
    given = command_parser().parse_args(words)
    check_at_least(0, "0 makes the runs in this process", processes=given.processes)
    folder = given.output or default_folder(given.config)
    check_output(folder)
    check_seeds(given.seeds)
    experiment = experiment_of(given, overrides)
    cells = Cells(experiment, Request())
    every = cells.all()
    check_rounds(given.at, every)
    check_clocks(experiment.tables or Tables(), every)
    check_reference(cells, option="--reference")
    if not given.allow_different_data:
        check_same_data(every)
    if counts_to_target(given.columns):
        for metric in given.metrics:
            check_directions(every, metric)
    check_starts([cells], given.processes, [folder])
    write_file(folder / FILE, as_text(experiment))
    command = shlex.join([PROG, "compare", *argv])
    Maker(cells, folder, given.processes, command=command, keep=given.keep_checkpoints).make(notes_of(cells))


def default_folder(configs: Sequence[str]) -> Path:
    """Return the folder of an experiment that no option names a folder for, after its last file.

    Args:
        configs: Values of `-c`: paths and names of files, or YAML, which names nothing.

    >>> default_folder(["experiment/digits_fedavg", "mine/more.yaml", "trainer: {max_epochs: 1}"]).as_posix()
    'comparisons/more'
    """
    files = [config for config in configs if ":" not in config]
    name = Path(files[-1]).stem if files else "compare"
    return FOLDER / name


def experiment_of(given: Any, overrides: SettingPairs) -> Experiment:
    """Make the experiment that the options ask for.

    Args:
        given: Options of the command.
        overrides: Options of `fit`.

    Raises:
        ValueError: An option is wrong. The sentence names it.
    """
    methods = named_methods(given.methods)
    baseline = given.baseline or next(iter(methods))
    for option, row in (("--baseline", baseline), ("--reference", given.reference)):
        if row is not None and row not in methods:
            raise ValueError(f"{option} must be one of --methods ({', '.join(methods)}), got {row}")
    settings = parse_settings(given.set, "--set")
    tuned = parse_settings(given.tune, "--tune")
    shared = joined_callbacks(overrides)
    set_by_cases = single_names(settings)
    for name in single_names(tuned):
        if is_data(name) or name in set_by_cases or name in shared:
            raise ValueError(f"--tune takes settings of the training that nothing else sets, got {name}")
    for name in set_by_cases:
        if name in shared:
            raise ValueError(f"--set {name} and --{name} set the same; leave one out")
    check_columns(given)
    cases = {}
    for case in setting_combinations(settings):
        cases[settings_text(case.items())] = {**case, **shared}
    rows = []
    for name, method in methods.items():
        rows.append(Runs([method], tune=tuned, label=None if name == method else name))
    return Experiment(
        base=given.config,
        cases=cases,
        runs=rows,
        seeds=given.seeds,
        hold=given.hold,
        tables=Tables(
            baseline=baseline,
            metrics=given.metrics,
            target=given.target,
            at=given.at,
            columns=given.columns,
            at_seconds=given.at_seconds,
            reference=given.reference,
        ),
        val_fraction=given.val_fraction,
        tune_metric=given.tune_metric,
    )


def joined_callbacks(overrides: SettingPairs) -> dict[str, str]:
    """Return the options of `fit` by name, with all added callbacks in one list."""
    shared = dict(overrides)
    added = [value for name, value in overrides if name == CALLBACKS]
    if added:
        shared[CALLBACKS] = in_list(*added)
    return shared


def counts_to_target(columns: Sequence[str]) -> bool:
    """Return True if one of the columns counts until a target."""
    return any(column in COUNTS for column in columns)


def check_columns(given: Any) -> None:
    """Refuse columns after less than one round or no second, and a target that no column uses.

    Args:
        given: Options of the command.

    Raises:
        ValueError: One of these is wrong.
    """
    for rounds in given.at:
        check_at_least(1, "it is a number of rounds", at=rounds)
    for seconds in given.at_seconds:
        check_above(0, "it is a number of simulated seconds", at_seconds=seconds)
    if given.target is not None and not counts_to_target(given.columns):
        raise ValueError(f"--target belongs to --columns {' '.join(COUNTS)}, got {given.target} without them; add one")


def named_methods(given: Sequence[str]) -> dict[str, str]:
    """Name methods for the tables.

    Args:
        given: Values of `--methods`. `NAME=METHOD` gives a name, others have the name of their file or class.

    Returns:
        The methods by name.

    Raises:
        ValueError: Two methods have the same name, a method has none, or a text has a comma.

    >>> named_methods(["FedAvg", "ours=my_methods.FedLS", "my_methods.FedLS"])
    {'FedAvg': 'FedAvg', 'ours': 'my_methods.FedLS', 'FedLS': 'my_methods.FedLS'}
    """
    methods = dict[str, str]()
    for text in given:
        name, is_named, method = text.partition("=")
        if not is_named:
            name = short_name(text)
            method = text
        if "," in text:
            raise ValueError(
                f"--methods takes names with spaces between them, got {text}; write {text.replace(',', ' ')}"
            )
        if not name or not method:
            raise ValueError(f"--methods takes METHOD or NAME=METHOD, got {text!r}")
        if name in methods:
            raise ValueError(f"--methods must have names of their own, got {name} twice; write NAME={method}")
        methods[name] = method
    return methods


def command_parser() -> CommandParser:
    """Build the parser of the command."""
    parser = CommandParser(prog=f"{PROG} compare", description=DESCRIPTION)
    parser.further = OF_FIT
    add = parser.add_argument
    add_list = partial(parser.add_argument, nargs="+")
    # An option that is given again adds its values. `extend` works for text only.
    add_more = partial(add_list, action="extend", type=str, default=[])
    add("-c", "--config", action="append", required=True, help="a YAML file that all methods share; several are merged")
    methods = "files in configs/method by name, paths of files or classes; A+B takes both, NAME=A names it"
    add_list("--methods", type=str, required=True, help=methods)
    add_list("--seeds", type=int, default=[0, 1, 2], help="each varies partition, cohorts, weights and batches")
    folder = "folder of the experiment; None: comparisons/ and the name of the last file of -c, compare without a file"
    add("--output", type=Path | None, default=None, help=folder)
    add_more("--set", help="NAME=V1,V2: a column for each value; NAME,NAME=[V1,W1],[V2,W2] sets both together")
    tuned = "NAME=V1,V2, or NAME,NAME=…: chosen for each method on the server's validation split"
    add_more("--tune", help=tuned)
    add_list("--hold", type=Held, default=[], help="what a seed does not vary; training: weights and batches")
    at_once = "runs at once, what memory or the cores allow; 0: one after the other in this process"
    add("--processes", type=int, default=1, help=at_once)
    add("--baseline", type=str | None, default=None, help="method that the others are compared with; None: the first")
    reference = "method with data.scenario.cumulative, against which intransigence has a column; None: no column"
    add("--reference", type=str | None, default=None, help=reference)
    add_more("--metrics", help="log keys; the known ones where none is given")
    target = f"of the columns {', '.join(COUNTS)}; None: the baseline's mean of the last five"
    add("--target", type=float | None, default=None, help=target)
    add_list("--at", type=int, default=[], help="rounds after which the value has a column, too")
    at_seconds = "simulated seconds after which the value has a column, too, of runs with data.devices"
    add_list("--at_seconds", "--at-seconds", type=float, default=[], help=at_seconds)
    columns = f"further columns: {', '.join(get_args(Column))}; what a round costs is measured"
    add_list("--columns", type=Column, default=[], help=columns)
    add("--val_fraction", type=float, default=0.1, help="of tuning, where the base has no validation split")
    add(
        "--tune_metric",
        type=str,
        default="val/acc",
        help="log key: val/… of the global model, local/… of the clients' models",
    )
    add("--keep_checkpoints", type=Keep, default="none", help=KEPT)
    add("--allow_different_data", type=bool, default=False, help="one table although data or cohorts differ")
    return parser


def check_rounds(at: Sequence[int], cells: Sequence[Cell]) -> None:
    """Refuse columns after rounds that no run has, if all runs have a limit of rounds.

    Args:
        at: Numbers of rounds after which a value has a column.
        cells: Cells of the experiment.

    Raises:
        ValueError: A number is above the rounds of all runs.
    """
    if any(cell.max_rounds <= 0 for cell in cells):
        return
    most = max(cell.max_rounds for cell in cells)
    for rounds in at:
        if rounds > most:
            raise ValueError(f"--at must name rounds that the runs have, at most {most}, got {rounds}")


def check_clocks(tables: Tables, cells: Sequence[Cell]) -> None:
    """Refuse columns of simulated seconds if a run has none, and seconds that no run has.

    Args:
        tables: Settings of the tables.
        cells: Cells of the experiment.

    Raises:
        ValueError: A run has no simulated seconds, or a column is after the end of all runs.
    """
    asked = [f"--at_seconds {seconds:.12g}" for seconds in tables.at_seconds]
    asked += [f"--columns {name}" for name in TIMED if name in tables.columns]
    if not asked:
        return
    for cell in cells:
        if cell.config["data"].get("devices") is None:
            raise ValueError(
                f"{asked[0]} needs simulated seconds in all runs, and {cell.method} has no data.devices; set it for all"
            )
    longest = max(inf if cell.max_seconds is None else cell.max_seconds for cell in cells)
    for seconds in tables.at_seconds:
        if seconds > longest:
            raise ValueError(
                f"--at_seconds must be within model.max_seconds, at most {longest:.12g}, got {seconds:.12g}; give "
                f"{longest:.12g}"
            )


def check_same_data(cells: Sequence[Cell]) -> None:
    """Refuse tables of cells whose data or cohorts differ with the same seed.

    Raises:
        ValueError: A setting of the data or the cohorts differs. The sentence names the first.
    """
    first: dict[tuple[str, int], Cell] = {}
    for cell in cells:
        other = first.setdefault((cell.case, cell.seed), cell)
        for name, before, after in differences(data_settings(other), data_settings(cell)):
            raise ValueError(
                f"one table needs the same data and cohorts for all methods, but {name} is {before} for "
                f"{other.method} and {after} for {cell.method}; give all the same by --{name} VALUE, or "
                f"--allow_different_data true"
            )


def data_settings(cell: Cell) -> dict[str, Any]:
    """Return the settings of a cell's data and cohorts by dotted name."""
    return {name: value for name, value in flat(cell.config).items() if is_data(name)}


def notes_of(cells: Cells) -> list[str]:
    """Return a sentence for each part of a method that the base gives to all methods."""
    config: Mapping[str, Any] = flat(cells.composer.compose(""))
    notes = []
    for name in PARTS:
        if config.get(name) not in (None, [], "None"):
            notes.append(f"The base sets {name}={config[name]}, which every method has that does not set another.")
    return notes
