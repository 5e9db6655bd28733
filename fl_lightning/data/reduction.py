"""The clients' training samples as they were dealt, and as each client has them now."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fl_lightning.data.clients import ClientIndices, ClientView, FederatedData
from fl_lightning.data.splits import Split
from fl_lightning.functional.classes import label_counts
from fl_lightning.utils.keyed import keyed_generator

ClassCounts = dict[int, dict[int, int]]
"""Samples that are left, by client and class; a class that is not named has all."""


def reduced(part: Tensor, labels: Tensor, counts: Mapping[int, int], seed: int, client_id: int) -> Tensor:
    """Keep so many of a client's samples of some classes.

    Fewer samples are a part of more: what is kept does not depend on earlier counts.

    Args:
        part: the client's samples as they were dealt, (n,) int64 into the split.
        labels: of the split, (N,) int64.
        counts: samples to be kept, by class.
        seed: of the draw.
        client_id: 0 ... N-1.

    Returns:
        (n',) int64, in the order of `part`.

    >>> labels = torch.tensor([0, 1, 1, 1, 0])
    >>> few, none = (reduced(torch.arange(5), labels, {1: n}, 0, 0) for n in (2, 0))
    >>> len(few), none
    (4, tensor([0, 4]))
    """
    keeps = torch.ones(len(part), dtype=torch.bool)
    for class_idx, count in counts.items():
        rows = (labels[part] == class_idx).nonzero().flatten()
        order = torch.randperm(len(rows), generator=keyed_generator(seed, f"class_count/{class_idx}", -1, client_id))
        keeps[rows[order[count:]]] = False
    return part[keeps]


class ClientSamples:
    """Training samples of every client, some of which may be held back.

    Args:
        train: the training split, whose labels are read where samples are held back.
        dealt: of each client, int64 indices into the split.
        data: the data module.
        seed: of the draws.
    """

    def __init__(self, train: Split, dealt: ClientIndices, data: FederatedData, seed: int) -> None:
        self.dealt, self._train, self._data, self._seed = dealt, train, data, seed
        self._counts: ClassCounts = {}
        self._reduced: dict[int, Tensor] = {}

    def view(self, client_id: int, round_idx: int) -> ClientView:
        """Make the view of one client's data in one round."""
        return ClientView(self._data, self._train, {"train": self.indices(client_id)}, client_id, round_idx)

    def indices(self, client_id: int) -> Tensor:
        """Get the samples that a client has now, (n,) int64."""
        return self._reduced[client_id] if client_id in self._reduced else self.dealt[client_id]

    def size(self, client_id: int) -> int:
        """Count the samples that a client has now."""
        return len(self.indices(client_id))

    def set_count(self, client_id: int, class_idx: int, count: int | None) -> None:
        """Let a client have `count` samples of a class, or with None all.

        Raises:
            ValueError: no such client or class, or a count outside [0, the samples dealt].
        """
        labels, num_classes = self._train.labels, self._data.num_classes
        if labels is None or num_classes is None:
            raise ValueError("set_class_count needs samples with integer labels, and these have none")
        for name, value, most in ("client_id", client_id, len(self.dealt)), ("class_idx", class_idx, num_classes):
            if not 0 <= value < most:
                raise ValueError(f"{name} must lie in [0, {most}), got {value}")
        dealt = int(label_counts(labels, [self.dealt[client_id]], num_classes)[0, class_idx])
        if count is not None and not 0 <= count <= dealt:
            raise ValueError(
                f"client {client_id} was dealt {dealt} samples of class {class_idx}: count must lie in [0, {dealt}], "
                f"got {count}; None gives it all of them back"
            )
        counts = self._counts.setdefault(client_id, {})
        counts.pop(class_idx, None)
        if count is not None:
            counts[class_idx] = count
        self._hold_back(client_id)

    def _hold_back(self, client_id: int) -> None:
        part, counts = self.dealt[client_id], self._counts.get(client_id)
        if counts and (labels := self._train.labels) is not None:
            part = reduced(part, labels, counts, self._seed, client_id)
        self._reduced[client_id] = part

    def state_dict(self) -> dict[str, Any]:
        return {"class_counts": {client_id: dict(counts) for client_id, counts in self._counts.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        before, self._counts = self._counts, {client: dict(counts) for client, counts in state["class_counts"].items()}
        for client_id in before.keys() | self._counts.keys():
            self._hold_back(client_id)
