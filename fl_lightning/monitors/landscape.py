"""Monitor of the loss around the weights of the global and the clients' models."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Trainer
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.engines.inspection import Inspection
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.functional.hessian import hessian_product, leading_eigenvectors
from fl_lightning.functional.importance import as_function
from fl_lightning.functional.state import State, StateLike, add, to_float32
from fl_lightning.monitors.monitor import Measurements, Monitor, add_to_row, write_arrays
from fl_lightning.monitors.probe_figures import plot_landscape
from fl_lightning.reports.figures import save
from fl_lightning.types import ClientUpdate
from fl_lightning.utils.keyed import keyed_generator
from fl_lightning.utils.settings import check_above, check_at_least


class LossLandscape(Monitor):
    r"""Loss around the weights: under Gaussian noise, and on the plane of the Hessian's leading eigenvectors.

    Of the new global model, and of the weights of the `clients` that are named, as they were trained.
    `landscape-ROUND-MODEL.npz` has `sigmas` (S,), `noise_loss` and `noise_accuracy` (S, R) at w + σε, ε ~ N(0, I);
    `line` (G,), `plane` (G, G), the loss at w + a·v₁ + b·v₂, and the `eigenvalues` (2,); the picture of the same name
    shows them. Logged: `global/hessian/1` and `/2`, the eigenvalues. The loss is the mean cross-entropy in eval mode.

    Source: Lee et al. 2022, arXiv:2106.03097, App. J and Fig. 14.

    Args:
        split: whose samples the loss is taken of; None: `test`, else `val`.
        samples: so many of them, drawn once for the run; None: all.
        sigmas: σ of the noise, ≥ 0.
        repeats: draws of noise for each σ.
        reach: largest step along an eigenvector.
        grid: points along each, odd, so that w is one of them.
        iterations: restarts of the search for the eigenvectors at most, each of up to 20 Hessian products.
        every: measure every so many rounds.
        clients: whose models are measured besides the global one.
        dirpath: folder of the files; None: that of the Trainer's first logger (no logger: none).
    """

    def __init__(
        self,
        split: str | None = None,
        samples: int | None = 500,
        sigmas: Sequence[float] = (0.0, 0.01, 0.02, 0.05, 0.1),
        repeats: int = 5,
        reach: float = 1.0,
        grid: int = 11,
        iterations: int = 30,
        every: int = 10,
        clients: Sequence[int] = (),
        dirpath: str | Path | None = None,
    ) -> None:
        super().__init__(every, clients, dirpath)
        check_at_least(1, samples=samples, repeats=repeats, grid=grid, iterations=iterations)
        check_at_least(0, sigmas=min(sigmas, default=0.0))
        check_above(0, reach=reach)
        self.split = split
        self._split = ""
        self.samples = samples
        self.sigmas = list(sigmas)
        self.repeats = repeats
        self.reach = reach
        self.grid = grid
        self.iterations = iterations

    def begin(self, trainer: Trainer, loop: FederatedLoop) -> None:
        self.check_classes(loop)
        self._split = loop.data.measured_split(self.split)

    def end(self, loop: FederatedLoop, update: ClientUpdate, measured: Measurements) -> None:
        measured["landscape"] = self._measure(loop, update.client_id)

    def summarise(self, trainer: Trainer, loop: FederatedLoop, measured: Mapping[int, Measurements]) -> None:
        for client_id, values in measured.items():
            self._write(trainer, values["landscape"], f"client{client_id}")

    def round_end(self, trainer: Trainer, loop: FederatedLoop, measured: Mapping[int, Measurements]) -> None:
        """Measure the new global model."""
        if loop.global_weights.shared:
            with loop.evaluation.evaluated_entries():
                landscape = self._measure(loop, -1)
            first, second = landscape["eigenvalues"].tolist()
            add_to_row(loop, {"global/hessian/1": first, "global/hessian/2": second})
            self._write(trainer, landscape, "global")

    def _write(self, trainer: Trainer, arrays: Mapping[str, Tensor], model: str) -> None:
        if self.folder is not None:
            path = self.folder / f"landscape-{trainer.current_epoch:05d}-{model}"
            write_arrays(path.with_suffix(".npz"), arrays)
            save(plot_landscape(**arrays), path.with_suffix(".png"))

    # --- of one model --------------------------------------------------------------------------------------------

    def _measure(self, loop: FederatedLoop, client_id: int) -> dict[str, Tensor]:
        inspection = loop.evaluation.inspection
        batches = inspection.over(inspection.batches(self._split, self.samples), lambda batch: batch)
        params = {name: value.detach() for name, value in inspection.client.trained().items()}
        with inspection.look():
            around = Surroundings(inspection, params, batches)
            generator = keyed_generator(loop.parts.seed, "landscape", loop.trainer.current_epoch, client_id)
            draw = partial(torch.randn, around.size, generator=generator, dtype=torch.float64)  # of ε ~ N(0, I)
            noise = [[around.at(draw(), sigma) for _ in range(self.repeats)] for sigma in self.sigmas]
            values, vectors = leading_eigenvectors(around.hessian, around.size, 2, self.iterations, generator=generator)
            line = torch.linspace(-self.reach, self.reach, self.grid, dtype=torch.float64)
            plane = [[around.at(a * vectors[0] + b * vectors[1])[0] for b in line] for a in line]
        sigmas, draws, losses = (torch.tensor(table, dtype=torch.float64) for table in (self.sigmas, noise, plane))
        measured = {"sigmas": sigmas, "noise_loss": draws[..., 0], "noise_accuracy": draws[..., 1]}
        return measured | {"line": line, "plane": losses, "eigenvalues": values}


class Surroundings:
    """Computes the loss of a model at and around its weights, and writes nothing into the module.

    Args:
        inspection: has the module.
        params: the trainable parameters w.
        batches: pairs (x, y), where the module has them.
    """

    def __init__(self, inspection: Inspection, params: State, batches: Sequence[Any]) -> None:
        self._predict = as_function(inspection.client, "forward")
        self._params = params
        self._batches = batches
        self.size = sum(value.numel() for value in params.values())

    def loss(self, params: StateLike, batch: Any) -> Tensor:
        """Mean cross-entropy of a batch."""
        return F.cross_entropy(to_float32(self._predict(params, batch[0])), batch[1])

    def at(self, direction: Tensor, scale: float = 1.0) -> tuple[float, float]:
        """Mean loss and accuracy at w + scale · direction, (D,)."""
        params = add(self._params, self._named(scale * direction))
        total = 0.0
        hits = 0.0
        count = 0
        for x, y in self._batches:
            logits = to_float32(self._predict(params, x))
            total += float(F.cross_entropy(logits, y, reduction="sum"))
            hits += float((logits.argmax(1) == y).sum())
            count += len(y)
        return total / count, hits / count

    def hessian(self, vector: Tensor) -> Tensor:
        """Product of the loss's Hessian at w with a vector, both (D,) float64 on the CPU."""
        batches = ((batch, len(batch[1])) for batch in self._batches)
        product = hessian_product(self.loss, self._params, batches, self._named(vector))
        return torch.cat([value.flatten().double().cpu() for value in product.values()])

    def _named(self, vector: Tensor) -> State:
        """A vector (D,) by the parameters' names, in their shapes and types."""
        parts = torch.split(vector, [value.numel() for value in self._params.values()])
        return {n: part.view_as(value).to(value) for (n, value), part in zip(self._params.items(), parts, strict=True)}
