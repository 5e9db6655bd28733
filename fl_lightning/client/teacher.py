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
from fl_lightning.utils.devices import copy_to_device


class LogitCache:
    """Holds teachers' logits of one client's samples, which come back unchanged in every epoch.

    Args:
        size: The number of samples n of the split.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._x: Tensor | None = None
        self._positions = torch.empty(0, dtype=torch.int64)
        self._complete = False
        self._stored: dict[str, Tensor] = {}
        """Logits (n, C) of the samples that were seen, by teacher."""
        self._stopped: set[str] = set()

    def stop(self, name: str) -> None:
        """Keep no logits of the teacher `name`, which has other weights from now on."""
        self._stopped.add(name)

    def begin_batch(self, x: Tensor, positions: Tensor) -> None:
        """Record the batch in training.

        Args:
            x: The inputs (B, ...).
            positions: The positions of the samples in the split, (B,) int64.
        """
        self._x = x
        self._positions = positions

    def finish_epoch(self) -> None:
        """Record that every sample has been seen."""
        self._complete = True

    def holds(self, x: Tensor) -> bool:
        """Return True if `x` is the tensor of inputs of the batch in training."""
        return self._x is x

    def logits(self, name: str, x: Tensor, compute: Callable[[Tensor], Tensor]) -> Tensor:
        """Return a teacher's logits (B, C) of the batch in training.

        In the first epoch they are computed and stored. In later epochs they are looked up.

        Args:
            name: The name of the teacher.
            x: The inputs of the batch, (B, ...).
            compute: A function that computes the logits of inputs.
        """
        if name in self._stopped:
            return compute(x)
        positions = copy_to_device(self._positions, x.device)
        stored = self._stored.get(name)
        if self._complete and stored is not None:
            return stored.index_select(0, positions)
        logits = compute(x)
        if stored is None:
            _, *shape = logits.shape
            stored = logits.new_empty((self.size, *shape))
            self._stored[name] = stored
        stored.index_copy_(0, positions, logits)
        return stored.index_select(0, positions)


class Teacher:
    """Computes the outputs of a frozen copy of a net, without gradient and in no state dict.

    Its logits of a client's samples are computed in the first local epoch and looked up in the others, if samples are
    not augmented and no output depends on other samples of the batch.

    Args:
        name: The name of the teacher.
        net: The net that is copied.

    Attributes:
        net: The copy.
        token: The object that identifies the weights that were loaded last. None: no client shares them.
        mode: The mode that was loaded last.
        batch_statistics: Whether BatchNorm uses the statistics of the batch.
    """

    def __init__(self, name: str, net: nn.Module) -> None:
        self.name = name
        self.net = copy.deepcopy(net).requires_grad_(requires_grad=False).eval()
        self.token: object = None
        self.mode = "eval"
        self.forward_context: ForwardContext = nullcontext
        self.cache: LogitCache | None = None
        self.batch_statistics = False
        self._targets = self.net.state_dict(keep_vars=True)
        self._norms = [module for module in self.net.modules() if isinstance(module, BATCH_NORMS)]
        self._mixes_samples = mixes_samples(self.net)

    def holds(self, token: object, mode: str) -> bool:
        """Return True if the teacher has these weights and this mode already.

        Args:
            token: The object that identifies the weights. None: the weights are unknown.
            mode: "eval" or "train".
        """
        return token is not None and self.token is token and self.mode == mode

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor], token: object, mode: Literal["eval", "train"]) -> None:
        """Copy weights into the net.

        Mode "train" uses batch statistics and leaves the running statistics as they are. The rest of the net stays in
        eval mode, so there is no dropout. A batch of one sample has no statistics and uses the running ones, as in the
        student.

        Args:
            state: The entries of the net by name.
            token: The object that identifies the weights. None: they are not used again.
            mode: The mode of BatchNorm.
        """
        for name, target in self._targets.items():
            target.copy_(state[name])
        self.token = token
        self.mode = mode
        self.batch_statistics = mode == "train" and bool(self._norms)
        for module in self._norms:
            module.momentum = 0.0

    def use(self, forward_context: ForwardContext, cache: LogitCache | None) -> None:
        """Set the context of the forward pass and the cache of logits.

        Args:
            forward_context: The context of the Trainer's precision.
            cache: The cache. None: logits are computed for every batch.
        """
        self.forward_context = forward_context
        self.cache = cache

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        """Return the logits (B, C) of a batch."""
        cache = self.cache
        if cache is None or not cache.holds(x) or self.batch_statistics or self._mixes_samples:
            return self._logits(x)
        return cache.logits(self.name, x, self._logits)

    def _logits(self, x: Tensor) -> Tensor:
        self._set_modes(x)
        with self.forward_context():
            return cast(Tensor, self.net(x))

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        """Return the features (B, D) of a batch, as `Backbone.features`."""
        self._set_modes(x)
        with self.forward_context():
            return cast(Backbone, self.net).features(x)

    def _set_modes(self, x: Tensor) -> None:
        """Let BatchNorm use the statistics of a batch of several samples, if the teacher does."""
        training = self.batch_statistics and len(x) > 1
        for module in self._norms:
            module.train(training)
