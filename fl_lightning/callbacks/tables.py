"""Tables for the terminal."""

from collections.abc import Mapping, Sequence

from torch import Tensor


def print_classes(
    title: str,
    names: Sequence[str],
    samples: Tensor,
    accuracy: Tensor,
    peak: Tensor | None,
    max_rows: int,
) -> None:
    """Print the accuracy of every class, and below it accuracy, forgetting F and worst class.

    Args:
        title: above the table.
        names: of the C classes.
        samples: evaluated samples of each class, (C,).
        accuracy: A_c, (C,); NaN without samples.
        peak: best A_c over the rounds, (C,); None: not known, then nothing is said of forgetting.
        max_rows: of more classes only so many are shown, the worst.
    """
    from rich import box  # noqa: PLC0415 - slow to import
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("class")
    for column in ("samples", "accuracy", *(("best", "forgetting") if peak is not None else ())):
        table.add_column(column, justify="right")
    lost = None if peak is None else peak - accuracy
    order = accuracy.nan_to_num(2.0).argsort(stable=True).tolist()
    shown = range(len(names)) if len(names) <= max_rows else order[:max_rows]
    for c in shown:
        cells = [str(int(samples[c])), percent(accuracy[c])]
        if peak is not None and lost is not None:
            cells += [percent(peak[c]), percent(lost[c])]
        table.add_row(names[c], *cells, style="bold" if c == order[0] else None)
    overall = (accuracy.nan_to_num() * samples).sum() / samples.sum()
    below = [f"accuracy {percent(overall)}"]
    if lost is not None:
        below.append(f"forgetting F {percent(lost.nanmean())}")
    below.append(f"worst class {names[order[0]]}: {percent(accuracy[order[0]])}")
    if len(shown) < len(names):
        below.append(f"({len(shown)} of {len(names)} classes shown, the worst)")
    console = Console(highlight=False, markup=False)
    console.print(f"\n{title}", style="bold")
    console.print(table)
    console.print("   ".join(below))


def print_metrics(metrics: Mapping[str, float]) -> None:
    """Print values by name."""
    from rich import box  # noqa: PLC0415 - slow to import
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    if not metrics:
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("name")
    table.add_column("value", justify="right")
    for name, value in metrics.items():
        table.add_row(name, f"{value:.6g}")
    console = Console(highlight=False, markup=False)
    console.print("\nLast values", style="bold")
    console.print(table)


def percent(value: Tensor) -> str:
    """A fraction as printed; a dash for NaN."""
    return "-" if value.isnan() else f"{100 * float(value):.1f} %"
