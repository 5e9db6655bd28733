"""Drawings of the inside of models: their features, their neurons, the loss around them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fl_lightning.metrics.history import BY_CLASS
from fl_lightning.monitors.probe_figures import colour_of, joint_embedding, plot_circles, plot_embedding
from fl_lightning.papers.drawing import Drawing, Drawn, Series, by_name, chosen, last_file, unique
from fl_lightning.papers.panels import panels
from fl_lightning.reports.figures import draw_line, label_places, new_figure
from fl_lightning.reports.saved import SavedRun


def last_arrays(run: SavedRun, pattern: str) -> dict[str, NDArray[Any]]:
    """Read the last file of a monitor, by the pattern of its names."""
    with np.load(last_file(run, pattern)) as file:
        return dict(file)


class Landscapes(Drawing):
    """Loss of the global model under noise, a line for each method, and on the plane of the Hessian's eigenvectors.

    Needs `LossLandscape`.

    Source: Lee et al. 2022, arXiv:2106.03097, App. J and Fig. 14.
    """

    def draw(self, series: Sequence[Series]) -> Drawn:
        from matplotlib.ticker import LogFormatter, MaxNLocator  # noqa: PLC0415 - slow to import

        landscapes = [(runs.name, last_arrays(runs.run, "landscape-*-global.npz")) for runs in series]
        figure = new_figure(3.0 * (len(landscapes) + 1), 3.0)
        noise, *planes = figure.subplots(1, len(landscapes) + 1)
        for i, (name, arrays) in enumerate(landscapes):
            losses = arrays["noise_loss"]
            draw_line(noise, i, arrays["sigmas"], losses.mean(1), std=losses.std(1), label=name)
        noise.set(xlabel="σ of the parameters' noise", ylabel="loss (nats)", yscale="log")
        noise.yaxis.set_major_formatter(LogFormatter())  # powers of ten without formulas, which no text has
        noise.yaxis.set_minor_formatter(LogFormatter())
        noise.grid(True, alpha=0.4)
        noise.legend(fontsize="small", frameon=False)
        logs = [np.log10(arrays["plane"]) for _, arrays in landscapes]
        levels = np.linspace(min(map(np.min, logs)), max(map(np.max, logs)), 15)
        for place, plane, (name, arrays) in zip(planes, logs, landscapes, strict=True):
            line, (first, second) = arrays["line"], arrays["eigenvalues"]
            image = place.contourf(line, line, plane.T, levels=levels, cmap="viridis")
            place.set(xlabel=f"first eigenvector, λ = {first:.3g}", ylabel=f"second, λ = {second:.3g}")
            place.set_title(name, fontsize="medium")
        figure.colorbar(image, ax=planes, label="log₁₀ loss (nats)", ticks=MaxNLocator(6))
        largest = by_name({name: float(arrays["eigenvalues"][0]) for name, arrays in landscapes}, "{:.3g}")
        sigma = landscapes[0][1]["sigmas"][-1]
        noisy = by_name({name: float(arrays["noise_loss"][-1].mean()) for name, arrays in landscapes}, "{:.2f}")
        text = f"Largest eigenvalue of the Hessian at the last global model: {largest}."
        return Drawn(figure, f"{text} Loss with noise of σ = {sigma:g}: {noisy}.")


class NeuronClasses(Drawing):
    """Class that each neuron of the last hidden layer prefers, a colour each, in the models of one round.

    A column of a panel is a model: the received one, the clients' after training, the aggregate. Needs
    `NeuronActivations`.

    Source: Lee et al. 2022, arXiv:2106.03097, Eq. 19 and Fig. 17.
    """

    def draw(self, series: Sequence[Series]) -> Drawn:
        from matplotlib.colors import BoundaryNorm, ListedColormap  # noqa: PLC0415 - slow to import

        cases = unique(runs.case for runs in series)
        methods = unique(runs.method for runs in series)
        figure, axes = panels([f"{name}: neuron" for name in methods], cases, width=3.4, height=2.4, sharey="all")
        agreed: dict[str, float] = {}
        for runs in series:
            arrays = last_arrays(runs.run, "neurons-*.npz")
            table = np.stack([arrays["received"], *arrays["trained"], arrays["aggregate"]], 1)
            count = len(runs.group.columns(BY_CLASS)[1])
            order = np.argsort(table[:, 0], kind="stable")
            colours = ListedColormap([colour_of(c, count) for c in range(count)])
            place = axes[methods.index(runs.method), cases.index(runs.case)]
            norm = BoundaryNorm(np.arange(count + 1) - 0.5, count)
            image = place.imshow(table[order], aspect="auto", cmap=colours, norm=norm, interpolation="nearest")
            label_places(place.xaxis, ["G", *map(str, arrays["clients"]), "A"], 25)
            agreed[runs.name] = 100 * float((arrays["trained"] == arrays["received"]).mean())
        for place in axes[-1]:
            place.set_xlabel("global (G), clients, aggregate (A)")
        figure.colorbar(image, ax=axes, label="preferred class", ticks=range(count))
        text = f"Neurons that prefer the same class in the received and a client's model, in %: {by_name(agreed)}."
        return Drawn(figure, text)


class Circles(Drawing):
    """Densities of two-dimensional features on the circle, of the received model, clients' models and the aggregate.

    Needs `FeatureProbe`.

    Source: Lee et al. 2022, arXiv:2106.03097, App. N and Fig. 18.

    Args:
        clients: how many of them.
    """

    def __init__(self, clients: int = 3) -> None:
        self.clients = clients

    def draw(self, series: Sequence[Series]) -> Drawn:
        (runs,) = chosen(series)
        arrays = last_arrays(runs.run, "features-*.npz")
        names = list(map(str, arrays["models"]))
        features = torch.from_numpy(arrays["features"])
        rows = [0, *range(1, 1 + self.clients), len(names) - 1]
        target = torch.from_numpy(arrays["targets"])
        classes = runs.group.columns(BY_CLASS)[1]
        figure = plot_circles(features[rows], target, [names[k] for k in rows], classes)
        text = by_name({names[k]: spread_of(features[k], target) for k in rows}, "{:.2f}")
        return Drawn(figure, f"Resultant length of each class's angles, mean over the classes (1: a point): {text}.")


def spread_of(features: torch.Tensor, target: torch.Tensor) -> float:
    """Length of the mean of each class's points on the unit circle, mean over the classes: (n, 2), (n,) -> [0, 1]."""
    unit = torch.nn.functional.normalize(features.double(), dim=1)
    return float(torch.stack([unit[target == c].mean(0).norm() for c in sorted(set(target.tolist()))]).mean())


@dataclass
class Embedding(Drawing):
    """Joint t-SNE of the features of the received model and the clients' models, by class and by model.

    The series are embedded together: the received model once, then the clients of each. Needs `FeatureProbe`.

    Source: Lee et al. 2022, arXiv:2106.03097, App. O and Figs. 19-21.

    Args:
        methods: whose clients; none named: all.
        cases: likewise.
        by: what the colours tell, in panels beside each other.
        samples: that each model embeds at most.
        seed: of t-SNE.
    """

    methods: Sequence[str] = ()
    cases: Sequence[str] = ()
    by: Sequence[Literal["class", "model"]] = ("class", "model")
    samples: int = 100
    seed: int = 0

    def draw(self, series: Sequence[Series]) -> Drawn:
        shown = chosen(series, self.methods, self.cases)
        features = list[torch.Tensor]()
        names = list[str]()
        for runs in shown:
            arrays = last_arrays(runs.run, "features-*.npz")
            models = list(map(str, arrays["models"]))
            table = torch.from_numpy(arrays["features"])[:, : self.samples]
            target = torch.from_numpy(arrays["targets"])[: self.samples]
            before = f"{runs.method} " if len(shown) > 1 else ""
            first = 0 if not names else 1  # what they received is the same
            features.append(table[first:-1])
            names += [name if name == "received" else f"{before}{name}" for name in models[first:-1]]
        points = joint_embedding(torch.cat(features), self.seed)
        figure = plot_embedding(points, target, names, shown[0].group.columns(BY_CLASS)[1], by=self.by)
        flat = points.flatten(0, 1)
        near = torch.cdist(flat, flat).fill_diagonal_(torch.inf).argmin(1)
        by_class = target.tile(len(names))
        by_model = torch.arange(len(names)).repeat_interleave(len(target))
        groups = {"the same class": by_class, "the same model": by_model}
        same = {name: 100 * float((group[near] == group).double().mean()) for name, group in groups.items()}
        return Drawn(figure, f"Points whose nearest neighbour is of …, in %: {by_name(same)}.")
