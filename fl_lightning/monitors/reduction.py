"""The number of samples of one class at one client, and the former callback that takes samples away."""

from collections.abc import Mapping, Sequence
from typing import Any

from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_warn

from fl_lightning.data import RemoveSamples
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.monitors.monitor import Measurements, Monitor, log_known


class ClassCount(Monitor):
    """Logs how many training samples of one class a client has in each round, as `data/class_count`.

    Args:
        class_idx: Index of the class, from 0.
        client: Id of the client, 0 … N−1.
    """

    instead = "take ClientTable, which has the number of samples of each client"

    def __init__(self, class_idx: int, client: int = 0) -> None:
        super().__init__(clients=[client])
        self.class_idx = class_idx
        self.client = client

    def begin(self, trainer: Trainer, loop: FederatedLoop) -> None:
        """Refuse a client or class that does not exist.

        Raises:
            ValueError: The data have no classes, or there is no such client or class.
        """
        num_classes = self.num_classes(loop)
        if not 0 <= self.client < loop.data.num_clients:
            raise ValueError(f"client must lie in [0, {loop.data.num_clients}), got {self.client}; choose one")
        if not 0 <= self.class_idx < num_classes:
            raise ValueError(f"class_idx must lie in [0, {num_classes}), got {self.class_idx}; choose one")

    def num_classes(self, loop: FederatedLoop) -> int:
        """Return the number of classes.

        Raises:
            ValueError: The data have no classes.
        """
        if loop.data.num_classes is None:
            raise ValueError(
                f"{type(self).__name__} needs data with classes, and these have none; set data.num_classes if the "
                f"samples have classes, else {self.instead}"
            )
        return loop.data.num_classes

    def summarise(self, trainer: Trainer, loop: FederatedLoop, measured: Mapping[int, Measurements]) -> None:
        counts = loop.data.view(self.client, loop.server.round_idx).label_counts
        log_known(loop, {"data/class_count": float(counts[self.class_idx])})


class SampleReduction(ClassCount):
    """Puts the scenario `RemoveSamples` into the data, and counts as `ClassCount` does. The next release lacks it.

    Source: FedKA, Fig. 3. The arguments are those of `fl_lightning.data.RemoveSamples`.

    Args:
        class_idx: Index of the class, from 0.
        client: Id of the client, 0 … N−1.
        start: Round, from 0, in which the first samples are gone.
        every: Number of rounds between two steps, ≥ 1.
        step: Number of samples that a step takes, as a share in (0, 1] of all samples that the client was dealt.
        until: Least number of samples of the class that stay, as a share in [0, 1] of all samples that the client was
            dealt.
        counts: Number of samples of the class that stay after each step, in place of `step` and `until`.
    """

    instead = "take data.partition, which deals a client fewer samples"

    def __init__(
        self,
        class_idx: int,
        client: int = 0,
        start: int = 50,
        *,
        every: int = 10,
        step: float = 0.01,
        until: float = 0.01,
        counts: Sequence[int] | None = None,
    ) -> None:
        super().__init__(class_idx=class_idx, client=client)
        arguments: dict[str, Any] = {"class_idx": class_idx, "client": client, "start": start, "every": every}
        if counts is None:
            arguments |= {"step": step, "until": until}
        else:
            arguments["counts"] = list(counts)
        self._arguments = arguments
        self.scenario = RemoveSamples(**arguments)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put the scenario into the data of a fit, and say what to type instead.

        Raises:
            ValueError: The data have no classes or a scenario of their own, or there is no such client or class.
        """
        if stage != "fit" or not isinstance(pl_module, FederatedLoop):
            return
        self.num_classes(pl_module)
        pl_module.data.take_scenario(self.scenario, setting=type(self).__name__)
        written = ", ".join(f"{name}: {value}" for name, value in self._arguments.items())
        rank_zero_warn(
            f"SampleReduction is the scenario RemoveSamples now, and the next release lacks the callback; set "
            f"data.scenario to {{class_path: fl_lightning.data.RemoveSamples, init_args: {{{written}}}}}, and take "
            f"ClassCount(class_idx={self.class_idx}, client={self.client}) if you need data/class_count",
            category=FutureWarning,
        )
