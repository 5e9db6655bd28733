"""Hands figures to the loggers that take pictures, known by what they can do and not by their classes."""

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
    """Find how a logger takes a figure, None where it takes none.

    By its own `log_image(key, images, step)`, as that of Weights & Biases; by its experiment's
    `add_figure(tag, figure, global_step)`, as TensorBoard's; or by its `run_id` and its experiment's
    `log_figure(run_id, figure, artifact_file)`, as MLflow's, which keeps the latest picture of a name.
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
    """Tell whether the class has the method: an object that takes any call, to do nothing, does not offer it."""
    return callable(getattr(type(taker), method, None))


def pixels(figure: Figure) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Draw a figure: (height, width, 3), uint8."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415 - slow to import

    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def log_figures(loggers: Iterable[Logger], figures: Mapping[str, Figure], step: int) -> None:
    """Give the figures to every logger that takes one, and warn of what goes wrong there, since the fit is done.

    Args:
        loggers: of the Trainer, on its first process.
        figures: by name, which begins with the scope of its values, as `global/classwise`.
        step: the 0-based round.
    """
    for logger in loggers:
        try:
            if (writer := figure_writer(logger)) is not None:
                for name, figure in figures.items():
                    writer(name, figure, step)
        except Exception as error:
            kind = type(logger).__name__
            reason = f"{type(error).__name__}: {error}"
            rank_zero_warn(f"{kind} did not take the figures {', '.join(figures)} ({reason}); the run is complete")
