"""Which samples belong to which client, for any number of clients."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Parts(Sequence[Tensor]):
    """Index tensors, one for each client, as views of one tensor: apart they would take 1.2 kB each.

    Args:
        arrays: for each client int64 indices (n,).
        pool: where the indices point into this array, (m,) int64, its entries are meant; None: the indices are.

    Attributes:
        indices: of all clients, end to end.
        ends: where each client's indices end, (N,).

    >>> parts = Parts([np.array([2, 0]), np.array([], dtype=np.int64), np.array([1])])
    >>> parts[0], len(parts[1]), [len(part) for part in parts]
    (tensor([2, 0]), 0, [2, 0, 1])
    """

    def __init__(self, arrays: Sequence[np.ndarray[Any, Any]], pool: np.ndarray[Any, Any] | None = None) -> None:
        everything = np.concatenate(arrays).astype(np.int64, copy=False) if len(arrays) else np.arange(0)
        self.indices = torch.from_numpy(everything if pool is None else pool[everything])
        self.ends = torch.from_numpy(np.cumsum([len(array) for array in arrays], dtype=np.int64))
        self._replaced: dict[int, Tensor] = {}

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, client_id: Any) -> Any:
        if client_id in self._replaced:
            return self._replaced[client_id]
        if not 0 <= client_id < len(self.ends):
            raise IndexError(f"client_id must lie in [0, {len(self.ends)}), got {client_id}")
        start = int(self.ends[client_id - 1]) if client_id else 0
        return self.indices[start : int(self.ends[client_id])]

    def __copy__(self) -> "Parts":
        """The same parts, of which clients may be given others by `replace` without a change of these."""
        found = type(self)(())
        vars(found).update({**vars(self), "_replaced": dict(self._replaced)})
        return found

    def replace(self, client_id: int, part: Tensor) -> None:
        """Give a client other indices, (n',) int64."""
        self._replaced[client_id] = part
