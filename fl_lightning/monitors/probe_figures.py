"""Figures of features and loss landscapes, as pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from fl_lightning.functional.density import angle_density, kernel_density
from fl_lightning.reports.figures import GREY, in_legend, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_NAMES = 24
"""Names in a legend at most."""


def joint_embedding(features: Tensor, seed: int) -> Tensor:
    """Embed the features of several models together by t-SNE, so that places mean the same for all.

    Args:
        features: of M models on the same samples, (M, n, d).
        seed: of t-SNE, in [0, 2³²).

    Returns:
        (M, n, 2), float32.
    """
    from sklearn.manifold import TSNE  # noqa: PLC0415 - slow to import

    rows = features.flatten(0, 1).double().numpy()
    perplexity = min(30.0, max(1.0, (len(rows) - 1) / 3))
    points = TSNE(perplexity=perplexity, init="random", random_state=seed).fit_transform(rows)
    return torch.as_tensor(points).view(*features.shape[:2], 2)


def plot_embedding(
    points: Tensor,
    target: Tensor,
    models: Sequence[str],
    class_names: Sequence[str],
    by: Sequence[Literal["class", "model"]] = ("class", "model"),
) -> Figure:
    """Joint embedding of several models' features, coloured by class and by model.

    Args:
        points: (M, n, 2).
        target: class of each sample, (n,).
        models: M names.
        class_names: C names.
        by: what the colours of each panel tell.
    """
    figure = new_figure(5.75 * len(by), 4.8)
    embedded = {
        "class": (target.expand(len(models), -1), class_names),
        "model": (torch.arange(len(models))[:, None].expand(-1, len(target)), models),
    }
    for axes, kind in zip(figure.subplots(1, len(by), squeeze=False)[0], by, strict=True):
        groups, names = embedded[kind]
        for i, name in enumerate(names):
            x, y = points[groups == i].T.numpy()
            axes.scatter(x, y, s=5, color=colour_of(i, len(names)), linewidths=0, label=in_legend(name))
        axes.set(title=f"by {kind}", xlabel="t-SNE 1", ylabel="t-SNE 2", xticks=[], yticks=[])
        legend(axes, len(names))
    return figure


def plot_circles(features: Tensor, target: Tensor, models: Sequence[str], class_names: Sequence[str]) -> Figure:
    """Densities of two-dimensional features: above in the plane, below of their angle, a curve for each class.

    Args:
        features: of M models, (M, n, 2).
        target: class of each sample, (n,).
        models: M names.
        class_names: C names.
    """
    figure = new_figure(2.6 * len(models) + 1.2, 5.2)
    panels = figure.subplots(2, len(models), squeeze=False, sharey="row")
    reach = float(1.15 * features.abs().max().clamp(min=1e-12))
    line = torch.linspace(-reach, reach, 60, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line)
    angles = torch.linspace(-torch.pi, torch.pi, 181, dtype=torch.float64)
    for column, (points, name) in enumerate(zip(features.double(), models, strict=True)):
        plane, circle = panels[:, column]
        density = kernel_density(grid, points, width=0.08 * reach).view(60, 60).T
        plane.pcolormesh(line.numpy(), line.numpy(), density.numpy(), cmap="Greys", rasterized=True)
        plane.set(title=name, aspect="equal", xticks=[], yticks=[])
        for c, label in enumerate(class_names):
            of_class = points[target == c]
            if len(of_class):
                curve = angle_density(angles, torch.atan2(of_class[:, 1], of_class[:, 0]), width=0.15)
                circle.plot(angles.numpy(), curve.numpy(), color=colour_of(c, len(class_names)), label=in_legend(label))
        circle.set(xlabel="angle (rad)", xticks=[-np.pi, 0, np.pi], xticklabels=["−π", "0", "π"])
        circle.grid(True, color=GREY, linewidth=0.6)
    panels[0, 0].set_ylabel("density in the plane")
    panels[1, 0].set_ylabel("density (1/rad)")
    legend(panels[1, -1], len(class_names))
    return figure


def plot_landscape(
    sigmas: Tensor, noise_loss: Tensor, noise_accuracy: Tensor, line: Tensor, plane: Tensor, eigenvalues: Tensor
) -> Figure:
    """Loss under noise on the parameters, and on the plane of the Hessian's two leading eigenvectors.

    Args:
        sigmas: σ of the noise, (S,).
        noise_loss: (S, R), R draws each.
        noise_accuracy: the same, fractions.
        line: steps along either eigenvector, (G,).
        plane: loss, (G, G): rows along the first eigenvector.
        eigenvalues: (2,).
    """
    figure = new_figure(10.5, 4.0)
    noise, hessian = figure.subplots(1, 2)
    other = noise.twinx()
    for axes, values, colour, style in (
        (noise, noise_loss, "#0072B2", "-"),
        (other, 100 * noise_accuracy, "#D55E00", "--"),
    ):
        mean = values.mean(1)
        std = values.std(1, correction=0)
        axes.plot(sigmas.numpy(), mean.numpy(), style, color=colour, marker="o", markersize=3.5)
        axes.fill_between(sigmas.numpy(), (mean - std).numpy(), (mean + std).numpy(), color=colour, alpha=0.2)
        axes.tick_params("y", colors=colour)
    noise.set(xlabel="σ of the noise on every parameter", title="noise: mean ± std over draws")
    noise.set_ylabel("loss (nats)", color="#0072B2")
    other.set_ylabel("accuracy (%)", color="#D55E00")
    noise.grid(True, color=GREY, linewidth=0.6)
    image = hessian.contourf(line.numpy(), line.numpy(), plane.T.numpy(), levels=20, cmap="viridis")
    figure.colorbar(image, ax=hessian, label="loss (nats)")
    first, second = eigenvalues.tolist()
    hessian.set(xlabel=f"first eigenvector (λ = {first:.3g})", ylabel=f"second eigenvector (λ = {second:.3g})")
    hessian.set_title("plane of the leading eigenvectors")
    return figure


def colour_of(i: int, count: int) -> Any:
    """Colour of the i-th of `count` groups: told apart by their lightness, too."""
    from matplotlib import colormaps  # noqa: PLC0415 - slow to import

    return colormaps["tab10"](i) if count <= 10 else colormaps["turbo"](i / (count - 1))


def legend(axes: Axes, count: int) -> None:
    """Name the groups beside the axes, where they are not too many."""
    if count <= MOST_NAMES:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, markerscale=2.5, fontsize="small")
