"""Pictures of values over the rounds, over simulated seconds and over the bytes moved: a panel for each case."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

import numpy as np

from fl_lightning.metrics.history import BY_CLASS, EPSILON
from fl_lightning.metrics.keys import (
    STALENESS,
    TIME,
    Unit,
    is_in_percent,
    is_of_task,
    percent_factor,
    scope_of,
)
from fl_lightning.reports.curves import Band, Curves, Panel, plot_curves
from fl_lightning.reports.facts import distinct_texts
from fl_lightning.reports.page import Picture
from fl_lightning.reports.results import (
    MEGABYTE,
    bytes_by_round,
    direction_in,
    known_metrics,
    mean_of,
    runs_of,
    statistics_of,
    unit_in,
)
from fl_lightning.reports.saved import Group

MOST_METHODS = 8
"""Largest number of methods in a figure. More cannot be told apart by color."""

MOST_CASES = 12
"""Largest number of cases in a figure."""

MOST_PANELS = 24
"""Largest number of panels of values over the rounds, which keeps a page small."""

LONGEST_STEM = 100
"""Largest number of characters of a key in the name of its figure's file."""

COSTS = ("comm/", "cost/")
"""Beginnings of the keys that the table of costs has."""

NAMES = {
    "global/acc": "accuracy, test split (%)",
    "val/acc": "accuracy, in validation (%)",
    "global/loss": "loss, test split",
    "val/loss": "loss, in validation",
    "global/forgetting": "forgetting F, test split (%)",
    "val/forgetting": "forgetting F, in validation (%)",
    EPSILON: "ε of all rounds so far",
    "local/alma": "ALMA, mean of the clients' own accuracies (%)",
    "local/tuned/alma": "ALMA after fine-tuning (%)",
    "global/acc_tasks": "mean accuracy over the tasks met, test split (%)",
    "val/acc_tasks": "mean accuracy over the tasks met, in validation (%)",
    "global/forgetting_tasks": "forgetting of tasks, test split (%)",
    "val/forgetting_tasks": "forgetting of tasks, in validation (%)",
    STALENESS: "mean staleness (server steps)",
}
"""Labels of axes by log key. Any other key is described by its scope."""


@dataclass(frozen=True)
class Shown:
    """Has the groups that figures show.

    Attributes:
        groups: The groups, in their order on the page.
    """

    groups: Sequence[Group]

    @property
    def methods(self) -> list[str]:
        """The methods, each once."""
        return distinct_texts(group.row for group in self.groups)

    @property
    def cases(self) -> list[str]:
        """The cases, each once. A page without cases has an empty one."""
        return list(dict.fromkeys(group.case for group in self.groups))

    def panels(self, band_of: Callable[[Group], Band]) -> list[Panel]:
        """Make a panel for each case that has curves.

        Args:
            band_of: Returns the curves of a group, which may have none.
        """
        panels = []
        for case in self.cases:
            bands = {}
            for group in self.groups:
                if group.case == case:
                    band = band_of(group)
                    if band.x:
                        bands[group.row] = band
            if bands:
                panels.append(Panel(case, bands))
        return panels


def shown_of(groups: Sequence[Group]) -> tuple[Shown, list[str]]:
    """Choose the groups that figures show: those of the best methods by the first known metric, and the first cases.

    The methods are the first ones if nobody tells whether lower or higher is better.

    Returns:
        The groups, in their order, and a sentence for what is left out.
    """
    every = Shown(groups)
    key = next(iter(known_metrics(groups)), "")
    direction = direction_in(runs_of(groups), key)

    def rank(method: str) -> float:
        finals = []
        for group in groups:
            if group.row == method:
                finals += [statistics_of(run, key).get("final", math.nan) for run in group.runs]
        mean = mean_of(finals)
        if direction is None or not math.isfinite(mean):
            return math.inf
        return mean if direction == "min" else -mean

    best = sorted(every.methods, key=rank)[:MOST_METHODS]
    cases = every.cases[:MOST_CASES]
    left_out = []
    if len(best) < len(every.methods):
        left_out.append(
            f"Figures show the {len(best)} of {len(every.methods)} methods that are best at the end; tables have all."
        )
    if len(cases) < len(every.cases):
        left_out.append(f"Figures show the first {len(cases)} of {len(every.cases)} settings; tables have all.")
    return Shown([group for group in groups if group.row in best and group.case in cases]), left_out


def curves_of(shown: Shown) -> tuple[list[Picture], list[Picture], list[str]]:
    """Draw each value over the rounds, except values of single classes and tasks, costs and simulated time.

    Returns:
        The pictures of the metrics that are compared, the others, and the keys that are not drawn.
    """
    compared: list[Picture] = []
    further: list[Picture] = []
    not_drawn: list[str] = []
    metrics = known_metrics(shown.groups)
    room = MOST_PANELS
    for key in drawn_keys(shown):
        panels = shown.panels(lambda group, key=key: band_over_rounds(group, key, shown))  # type: ignore[misc]
        if not panels:
            continue
        if len(panels) > room:
            not_drawn.append(key)
            continue
        room -= len(panels)
        curves = Curves(shown.methods, panels, axis_label(key, unit_of(shown, key)))
        caption = f"After each round{bands_text(shown)}."
        if any(run.is_unprotected(key) for run in runs_of(shown.groups)):
            caption += " Of private runs it is unprotected: the guarantee does not cover it."
        picture = Picture(
            name="curve-" + file_stem(key),
            figure=plot_curves(curves),
            caption=caption,
            heading=heading_of(scope_of(key), unit_of(shown, key)),
            curves=curves,
        )
        (compared if key in metrics else further).append(picture)
    return compared, further, not_drawn


def drawn_keys(shown: Shown) -> list[str]:
    """Return the keys that are drawn over the rounds: the compared ones first, then those with labels of their own."""
    keys: dict[str, None] = {}
    for run in runs_of(shown.groups):
        keys |= dict.fromkeys(run.history.keys)
    in_maps = [key for key in keys if BY_CLASS in key or is_of_task(key)]
    drawn = [key for key in keys if key not in in_maps and not key.startswith((*COSTS, TIME))]
    metrics = known_metrics(shown.groups)
    return sorted(drawn, key=lambda key: ([*metrics, key].index(key), [*NAMES, key].index(key), key))


def unit_of(shown: Shown, key: str) -> Unit:
    """Return the unit of a key in all groups."""
    return unit_in(runs_of(shown.groups), key)


def band_over_rounds(group: Group, key: str, shown: Shown) -> Band:
    """Return the values of a key over the rounds."""
    rounds, values = group.carried_curves(key)
    return Band(rounds, percent_factor(unit_of(shown, key)) * values)


def axis_label(key: str, unit: Unit) -> str:
    """Name a key and its unit on an axis."""
    if key in NAMES:
        return NAMES[key]
    return heading_of(scope_of(key), unit)


def heading_of(scope: str, unit: Unit) -> str:
    """Name a value and its unit."""
    return f"{scope} (%)" if is_in_percent(unit) else scope


def bands_text(shown: Shown) -> str:
    """Describe the line and the band of a figure, if a group has several runs."""
    text = ""
    if has_seeds(shown.groups):
        text = ", mean and one standard deviation over the seeds"
    if not all(group.has_equal_rounds for group in shown.groups):
        text += "; a run that ended earlier stands at its last value"
    return text


def has_seeds(groups: Sequence[Group]) -> bool:
    """Return True if a group has several runs."""
    return any(len(group.runs) > 1 for group in groups)


def timed_curves_of(shown: Shown) -> list[Picture]:
    """Draw each metric that is compared, and the staleness, over simulated seconds."""
    pictures = []
    keys = known_metrics(shown.groups)
    if any(any(run.history.curve(STALENESS).values()) for run in runs_of(shown.groups)):
        keys.append(STALENESS)
    for key in keys:
        unit = unit_of(shown, key)
        panels = shown.panels(lambda group, key=key: band_over_seconds(group, key, shown))  # type: ignore[misc]
        if not panels:
            continue
        curves = Curves(shown.methods, panels, axis_label(key, unit), xlabel="simulated seconds", in_steps=True)
        over = ", mean and one standard deviation over the seeds" if has_seeds(shown.groups) else ""
        picture = Picture(
            name="time-" + file_stem(key),
            figure=plot_curves(curves),
            caption=f"Over simulated seconds{over}. A value holds until the next one.",
            heading=heading_of(scope_of(key), unit),
            curves=curves,
        )
        pictures.append(picture)
    return pictures


def band_over_seconds(group: Group, key: str, shown: Shown) -> Band:
    """Return the values of a key over simulated seconds."""
    seconds, values = group.timed_curves(key)
    return Band(seconds, percent_factor(unit_of(shown, key)) * values)


def curves_over_bytes(shown: Shown) -> list[Picture]:
    """Draw the first metric that is compared over the bytes that were moved."""
    key = next(iter(known_metrics(shown.groups)), "")
    unit = unit_of(shown, key)
    panels = shown.panels(lambda group: band_over_bytes(group, key, unit))
    if not panels:
        return []
    curves = Curves(shown.methods, panels, axis_label(key, unit), xlabel="communication, both directions (MB)")
    picture = Picture(
        name="communication",
        figure=plot_curves(curves),
        caption=f"Over the bytes moved in both directions{bands_text(shown)}.",
        heading=heading_of(scope_of(key), unit),
        curves=curves,
    )
    return [picture]


def band_over_bytes(group: Group, key: str, unit: Unit) -> Band:
    """Return the values of a key over the bytes that were moved until then, mean over the runs. It may be empty."""
    rounds, scores = group.carried_curves(key)
    moved = [bytes_by_round(run) for run in group.runs]
    if not rounds or not all(moved) or len(scores) != len(moved):
        return Band([], np.zeros((0, 0)))
    places = []
    for round_idx in rounds:
        totals = [sum(value for r, value in of_run.items() if r <= round_idx) for of_run in moved]
        places.append(sum(totals) / len(totals) / MEGABYTE)
    return Band(places, percent_factor(unit) * scores)


def file_stem(key: str) -> str:
    """Return the name of a key's file. A plain key stays readable, and no two keys share a name.

    >>> file_stem("global/acc"), file_stem("global-acc")
    ('global-acc', 'global-acc~51f1cd78')
    """
    readable = re.sub(r"[^\w.]+", "-", key, flags=re.ASCII)[:LONGEST_STEM]
    if re.fullmatch(r"[\w.]+(/[\w.]+)*", key, re.ASCII) and len(key) <= LONGEST_STEM:
        return readable
    digest = sha256(key.encode(errors="backslashreplace")).hexdigest()
    return f"{readable}~{digest[:8]}"
