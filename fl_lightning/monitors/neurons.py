"""Monitor of the classes that a layer's neurons prefer."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Trainer
from torch import Tensor

from fl_lightning.engines.inspection import Inspection, Moment
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.functional.drift import activation_sums, dead_neurons, preferred_by_sums, weight_alignment
from fl_lightning.monitors.monitor import Measurements, Monitor, add_to_row, ended, log_means, write_arrays
from fl_lightning.types import ClientUpdate
from fl_lightning.utils.settings import check_at_least


class NeuronActivations(Monitor):
    r"""Measures which class each neuron of a layer prefers in the received, the trained and the new global model.

    A neuron prefers the class argmax_c h_c, where h_c is its mean output over the samples of class c. A client's
    trained model is the weights as they were trained, even if the client would deploy others. The monitor logs:

    - `local/weight_alignment`: the share of neurons that prefer the same class in the received and in a client's
      trained model (mean over clients, and `/std`).
    - `global/weight_alignment`: the same share for the received and the new global model.
    - `local/dead_neurons`: the share of neurons of the trained models that no sample activates. Dead neurons agree in
      any two models.

    `neurons-ROUND.npz` has the preferences: `received` (n,), `trained` (K, n) of `clients` (K,), and `aggregate` (n,).

    Source: Lee et al. 2022, arXiv:2106.03097, Eq. 19, Table 2 and Fig. 17.

    Args:
        layer: Name of a module within the client whose outputs are taken after their ReLU, such as `net.body.1`. None
            is the features that the net's head reads.
        split: Name of the split whose samples the nets get. None is `test`, or `val` without test samples.
        samples: Number of samples of the split, drawn once for the run. None is all.
        every: Number of rounds from one measured round to the next.
        clients: Ids of the clients that are measured. None is the whole cohort.
        dirpath: Folder of the files. None is the folder of the Trainer's first logger, and no folder without a logger.
        name: Name at the end of the log keys (`local/weight_alignment/NAME`) and in the names of the files, for several
            such monitors in one run. An empty name is left out.
    """

    instead = "take DriftMonitor, which compares weights"

    def __init__(
        self,
        layer: str | None = None,
        split: str | None = None,
        samples: int | None = None,
        *,
        every: int = 1,
        clients: Sequence[int] | None = None,
        dirpath: str | Path | None = None,
        name: str = "",
    ) -> None:
        super().__init__(every=every, clients=clients, dirpath=dirpath)
        check_at_least(1, "None measures on all", samples=samples)
        self.layer = layer
        self.split = split
        self._split = ""
        self.samples = samples
        self.ending = f"/{name}" if name else ""
        self.stem = f"neurons-{name}" if name else "neurons"

    def begin(self, trainer: Trainer, loop: FederatedLoop) -> None:
        self.check_classes(loop).check_layer(self.layer, type(self).__name__)
        self._split = loop.data.measured_split(self.split)

    def start(self, loop: FederatedLoop, client_id: int) -> Measurements:
        inspection = loop.evaluation.inspection
        received, _ = self._preferences(inspection, inspection.received)
        return {"received": received}

    def end(self, loop: FederatedLoop, update: ClientUpdate, measured: Measurements) -> None:
        trained, dead = self._preferences(loop.evaluation.inspection, ended(loop, update.client_id))
        measured["trained"] = trained
        measured["dead"] = float(dead.double().mean())
        measured["alignment"] = float(weight_alignment(measured["received"], trained))

    def summarise(self, trainer: Trainer, loop: FederatedLoop, measured: Mapping[int, Measurements]) -> None:
        alignments = [values["alignment"] for values in measured.values()]
        log_means(loop, {f"local/weight_alignment{self.ending}": alignments})
        dead = [values["dead"] for values in measured.values()]
        log_means(loop, {f"local/dead_neurons{self.ending}": dead}, deviations=False)

    def round_end(self, trainer: Trainer, loop: FederatedLoop, measured: Mapping[int, Measurements]) -> None:
        """Compare with the new global model, and write the round's file."""
        if not measured:
            return
        first = next(iter(measured.values()))
        arrays = {"clients": torch.tensor(list(measured)), "received": first["received"]}
        trained = [values["trained"] for values in measured.values()]
        shapes = {preferences.shape for preferences in trained}
        if len(shapes) == 1:
            arrays["trained"] = torch.stack(trained)
        if loop.global_weights.shared:
            moment = ("aggregate", trainer.current_epoch)
            with loop.evaluation.evaluated_entries():
                arrays["aggregate"], _ = self._preferences(loop.evaluation.inspection, moment)
            alignment = float(weight_alignment(arrays["received"], arrays["aggregate"]))
            add_to_row(loop, {f"global/weight_alignment{self.ending}": alignment})
        if self.folder is not None:
            write_arrays(self.folder / f"{self.stem}-{trainer.current_epoch:05d}.npz", arrays)

    def _preferences(self, inspection: Inspection, moment: Moment) -> tuple[Tensor, Tensor]:
        """Return the preferred class of each neuron, (n,) int64, and whether it is dead, (n,) bool, on the CPU."""
        classes = inspection.data.num_classes or 0

        def sums_of(batch: Any) -> tuple[Tensor, Tensor]:
            activations = inspection.layer(batch[0], self.layer)
            return activation_sums(activations, target=batch[1], num_classes=classes)

        def compute() -> tuple[Tensor, Tensor]:
            parts = inspection.over_split(self._split, self.samples, sums_of)
            sums = torch.stack([sums_of_batch for sums_of_batch, _ in parts]).sum(0)
            samples = torch.stack([samples_of_batch for _, samples_of_batch in parts]).sum(0)
            return preferred_by_sums(sums, samples).cpu(), dead_neurons(sums).cpu()

        what = ("neurons", self.layer, self._split, self.samples)
        return inspection.once(moment, what, compute)
