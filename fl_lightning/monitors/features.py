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
    """Keeps the features of the same test samples in the received, the clients' trained and the new global model.

    A client's trained model is the weights as they were trained, even if the client would deploy others.

    `features-ROUND.npz` has the `features` (M, n, d), the `models` (M,) by name and the `targets` (n,). One of two
    pictures shows them:

    - `tsne-ROUND.png` embeds the features of all models together by t-SNE, colored by class and by model.
    - `circle-ROUND.png` replaces it for features of two dimensions (`FedNTDHypersphere`). It shows their density in the
      plane and the density of their angle, by class.

    Source: Lee et al. 2022, arXiv:2106.03097, Apps. N and O, Figs. 18-21.

    Args:
        layer: Name of a module within the client whose outputs are the features. None is the features that the net's
            head reads.
        split: Name of the split whose samples the nets get. None is `test`, or `val` without test samples.
        samples: Number of samples of the split, drawn once for the run. None is all.
        every: Number of rounds from one measured round to the next.
        clients: Ids of the clients that are measured. None is the whole cohort.
        dirpath: Folder of the files. None is the folder of the Trainer's first logger, and no folder without a logger.
        plot: Whether the pictures are drawn. t-SNE takes seconds.
    """

    instead = "take DriftMonitor, which compares weights"

    def __init__(
        self,
        layer: str | None = None,
        split: str | None = None,
        samples: int | None = 200,
        *,
        every: int = 10,
        clients: Sequence[int] | None = None,
        dirpath: str | Path | None = None,
        plot: bool = True,
    ) -> None:
        super().__init__(every=every, clients=clients, dirpath=dirpath)
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
        # One client of each process tells what was received.
        if self.under_way:
            return {}
        return {"received": self._features(loop, loop.evaluation.inspection.received)}

    def end(self, loop: FederatedLoop, update: ClientUpdate, measured: Measurements) -> None:
        measured["trained"] = self._features(loop, ended(loop, update.client_id))

    def round_end(self, trainer: Trainer, loop: FederatedLoop, measured: Mapping[int, Measurements]) -> None:
        """Add the new global model, and write the round's files."""
        if not measured or self.folder is None:
            return
        round_idx = trainer.current_epoch
        by_model = self._features_by_model(loop, round_idx, measured)
        inspection = loop.evaluation.inspection
        labels = inspection.data.split(self._split).labels
        shapes = {features.shape for features in by_model.values()}
        # Models with features of different shapes have no common picture.
        if labels is None or len(shapes) != 1:
            return
        target = labels[inspection.subset(self._split, self.samples)]
        features = torch.stack(list(by_model.values()))
        models = list(by_model)
        arrays = {"features": features, "models": models, "targets": target}
        write_arrays(self.folder / f"features-{round_idx:05d}.npz", arrays)
        if not self.plot:
            return
        class_names = inspection.class_names
        if features.shape[2] == 2:
            figure = plot_circles(features=features, target=target, models=models, class_names=class_names)
            path = self.folder / f"circle-{round_idx:05d}.png"
        else:
            seed = keyed_seed(loop.parts.seed, "t-SNE") % 2**32
            points = joint_embedding(features, seed)
            figure = plot_embedding(points=points, target=target, models=models, class_names=class_names)
            path = self.folder / f"tsne-{round_idx:05d}.png"
        save(figure, path)

    def _features_by_model(
        self,
        loop: FederatedLoop,
        round_idx: int,
        measured: Mapping[int, Measurements],
    ) -> dict[str, Tensor]:
        """Return the features (n, d) by the name of the model: the received, the clients' and the new global model."""
        models: dict[str, Tensor] = {}
        has_global_model = bool(loop.global_weights.shared)
        received = [values["received"] for values in measured.values() if "received" in values]
        if received and has_global_model:
            models["received"] = received[0]
        for client_id, values in measured.items():
            models[f"client {client_id}"] = values["trained"]
        if has_global_model:
            with loop.evaluation.evaluated_entries():
                models["aggregate"] = self._features(loop, ("aggregate", round_idx))
        return models

    def _features(self, loop: FederatedLoop, moment: tuple[object, ...]) -> Tensor:
        """Return the features of the model that the module holds, (n, d) on the CPU."""
        outputs, _ = loop.evaluation.inspection.outputs(
            moment,
            layer=self.layer,
            split=self._split,
            samples=self.samples,
        )
        return outputs
