"""Tables for the terminal."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fl_lightning.functional.forgetting import forgetting, forgetting_per_class
from fl_lightning.metrics.history import History
from fl_lightning.metrics.keys import Direction, Directions, best_of, direction_of, is_value
from fl_lightning.utils.text import printable

AVERAGES = ("macro", "weighted")
"""Averages over the classes: alike, and by their samples."""

MOST_COLUMNS = 8
"""Largest number of values in a line of the table by round."""


WIDEST = 10_000
"""Characters that a table may have before it is measured against the terminal."""


def print_classes(
    title: str,
    names: Sequence[str],
    samples: Tensor,
    accuracy: Tensor,
    peak: Tensor | None,
    scores: Mapping[str, Tensor],
    max_rows: int,
) -> None:
    """Print the accuracy of every class, and below it accuracy, forgetting F, worst class and averages.

    Args:
        title: above the table.
        names: of the C classes.
        samples: evaluated samples of each class, (C,).
        accuracy: A_c, (C,); NaN without samples.
        peak: best A_c over the rounds, (C,); None: not known, then nothing is said of forgetting.
        scores: precision, recall and F1 by name, of each class and as averages, (C + 2,).
        max_rows: of more classes only so many are shown, the worst.
    """
    order = accuracy.nan_to_num(2.0).argsort(stable=True).tolist()
    worst = order[0]
    shown = list(range(len(names))) if len(names) <= max_rows else order[:max_rows]
    overall = (accuracy.nan_to_num() * samples).sum() / samples.sum()
    columns = {"samples": [str(int(n)) for n in samples], "accuracy": list(map(percent, accuracy))}
    columns |= {name: list(map(percent, scores[name])) for name in scores if name != "recall"}  # which the accuracy is
    below = [f"accuracy {percent(overall)}"]
    if peak is not None:
        rounds = torch.stack([peak, accuracy])
        columns |= {"best": list(map(percent, peak)), "forgetting": list(map(percent, forgetting_per_class(rounds)))}
        below.append(f"forgetting F {percent(forgetting(rounds))}")
    below.append(f"worst class {names[worst]}: {percent(accuracy[worst])}")
    if len(shown) < len(names):
        below.append(f"({len(shown)} of {len(names)} classes shown, the worst)")
    rows = [[names[c], *(column[c] for column in columns.values())] for c in shown]
    averages = (
        f"{average}: " + ", ".join(f"{name} {percent(values[len(names) + i])}" for name, values in scores.items())
        for i, average in enumerate(AVERAGES)
    )
    print_table(title, ["class", *columns], rows, shown.index(worst), "\n".join(["   ".join(below), *averages]))


def print_metrics(metrics: Mapping[str, float]) -> None:
    """Print values by name."""
    if metrics:
        print_table("Last values", ["name", "value"], ([name, f"{value:.6g}"] for name, value in metrics.items()))


def print_rounds(history: History, best: str, max_rows: int, directions: Directions | None = None) -> None:
    """Print the values of every round, numbered from 0 as in metrics.csv, but for bytes and single classes.

    Args:
        history: of the run.
        best: key whose best round stands out; the last round if the key, its direction or a finite value is not known.
        max_rows: of more rounds only so many are shown, the last ones.
        directions: directions of keys that the user or metric objects give.
    """
    names = [name for name in history.names if is_value(name)][:MOST_COLUMNS]
    if not names or len(history) < 2:
        return
    columns = [history.curve(name) for name in names]
    shown = history.rounds[-max_rows:]
    rows = [[str(r), *(f"{column[r]:.6g}" if r in column else "-" for column in columns)] for r in shown]
    bold = best_round(history.curve(best), direction_of(best, directions))
    if bold is None:
        bold = shown[-1]
    print_table("Values by round", ["round", *names], rows, shown.index(bold) if bold in shown else None)


def best_round(curve: Mapping[int, float], direction: Direction | None) -> int | None:
    """Return the first round with the best finite value, or None without one or without a direction."""
    if direction is None:
        return None
    best = best_of(curve.values(), direction)
    return next((round_idx for round_idx, value in curve.items() if value == best), None)


def print_table(
    title: str, header: Sequence[str], rows: Iterable[Sequence[str]], bold: int | None = None, below: str = ""
) -> None:
    """Print a table whose first column holds names and the others numbers, and whose row `bold` stands out.

    On a terminal that is too narrow for it the table is several, each with the names.
    """
    lines = [list(map(printable, line)) for line in (header, *rows)]
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(f"\n{title}", style="bold")
    names, *others = zip(*lines, strict=True)
    anything = console.options.update(max_width=WIDEST)
    while others:
        count = 1
        while (
            count < len(others)
            and console.measure(columns_table(names, others[: count + 1]), options=anything).maximum <= console.width
        ):
            count += 1
        console.print(columns_table(names, others[:count], bold))
        del others[:count]
    if below:
        console.print(printable(below, keep="\n"))


def columns_table(names: Sequence[str], others: Iterable[Sequence[str]], bold: int | None = None) -> Table:
    """Make a table of columns, each with its heading first."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns = [names, *others]
    for i, (heading, *_) in enumerate(columns):
        table.add_column(heading, justify="right" if i else "left")
    for i, row in enumerate(zip(*(column[1:] for column in columns), strict=True)):
        table.add_row(*row, style="bold" if i == bold else None)
    return table


def percent(value: Tensor) -> str:
    """Write a fraction in percent, NaN as a dash."""
    return "-" if value.isnan() else f"{100 * float(value):.1f} %"
