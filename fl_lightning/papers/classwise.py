"""Accuracy of each class of the global model over the rounds."""

from collections.abc import Sequence

import numpy as np

from fl_lightning.metrics.history import BY_CLASS
from fl_lightning.papers.drawing import Drawing, Drawn, Series, by_name, chosen, unique
from fl_lightning.papers.panels import draw_maps


class ClassMaps(Drawing):
    """Draws class × round maps of the global model's accuracy, in a row for each method and a column for each case.

    Source: Lee et al. 2022, arXiv:2106.03097, Figs. 2a and 10; FedKA, Fig. 1a.

    Args:
        normalised: each class's share A_c / ΣA in place of its accuracy.
        methods: that are drawn; none named: all.
        cases: likewise.
    """

    def __init__(self, normalised: bool = False, methods: Sequence[str] = (), cases: Sequence[str] = ()) -> None:
        self.normalised, self.methods, self.cases = normalised, methods, cases

    def draw(self, series: Sequence[Series]) -> Drawn:
        shown = chosen(series, self.methods, self.cases)
        maps, names, changes, spread = {}, list[str](), dict[str, float](), dict[str, float]()
        for runs in shown:
            _, names, table = runs.group.columns(BY_CLASS)
            changes[runs.name] = 100 * float(np.abs(np.diff(table, axis=0)).mean())
            with np.errstate(invalid="ignore"):
                shares = table / table.sum(1, keepdims=True)
            spread[runs.name] = 100 * float(np.nanstd(shares, axis=1).mean())
            maps[runs.name] = (shares if self.normalised else 100 * table).T
        value, limits = ("share of ΣA", (0.0, 0.3)) if self.normalised else ("accuracy (%)", (0.0, 100.0))
        columns = len(unique(runs.case for runs in shown))
        figure = draw_maps(maps, "round", "class", value, names, columns, limits, width=3.4)
        text = f"Mean change of a class's accuracy from one round to the next, in points: {by_name(changes)}."
        if self.normalised:
            text = f"Deviation of the shares over the classes, mean over the rounds, in points: {by_name(spread)}."
        return Drawn(figure, text)
