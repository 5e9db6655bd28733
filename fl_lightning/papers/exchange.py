"""Rounds to a target, and what KnFu's server learns of its clients."""

from collections.abc import Mapping, Sequence

import numpy as np

from fl_lightning.papers.clients import counts_of
from fl_lightning.papers.drawing import Drawing, Drawn, Series, by_name, unique
from fl_lightning.papers.panels import draw_maps, finish, panels
from fl_lightning.reports.figures import COLOURS
from fl_lightning.reports.results import rounds_until
from fl_lightning.reports.saved import read_columns
from fl_lightning.utils.text import drawable


class RoundsToTarget(Drawing):
    """Draws bars of the rounds until a value reaches a target, mean over the seeds, none where a method never does.

    Source: Yao and Sun 2020, arXiv:2005.12657, Fig. 2.

    Args:
        targets: in percent, by case; under an empty name that of all other cases.
        key: log key of the value.
        baseline: method whose rounds are 100 %.
    """

    def __init__(self, targets: Mapping[str, float], key: str = "global/acc", baseline: str = "FedAvg") -> None:
        self.targets, self.key, self.baseline = targets, key, baseline

    def draw(self, series: Sequence[Series]) -> Drawn:
        cases, methods = unique(runs.case for runs in series), unique(runs.method for runs in series)
        titles = [", ".join(filter(None, (case, f"target {self.target(case):g} %"))) for case in cases]
        figure, axes = panels(["rounds to the target"], titles, width=3.4, height=2.6)
        sentences = []
        for place, case in zip(axes[0], cases, strict=True):
            reached = {runs.method: self.rounds(runs) for runs in series if runs.case == case}
            for i, method in enumerate(methods):
                if (rounds := reached.get(method)) is not None:
                    place.bar(i, rounds, color=COLOURS[i % len(COLOURS)])
                    place.text(i, rounds, f"{rounds:.0f}", ha="center", va="bottom", fontsize=8)
                else:
                    place.text(i, 0, "never", ha="center", va="bottom", fontsize=8)
            place.set_xticks(range(len(methods)), [drawable(m).replace(" ", "\n", 1) for m in methods], fontsize=8)
            base = reached.get(self.baseline)
            shares = {m: 100 * r / base for m, r in reached.items() if r is not None and base and m != self.baseline}
            never = ", ".join(m for m, r in reached.items() if r is None)
            text = by_name(shares, "{:.0f} %") or "none"
            sentences.append(f"{case or 'All'}: {text}" + f"; never: {never}" * bool(never))
        finish(figure, axes, "method")
        return Drawn(figure, f"Rounds to the target as a share of {self.baseline}'s. {'. '.join(sentences)}.")

    def target(self, case: str) -> float:
        """Target of a case, in percent."""
        return self.targets.get(case, self.targets.get("", 100.0))

    def rounds(self, runs: Series) -> float | None:
        """Count the rounds of a series, from 1, mean over its runs, None where one of them never gets there."""
        rounds = [rounds_until(run, self.key, self.target(runs.case) / 100) for run in runs.group.runs]
        known = [value for value in rounds if value is not None]
        return float(np.mean(known)) if len(known) == len(rounds) else None


class PredictedDistributions(Drawing):
    """Client × class: the true class distributions, and the mean predictions (EPD) from which the server infers them.

    Needs `PredictedDistribution`.

    Source: Seyedmohammadi et al. 2024, arXiv:2403.11892, Eq. 5 and Fig. 1.
    """

    def draw(self, series: Sequence[Series]) -> Drawn:
        run = series[0].run
        table = read_columns(run.folder / "predicted_distribution.csv")
        names = list(table)[2:]
        rows = table["round"] == table["round"].max()
        clients = table["client"][rows].astype(int)
        predicted = np.stack([table[name][rows] for name in names], 1)
        counts = counts_of(run).table[clients]
        true = counts / counts.sum(1, keepdims=True)
        maps = {"(a) true class distribution": true.T, "(b) mean prediction (EPD)": predicted.T}
        figure = draw_maps(maps, "client", "class", "share", names, limits=(0, 1), cmap="YlGnBu", width=4.0)
        distance = np.abs(true - predicted).sum(1).mean()
        r = np.corrcoef(true.ravel(), predicted.ravel())[0, 1]
        when = int(table["round"].max()) + 1
        return Drawn(figure, f"After round {when}: mean 1-norm distance {distance:.2f}, Pearson's r {r:.2f}.")
