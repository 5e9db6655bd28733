"""Hands figures to loggers that take pictures. A logger is known by its methods and not by its class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from pytorch_lightning.loggers.logger import Logger
from pytorch_lightning.utilities import rank_zero_warn

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FigureWriter = Callable[[str, "Figure", int], object]
"""Logs a figure under a name, for a round."""


def figure_writer(logger: Logger) -> FigureWriter | None:
    """Return the function by which a logger takes a figure. None means that it takes none.

    There are three kinds of loggers that take one:

    - Weights & Biases has `log_image(key, images, step)` of its own.
    - TensorBoard's experiment has `add_figure(tag, figure, global_step)`.
    - MLflow has a `run_id`, and its experiment `log_figure(run_id, figure, artifact_file)`, which keeps the latest
      picture of a name.
    """
    taker: Any = logger
    if offers(taker, "log_image"):
        return lambda name, figure, step: taker.log_image(name, [pixels(figure)], step)
    experiment: Any = getattr(taker, "experiment", None)
    if offers(experiment, "add_figure"):
        return lambda name, figure, step: experiment.add_figure(name, figure, step, close=False)
    if offers(experiment, "log_figure") and hasattr(type(taker), "run_id"):
        return lambda name, figure, _: experiment.log_figure(taker.run_id, figure, f"{name}.png")
    return None


def offers(taker: object, method: str) -> bool:
    """Return True if the class of an object has a method.

    Lightning's dummy takes any call and does nothing. Its class does not have the method.

    Args:
        taker: The object.
        method: Name of the method.
    """
    return callable(getattr(type(taker), method, None))


def pixels(figure: Figure) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Draw a figure as pixels, (height, width, 3) uint8."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - slow to import

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def log_figures(loggers: Iterable[Logger], figures: Mapping[str, Figure], step: int) -> None:
    """Give figures to every logger that takes one. An error of a logger becomes a warning, because the fit is done.

    Args:
        loggers: Loggers of the Trainer, on its first process.
        figures: Figures by name. A name begins with the scope of the values, such as `global/classwise`.
        step: The round, from 0.
    """
    for logger in loggers:
        try:
            give_figures(logger, figures, step)
        except Exception as error:
            kind = type(logger).__name__
            reason = f"{type(error).__name__}: {error}"
            rank_zero_warn(f"{kind} did not take the figures {', '.join(figures)} ({reason}); the run is complete")


def give_figures(logger: Logger, figures: Mapping[str, Figure], step: int) -> None:
    """Give figures to a logger if it takes figures.

    Args:
        logger: The logger.
        figures: Figures by name.
        step: The round, from 0.

    Raises:
        Exception: The logger raises it. It may be of any kind.
    """
    writer = figure_writer(logger)
    if writer is None:
        return
    for name, figure in figures.items():
        writer(name, figure, step)
