"""The row of an experiment that keeps the samples of earlier tasks, against which intransigence is measured."""

from typing import Any

from fl_lightning.experiments.cell import Cell
from fl_lightning.experiments.cells import Cells
from fl_lightning.federation.configured import flat
from fl_lightning.federation.differences import differences
from fl_lightning.federation.effects import below

SCENARIO = "data.scenario"
"""Setting of how the data change."""

CUMULATIVE = "data.scenario.cumulative"
"""Setting of whether the samples of earlier tasks stay."""


def check_reference(cells: Cells, option: str) -> None:
    """Refuse a row that is no reference of the others: without tasks, not cumulative, or with other tasks.

    Args:
        cells: The cells of an experiment, whose tables may name such a row.
        option: Name of the option that names it, for the error.

    Raises:
        ValueError: The row is no reference.
    """
    tables = cells.experiment.tables
    if tables is None or tables.reference is None:
        return
    every = cells.all()
    by_case = {cell.case: cell for cell in every if cell.method == tables.reference}
    for cell in every:
        reference = by_case.get(cell.case)
        if reference is None:
            where = f" in {cell.case!r}" if cell.case else ""
            raise ValueError(f"{option} must name a row that is run{where}, got {tables.reference}; run it, too")
        check_cumulative(reference, option)
        check_same_tasks(cell, reference, option)


def check_cumulative(cell: Cell, option: str) -> None:
    """Refuse a reference that does not keep the samples of earlier tasks.

    Args:
        cell: A cell of the reference.
        option: Name of the option.

    Raises:
        ValueError: It does not.
    """
    settings = scenario_of(cell)
    if settings.get(SCENARIO) is None:
        raise ValueError(
            f"{option} must name a row with tasks, got {cell.method}, which has no data.scenario; set "
            f"data.scenario to ClassIncremental for all rows"
        )
    if CUMULATIVE not in settings:
        kind = str(settings[SCENARIO]).rpartition(".")[2]
        raise ValueError(
            f"{option} must name a row that keeps the samples of earlier tasks, got {cell.method} with {kind}, which "
            f"has no setting cumulative; set data.scenario to ClassIncremental for all rows"
        )
    if settings[CUMULATIVE] is not True:
        raise ValueError(
            f"{option} must name a row that keeps the samples of earlier tasks, got {cell.method} without it; set "
            f"{CUMULATIVE}: true for that row"
        )


def check_same_tasks(cell: Cell, reference: Cell, option: str) -> None:
    """Refuse a row whose scenario is another one than that of the reference.

    Args:
        cell: A cell of the row.
        reference: The cell of the reference in the same case.
        option: Name of the option.

    Raises:
        ValueError: A setting of the scenario other than `cumulative` differs.
    """
    settings = scenario_of(cell)
    expected = scenario_of(reference)
    for changed in differences(expected, settings):
        if changed.name != CUMULATIVE:
            raise ValueError(
                f"{option} must name a row with the tasks of the others, but {changed.name} is {changed.was} for "
                f"{reference.method} and {changed.now} for {cell.method}; give both the same"
            )


def scenario_of(cell: Cell) -> dict[str, Any]:
    """Return the settings of a cell's scenario by dotted name."""
    return {name: value for name, value in flat(cell.config).items() if below(name, SCENARIO)}
