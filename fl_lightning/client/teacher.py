"""Teachers: frozen copies of a net, from which a client distils."""

import copy
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Literal, cast

import torch
from torch import Tensor, nn

from fl_lightning.client.modes import BATCH_NORMS, mixes_samples
from fl_lightning.nets import Backbone
from fl_lightning.types import ForwardContext
from fl_lightning.utils.devices import to_device


class LogitCache:
    """A teacher's logits of one client's samples, where these come back unchanged in every epoch.

    Args:
        size: samples n of the split.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._x: Tensor | None = None
        self._positions = torch.empty(0, dtype=torch.int64)
        self._complete = False
        self._kept: dict[str, Tensor] = {}
        self._stopped: set[str] = set()

    def stop(self, name: str) -> None:
        """Keep nothing of the teacher `name`, which has other weights now."""
        self._stopped.add(name)

    def begin_batch(self, x: Tensor, positions: Tensor) -> None:
        """Record the batch in training: inputs (B, ...), and its samples' positions in the split, (B,) int64."""
        self._x = x
        self._positions = positions

    def finish_epoch(self) -> None:
        """Record that every sample has been seen."""
        self._complete = True

    def holds(self, x: Tensor) -> bool:
        """Return True for the inputs of the batch in training."""
        return self._x is x

    def logits(self, name: str, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Give a teacher's logits of the batch in training: kept ones from the second epoch on, else `compute(x)`."""
        if name in self._stopped:
            return compute(x)
        positions = to_device(self._positions, x.device)
        kept = self._kept.get(name)
        if self._complete and kept is not None:
            return kept.index_select(0, positions)
        logits = compute(x)
        if kept is None:
            kept = self._kept[name] = logits.new_empty(self.size, *logits.shape[1:])
        return kept.index_copy_(0, positions, logits).index_select(0, positions)


class Teacher:
    """A frozen copy of a net: called for its outputs, without gradient, in no state dict.

    Its logits of a client's samples are computed in the first local epoch and looked up in the others, where samples
    are not augmented and none depends on others of its batch.

    Args:
        name: of the teacher.
        net: the net that is copied.
    """

    def __init__(self, name: str, net: nn.Module) -> None:
        self.name = name
        self.net = copy.deepcopy(net).requires_grad_(False)
        self.token: object = None
        self.mode = "eval"
        self.forward_context: ForwardContext = nullcontext
        self.cache: LogitCache | None = None
        self.batch_statistics = False
        self._targets = self.net.state_dict(keep_vars=True)
        self._norms = [module for module in self.net.eval().modules() if isinstance(module, BATCH_NORMS)]
        self._mixes = mixes_samples(self.net)

    def holds(self, token: object, mode: str) -> bool:
        """Return True where these are the weights and the mode that were loaded last."""
        return token is not None and self.token is token and self.mode == mode

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor], token: object, mode: Literal["eval", "train"]) -> None:
        """Copy the weights in `state`.

        `token` identifies them.

        Mode "train" uses batch statistics and leaves the running ones alone. Nothing else of the net trains: there is
        no dropout. A batch of one sample has no statistics and takes the running ones, as it does in the student.
        """
        for name, target in self._targets.items():
            target.copy_(state[name])
        self.token = token
        self.mode = mode
        self.batch_statistics = mode == "train" and bool(self._norms)
        for module in self._norms:
            module.momentum = 0.0

    def use(self, forward_context: ForwardContext, cache: LogitCache | None) -> None:
        """Set the context of the forward pass, and the cache of logits (None: none)."""
        self.forward_context = forward_context
        self.cache = cache

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        cache = self.cache
        if cache is None or not cache.holds(x) or self.batch_statistics or self._mixes:
            return self._logits(x)
        return cache.logits(self.name, x, self._logits)

    def _logits(self, x: Tensor) -> Tensor:
        self._set_modes(x)
        with self.forward_context():
            return cast(Tensor, self.net(x))

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        """Features of a batch, as `Backbone.features`."""
        self._set_modes(x)
        with self.forward_context():
            return cast(Backbone, self.net).features(x)

    def _set_modes(self, x: Tensor) -> None:
        training = self.batch_statistics and len(x) > 1
        for module in self._norms:
            module.train(training)
