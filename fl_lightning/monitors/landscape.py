"""Monitor of the loss around the weights of the global and the clients' models."""

from collections.abc import Mapping, Sequence
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
    r"""Measures the loss under Gaussian noise on the weights, and on the plane of the Hessian's leading eigenvectors.

    The monitor measures the new global model, and the weights of the named `clients` as they were trained. The loss is
    the mean cross-entropy in eval mode. `landscape-ROUND-MODEL.npz` has these arrays, and the picture of the same name
    shows them:

    - `sigmas` (S,), `noise_loss` and `noise_accuracy` (S, R): loss and accuracy at w + σε, ε ~ N(0, I).
    - `line` (G,) and `plane` (G, G): the loss at w + a·v₁ + b·v₂.
    - `eigenvalues` (2,): the eigenvalues of v₁ and v₂. Those of the global model are logged as `global/hessian/1` and
      `/2`.

    Source: Lee et al. 2022, arXiv:2106.03097, App. J and Fig. 14.

    Args:
        split: Name of the split of the loss. None is `test`, or `val` without test samples.
        samples: Number of samples of the split, drawn once for the run. None is all.
        sigmas: Standard deviations σ of the noise, ≥ 0.
        repeats: Number of draws of noise for each σ.
        reach: Largest step along an eigenvector, > 0.
        grid: Number of points along each eigenvector. An odd number makes w one of them.
        iterations: Largest number of restarts of the search for the eigenvectors, each of up to 20 Hessian products.
        every: Number of rounds from one measured round to the next.
        clients: Ids of the clients whose models are measured besides the global model.
        dirpath: Folder of the files. None is the folder of the Trainer's first logger, and no folder without a logger.
    """

    instead = "take DriftMonitor, which compares weights"

    def __init__(
        self,
        split: str | None = None,
        samples: int | None = 500,
        *,
        sigmas: Sequence[float] = (0.0, 0.01, 0.02, 0.05, 0.1),
        repeats: int = 5,
        reach: float = 1.0,
        grid: int = 11,
        iterations: int = 30,
        every: int = 10,
        clients: Sequence[int] = (),
        dirpath: str | Path | None = None,
    ) -> None:
        super().__init__(every=every, clients=clients, dirpath=dirpath)
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
            self._write(trainer, arrays=values["landscape"], model=f"client{client_id}")

    def round_end(self, trainer: Trainer, loop: FederatedLoop, measured: Mapping[int, Measurements]) -> None:
        """Measure the new global model."""
        if not loop.global_weights.shared:
            return
        with loop.evaluation.evaluated_entries():
            landscape = self._measure(loop, client_id=-1)
        first, second = landscape["eigenvalues"].tolist()
        add_to_row(loop, {"global/hessian/1": first, "global/hessian/2": second})
        self._write(trainer, arrays=landscape, model="global")

    def _write(self, trainer: Trainer, arrays: Mapping[str, Tensor], model: str) -> None:
        """Write the arrays of a model and their picture."""
        if self.folder is not None:
            path = self.folder / f"landscape-{trainer.current_epoch:05d}-{model}"
            write_arrays(path.with_suffix(".npz"), arrays)
            save(plot_landscape(**arrays), path.with_suffix(".png"))

    # --- of one model --------------------------------------------------------------------------------------------

    def _measure(self, loop: FederatedLoop, client_id: int) -> dict[str, Tensor]:
        """Measure the model that the module holds, and return the arrays of its file.

        Args:
            loop: The federation.
            client_id: Id of the client whose model it is. −1 is the global model.
        """
        inspection = loop.evaluation.inspection
        batches = inspection.over_split(self._split, self.samples, lambda batch: batch)
        params = {name: value.detach() for name, value in inspection.client.trained().items()}
        generator = keyed_generator(
            seed=loop.parts.seed,
            purpose="landscape",
            round_idx=loop.trainer.current_epoch,
            client_id=client_id,
        )
        with inspection.look():
            around = Surroundings(inspection, params, batches)
            losses, accuracies = self._under_noise(around, generator)
            eigenvalues, vectors = leading_eigenvectors(
                around.hessian,
                around.size,
                count=2,
                iterations=self.iterations,
                generator=generator,
            )
            line = torch.linspace(-self.reach, self.reach, self.grid, dtype=torch.float64)
            plane = loss_on_plane(around, vectors, line)
        return {
            "sigmas": torch.tensor(self.sigmas, dtype=torch.float64),
            "noise_loss": losses,
            "noise_accuracy": accuracies,
            "line": line,
            "plane": plane,
            "eigenvalues": eigenvalues,
        }

    def _under_noise(self, around: "Surroundings", generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return loss and accuracy at w + σε for several draws of ε ~ N(0, I), both (S, R) float64."""
        table = []
        for sigma in self.sigmas:
            row = []
            for _ in range(self.repeats):
                noise = torch.randn(around.size, generator=generator, dtype=torch.float64)
                row.append(around.at(noise, sigma))
            table.append(row)
        draws = torch.tensor(table, dtype=torch.float64)
        return draws[..., 0], draws[..., 1]


class Surroundings:
    """Computes the loss of a model at and around its weights, and writes nothing into the module.

    Args:
        inspection: The inspection of the module.
        params: The trainable parameters w, with D numbers in all.
        batches: Pairs (x, y) on the device of the module.
    """

    def __init__(self, inspection: Inspection, params: State, batches: Sequence[Any]) -> None:
        self._predict = as_function(inspection.client, "forward")
        self._params = params
        self._batches = batches
        self.size = sum(value.numel() for value in params.values())

    def loss(self, params: StateLike, batch: Any) -> Tensor:
        """Return the mean cross-entropy of a batch."""
        logits = to_float32(self._predict(params, batch[0]))
        return F.cross_entropy(logits, batch[1])

    def at(self, direction: Tensor, scale: float = 1.0) -> tuple[float, float]:
        """Return the mean loss and the accuracy at w + scale · direction, where the direction is (D,)."""
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
        """Return the product of the loss's Hessian at w with a vector, both (D,) float64 on the CPU."""
        product = hessian_product(
            self.loss,
            self._params,
            batches=((batch, len(batch[1])) for batch in self._batches),
            vector=self._named(vector),
        )
        return torch.cat([value.flatten().double().cpu() for value in product.values()])

    def _named(self, vector: Tensor) -> State:
        """Return a vector (D,) by the parameters' names, in their shapes and types."""
        parts = torch.split(vector, [value.numel() for value in self._params.values()])
        named = {}
        for (name, value), part in zip(self._params.items(), parts, strict=True):
            named[name] = part.view_as(value).to(value)
        return named


def loss_on_plane(around: Surroundings, vectors: Tensor, line: Tensor) -> Tensor:
    """Return the loss at w + a·v₁ + b·v₂ for all steps a and b, (G, G) float64. A row is a step a.

    Args:
        around: The surroundings of the weights w.
        vectors: The directions v₁ and v₂, (2, D).
        line: Steps along either direction, (G,).
    """
    table = []
    for a in line:
        row = []
        for b in line:
            loss, _ = around.at(a * vectors[0] + b * vectors[1])
            row.append(loss)
        table.append(row)
    return torch.tensor(table, dtype=torch.float64)
