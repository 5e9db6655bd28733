"""Figures of features and loss landscapes, as pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning.functional.classes import shown_names
from fl_lightning.functional.density import angle_density, kernel_density
from fl_lightning.reports.figures import GREY, in_legend, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_NAMES = 24
"""Largest number of names in a legend."""


def joint_embedding(features: Tensor, seed: int) -> Tensor:
    """Embed the features of several models together by t-SNE, so that places mean the same for all.

    Args:
        features: Features of M models on the same samples, (M, n, d).
        seed: Seed of t-SNE, in [0, 2³²).

    Returns:
        The points, (M, n, 2) float32.
    """
    from sklearn.manifold import TSNE  # noqa: PLC0415 - slow to import

    rows = features.flatten(0, 1).double().numpy()
    perplexity = min(30.0, max(1.0, (len(rows) - 1) / 3))
    tsne = TSNE(perplexity=perplexity, init="random", random_state=seed)
    points = tsne.fit_transform(rows)
    num_models, num_samples, _ = features.shape
    return torch.as_tensor(points).view(num_models, num_samples, 2)


def plot_embedding(
    points: Tensor,
    target: Tensor,
    models: Sequence[str],
    class_names: Sequence[str],
    *,
    by: Sequence[Literal["class", "model"]] = ("class", "model"),
) -> Figure:
    """Draw the joint embedding of several models' features, colored by class and by model.

    Args:
        points: Embedded features, (M, n, 2).
        target: Class of each sample, (n,).
        models: Names of the M models.
        class_names: Names of the C classes.
        by: What the colors tell, for each panel.
    """
    figure = new_figure(5.75 * len(by), 4.8)
    panels = figure.subplots(1, len(by), squeeze=False)[0]
    classes = target.expand(len(models), -1)
    places_of_models = torch.arange(len(models))[:, None].expand(-1, len(target))
    embedded = {"class": (classes, shown_names(class_names)), "model": (places_of_models, models)}
    for axes, kind in zip(panels, by, strict=True):
        groups, names = embedded[kind]
        for i, name in enumerate(names):
            x, y = points[groups == i].T.numpy()
            axes.scatter(x, y, s=5, color=colour_of(i, len(names)), linewidths=0, label=in_legend(name))
        axes.set(title=f"by {kind}", xlabel="t-SNE 1", ylabel="t-SNE 2", xticks=[], yticks=[])
        legend(axes, len(names))
    return figure


def plot_circles(features: Tensor, target: Tensor, models: Sequence[str], class_names: Sequence[str]) -> Figure:
    """Draw densities of two-dimensional features: above in the plane, below of their angle with a curve for each class.

    Args:
        features: Features of M models, (M, n, 2).
        target: Class of each sample, (n,).
        models: Names of the M models.
        class_names: Names of the C classes.
    """
    figure = new_figure(2.6 * len(models) + 1.2, 5.2)
    panels = figure.subplots(2, len(models), squeeze=False, sharey="row")
    reach = float(1.15 * features.abs().max().clamp(min=1e-12))
    line = torch.linspace(-reach, reach, 60, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line)
    angles = torch.linspace(-torch.pi, torch.pi, 181, dtype=torch.float64)
    for column, (points, name) in enumerate(zip(features.double(), models, strict=True)):
        plane, circle = panels[:, column]
        density = kernel_density(grid, points, width=0.08 * reach).view(60, 60)
        plane.pcolormesh(line.numpy(), line.numpy(), density.T.numpy(), cmap="Greys", rasterized=True)
        plane.set(title=name, aspect="equal", xticks=[], yticks=[])
        for c, label in enumerate(shown_names(class_names)):
            of_class = points[target == c]
            if not len(of_class):
                continue
            angles_of_class = torch.atan2(of_class[:, 1], of_class[:, 0])
            curve = angle_density(angles, angles_of_class, width=0.15)
            color = colour_of(c, len(class_names))
            circle.plot(angles.numpy(), curve.numpy(), color=color, label=in_legend(label))
        circle.set(xlabel="angle (rad)", xticks=[-np.pi, 0, np.pi], xticklabels=["−π", "0", "π"])
        circle.grid(visible=True, color=GREY, linewidth=0.6)
    panels[0, 0].set_ylabel("density in the plane")
    panels[1, 0].set_ylabel("density (1/rad)")
    legend(panels[1, -1], len(class_names))
    return figure


def plot_landscape(
    *,
    sigmas: Tensor,
    noise_loss: Tensor,
    noise_accuracy: Tensor,
    line: Tensor,
    plane: Tensor,
    eigenvalues: Tensor,
) -> Figure:
    """Draw the loss under noise on the parameters, and on the plane of the Hessian's two leading eigenvectors.

    Args:
        sigmas: Standard deviations σ of the noise, (S,).
        noise_loss: Losses of R draws for each σ, (S, R).
        noise_accuracy: Accuracies in [0, 1] of the same draws, (S, R).
        line: Steps along either eigenvector, (G,).
        plane: Losses on the plane, (G, G). A row is a step along the first eigenvector.
        eigenvalues: The two leading eigenvalues, (2,).
    """
    figure = new_figure(10.5, 4.0)
    noise, hessian = figure.subplots(1, 2)
    draw_noise(noise, sigmas=sigmas, loss=noise_loss, accuracy=noise_accuracy)
    image = hessian.contourf(line.numpy(), line.numpy(), plane.T.numpy(), levels=20, cmap="viridis")
    figure.colorbar(image, ax=hessian, label="loss (nats)")
    first, second = eigenvalues.tolist()
    hessian.set(xlabel=f"first eigenvector (λ = {first:.3g})", ylabel=f"second eigenvector (λ = {second:.3g})")
    hessian.set_title("plane of the leading eigenvectors")
    return figure


def draw_noise(axes: Axes, *, sigmas: Tensor, loss: Tensor, accuracy: Tensor) -> None:
    """Draw loss and accuracy under noise, each with an axis of its own on one panel.

    Args:
        axes: The panel.
        sigmas: Standard deviations σ of the noise, (S,).
        loss: Losses of R draws for each σ, (S, R).
        accuracy: Accuracies in [0, 1] of the same draws, (S, R).
    """
    other = axes.twinx()
    loss_color = "#0072B2"
    accuracy_color = "#D55E00"
    draw_band(axes, x=sigmas, values=loss, color=loss_color, style="-")
    draw_band(other, x=sigmas, values=100 * accuracy, color=accuracy_color, style="--")
    axes.set(xlabel="σ of the noise on every parameter", title="noise: mean ± std over draws")
    axes.set_ylabel("loss (nats)", color=loss_color)
    other.set_ylabel("accuracy (%)", color=accuracy_color)
    axes.grid(visible=True, color=GREY, linewidth=0.6)


def draw_band(axes: Axes, *, x: Tensor, values: Tensor, color: str, style: str) -> None:
    """Draw the mean of draws with a band of one standard deviation.

    Args:
        axes: The panel.
        x: Places, (S,).
        values: Values of R draws at each place, (S, R).
        color: Color of the line, of the band and of the axis of values.
        style: Style of the line, as matplotlib writes it.
    """
    mean = values.mean(1)
    std = values.std(1, correction=0)
    axes.plot(x.numpy(), mean.numpy(), style, color=color, marker="o", markersize=3.5)
    axes.fill_between(x.numpy(), (mean - std).numpy(), (mean + std).numpy(), color=color, alpha=0.2)
    axes.tick_params("y", colors=color)


def colour_of(i: int, count: int) -> Any:
    """Return the color of the i-th of `count` groups. The colors of many groups differ in lightness, too."""
    from matplotlib import colormaps  # noqa: PLC0415 - slow to import

    if count <= 10:
        return colormaps["tab10"](i)
    return colormaps["turbo"](i / (count - 1))


def legend(axes: Axes, count: int) -> None:
    """Name the groups beside the axes, if there are not too many."""
    if count <= MOST_NAMES:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, markerscale=2.5, fontsize="small")
