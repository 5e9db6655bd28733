"""`fl-lightning compare`: a grid of methods, settings and seeds, and its tables."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import chain
from pathlib import Path

from fl_lightning.cli.compare.grid import Case, Cell, Composer, Held, combinations, option_names, parse_settings
from fl_lightning.cli.compare.results import write_results
from fl_lightning.cli.compare.running import Grid, run_cells
from fl_lightning.cli.compare.tuning import tune
from fl_lightning.cli.errors import PROG
from fl_lightning.cli.parser import CommandParser
from fl_lightning.federation.identity import differences, flat
from fl_lightning.reports.saved import SEEDS, is_data
from fl_lightning.runs import folder as folders
from fl_lightning.utils.settings import check_at_least

DESCRIPTION = (
    "Run every method with every seed and setting, and write results.csv, results.md, results.tex and report.html. "
    "Runs that are done are skipped, others continued: the same command goes on where it was stopped."
)
PARTS = ("model.aggregator", "model.server_module", "model.server_optimizer", "model.transforms", "model.personal")
"""Settings that make a method, and that the base gives to all of them."""


def run(argv: list[str]) -> None:
    """Run the grid and write its tables.

    Args:
        argv: options of the command.

    Raises:
        SystemExit: with 2 for a wrong option, 0 after the help.
        ValueError: what was asked for cannot be one table, or not be continued; or naming the cells that failed,
            after the tables of the others were written.
        KeyboardInterrupt: naming how to go on.
    """
    given = command_parser().parse_args(argv)
    check_at_least(0, "0 runs the cells in this process", processes=given.processes)
    for option in ("methods", "seeds"):
        if len(set(given[option])) < len(given[option]):
            raise ValueError(f"--{option} must name each of its values once, got {' '.join(map(str, given[option]))}")
    baseline = given.baseline or given.methods[0]
    if baseline not in given.methods:
        raise ValueError(f"--baseline must be one of --methods ({', '.join(given.methods)}), got {baseline}")
    grid = Grid(Composer(given.config), given.output, given.methods, given.seeds, given.hold, given.processes)
    cases = combinations(parse_settings(given.set, "--set"))
    candidates = combinations(parse_settings(given.tune, "--tune"))
    check_settings(grid, cases[0], candidates[0])
    for case in cases if not given.allow_different_data else ():
        check_data(grid.cells(case))
    with locked(grid.output):
        notes = note_shared_parts(grid)
        if given.tune:
            notes += tune(grid, cases, candidates, given.val_fraction, given.tune_metric)
        for note in notes:
            print(note)
        cells = {case: grid.cells(case) for case in cases}
        failed = run_cells(chain.from_iterable(cells.values()), grid.processes, grid.output)
        notes += [f"{name} failed: {error}" for name, error in failed.items()]
        write_results(grid.output, cells, baseline, given.metrics, given.target, notes)
    if failed:
        named = "; ".join(f"{name}: {error}" for name, error in failed.items())
        raise ValueError(
            f"{len(failed)} cell{'s' * (len(failed) != 1)} failed, and the tables are those of the others. {named}. "
            f"{given.output}/logs has what each printed; the same command tries them again"
        )


def command_parser() -> CommandParser:
    """Build the parser of the command."""
    parser = CommandParser(prog=f"{PROG} compare", description=DESCRIPTION)
    add, add_list = parser.add_argument, partial(parser.add_argument, nargs="+")
    add("-c", "--config", action="append", required=True, help="a YAML file that all methods share; several are merged")
    add_list("--methods", type=str, required=True, help="files in configs/method by name, or paths; A+B takes both")
    add_list("--seeds", type=int, default=[0, 1, 2], help="each varies partition, cohorts, weights and batches")
    add("--output", type=Path, required=True, help="folder of the grid")
    add_list("--set", type=str, default=[], help="NAME=V1,V2: one table for each value")
    tuned = "NAME=V1,V2: chosen for each method on the server's validation split"
    add_list("--tune", type=str, default=[], help=tuned)
    add_list("--hold", type=Held, default=[], help="what a seed does not vary; training: weights and batches")
    at_once = "cells at once, what memory or the cores allow; 0: one after the other in this process"
    add("--processes", type=int, default=1, help=at_once)
    add("--baseline", type=str | None, default=None, help="method that the others are compared with; None: the first")
    add_list("--metrics", type=str, default=[], help="log keys; the known ones where none is given")
    target = "of rounds to target; None: the baseline's mean of the last five"
    add("--target", type=float | None, default=None, help=target)
    add("--val_fraction", type=float, default=0.1, help="of tuning, where the base has no validation split")
    add("--tune_metric", type=str, default="val/acc", help="log key, of the validation split")
    add("--allow_different_data", type=bool, default=False, help="one table although data or cohorts differ")
    return parser


# --- checks ---------------------------------------------------------------------------------------


def check_settings(grid: Grid, case: Case, candidate: Case) -> None:
    """Refuse settings that no method knows, those that are the grid's own, and data that are tuned.

    Raises:
        ValueError: naming the setting.
    """
    known = set[str]().union(*(option_names(grid.composer.compose(method)) for method in grid.methods))
    for name, _ in (*case, *candidate):
        if name in (*SEEDS, "trainer.default_root_dir", "trainer.logger"):
            raise ValueError(
                f"--set and --tune take settings that the grid does not set itself, got {name}; see --seeds"
            )
        if name not in known:
            raise ValueError(f"--set and --tune take options of fit, and no method of the grid knows {name!r}")
    for name, _ in candidate:
        if is_data(name) or name in dict(case):
            raise ValueError(f"--tune takes settings of the training that --set does not take, got {name}")


def locked(folder: Path) -> AbstractContextManager[None]:
    """Keep the folder of a grid for this process within a block."""
    return folders.locked(
        folder, f"a grid has one process that runs it, and {folder} is in use by another; wait for its end"
    )


def check_data(cells: Sequence[Cell]) -> None:
    """Refuse a table of cells whose data or cohorts differ with the same seed.

    Raises:
        ValueError: naming the first difference.
    """
    first: dict[int, Cell] = {}
    for cell in cells:
        other = first.setdefault(cell.seed, cell)
        was, now = ({n: v for n, v in flat(of.config).items() if is_data(n)} for of in (other, cell))
        for name, before, after in differences(was, now):
            raise ValueError(
                f"one table needs the same data and cohorts for all methods, but {name} is {before} for "
                f"{other.method} and {after} for {cell.method}; give all the same by --set {name}=VALUE, or "
                f"--allow_different_data true"
            )


def note_shared_parts(grid: Grid) -> list[str]:
    """Name the parts of a method that the base gives to all of them."""
    config = flat(grid.composer.compose(""))
    return [
        f"The base sets {name}={config[name]}, which every method has that does not set another."
        for name in PARTS
        if config.get(name) not in (None, [], "None")
    ]
