"""Experiment callback: takes samples of one class from one client in the course of a run."""

from collections.abc import Sequence

from pytorch_lightning import Callback, LightningModule, Trainer

from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.runs.plain_fit import warn_of_plain_fit
from fl_lightning.utils.settings import check_above, check_at_least


class SampleReduction(Callback):
    """Takes training samples of one class from one client, from a round on, step by step.

    The callback logs the number of remaining samples of the class as `data/class_count`. `ForgettingMonitor` shows
    what the client forgets. Every checkpoint has the number of remaining samples.

    Source: FedKA, Fig. 3. A dominant class loses 1 % of the client's samples every 10 rounds, until its share is about
    1 %. A non-dominant class is cut to 10, 5 and 0 samples (`counts`).

    Args:
        class_idx: Index of the class, from 0.
        client: Id of the client, 0 … N−1.
        start: Round, from 0, before which the first samples are taken.
        every: Number of rounds between two steps, ≥ 1.
        step: Number of samples that a step takes, as a share (> 0) of all samples that the client was dealt.
        until: Least number of samples of the class that stay, as a share (≥ 0) of all samples that the client was
            dealt.
        counts: Number of samples of the class that stay after each step. It replaces `step` and `until`. None uses
            them.
    """

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
        """Return the number of samples of the class that the client has in a round.

        Args:
            round_idx: Number of the round, from 0.
            dealt: Number of samples that the client was dealt.
            of_class: Number of samples of the class among them.

        >>> study = SampleReduction(class_idx=3)
        >>> [study.count_at(round_idx, 5000, 1000) for round_idx in (49, 50, 60, 230, 500)]
        [1000, 950, 900, 50, 50]
        """
        steps = max(0, (round_idx - self.start) // self.every + 1)
        if self.counts is None:
            remaining = of_class - round(steps * self.step * dealt)
            least = round(self.until * dealt)
            return min(of_class, max(remaining, least))
        if steps == 0 or not self.counts:
            return of_class
        last_step = min(steps, len(self.counts))
        return min(of_class, self.counts[last_step - 1])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a client or class that does not exist, and begin from all samples.

        Raises:
            ValueError: The data have no classes, or there is no such client or class.
        """
        if isinstance(pl_module, FederatedLoop):
            if pl_module.data.num_classes is None:
                raise ValueError(
                    "SampleReduction needs data with classes, and these have none; set data.num_classes if the samples "
                    "have classes, else take data.partition, which deals a client fewer samples"
                )
            pl_module.data.set_class_count(self.client, self.class_idx, None)
        else:
            warn_of_plain_fit(self, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not isinstance(pl_module, FederatedLoop):
            return
        data = pl_module.data
        dealt = data.client_samples().dealt[self.client]
        of_class = int(data.count_labels([dealt])[0, self.class_idx])
        count = self.count_at(round_idx=trainer.current_epoch, dealt=len(dealt), of_class=of_class)
        data.set_class_count(self.client, self.class_idx, count)

    def on_exchange_end(self, trainer: Trainer, loop: FederatedLoop, exchange: str) -> None:
        """Log how many samples of the class the client has in this round."""
        if trainer.is_global_zero and exchange == loop.client.exchanges[-1]:
            loop.log("data/class_count", float(loop.data.label_counts[self.client, self.class_idx]))
