"""Experiment callback: takes samples of one class from one client in the course of a run."""

from collections.abc import Sequence

from pytorch_lightning import Callback, LightningModule, Trainer

from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.runs.plain_fit import warn_of_plain_fit
from fl_lightning.utils.settings import check_above, check_at_least


class SampleReduction(Callback):
    """Takes training samples of one class from one client, from a round on, step by step.

    Source: FedKA, Fig. 3: a dominant class loses 1 % of the client's samples every 10 rounds, until its share is about
    1 %; a non-dominant one is cut to 10, 5 and 0 samples (`counts`). The number left is logged as `data/class_count`;
    `ForgettingMonitor` shows what the client forgets. What was taken is part of every checkpoint.

    Args:
        class_idx: class c.
        client: client i.
        start: 0-based round before which the first samples are taken.
        every: rounds between two steps.
        step: samples taken in each step, as a share of all that the client was dealt.
        until: share of these that stays of the class at least.
        counts: samples of the class that stay after each step, in place of `step` and `until`.
    """

    def __init__(
        self,
        class_idx: int,
        client: int = 0,
        start: int = 50,
        every: int = 10,
        step: float = 0.01,
        until: float = 0.01,
        counts: Sequence[int] | None = None,
    ) -> None:
        check_at_least(0, start=start, until=until)
        check_at_least(1, every=every)
        check_above(0, step=step)
        self.class_idx = class_idx
        self.client = client
        self.start = start
        self.every = every
        self.step = step
        self.until = until
        self.counts = counts

    def count_at(self, round_idx: int, dealt: int, of_class: int) -> int:
        """Samples of the class that the client has in a round.

        Args:
            round_idx: from 0.
            dealt: samples that the client was dealt.
            of_class: of them, those of the class.

        >>> study = SampleReduction(class_idx=3)
        >>> [study.count_at(round_idx, 5000, 1000) for round_idx in (49, 50, 60, 230, 500)]
        [1000, 950, 900, 50, 50]
        """
        steps = max(0, (round_idx - self.start) // self.every + 1)
        if self.counts is not None:
            return min(of_class, self.counts[min(steps, len(self.counts)) - 1]) if steps and self.counts else of_class
        return min(of_class, max(of_class - round(steps * self.step * dealt), round(self.until * dealt)))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a client or class that does not exist, and begin from all samples."""
        if isinstance(pl_module, FederatedLoop):
            pl_module.data.set_class_count(self.client, self.class_idx, None)
        else:
            warn_of_plain_fit(self, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(pl_module, FederatedLoop):
            return
        data = pl_module.data
        dealt = data.client_samples().dealt[self.client]
        of_class = int(data.count_labels([dealt])[0, self.class_idx])
        data.set_class_count(self.client, self.class_idx, self.count_at(trainer.current_epoch, len(dealt), of_class))

    def on_exchange_end(self, trainer: Trainer, loop: FederatedLoop, exchange: str) -> None:
        """Log how many samples of the class the client has in this round."""
        if trainer.is_global_zero and exchange == loop.client.exchanges[-1]:
            loop.log("data/class_count", float(loop.data.label_counts[self.client, self.class_idx]))
