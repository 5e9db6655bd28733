"""Losses and gradients of a stack's step, and steps that are compiled."""

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor, nn
from torch.func import vmap
from torch.fx import GraphModule

from fl_lightning.client.module import ClientModule

LAYERS = ("torch.nn.modules.", "fl_lightning.nets.")
"""Modules of the classes whose outputs depend on nothing but their tensors and plain attributes."""

ENTRIES = (Tensor, nn.Module, type(None))
PARTS = ("local_loss", "forward")
UNKNOWN = object()
"""Stands for an attribute that may be anything."""

PLAIN = frozenset((bool, int, float, str, type(None)))


class Gradients(NamedTuple):
    """Gradients of the rows' losses, and what their step has made besides.

    Args:
        gradients: by trained tensor, each (k, ...); None: the losses do not depend on it.
        made: further tensors of the step, each (k, ...).
        said: what `says` gave after the step.
    """

    gradients: Sequence[Tensor | None]
    made: Sequence[Tensor]
    said: Any


class _Recording(NamedTuple):
    """Compiled operations of a step; `depends`: on which trained tensors its losses do; `said`: as of `Gradients`."""

    run: Callable[..., Sequence[Tensor]]
    depends: Sequence[bool]
    said: Any


class StackStep:
    """Differentiates a step of single rows for all rows of a stack at once.

    By `vmap`, whose cost in a small net is that of finding out what to compute.

    Args:
        compiles: whether the operations of a step that is known to depend on nothing but its tensors are recorded and
            compiled by `torch.compile`. Where that fails, a line says so, and nothing is compiled from then on.
    """

    def __init__(self, compiles: bool = False) -> None:
        self.compiles, self._told = compiles, False
        self._recorded: dict[Hashable, _Recording] = {}

    def __call__(
        self,
        step: Callable[..., tuple[Tensor, ...]],
        tensors: Sequence[Tensor],
        trained: Sequence[int],
        says: Callable[[], Any],
        kind: Hashable = None,
    ) -> Gradients:
        """Take the step of all rows.

        Args:
            step: of one row: its loss, and further tensors.
            tensors: each (k, ...), leaves of autograd where they are trained.
            trained: places of those to which gradients are computed.
            says: gives what the step has left behind besides its tensors.
            kind: all that the step depends on besides its tensors; None: that is not known.
        """
        if kind is None or not self.compiles:
            self._tell(
                "it is not cross-entropy alone of a net of torch's and this package's layers, without buffers, hooks "
                "and callbacks between its epochs"
            )
            return self._differentiate(step, tensors, trained, says)
        kind = kind, tuple(trained), tuple(map(layout, tensors))
        found = self._recorded.get(kind)
        if found is None:
            found = self._record(step, tensors, trained, says)
            if found is None:
                return self._differentiate(step, tensors, trained, says)
            self._recorded[kind] = found
        with torch.no_grad():
            results = iter(found.run(*tensors))
        return Gradients([next(results) if any_ else None for any_ in found.depends], list(results), found.said)

    @staticmethod
    def _differentiate(
        step: Callable[..., tuple[Tensor, ...]],
        tensors: Sequence[Tensor],
        trained: Sequence[int],
        says: Callable[[], Any],
    ) -> Gradients:
        losses, *made = vmap(step)(*tensors)
        gradients = torch.autograd.grad(losses.sum(), [tensors[i] for i in trained], allow_unused=True)
        return Gradients(gradients, made, says())

    def _record(
        self,
        step: Callable[..., tuple[Tensor, ...]],
        tensors: Sequence[Tensor],
        trained: Sequence[int],
        says: Callable[[], Any],
    ) -> _Recording | None:
        """Record the operations of a step, and compile them; None: that cannot be done."""
        from torch.fx.experimental.proxy_tensor import make_fx  # noqa: PLC0415 - takes a second

        found: list[Gradients] = []

        def whole(*rows: Tensor) -> list[Tensor]:
            leaves = [row.detach().requires_grad_(i in trained) for i, row in enumerate(rows)]
            found.append(self._differentiate(step, leaves, trained, says))
            gradients = [value for value in found[-1].gradients if value is not None]
            return [*gradients, *(value.detach() for value in found[-1].made)]

        given = [each.detach() for each in tensors]
        try:
            graph = make_fx(whole)(*given)
        except Exception as error:  # of an operation that torch does not trace, or of the step, which raises it again
            self._give_up(error)
            return None
        return _Recording(
            self._compiled(graph, given), [value is not None for value in found[-1].gradients], found[-1].said
        )

    def _compiled(self, graph: GraphModule, given: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
        """Compile a recorded step, if that can be done."""
        began, compiled = time.perf_counter(), torch.compile(graph, fullgraph=True, dynamic=False)
        try:
            with torch.no_grad():
                compiled(*given)
        except Exception as error:
            self._give_up(error)
            return graph.forward
        if not self._told:
            self._told = True
            rank_zero_info(f"model.compile: the first step took {time.perf_counter() - began:.1f} s to compile")
        return compiled

    def _give_up(self, error: Exception) -> None:
        """Compile nothing from now on."""
        self._tell(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        self.compiles = False

    def _tell(self, reason: str) -> None:
        if self.compiles and not self._told:
            self._told = True
            rank_zero_info(f"model.compile: the step of a stack is not compiled: {reason}")


def kind_of(client: ClientModule, step: Callable[..., Tensor]) -> Hashable:
    """Describe all that a client's step depends on besides its tensors; None: that is not known.

    It is for the cross-entropy of a net of torch's and this package's layers, without hooks of net and client.
    """
    own, kind = ClientModule, type(client)
    if any(isinstance(value, dict) and has_hooks(value) for value in vars(client).values()):
        return None
    if client.net is None or getattr(step, "__func__", None) not in (own.local_loss, own.training_step):
        return None
    if any(name in vars(client) or getattr(kind, name) is not getattr(own, name) for name in PARTS):
        return None
    found = [part for module in client.net.modules() for part in attributes(module)]
    return None if UNKNOWN in found else tuple(found)


def attributes(module: nn.Module) -> list[Hashable]:
    """Class and attributes of a module but for the values of tensors; `UNKNOWN` for what may change what it computes.

    >>> UNKNOWN in attributes(nn.Linear(2, 3)), 3 in attributes(nn.Linear(2, 3))
    (False, True)
    """
    found: list[Hashable] = [type(module) if type(module).__module__.startswith(LAYERS) else UNKNOWN]
    for value in vars(module).values():
        if type(value) in PLAIN:
            found.append(value)
        elif isinstance(value, dict):  # of hooks, or entries
            known = not has_hooks(value) and all(isinstance(one, ENTRIES) for one in value.values())
            found.append(tuple(value) if known else UNKNOWN)
        elif isinstance(value, list | tuple | set):
            found.append(tuple(value) if all(type(one) in PLAIN for one in value) else UNKNOWN)
        else:
            found.append(UNKNOWN)
    return found


def has_hooks(entries: Mapping[Any, Any]) -> bool:
    """True for a dict of hooks, which has them by number; a module's entries are by name."""
    return any(isinstance(key, int) for key in entries)


def layout(tensor: Tensor) -> tuple[Any, ...]:
    """Shape, strides and type."""
    return tensor.shape, tensor.stride(), tensor.dtype
