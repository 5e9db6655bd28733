"""Monitor of the classes that a layer's neurons prefer."""

from collections.abc import Mapping, Sequence
from pathlib import Path

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
    r"""Class preference argmax_c h_c of a layer's neurons in the received, the trained and the new global model.

    h_c is the mean output over the samples of class c; the trained model is the client's weights as they were trained,
    whatever it would deploy. Logged: `local/weight_alignment`, the share of neurons that
    prefer the same class in the received and a client's trained model (mean over clients, and `/std`);
    `global/weight_alignment`, the same for the received and the new global model; `local/dead_neurons`, the share of
    neurons of the trained models that no sample activates: they agree in any two models. `neurons-ROUND.npz` has the
    preferences: `received` (n,), `trained` (K, n) of `clients` (K,), and `aggregate` (n,).

    Source: Lee et al. 2022, arXiv:2106.03097, Eq. 19, Table 2 and Fig. 17.

    Args:
        layer: name of a module within the client whose outputs are taken after their ReLU, such as `net.body.1`; None:
            the features that the net's head reads.
        split: whose samples are passed through the net; None: `test`, else `val`.
        samples: so many of them, drawn once for the run; None: all.
        every: measure every so many rounds.
        clients: measure these only; None: the whole cohort.
        dirpath: folder of the files; None: that of the Trainer's first logger (no logger: none).
        name: ends the log keys (`local/weight_alignment/NAME`) and stands in the files' names, so that several layers
            can be measured in one run; empty: left out.
    """

    def __init__(
        self,
        layer: str | None = None,
        split: str | None = None,
        samples: int | None = None,
        every: int = 1,
        clients: Sequence[int] | None = None,
        dirpath: str | Path | None = None,
        name: str = "",
    ) -> None:
        super().__init__(every, clients, dirpath)
        check_at_least(1, "None measures on all", samples=samples)
        self.layer = layer
        self.split = split
        self._split = ""
        self.samples = samples
        self.ending, self.stem = (f"/{name}", f"neurons-{name}") if name else ("", "neurons")

    def begin(self, trainer: Trainer, loop: FederatedLoop) -> None:
        self.check_classes(loop).check_layer(self.layer, type(self).__name__)
        self._split = loop.data.measured_split(self.split)

    def start(self, loop: FederatedLoop, client_id: int) -> Measurements:
        inspection = loop.evaluation.inspection
        return {"received": self._preferences(inspection, inspection.received)[0]}

    def end(self, loop: FederatedLoop, update: ClientUpdate, measured: Measurements) -> None:
        measured["trained"], dead = self._preferences(loop.evaluation.inspection, ended(loop, update.client_id))
        measured["dead"] = float(dead.double().mean())
        measured["alignment"] = float(weight_alignment(measured["received"], measured["trained"]))

    def summarise(self, trainer: Trainer, loop: FederatedLoop, measured: Mapping[int, Measurements]) -> None:
        log_means(loop, {f"local/weight_alignment{self.ending}": [values["alignment"] for values in measured.values()]})
        dead = [values["dead"] for values in measured.values()]
        log_means(loop, {f"local/dead_neurons{self.ending}": dead}, deviations=False)

    def round_end(self, trainer: Trainer, loop: FederatedLoop, measured: Mapping[int, Measurements]) -> None:
        """Compare with the new global model, and write the round's file."""
        if not measured:
            return
        arrays = {"clients": torch.tensor(list(measured)), "received": next(iter(measured.values()))["received"]}
        trained = [values["trained"] for values in measured.values()]
        if len({preferences.shape for preferences in trained}) == 1:
            arrays["trained"] = torch.stack(trained)
        if loop.global_weights.shared:
            moment = ("aggregate", trainer.current_epoch)
            with loop.evaluation.evaluated_entries():
                arrays["aggregate"] = self._preferences(loop.evaluation.inspection, moment)[0]
            alignment = float(weight_alignment(arrays["received"], arrays["aggregate"]))
            add_to_row(loop, {f"global/weight_alignment{self.ending}": alignment})
        if self.folder is not None:
            write_arrays(self.folder / f"{self.stem}-{trainer.current_epoch:05d}.npz", arrays)

    def _preferences(self, inspection: Inspection, moment: Moment) -> tuple[Tensor, Tensor]:
        """Preferred class of each neuron, (n,) int64, and whether it is dead, (n,) bool, on the CPU."""
        classes = inspection.data.num_classes or 0

        def compute() -> tuple[Tensor, Tensor]:
            parts = inspection.over(
                inspection.batches(self._split, self.samples),
                lambda batch: activation_sums(inspection.layer(batch[0], self.layer), batch[1], classes),
            )
            sums, samples = (torch.stack(column).sum(0) for column in zip(*parts, strict=True))
            return preferred_by_sums(sums, samples).cpu(), dead_neurons(sums).cpu()

        return inspection.once(moment, ("neurons", self.layer, self._split, self.samples), compute)
