"""Rules that compare the clients with each other."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor

from fl_lightning.aggregation.server_parts import Aggregator
from fl_lightning.types import ClientUpdate, State


class GatheringAggregator(Aggregator, ABC):
    """A rule that compares the clients with each other (median, Krum): it sees every update at once.

    The updates are gathered on the root process only, and what it returns goes to the others.
    """

    @abstractmethod
    def reduce(self, updates: Mapping[int, ClientUpdate]) -> Mapping[str, Tensor]:
        """Make the new trainable shared entries, by name.

        Args:
            updates: of the clients with samples, by client id, ascending; at least one.
        """

    def add(self, update: ClientUpdate) -> None:
        """Keep the update, and take the weighted mean of the entries that are not trained."""
        if update.weights is None:
            return
        trainable = set(self.server.trainable)
        rest = {name: value for name, value in update.weights.items() if name not in trainable}
        self.sum("weights", rest, self.weight(update))
        self.gather(update)

    def finish(self) -> State | None:
        mean = super().finish()
        counted = {} if mean is None else self.rows_with("num_samples")
        if mean is None or not counted:
            return None
        new = {**mean, **self.reduce(counted)}
        if missing := [name for name in self.server.trainable if name not in new]:
            raise ValueError(
                f"{type(self).__name__}.reduce must return every trainable shared entry, but {missing[0]!r} is "
                f"missing; return it as it is where the rule does not touch it"
            )
        return {name: new[name].to(value.dtype) for name, value in self.server.weights.items() if name in new}
