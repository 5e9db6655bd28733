"""Drawings of what clients know before and after their local training, from the table of `ForgettingMonitor`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fl_lightning.functional.accuracy import class_weighted_accuracy
from fl_lightning.functional.classes import in_local, out_local, shown_names
from fl_lightning.functional.forgetting import forgetting_degree
from fl_lightning.metrics.history import BY_CLASS
from fl_lightning.papers.drawing import Drawing, Drawn, Series, by_name, labels_of, last_file, unique
from fl_lightning.papers.panels import draw_maps, finish, name_rounds, panels
from fl_lightning.reports.figures import COLOURS, MARKERS, Numbers, draw_line
from fl_lightning.reports.saved import Counts, SavedRun
from fl_lightning.utils.text import drawable

LEAST_OF_MAPS = -1.0
"""Lower end of the scale of the forgetting degree τ in a map. τ has no lower bound."""

LEAST_OF_AXES = -1.5
"""Lower end of an axis of τ."""

BARS_BESIDE = 2
"""Number of panels with bars beside each other."""


class ClientAccuracies:
    """Holds the class-wise accuracies of a run's clients, K rows: one for each round, client and moment.

    Args:
        run: A run with the table of `ForgettingMonitor`.

    Attributes:
        rounds: Round of each row, (K,).
        clients: Client of each row, (K,).
        moments: Moment of each row, (K,): `received`, the number of a local epoch, or `trained`.
        accuracy: Accuracy on each class as a fraction, (K, C). NaN for a class without test samples.
        names: Names of the C classes.
    """

    def __init__(self, run: SavedRun) -> None:
        table = run.columns(last_file(run, "client_classwise.csv", "ForgettingMonitor").name, texts=["moment"])
        self.rounds = table.pop("round")
        self.clients = table.pop("client")
        self.moments = table.pop("moment")
        self.names = list(table)
        self.accuracy = np.stack([*table.values()], axis=1)

    def at(self, moment: str, client: int | None = None, round_idx: int | None = None) -> tuple[Numbers, Numbers]:
        """Return the rounds and the accuracies of the rows of a moment.

        Args:
            moment: The moment.
            client: Client of the rows. None takes all clients.
            round_idx: Round of the rows. None takes all rounds.

        Returns:
            The rounds, (R,), and the accuracies, (R, C).
        """
        rows = self.moments == moment
        if client is not None:
            rows &= self.clients == client
        if round_idx is not None:
            rows &= self.rounds == round_idx
        return self.rounds[rows], self.accuracy[rows]


def counts_of(run: SavedRun) -> Counts:
    """Return the numbers of training samples of each client and class.

    Raises:
        ValueError: The samples have no classes.
    """
    if run.partition is None:
        raise ValueError(f"this drawing needs samples with classes, and the run in {run.folder} has no partition.csv")
    return run.partition


def mean_known(values: Numbers) -> float:
    """Average the values that are not NaN. Without such values it is NaN."""
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else np.nan


def degrees(accuracies: ClientAccuracies, client: int) -> tuple[Numbers, Numbers]:
    """Return the forgetting degree τ of a client in each round in which the client took part.

    A class that the received model does not recognize at all is NaN.

    Args:
        accuracies: Accuracies of the clients.
        client: The client.

    Returns:
        The rounds, (T,), and τ of each class, (T, C).
    """
    rounds, received = accuracies.at("received", client)
    _, trained = accuracies.at("trained", client)
    before = torch.from_numpy(received)
    after = torch.from_numpy(trained)
    return rounds, forgetting_degree(before, after).masked_fill(before == 0, torch.nan).numpy()


def local_curves(run: SavedRun) -> dict[str, Numbers]:
    """Return the in-local and out-local accuracies in percent, epoch by epoch, in the last round of a run.

    Args:
        run: A run with the table of `ForgettingMonitor`.

    Returns:
        By `in-local` and `out-local`, the accuracies of the N clients of the round before training and after each of
        its E epochs, (E + 1, N).
    """
    accuracies = ClientAccuracies(run)
    counts = torch.from_numpy(counts_of(run).table)
    last = int(accuracies.rounds.max())
    epochs = {moment for moment in accuracies.moments if moment.isdigit()}
    moments = ["received", *sorted(epochs, key=int)]
    clients = accuracies.clients[(accuracies.rounds == last) & (accuracies.moments == "received")]
    held = counts[torch.from_numpy(clients).long()]
    tables = [torch.from_numpy(accuracies.at(moment, round_idx=last)[1]) for moment in moments]
    curves = {}
    for side, shares in (("in-local", in_local(held)), ("out-local", out_local(held))):
        curves[side] = 100 * torch.stack([class_weighted_accuracy(table, shares) for table in tables]).numpy()
    return curves


class LocalProgress(Drawing):
    """Draws in- and out-local accuracy within one local training, epoch by epoch, of the last round that has it.

    A line is the mean over the clients of a method, with a band of one standard deviation. It needs
    `ForgettingMonitor` with `epochs: true`.

    Source: Lee et al. 2022, arXiv:2106.03097, Fig. 6.
    """

    def draw(self, series: Sequence[Series]) -> Drawn:
        figure, axes = panels(["accuracy (%)"], ["in-local", "out-local"], width=3.0, sharey="all")
        changes: dict[str, float] = {}
        labels = labels_of(series)
        for number, (label, runs) in enumerate(zip(labels, series, strict=True)):
            for place, (side, curve) in zip(axes[0], local_curves(runs.run).items(), strict=True):
                mean = curve.mean(1)
                draw_line(place, number, x=range(len(curve)), mean=mean, std=curve.std(1, ddof=1), label=label)
                changes[f"{label} {side}"] = float(mean[-1] - mean[0])
        finish(figure, axes, "local epochs done")
        text = by_name(changes, "{:+.1f}")
        return Drawn(figure, f"Change within one local training, in points, mean over the clients: {text}.")


class DegreeMap(Drawing):
    """Draws a class × round map of one client's forgetting degree τ, with the client's samples of each class.

    Source: FedKA, Eq. 1 and Fig. 2b.

    Args:
        client: The client.
    """

    def __init__(self, client: int = 3) -> None:
        self.client = client

    def draw(self, series: Sequence[Series]) -> Drawn:
        maps: dict[str, Numbers] = {}
        names: list[str] = []
        means: list[str] = []
        for label, runs in zip(labels_of(series), series, strict=True):
            counts = counts_of(runs.run)
            _, degree = degrees(ClientAccuracies(runs.run), self.client)
            held = counts.table[self.client]
            names = [f"{name} (n = {count:.0f})" for name, count in zip(shown_names(counts.names), held, strict=True)]
            maps[label] = degree.T
            is_dominant = held >= held.sum() / (2 * len(held))
            dominant = mean_known(degree[:, is_dominant])
            others = mean_known(degree[:, ~is_dominant])
            means.append(f"{label}: {dominant:.2f} of the dominant classes, {others:.2f} of the others")
        figure = draw_maps(
            maps,
            xlabel="round",
            ylabel="class",
            value=f"forgetting degree τ (≤ {LEAST_OF_MAPS:g} … 1)",
            row_names=names,
            limits=(LEAST_OF_MAPS, 1.0),
            cmap="PuOr_r",
            width=4.6,
        )
        text = f"Mean τ: {'; '.join(means)}."
        return Drawn(figure, f"Client {self.client}; negative: it gained; 1: it forgot all. {text}")


@dataclass
class OneClass(Drawing):
    """Draws one class at one client over the rounds: forgetting degree τ, and the trained model's accuracy on it.

    Source: FedKA, Figs. 3 and 6.

    Args:
        classes: Number of the class by case. An empty name has the class of all other cases.
        client: The client.
        accuracy: Whether the accuracy has a row of panels.
        count: Whether the client's samples of the class (`data/class_count`) have a row of panels.
    """

    classes: dict[str, int]
    client: int = 0
    accuracy: bool = True
    count: bool = False

    def draw(self, series: Sequence[Series]) -> Drawn:
        cases = unique(runs.case for runs in series)
        methods = unique(runs.method for runs in series)
        rows = ["forgetting degree τ"]
        if self.accuracy:
            rows.append("accuracy after training (%)")
        if self.count:
            rows.append("samples of the class")
        figure, axes = panels(rows, cases, width=3.2, height=2.0, sharey="none")
        means: dict[str, float] = {}
        for label, runs in zip(labels_of(series), series, strict=True):
            accuracies = ClientAccuracies(runs.run)
            class_idx = self.classes.get(runs.case, self.classes.get("", 0))
            rounds, degree = degrees(accuracies, self.client)
            curves = [(rounds, degree[:, class_idx])]
            if self.accuracy:
                _, trained = accuracies.at("trained", self.client)
                curves.append((rounds, 100 * trained[:, class_idx]))
            if self.count:
                counts = runs.run.history.curve("data/class_count")
                curves.append((np.array([*counts]), np.array([*counts.values()])))
            column = axes[:, cases.index(runs.case)]
            for place, (x, values) in zip(column, curves, strict=True):
                draw_line(place, methods.index(runs.method), x=x, mean=values, label=runs.method)
            column[0].set_ylim(LEAST_OF_AXES, 1.1)
            if self.count:
                column[-1].set_ylim(bottom=0)
            means[f"{label} (class {shown_names(accuracies.names)[class_idx]})"] = mean_known(degree[:, class_idx])
        name_rounds(axes, [int(round_idx) for round_idx in rounds])
        finish(figure, axes)
        return Drawn(figure, f"Client {self.client}. Mean τ over the rounds: {by_name(means, '{:.2f}')}.")


class DistanceScatter(Drawing):
    """Draws weight divergence ‖w − w_k‖₁ against distribution distance ‖Ã_G − p_k‖₁, by client and round.

    Later rounds are more opaque. It needs `DriftMonitor`.

    Source: Lee et al. 2022, arXiv:2106.03097, Fig. 8.
    """

    def draw(self, series: Sequence[Series]) -> Drawn:
        labels = labels_of(series)
        figure, axes = panels(["weight divergence ‖w − w_k‖₁"], labels, width=3.0)
        strengths: dict[str, float] = {}
        for i, (place, label, runs) in enumerate(zip(axes[0], labels, series, strict=True)):
            table = runs.run.columns(last_file(runs.run, "drift.csv", "DriftMonitor").name)
            distance = table["distribution_distance"]
            divergence = table["weight_divergence"]
            rounds = table["round"]
            known = ~np.isnan(distance) & ~np.isnan(divergence)
            place.scatter(
                distance[known],
                divergence[known],
                s=11,
                c=COLOURS[i % len(COLOURS)],
                marker=MARKERS[i % len(MARKERS)],
                alpha=0.08 + 0.72 * rounds[known] / max(1.0, rounds.max()),
                linewidths=0,
            )
            strengths[label] = float(np.corrcoef(distance[known], divergence[known])[0, 1])
        finish(figure, axes, "distribution distance ‖Ã_G − p_k‖₁")
        return Drawn(figure, f"Pearson's r over all rounds and clients: {by_name(strengths, '{:.2f}')}.")


class ClassBars(Drawing):
    """Draws the accuracy on each class of the received model, of the trained models, and of their aggregate.

    The models are of the first round that has them: runs that begin with the same weights are compared at their start.

    Source: FedED, Figs. 1 and 4.

    Args:
        client: Client whose trained model is shown. None shows the mean over all clients.
    """

    def __init__(self, client: int | None = None) -> None:
        self.client = client

    def draw(self, series: Sequence[Series]) -> Drawn:
        below = -(-len(series) // BARS_BESIDE)
        figure, axes = panels(
            ["accuracy (%)"] * below,
            [""] * BARS_BESIDE,
            width=4.0,
            height=2.4,
            sharey="all",
            sharex=False,
        )
        changes: dict[str, float] = {}
        aggregates: dict[str, float] = {}
        for place, label, runs in zip(axes.ravel(), labels_of(series), series, strict=False):
            accuracies = ClientAccuracies(runs.run)
            held = None if self.client is None else counts_of(runs.run).table[self.client]
            first = int(accuracies.rounds.min())
            _, received = accuracies.at("received", self.client, first)
            _, trained = accuracies.at("trained", self.client, first)
            before = received.mean(0)
            after = trained.mean(0)
            _, _, of_aggregate = runs.group.columns(BY_CLASS)
            self.draw_bars(place, accuracies.names, held=held, values=(before, after, of_aggregate[first]))
            aggregates[label] = 100 * runs.run.history.curve("global/acc").get(first, np.nan)
            place.set_title(f"{label}: aggregate {aggregates[label]:.1f} %", fontsize="medium")
            compared = np.ones(len(before), dtype=bool) if held is None else held == 0
            if compared.any():
                changes[label] = 100 * float((after - before)[compared].mean())
        for place in axes.ravel()[len(series) :]:
            place.set_axis_off()
        if self.client is None:
            xlabel = "class"
            scope = "in local training, mean over clients and classes"
        else:
            xlabel = f"class, and samples of it at client {self.client}"
            scope = "of its empty classes"
        finish(figure, axes, xlabel)
        text = f"Change of the accuracy {scope}, in points: {by_name(changes, '{:+.1f}')}."
        return Drawn(figure, f"{text} Accuracy of the aggregate, in %: {by_name(aggregates)}.")

    def draw_bars(self, axes: Any, names: Sequence[str], *, held: Numbers | None, values: Sequence[Numbers]) -> None:
        """Draw the bars of start, trained and aggregate for each of the C classes.

        Args:
            axes: The panel.
            names: Names of the classes.
            held: Number of the client's samples of each class, (C,), which the panel names. None names none.
            values: Accuracies of start, trained and aggregate, (C,) each.
        """
        who = "clients, mean" if self.client is None else f"client {self.client}"
        looks = (("start", 5, ""), (f"{who}, trained", 1, "////"), ("aggregate", 0, ""))
        for i, (label, color, hatch) in enumerate(looks):
            axes.bar(
                np.arange(len(names)) + 0.27 * (i - 1),
                100 * values[i],
                width=0.27,
                label=label,
                color=COLOURS[color],
                hatch=hatch,
                edgecolor="white",
                linewidth=0.3,
            )
        texts = shown_names(names)
        if held is not None:
            texts = [f"{name}\n{count:.0f}" for name, count in zip(texts, held, strict=True)]
        axes.set_xticks(range(len(names)), list(map(drawable, texts)), fontsize=8)


class ClassCounts(Drawing):
    """Draws client × class counts of training samples, a map for each case of the first method."""

    def draw(self, series: Sequence[Series]) -> Drawn:
        shown = [runs for runs in series if runs.method == series[0].method]
        maps = {runs.case or runs.method: counts_of(runs.run).table.T for runs in shown}
        figure = draw_maps(
            maps,
            xlabel="client",
            ylabel="class",
            value="training samples",
            row_names=shown_names(counts_of(shown[0].run).names),
            columns=2,
            limits=(0, max(float(table.max()) for table in maps.values())),
            cmap="YlGnBu",
            numbers=all(max(table.shape) <= 20 for table in maps.values()),
            width=4.2,
        )
        held = {name: float((table > 0).sum(0).mean()) for name, table in maps.items()}
        return Drawn(figure, f"Classes that a client has, mean: {by_name(held)}.")


class LocalShares(Drawing):
    """Draws the shares p of the classes at some clients, and the out-local shares p̃ = (1 − p) / (C − 1) beside them.

    Source: Lee et al. 2022, arXiv:2106.03097, Definition 1 and Fig. 3.

    Args:
        clients: Number of clients.
    """

    def __init__(self, clients: int = 10) -> None:
        self.clients = clients

    def draw(self, series: Sequence[Series]) -> Drawn:
        counts = counts_of(series[0].run)
        held = torch.from_numpy(counts.table).long()[: self.clients]
        inside = in_local(held).numpy().T
        outside = out_local(held).numpy().T
        figure = draw_maps(
            {"in-local p": inside, "out-local p̃ · (C − 1)": (len(outside) - 1) * outside},
            xlabel="client",
            ylabel="class",
            value="share",
            row_names=shown_names(counts.names),
            limits=(0, 1),
            cmap="YlGnBu",
            width=3.6,
        )
        bounds = f"p is at most {inside.max():.2f}, p̃ at most {outside.max():.2f}"
        return Drawn(figure, f"{bounds}: out-local shares spread over all classes that a client has few of.")


class PredictedDistributions(Drawing):
    """Draws client × class maps of the true class distributions, and of the mean predictions (EPD) of the clients.

    The server infers the distributions from the predictions. It needs `PredictedDistribution`.

    Source: Seyedmohammadi et al. 2024, arXiv:2403.11892, Eq. 5 and Fig. 1.
    """

    def draw(self, series: Sequence[Series]) -> Drawn:
        run = series[0].run
        table = run.columns(last_file(run, "predicted_distribution.csv", "PredictedDistribution").name)
        names = list(table)[2:]
        last = table["round"].max()
        rows = table["round"] == last
        clients = table["client"][rows].astype(int)
        predicted = np.stack([table[name][rows] for name in names], 1)
        counts = counts_of(run).table[clients]
        true = counts / counts.sum(1, keepdims=True)
        figure = draw_maps(
            {"(a) true class distribution": true.T, "(b) mean prediction (EPD)": predicted.T},
            xlabel="client",
            ylabel="class",
            value="share",
            row_names=shown_names(names),
            limits=(0, 1),
            cmap="YlGnBu",
            width=4.0,
        )
        distance = np.abs(true - predicted).sum(1).mean()
        r = np.corrcoef(true.ravel(), predicted.ravel())[0, 1]
        return Drawn(figure, f"After round {int(last) + 1}: mean 1-norm distance {distance:.2f}, Pearson's r {r:.2f}.")
