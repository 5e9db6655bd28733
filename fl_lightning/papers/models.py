"""Drawings of the inside of models: their features, their neurons, the loss around them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fl_lightning.metrics.history import BY_CLASS
from fl_lightning.monitors.probe_figures import colour_of, joint_embedding, plot_circles, plot_embedding
from fl_lightning.papers.drawing import Drawing, Drawn, Series, by_name, chosen, labels_of, last_file, unique
from fl_lightning.papers.panels import panels
from fl_lightning.reports.figures import draw_line, label_places, new_figure
from fl_lightning.reports.saved import SavedRun

CIRCLES = 3
"""Number of clients whose features are drawn on the circle."""

EMBEDDED = 100
"""Largest number of samples that each model embeds by t-SNE."""


def last_arrays(run: SavedRun, pattern: str) -> dict[str, NDArray[Any]]:
    """Read the arrays in the last file of a monitor.

    Args:
        run: The run.
        pattern: Pattern of the names of the monitor's files.
    """
    with np.load(last_file(run, pattern)) as file:
        return dict(file)


class Landscapes(Drawing):
    """Draws the loss of the global model under noise, and on the plane of the Hessian's eigenvectors.

    Under noise there is a line for each method, on the plane a panel. It needs `LossLandscape`.

    Source: Lee et al. 2022, arXiv:2106.03097, App. J and Fig. 14.
    """

    def draw(self, series: Sequence[Series]) -> Drawn:
        labels = labels_of(series)
        landscapes = {}
        for label, runs in zip(labels, series, strict=True):
            landscapes[label] = last_arrays(runs.run, "landscape-*-global.npz")
        figure = new_figure(3.0 * (len(landscapes) + 1), 3.0)
        noise, *planes = figure.subplots(1, len(landscapes) + 1)
        draw_noise(noise, landscapes)
        draw_planes(figure, planes, landscapes)
        largest = {name: float(arrays["eigenvalues"][0]) for name, arrays in landscapes.items()}
        noisy = {name: float(arrays["noise_loss"][-1].mean()) for name, arrays in landscapes.items()}
        sigma = landscapes[labels[0]]["sigmas"][-1]
        text = f"Largest eigenvalue of the Hessian at the last global model: {by_name(largest, '{:.3g}')}."
        return Drawn(figure, f"{text} Loss with noise of σ = {sigma:g}: {by_name(noisy, '{:.2f}')}.")


def draw_noise(axes: Any, landscapes: Mapping[str, Mapping[str, NDArray[Any]]]) -> None:
    """Draw the loss under noise, a line for each method.

    Args:
        axes: The panel.
        landscapes: Arrays of `LossLandscape` by method.
    """
    from matplotlib.ticker import LogFormatter  # noqa: PLC0415 - slow to import

    for number, (name, arrays) in enumerate(landscapes.items()):
        losses = arrays["noise_loss"]
        draw_line(axes, number, x=arrays["sigmas"], mean=losses.mean(1), std=losses.std(1), label=name)
    axes.set(xlabel="σ of the parameters' noise", ylabel="loss (nats)", yscale="log")
    # Matplotlib's own powers of ten are formulas, which no text may have.
    axes.yaxis.set_major_formatter(LogFormatter())
    axes.yaxis.set_minor_formatter(LogFormatter())
    axes.grid(visible=True, alpha=0.4)
    axes.legend(fontsize="small", frameon=False)


def draw_planes(figure: Any, panels: Sequence[Any], landscapes: Mapping[str, Mapping[str, NDArray[Any]]]) -> None:
    """Draw the loss on the plane of the Hessian's eigenvectors, a panel for each method, with one scale.

    Args:
        figure: The figure.
        panels: A panel for each method.
        landscapes: Arrays of `LossLandscape` by method.
    """
    from matplotlib.ticker import MaxNLocator  # noqa: PLC0415 - slow to import

    planes = {name: np.log10(arrays["plane"]) for name, arrays in landscapes.items()}
    levels = np.linspace(min(map(np.min, planes.values())), max(map(np.max, planes.values())), 15)
    for place, (name, plane) in zip(panels, planes.items(), strict=True):
        line = landscapes[name]["line"]
        first, second = landscapes[name]["eigenvalues"]
        image = place.contourf(line, line, plane.T, levels=levels, cmap="viridis")
        place.set(xlabel=f"first eigenvector, λ = {first:.3g}", ylabel=f"second, λ = {second:.3g}")
        place.set_title(name, fontsize="medium")
    figure.colorbar(image, ax=panels, label="log₁₀ loss (nats)", ticks=MaxNLocator(6))


class NeuronClasses(Drawing):
    """Draws the class that each neuron of the last hidden layer prefers, in the models of one round.

    Each class has a color. A column of a panel is a model: the received model, the clients' models after training, the
    aggregate. It needs `NeuronActivations`.

    Source: Lee et al. 2022, arXiv:2106.03097, Eq. 19 and Fig. 17.
    """

    def draw(self, series: Sequence[Series]) -> Drawn:
        from matplotlib.colors import BoundaryNorm, ListedColormap  # noqa: PLC0415 - slow to import

        cases = unique(runs.case for runs in series)
        methods = unique(runs.method for runs in series)
        figure, axes = panels([f"{name}: neuron" for name in methods], cases, width=3.4, height=2.4, sharey="all")
        agreed: dict[str, float] = {}
        for label, runs in zip(labels_of(series), series, strict=True):
            arrays = last_arrays(runs.run, "neurons-*.npz")
            preferred = np.stack([arrays["received"], *arrays["trained"], arrays["aggregate"]], 1)
            _, class_names, _ = runs.group.columns(BY_CLASS)
            count = len(class_names)
            by_received = np.argsort(preferred[:, 0], kind="stable")
            place = axes[methods.index(runs.method), cases.index(runs.case)]
            image = place.imshow(
                preferred[by_received],
                aspect="auto",
                cmap=ListedColormap([colour_of(c, count) for c in range(count)]),
                norm=BoundaryNorm(np.arange(count + 1) - 0.5, count),
                interpolation="nearest",
            )
            label_places(place.xaxis, ["G", *map(str, arrays["clients"]), "A"], 25)
            agreed[label] = 100 * float((arrays["trained"] == arrays["received"]).mean())
        for place in axes[-1]:
            place.set_xlabel("global (G), clients, aggregate (A)")
        figure.colorbar(image, ax=axes, label="preferred class", ticks=range(count))
        text = f"Neurons that prefer the same class in the received and a client's model, in %: {by_name(agreed)}."
        return Drawn(figure, text)


class Circles(Drawing):
    """Draws densities of two-dimensional features on the circle, of one run.

    The features are those of the received model, of the first clients' models and of the aggregate. It needs
    `FeatureProbe`.

    Source: Lee et al. 2022, arXiv:2106.03097, App. N and Fig. 18.
    """

    def draw(self, series: Sequence[Series]) -> Drawn:
        (runs,) = series
        arrays = last_arrays(runs.run, "features-*.npz")
        models = list(map(str, arrays["models"]))
        features = torch.from_numpy(arrays["features"])
        target = torch.from_numpy(arrays["targets"])
        rows = [0, *range(1, 1 + CIRCLES), len(models) - 1]
        names = [models[row] for row in rows]
        _, class_names, _ = runs.group.columns(BY_CLASS)
        figure = plot_circles(features[rows], target, models=names, class_names=class_names)
        lengths = {models[row]: resultant_length(features[row], target) for row in rows}
        text = by_name(lengths, "{:.2f}")
        return Drawn(figure, f"Resultant length of each class's angles, mean over the classes (1: a point): {text}.")


def resultant_length(features: torch.Tensor, target: torch.Tensor) -> float:
    """Return the length of the mean of each class's points on the unit circle, averaged over the classes, in [0, 1].

    Args:
        features: Features of the samples, (n, 2).
        target: Classes of the samples, (n,).
    """
    unit = torch.nn.functional.normalize(features.double(), dim=1)
    lengths = [unit[target == c].mean(0).norm() for c in sorted(set(target.tolist()))]
    return float(torch.stack(lengths).mean())


@dataclass
class Embedding(Drawing):
    """Draws the joint t-SNE of the features of the received model and the clients' models, by class and by model.

    The series are embedded together: the received model once, then the clients of each. It needs `FeatureProbe`.

    Source: Lee et al. 2022, arXiv:2106.03097, App. O and Figs. 19-21.

    Args:
        cases: Names of the cases whose clients are drawn. Without names all cases are drawn.
        by: Properties that the colors tell, in panels beside each other.
    """

    cases: Sequence[str] = ()
    by: Sequence[Literal["class", "model"]] = ("class", "model")

    def draw(self, series: Sequence[Series]) -> Drawn:
        shown = chosen(series, self.cases)
        features: list[torch.Tensor] = []
        names: list[str] = []
        for runs in shown:
            arrays = last_arrays(runs.run, "features-*.npz")
            models = list(map(str, arrays["models"]))
            table = torch.from_numpy(arrays["features"])[:, :EMBEDDED]
            target = torch.from_numpy(arrays["targets"])[:EMBEDDED]
            # All runs have received the same model, which the first one shows.
            first = 1 if names else 0
            features.append(table[first:-1])
            for model in models[first:-1]:
                is_own = len(shown) > 1 and model != "received"
                names.append(f"{runs.method} {model}" if is_own else model)
        points = joint_embedding(torch.cat(features), seed=0)
        _, class_names, _ = shown[0].group.columns(BY_CLASS)
        figure = plot_embedding(points, target, models=names, class_names=class_names, by=self.by)
        same = equal_neighbors(points, target)
        return Drawn(figure, f"Points whose nearest neighbour is of …, in %: {by_name(same)}.")


def equal_neighbors(points: torch.Tensor, target: torch.Tensor) -> dict[str, float]:
    """Return the shares of the points whose nearest neighbor has the same class or the same model, in percent.

    Args:
        points: Embedded features, (M, n, 2).
        target: Class of each sample, (n,).
    """
    num_models = len(points)
    flat = points.flatten(0, 1)
    nearest = torch.cdist(flat, flat).fill_diagonal_(torch.inf).argmin(1)
    by_class = target.tile(num_models)
    by_model = torch.arange(num_models).repeat_interleave(len(target))
    same = {}
    for name, group in (("the same class", by_class), ("the same model", by_model)):
        same[name] = 100 * float((group[nearest] == group).double().mean())
    return same
