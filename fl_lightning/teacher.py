"""A frozen copy of the received net, from which a client distils."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from fl_lightning.nets import Backbone

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def mixes_samples(net: nn.Module) -> bool:
    """True where a sample's output depends on its batch in eval mode too: BatchNorm without running statistics."""
    return any(isinstance(module, BATCH_NORMS) and module.running_mean is None for module in net.modules())


@dataclass
class Repeats:
    """The batch in training, where its samples come back unchanged in every epoch: what is known of them is kept.

    Args:
        size: samples n of the split.
        x: the batch's inputs (B, ...).
        positions: where the batch's samples stand in the split, (B,) int64.
        complete: True once every sample has been seen.
        kept: by name values (n, ...) of the samples.
    """

    size: int
    x: Tensor | None = None
    positions: Tensor | None = None
    complete: bool = False
    kept: dict[str, Tensor] = field(default_factory=dict)


class Teacher:
    """A frozen copy of the received net: called for its outputs, without gradient, in no state dict.

    Its logits of a client's samples are computed in the first local epoch and looked up in the others, where samples
    are not augmented and none depends on others of its batch.

    Args:
        name: of the teacher.
        net: the net that is copied.
        forward_context: in which it is called (the Trainer's precision).
    """

    def __init__(self, name: str, net: nn.Module, forward_context: Callable[[], AbstractContextManager[Any]]) -> None:
        self.name, self.forward_context = name, forward_context
        self.net = copy.deepcopy(net).requires_grad_(False)
        self.key: tuple[Any, ...] | None = None
        self.repeats: Repeats | None = None
        self.targets = list(self.net.state_dict(keep_vars=True).values())
        self.norms = [module for module in self.net.eval().modules() if isinstance(module, BATCH_NORMS)]
        self.mixes = mixes_samples(self.net)
        self.batch_statistics = False

    @torch.no_grad()
    def load(self, source: nn.Module, key: tuple[Any, ...], mode: Literal["eval", "train"]) -> None:
        """Take the weights of `source`; mode "train" uses batch statistics and leaves the running ones alone.

        Nothing else of the net trains: there is no dropout. A batch of one sample has no statistics and takes the
        running ones, as it does in the student.
        """
        if self.key == key:
            return
        for target, value in zip(self.targets, source.state_dict(keep_vars=True).values(), strict=True):
            target.copy_(value)
        self.key = key
        self.batch_statistics = mode == "train" and bool(self.norms)
        for module in self.norms:
            module.momentum = 0.0

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Tensor:
        repeats = self.repeats
        if repeats is None or repeats.x is not x or repeats.positions is None or self.batch_statistics or self.mixes:
            return self._logits(x)
        positions = repeats.positions.to(x.device)
        kept = repeats.kept.get(self.name)
        if repeats.complete and kept is not None:
            return kept.index_select(0, positions)
        logits = self._logits(x)
        if kept is None:
            kept = repeats.kept[self.name] = logits.new_empty(repeats.size, *logits.shape[1:])
        return kept.index_copy_(0, positions, logits).index_select(0, positions)

    def _logits(self, x: Tensor) -> Tensor:
        self._set_modes(x)
        with self.forward_context():
            return cast(Tensor, self.net(x))

    @torch.no_grad()
    def features(self, x: Tensor) -> Tensor:
        self._set_modes(x)
        with self.forward_context():
            return cast(Backbone, self.net).features(x)

    def _set_modes(self, x: Tensor) -> None:
        training = self.batch_statistics and len(x) > 1
        for module in self.norms:
            if module.training != training:
                module.training = training
