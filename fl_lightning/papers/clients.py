"""Drawings of what clients know before and after their local training, from the table of `ForgettingMonitor`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fl_lightning.functional.accuracy import class_weighted_accuracy
from fl_lightning.functional.classes import in_local, out_local
from fl_lightning.functional.forgetting import forgetting_degree
from fl_lightning.metrics.history import BY_CLASS
from fl_lightning.papers.drawing import Drawing, Drawn, Series, by_name, chosen, last_file, unique
from fl_lightning.papers.panels import draw_maps, finish, name_rounds, panels
from fl_lightning.reports.figures import COLOURS, MARKERS, Numbers, draw_line
from fl_lightning.reports.saved import Counts, SavedRun
from fl_lightning.utils.text import drawable


class ClientAccuracies:
    """Class-wise accuracies of a run's clients, a row for each round, client and moment.

    Attributes:
        rounds: (K,).
        clients: (K,).
        moments: `received`, the number of a local epoch, `trained`; (K,).
        accuracy: fractions, (K, C); NaN for a class without test samples.
        names: C names of the classes.
    """

    def __init__(self, run: SavedRun) -> None:
        table = run.columns(last_file(run, "client_classwise.csv", "ForgettingMonitor").name, texts=["moment"])
        self.rounds, self.clients, self.moments = (table.pop(name) for name in ("round", "client", "moment"))
        self.names = list(table)
        self.accuracy = np.stack([*table.values()], axis=1)

    def at(self, moment: str, client: int | None = None, round_idx: int | None = None) -> tuple[Numbers, Numbers]:
        """Take the rows of a moment, of all clients or one, in all rounds or one: rounds and accuracies."""
        rows = self.moments == moment
        if client is not None:
            rows &= self.clients == client
        if round_idx is not None:
            rows &= self.rounds == round_idx
        return self.rounds[rows], self.accuracy[rows]


def counts_of(run: SavedRun) -> Counts:
    """Training samples of each client and class.

    Raises:
        ValueError: the samples have no classes.
    """
    if run.partition is None:
        raise ValueError(f"this drawing needs samples with classes, and the run in {run.folder} has no partition.csv")
    return run.partition


def mean_known(values: Numbers) -> float:
    """Average the values that are known, NaN where none is."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else np.nan


def degrees(accuracies: ClientAccuracies, client: int) -> tuple[Numbers, Numbers]:
    """Forgetting degree τ of a client in each round it took part in: rounds, (T,), and values, (T, C).

    A class that the received model does not recognise at all is NaN.
    """
    rounds, received = accuracies.at("received", client)
    before = torch.from_numpy(received)
    after = torch.from_numpy(accuracies.at("trained", client)[1])
    return rounds, forgetting_degree(before, after).masked_fill(before == 0, torch.nan).numpy()


class LocalProgress(Drawing):
    """In- and out-local accuracy within one local training, epoch by epoch, of the last round that has it.

    A line for each method: the mean over the clients, with a band of one standard deviation. Needs `ForgettingMonitor`
    with `epochs: true`.

    Source: Lee et al. 2022, arXiv:2106.03097, Fig. 6.
    """

    def draw(self, series: Sequence[Series]) -> Drawn:
        figure, axes = panels(["accuracy (%)"], ["in-local", "out-local"], width=3.0, sharey="all")
        change: dict[str, float] = {}
        for i, runs in enumerate(series):
            accuracies = ClientAccuracies(runs.run)
            counts = torch.from_numpy(counts_of(runs.run).table)
            last = int(accuracies.rounds.max())
            steps = ["received", *sorted({m for m in accuracies.moments if m.isdigit()}, key=int)]
            members = accuracies.clients[(accuracies.rounds == last) & (accuracies.moments == "received")]
            held = counts[torch.from_numpy(members).long()]
            sides = {"in-local": in_local(held), "out-local": out_local(held)}
            tables = [torch.from_numpy(accuracies.at(moment, None, last)[1]) for moment in steps]
            for place, (side, shares) in zip(axes[0], sides.items(), strict=True):
                curve = 100 * torch.stack([class_weighted_accuracy(table, shares) for table in tables]).numpy()
                std = curve.std(1, ddof=1)
                draw_line(place, i, range(len(steps)), curve.mean(1), std=std, label=runs.name)
                change[f"{runs.name} {side}"] = float(curve[-1].mean() - curve[0].mean())
        finish(figure, axes, "local epochs done")
        text = by_name(change, "{:+.1f}")
        return Drawn(figure, f"Change within one local training, in points, mean over the clients: {text}.")


class DegreeMap(Drawing):
    """Draws a class × round map of one client's forgetting degree τ, with the client's samples of each class.

    Source: FedKA, Eq. 1 and Fig. 2b.

    Args:
        client: whose.
        least: values below it look like it: τ has no lower bound.
    """

    def __init__(self, client: int = 3, least: float = -1.0) -> None:
        self.client = client
        self.least = least

    def draw(self, series: Sequence[Series]) -> Drawn:
        maps = {}
        names = list[str]()
        signs = list[str]()
        for runs in series:
            accuracies = ClientAccuracies(runs.run)
            counts = counts_of(runs.run)
            _, degree = degrees(accuracies, self.client)
            held = counts.table[self.client]
            names = [f"{name} (n = {count:.0f})" for name, count in zip(counts.names, held, strict=True)]
            maps[runs.name] = degree.T
            dominant = held >= held.sum() / (2 * len(held))
            with np.errstate(invalid="ignore"):
                high, low = (mean_known(degree[:, rows]) for rows in (~dominant, dominant))
            signs.append(f"{runs.name}: {low:.2f} of the dominant classes, {high:.2f} of the others")
        value = f"forgetting degree τ (≤ {self.least:g} … 1)"
        limits = (self.least, 1.0)
        figure = draw_maps(maps, "round", "class", value, names, limits=limits, cmap="PuOr_r", width=4.6)
        means = "Mean τ: " + "; ".join(signs)
        return Drawn(figure, f"Client {self.client}; negative: it gained; 1: it forgot all. {means}.")


@dataclass
class OneClass(Drawing):
    """One class at one client over the rounds: forgetting degree τ, and the trained model's accuracy on that class.

    Source: FedKA, Figs. 3 and 6.

    Args:
        client: whose model.
        classes: class by case; under an empty name that of all other cases.
        accuracy: whether the accuracy has a second row of panels.
        count: whether the client's samples of the class (`data/class_count`) have a row of their own.
        least: of the axis of τ, which has no lower bound.
    """

    classes: dict[str, int]
    client: int = 0
    accuracy: bool = True
    count: bool = False
    least: float = -1.5

    def draw(self, series: Sequence[Series]) -> Drawn:
        cases = unique(runs.case for runs in series)
        methods = unique(runs.method for runs in series)
        rows = ["forgetting degree τ"]
        rows += ["accuracy after training (%)"] * self.accuracy + ["samples of the class"] * self.count
        figure, axes = panels(rows, cases, width=3.2, height=2.0, sharey="none")
        means: dict[str, float] = {}
        for runs in series:
            column = cases.index(runs.case)
            i = methods.index(runs.method)
            accuracies = ClientAccuracies(runs.run)
            klass = self.classes.get(runs.case, self.classes.get("", 0))
            rounds, degree = degrees(accuracies, self.client)
            shown = [degree[:, klass]]
            shown += [100 * accuracies.at("trained", self.client)[1][:, klass]] * self.accuracy
            for place, values in zip(axes[:, column], shown, strict=False):
                draw_line(place, i, rounds, values, label=runs.method)
            if self.count:
                counted = runs.run.history.curve("data/class_count")
                draw_line(axes[-1, column], i, list(counted), np.array([*counted.values()]), label=runs.method)
                axes[-1, column].set_ylim(bottom=0)
            axes[0, column].set_ylim(self.least, 1.1)
            means[f"{runs.name} (class {accuracies.names[klass]})"] = mean_known(degree[:, klass])
        name_rounds(axes, [int(r) for r in rounds])
        finish(figure, axes)
        return Drawn(figure, f"Client {self.client}. Mean τ over the rounds: {by_name(means, '{:.2f}')}.")


class DistanceScatter(Drawing):
    """Weight divergence ‖w − w_k‖₁ against distribution distance ‖Ã_G − p_k‖₁: a point for each client and round.

    Later rounds are more opaque. Needs `DriftMonitor`.

    Source: Lee et al. 2022, arXiv:2106.03097, Fig. 8.
    """

    def draw(self, series: Sequence[Series]) -> Drawn:
        figure, axes = panels(["weight divergence ‖w − w_k‖₁"], [runs.name for runs in series], width=3.0)
        strengths: dict[str, float] = {}
        for i, (place, runs) in enumerate(zip(axes[0], series, strict=True)):
            table = runs.run.columns(last_file(runs.run, "drift.csv", "DriftMonitor").name)
            x, y, t = (table[name] for name in ("distribution_distance", "weight_divergence", "round"))
            known = ~np.isnan(x) & ~np.isnan(y)
            opacity = 0.08 + 0.72 * t[known] / max(1.0, t.max())
            marker = MARKERS[i % len(MARKERS)]
            colour = COLOURS[i % len(COLOURS)]
            place.scatter(x[known], y[known], s=11, c=colour, marker=marker, alpha=opacity, linewidths=0)
            strengths[runs.name] = float(np.corrcoef(x[known], y[known])[0, 1])
        finish(figure, axes, "distribution distance ‖Ã_G − p_k‖₁")
        return Drawn(figure, f"Pearson's r over all rounds and clients: {by_name(strengths, '{:.2f}')}.")


class ClassBars(Drawing):
    """Accuracy on each class of the received model, of the clients' models after training, and of their aggregate.

    Of the first round that has it: runs that begin with the same weights are compared at their start.

    Source: FedED, Figs. 1 and 4.

    Args:
        client: whose trained model is shown; None: the mean over all clients.
        columns: panels beside each other.
    """

    def __init__(self, client: int | None = None, columns: int = 2) -> None:
        self.client = client
        self.columns = columns

    def draw(self, series: Sequence[Series]) -> Drawn:
        left = ["accuracy (%)"] * -(-len(series) // self.columns)
        figure, axes = panels(left, [""] * self.columns, width=4.0, height=2.4, sharey="all", sharex=False)
        changes = dict[str, float]()
        aggregates = dict[str, float]()
        for place, runs in zip(axes.ravel(), series, strict=False):
            accuracies = ClientAccuracies(runs.run)
            held = None if self.client is None else counts_of(runs.run).table[self.client]
            first = int(accuracies.rounds.min())
            before, after = (accuracies.at(m, self.client, first)[1].mean(0) for m in ("received", "trained"))
            self.draw_bars(place, accuracies.names, held, (before, after, runs.group.columns(BY_CLASS)[2][first]))
            aggregates[runs.name] = 100 * runs.run.history.curve("global/acc").get(first, np.nan)
            place.set_title(f"{runs.name}: aggregate {aggregates[runs.name]:.1f} %", fontsize="medium")
            rows = np.ones(len(before), dtype=bool) if held is None else held == 0
            if rows.any():
                changes[runs.name] = 100 * float((after - before)[rows].mean())
        for place in axes.ravel()[len(series) :]:
            place.set_axis_off()
        finish(figure, axes, "class" if self.client is None else f"class, and samples of it at client {self.client}")
        scope = "in local training, mean over clients and classes" if self.client is None else "of its empty classes"
        text = f"Change of the accuracy {scope}, in points: {by_name(changes, '{:+.1f}')}."
        return Drawn(figure, f"{text} Accuracy of the aggregate, in %: {by_name(aggregates)}.")

    def draw_bars(self, axes: Any, names: Sequence[str], held: Numbers | None, values: Sequence[Numbers]) -> None:
        """Draw bars of start, trained and aggregate, (C,) each, by class, and name the samples that the client has."""
        who = "clients, mean" if self.client is None else f"client {self.client}"
        looks = (("start", 5, ""), (f"{who}, trained", 1, "////"), ("aggregate", 0, ""))
        for i, (label, colour, hatch) in enumerate(looks):
            x = np.arange(len(names)) + 0.27 * (i - 1)
            look: dict[str, Any] = {"color": COLOURS[colour], "hatch": hatch, "edgecolor": "white", "linewidth": 0.3}
            axes.bar(x, 100 * values[i], 0.27, label=label, **look)
        below = list(names) if held is None else [f"{n}\n{count:.0f}" for n, count in zip(names, held, strict=True)]
        axes.set_xticks(range(len(names)), list(map(drawable, below)), fontsize=8)


class ClassCounts(Drawing):
    """Client × class counts, a map for each case.

    Args:
        methods: whose partition is drawn; none named: that of the first.
    """

    def __init__(self, methods: Sequence[str] = ()) -> None:
        self.methods = methods

    def draw(self, series: Sequence[Series]) -> Drawn:
        shown = chosen(series, self.methods or [series[0].method])
        maps = {runs.case or runs.method: counts_of(runs.run).table.T for runs in shown}
        names = counts_of(shown[0].run).names
        limits = (0, max(float(table.max()) for table in maps.values()))
        small = all(max(table.shape) <= 20 for table in maps.values())
        figure = draw_maps(maps, "client", "class", "training samples", names, 2, limits, "YlGnBu", small, width=4.2)
        held = {name: float((table > 0).sum(0).mean()) for name, table in maps.items()}
        return Drawn(figure, f"Classes that a client has, mean: {by_name(held)}.")


class LocalShares(Drawing):
    """Shares p of the classes at some clients, and out-local shares p̃ = (1 − p) / (C − 1) beside them.

    Source: Lee et al. 2022, arXiv:2106.03097, Definition 1 and Fig. 3.

    Args:
        clients: how many are drawn.
    """

    def __init__(self, clients: int = 10) -> None:
        self.clients = clients

    def draw(self, series: Sequence[Series]) -> Drawn:
        counts = counts_of(series[0].run)
        held = torch.from_numpy(counts.table).long()[: self.clients]
        lacking = out_local(held).numpy().T
        maps = {"in-local p": in_local(held).numpy().T, "out-local p̃ · (C − 1)": (len(lacking) - 1) * lacking}
        figure = draw_maps(maps, "client", "class", "share", counts.names, limits=(0, 1), cmap="YlGnBu", width=3.6)
        bounds = f"p is at most {maps['in-local p'].max():.2f}, p̃ at most {lacking.max():.2f}"
        return Drawn(figure, f"{bounds}: out-local shares spread over all classes that a client has few of.")


class PredictedDistributions(Drawing):
    """Client × class: the true class distributions, and the mean predictions (EPD) from which the server infers them.

    Needs `PredictedDistribution`.

    Source: Seyedmohammadi et al. 2024, arXiv:2403.11892, Eq. 5 and Fig. 1.
    """

    def draw(self, series: Sequence[Series]) -> Drawn:
        run = series[0].run
        table = run.columns(last_file(run, "predicted_distribution.csv", "PredictedDistribution").name)
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
