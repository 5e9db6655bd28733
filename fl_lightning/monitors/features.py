"""Monitor of the features of the global and the clients' models."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from pytorch_lightning import Trainer
from torch import Tensor

from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.monitors.monitor import Measurements, Monitor, ended, write_arrays
from fl_lightning.monitors.probe_figures import joint_embedding, plot_circles, plot_embedding
from fl_lightning.reports.figures import save
from fl_lightning.types import ClientUpdate
from fl_lightning.utils.keyed import keyed_seed
from fl_lightning.utils.settings import check_at_least


class FeatureProbe(Monitor):
    """Features of the same test samples in the received, the clients' trained and the new global model.

    The trained one is the client's weights as they were trained, whatever it would deploy.

    `features-ROUND.npz` has the `features` (M, n, d), the `models` (M,) by name and the `targets` (n,). The picture is
    `tsne-ROUND.png`, all models embedded together by t-SNE, coloured by class and by model; or, where features have two
    dimensions (`FedNTDHypersphere`), `circle-ROUND.png`: their density in the plane and that of their angle, by class.

    Source: Lee et al. 2022, arXiv:2106.03097, Apps. N and O, Figs. 18-21.

    Args:
        layer: name of a module within the client; None: the features that the net's head reads.
        split: whose samples are passed through the nets; None: `test`, else `val`.
        samples: so many of them, drawn once for the run; None: all.
        every: measure every so many rounds.
        clients: measure these only; None: the whole cohort.
        dirpath: folder of the files; None: that of the Trainer's first logger (no logger: none).
        plot: draw the pictures; t-SNE takes seconds.
    """

    def __init__(
        self,
        layer: str | None = None,
        split: str | None = None,
        samples: int | None = 200,
        every: int = 10,
        clients: Sequence[int] | None = None,
        dirpath: str | Path | None = None,
        plot: bool = True,
    ) -> None:
        super().__init__(every, clients, dirpath)
        check_at_least(1, "None takes all", samples=samples)
        self.layer = layer
        self.split = split
        self._split = ""
        self.samples = samples
        self.plot = plot

    def begin(self, trainer: Trainer, loop: FederatedLoop) -> None:
        self.check_classes(loop).check_layer(self.layer, type(self).__name__)
        self._split = loop.data.measured_split(self.split)

    def start(self, loop: FederatedLoop, client_id: int) -> Measurements:
        if self.under_way:
            return {}  # one client of each process tells what was received
        return {"received": self._features(loop, loop.evaluation.inspection.received)}

    def end(self, loop: FederatedLoop, update: ClientUpdate, measured: Measurements) -> None:
        measured["trained"] = self._features(loop, ended(loop, update.client_id))

    def round_end(self, trainer: Trainer, loop: FederatedLoop, measured: Mapping[int, Measurements]) -> None:
        """Add the new global model, and write the round's files."""
        if not measured or self.folder is None:
            return
        models: dict[str, Tensor] = {}
        received = [values["received"] for values in measured.values() if "received" in values]
        if received and loop.global_weights.shared:
            models["received"] = received[0]
        models |= {f"client {client_id}": values["trained"] for client_id, values in measured.items()}
        if loop.global_weights.shared:
            with loop.evaluation.evaluated_entries():
                models["aggregate"] = self._features(loop, ("aggregate", trainer.current_epoch))
        inspection = loop.evaluation.inspection
        at = f"{trainer.current_epoch:05d}"
        labels = inspection.data.split(self._split).labels
        if labels is None or len({features.shape for features in models.values()}) != 1:
            return  # models with different features have no common picture
        target = labels[inspection.subset(self._split, self.samples)]
        features = torch.stack(list(models.values()))
        arrays = {"features": features, "models": list(models), "targets": target}
        write_arrays(self.folder / f"features-{at}.npz", arrays)
        if self.plot and features.shape[2] == 2:
            save(plot_circles(features, target, list(models), inspection.class_names), self.folder / f"circle-{at}.png")
        elif self.plot:
            points = joint_embedding(features, keyed_seed(loop.parts.seed, "t-SNE") % 2**32)
            save(plot_embedding(points, target, list(models), inspection.class_names), self.folder / f"tsne-{at}.png")

    def _features(self, loop: FederatedLoop, moment: tuple[object, ...]) -> Tensor:
        return loop.evaluation.inspection.outputs(moment, self.layer, self._split, self.samples)[0]
