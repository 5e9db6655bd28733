"""Tables for the terminal."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fl_lightning.functional.classes import shown_names
from fl_lightning.functional.forgetting import forgetting, forgetting_per_class
from fl_lightning.metrics.history import History
from fl_lightning.metrics.keys import Direction, Directions, best_of, direction_of, is_value
from fl_lightning.utils.text import printable

AVERAGES = ("macro", "weighted")
"""Averages over the classes: all classes alike, and by their samples."""

MOST_COLUMNS = 8
"""Largest number of values in a line of the table by round."""

GAP = "   "
"""Blanks between two texts of a line."""

WIDEST = 10_000
"""Largest width of a table in characters before it is compared with the terminal."""


def print_classes(  # noqa: PLR0917 - called by position
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
        title: Title above the table.
        names: Names of the C classes.
        samples: Number of evaluated samples of each class, (C,).
        accuracy: A_c, (C,), NaN without samples.
        peak: Best A_c over the rounds, (C,). None means that it is not known: nothing is said of forgetting.
        scores: Precision, recall and F1 by name, of each class and as averages, (C + 2,).
        max_rows: Largest number of classes that are shown. Of more classes the worst are shown.
    """
    names = shown_names(names)
    order = accuracy.nan_to_num(2.0).argsort(stable=True).tolist()
    worst = order[0]
    shown = list(range(len(names)))
    if len(names) > max_rows:
        shown = order[:max_rows]
    overall = (accuracy.nan_to_num() * samples).sum() / samples.sum()
    columns = {"samples": [str(int(count)) for count in samples], "accuracy": percents(accuracy)}
    for name, values in scores.items():
        if name != "recall":  # The accuracy of a class is its recall.
            columns[name] = percents(values)
    below = [f"accuracy {percent(overall)}"]
    if peak is not None:
        rounds = torch.stack([peak, accuracy])
        columns["best"] = percents(peak)
        columns["forgetting"] = percents(forgetting_per_class(rounds))
        below.append(f"forgetting F {percent(forgetting(rounds))}")
    below.append(f"worst class {names[worst]}: {percent(accuracy[worst])}")
    if len(shown) < len(names):
        below.append(f"({len(shown)} of {len(names)} classes shown, the worst)")
    rows = []
    for class_idx in shown:
        cells = [column[class_idx] for column in columns.values()]
        rows.append([names[class_idx], *cells])
    lines = [GAP.join(below)]
    for index, average in enumerate(AVERAGES):
        place = len(names) + index
        values_of_average = [f"{name} {percent(values[place])}" for name, values in scores.items()]
        lines.append(f"{average}: {', '.join(values_of_average)}")
    print_table(title, header=["class", *columns], rows=rows, bold=shown.index(worst), below="\n".join(lines))


def print_note(text: str) -> None:
    """Print a sentence below the tables."""
    Console(highlight=False, markup=False, emoji=False).print(printable(text), style="italic", soft_wrap=True)


def print_metrics(metrics: Mapping[str, float]) -> None:
    """Print values by name."""
    if metrics:
        rows = [[name, f"{value:.6g}"] for name, value in metrics.items()]
        print_table("Last values", header=["name", "value"], rows=rows)


def print_rounds(history: History, best: str, max_rows: int, directions: Directions | None = None) -> None:
    """Print the values of every round, numbered from 0 as in metrics.csv, except bytes and single classes.

    Args:
        history: The history of the run.
        best: Key whose best round stands out. The last round does if the key, its direction or a finite value is not
            known.
        max_rows: Largest number of rounds that are shown. Of more rounds the last ones are shown.
        directions: Directions of keys that the user or metric objects give.
    """
    names = [name for name in history.names if is_value(name)][:MOST_COLUMNS]
    if not names or len(history) < 2:
        return
    curves = [history.curve(name) for name in names]
    shown = history.rounds[-max_rows:]
    rows = []
    for round_idx in shown:
        row = [str(round_idx)]
        for curve in curves:
            row.append(f"{curve[round_idx]:.6g}" if round_idx in curve else "-")
        rows.append(row)
    bold = best_round(history.curve(best), direction_of(best, directions))
    if bold is None:
        bold = shown[-1]
    place = shown.index(bold) if bold in shown else None
    print_table("Values by round", header=["round", *names], rows=rows, bold=place)


def print_texts(title: str, paragraphs: Iterable[Sequence[str]]) -> None:
    """Print short texts side by side, as many in a line as the terminal has room for.

    Args:
        title: Title above the texts.
        paragraphs: The texts of each paragraph, which begins a line.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(f"\n{printable(title)}", style="bold")
    for texts in paragraphs:
        for line in side_by_side([printable(text) for text in texts], width=console.width):
            console.print(line, soft_wrap=True)


def side_by_side(texts: Iterable[str], width: int) -> list[str]:
    """Join texts by blanks to lines, each as long as the width allows.

    Args:
        texts: The texts.
        width: Largest number of characters of a line. A longer text has a line of its own.

    >>> side_by_side(["ACC 80 %", "F 20 %", "BWT 3 %"], width=18)
    ['ACC 80 %   F 20 %', 'BWT 3 %']
    """
    lines: list[str] = []
    for text in texts:
        if lines and len(lines[-1]) + len(GAP) + len(text) <= width:
            lines[-1] += GAP + text
        else:
            lines.append(text)
    return lines


def best_round(curve: Mapping[int, float], direction: Direction | None) -> int | None:
    """Return the first round with the best finite value, or None without one or without a direction."""
    if direction is None:
        return None
    best = best_of(curve.values(), direction)
    return next((round_idx for round_idx, value in curve.items() if value == best), None)


def print_table(
    title: str,
    header: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    bold: int | None = None,
    below: str = "",
) -> None:
    """Print a table whose first column holds names and whose other columns hold numbers.

    On a terminal that is too narrow the table is several tables, each with the names.

    Args:
        title: Title above the table.
        header: Names of the columns.
        rows: Cells of the rows.
        bold: Index of the row that stands out. None means that no row does.
        below: Text below the table.
    """
    lines = [[printable(cell) for cell in line] for line in (header, *rows)]
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(f"\n{title}", style="bold")
    names, *others = zip(*lines, strict=True)
    while others:
        count = 1
        while count < len(others) and width_of(console, names, others[: count + 1]) <= console.width:
            count += 1
        console.print(columns_table(names, others[:count], bold))
        del others[:count]
    if below:
        console.print(printable(below, keep="\n"))


def width_of(console: Console, names: Sequence[str], others: Sequence[Sequence[str]]) -> int:
    """Return the number of characters that a table takes on a console of any width.

    Args:
        console: The console.
        names: First column, with its heading.
        others: Further columns, each with its heading.
    """
    options = console.options.update(max_width=WIDEST)
    return console.measure(columns_table(names, others), options=options).maximum


def columns_table(names: Sequence[str], others: Iterable[Sequence[str]], bold: int | None = None) -> Table:
    """Make a table of columns, each with its heading first.

    Args:
        names: First column.
        others: Further columns.
        bold: Index of the row that stands out. None means that no row does.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    columns = [names, *others]
    for index, (heading, *_) in enumerate(columns):
        table.add_column(heading, justify="right" if index else "left")
    cells = [column[1:] for column in columns]
    for index, row in enumerate(zip(*cells, strict=True)):
        style = "bold" if index == bold else None
        table.add_row(*row, style=style)  # style: ok, rich takes cells one by one
    return table


def percent(value: Tensor) -> str:
    """Write a fraction in percent, NaN as a dash."""
    return "-" if value.isnan() else f"{100 * float(value):.1f} %"


def percents(values: Tensor) -> list[str]:
    """Write fractions in percent, (n,)."""
    return [percent(value) for value in values]
