"""The stack: parameters, buffers and constants of several clients, and their losses in one call of their step."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fl_lightning.client.context import ClientContext
from fl_lightning.client.module import ClientModule
from fl_lightning.client.services import ClientServices
from fl_lightning.types import Batch, State

Step = Callable[[Batch, int], Tensor]
"""`(batch, batch_idx) -> loss` of one client."""


Result = TypeVar("Result")


class StackingError(RuntimeError):
    """Raised by a client whose step cannot be taken for several clients at once."""


class Logged(NamedTuple):
    """A value that a step has logged.

    Args:
        name: log key.
        values: one for each row, or a number for all.
        weight: of each.
        reduction: of the values of a round.
    """

    name: str
    values: Tensor | float
    weight: float
    reduction: str


@dataclass(frozen=True)
class Rows:
    """Neighbouring rows of a stack, which share its memory.

    Args:
        params: trained parameters by name, each (k, ...), leaves of autograd.
        buffers: by name, each (k, ...).
        constants: what differs between clients and is not trained.
        dims: of the constants: 0 where a tensor has one value per row, None where all rows share it.
    """

    params: State
    buffers: State
    constants: Any
    dims: Any

    def single(self) -> tuple[State, State, Any]:
        """Parameters, buffers and constants of the only row, as of one client; views of the rows."""
        params, buffers = ({n: value.squeeze(0) for n, value in of.items()} for of in (self.params, self.buffers))
        return params, buffers, rows_of(self.constants, self.dims, 0)


class ClientStack:
    """Parameters, buffers and round buffers of K clients, one row each.

    Args:
        client: the module, whose step is taken.
        states: by row, all entries of the client as its training begins; copied.
        contexts: by row, of the client.
        places: of the entries: who owns them, and under which attribute.
        tied: further names of entries.

    Attributes:
        proven: whether a step of several rows has been taken.
    """

    def __init__(
        self,
        client: ClientModule,
        states: Sequence[State],
        contexts: Sequence[ClientContext],
        places: Mapping[str, tuple[nn.Module, str]],
        tied: Mapping[str, str],
    ) -> None:
        self._client, self._trainable = client, contexts[0].trainable
        first, number = states[0], len(states)
        if all(state is first for state in states):
            entries = {name: value.expand(number, *value.shape).clone() for name, value in first.items()}
        else:
            entries = {name: torch.stack([state[name] for state in states]) for name in first}
        parameters = {name for name, place in places.items() if isinstance(getattr(*place), nn.Parameter)}
        self.params = {name: value for name, value in entries.items() if name in parameters}
        self.buffers = {name: value for name, value in entries.items() if name not in parameters}
        starts = [context.start for context in contexts]
        alike = all(start is starts[0] for start in starts)
        own = [({} if alike else context.received, context.round) for context in contexts]
        self._start = starts[0] if alike else None
        self._constants, self._dims = stack_nest(own)
        self._step = _Step(client, places, set(self.buffers), tied)
        self._views: dict[tuple[int, int], Rows] = {}
        self.proven = False

    def state(self, row: int) -> State:
        """The entries of one client, live."""
        return {name: value[row] for name, value in {**self.params, **self.buffers}.items()}

    def rows(self, rows: slice) -> Rows:
        """Some rows; the same object for the same rows."""
        key = (rows.start, rows.stop)
        if key not in self._views:
            self._views[key] = Rows(
                {name: value[rows].detach().requires_grad_() for name, value in self.params.items()},
                {name: value[rows] for name, value in self.buffers.items()},
                rows_of(self._constants, self._dims, rows),
                self._dims,
            )
        return self._views[key]

    def losses(
        self, rows: Rows, step: Step, batches: Sequence[Batch], index: int, services: ClientServices
    ) -> tuple[Tensor, list[Logged]]:
        """Losses (k,) of the rows and what they logged; the rows' buffers are updated.

        Args:
            rows: of this stack.
            step: the client's training step.
            batches: one for each row, of equal shapes.
            index: of the batch in its epoch.
            services: attached to the client.

        Raises:
            StackingError: if the step cannot be stacked, with the reason.
        """
        said: list[tuple[str, str, float, float | None]] = []

        def one(params: State, buffers: State, constants: Any, batch: Batch) -> tuple[Tensor, list[Tensor], State]:
            received, round_ = constants
            start = received if self._start is None else self._start
            absent: Any = _Absent()
            self._client.begin(ClientContext(absent, start, self._trainable, absent, round=round_, progress=absent))
            logged = services.begin_client()
            services.begin_batch(batch)
            loss, after = self._step.call(params, buffers, (step, batch, index))
            if not isinstance(loss, Tensor) or loss.ndim:
                raise StackingError("its training_step returns no single loss")
            if logged.metrics:
                raise StackingError(f"it logs the metric object {next(iter(logged.metrics))!r}")
            values: list[Tensor] = []
            said.clear()
            for name, (kind, pairs) in logged.rows.items():
                for value, weight in pairs:
                    values += [value] if isinstance(value, Tensor) else []
                    said.append((name, kind, weight, None if isinstance(value, Tensor) else value))
            return loss, values, {name: value for name, value in after.items() if value is not buffers[name]}

        if len(batches) == 1:  # vmap would cost more than it saves
            losses, values, assigned = _without_draws(lambda: one(*rows.single(), batches[0]))
            losses, values = losses.unsqueeze(0), [value.unsqueeze(0) for value in values]
        else:
            batch, batch_dims = stack_nest(batches)
            in_dims = (0, 0, rows.dims, batch_dims)
            losses, values, assigned = vmap(one, in_dims)(rows.params, rows.buffers, rows.constants, batch)
            self.proven = True
        with torch.no_grad():
            for name, value in assigned.items():
                rows.buffers[name].copy_(value)
        tensors = iter(values)
        return losses, [
            Logged(name, next(tensors).detach() if number is None else number, weight, kind)
            for name, kind, weight, number in said
        ]


def _without_draws(compute: Callable[[], Result]) -> Result:
    """Compute something that must not draw, as `vmap` sees to for several rows: no client's seed is set.

    Raises:
        StackingError: if it has drawn.
    """
    before = torch.default_generator.get_state()
    result = compute()
    if not torch.equal(before, torch.default_generator.get_state()):
        raise StackingError("its training_step draws random numbers")
    return result


class _Step(nn.Module):
    """A module whose forward is the client's step, for `functional_call`; it returns the buffers after it as well."""

    def __init__(
        self,
        client: ClientModule,
        places: Mapping[str, tuple[nn.Module, str]],
        buffers: Collection[str],
        tied: Mapping[str, str],
    ) -> None:
        super().__init__()
        self.client = client
        self._owners = [(name, *places[name]) for name in buffers]
        known = {(id(owner), attribute): name for name, (owner, attribute) in places.items()}
        for alias in tied:  # of a shared module the place is the same: it must not be replaced twice
            path, _, attribute = alias.rpartition(".")
            known.setdefault((id(client.get_submodule(path)), attribute), alias)
        self._aliases = {alias: tied[alias] for alias in known.values() if alias in tied}

    def call(self, params: State, buffers: State, arguments: tuple[Any, ...]) -> tuple[Any, State]:
        """Take the step with these parameters and buffers in the client."""
        entries = params | buffers
        entries |= {alias: entries[name] for alias, name in self._aliases.items()}
        entries = {f"client.{name}": value for name, value in entries.items()}
        found: tuple[Any, State] = functional_call(self, entries, arguments, tie_weights=False)
        return found

    def forward(self, step: Step, batch: Batch, index: int) -> tuple[Any, State]:
        loss = step(batch, index)
        if self.client.outputs:
            self.client.outputs = {}  # of no client: they must not outlive the step
        return loss, {name: getattr(owner, attribute) for name, owner, attribute in self._owners}


class _Absent:
    """Stands for what a step of several clients cannot read: there is no one client."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise StackingError(
            "its training_step reads client_id, memory, num_steps or exposure, which differ between clients"
        )

    __getattr__ = __getitem__ = __contains__ = __iter__ = __len__ = __eq__ = __hash__ = __index__ = _refuse

    def __setitem__(self, name: str, value: Any) -> None:
        self._refuse()


def stack_nest(nests: Sequence[Any]) -> tuple[Any, Any]:
    """Stack nests of one structure: each tensor becomes (K, ...); returns dims beside it, as `vmap` wants them.

    What is the same object, or an equal plain value, in all of them stays one.

    Raises:
        StackingError: if their structures, shapes or plain values differ.

    >>> stack_nest([{"a": torch.tensor(1.0), "n": 3}, {"a": torch.tensor(2.0), "n": 3}])
    ({'a': tensor([1., 2.]), 'n': 3}, {'a': 0, 'n': None})
    """
    first = nests[0]
    if isinstance(first, Tensor):
        if all(nest is first for nest in nests):
            return first, None
        if any(not isinstance(nest, Tensor) or nest.shape != first.shape for nest in nests):
            raise StackingError("its clients have tensors of different shapes")
        return torch.stack(list(nests)), 0
    if any(type(nest) is not type(first) for nest in nests):
        raise StackingError("its clients have values of different types")
    if isinstance(first, dict):
        if any(nest.keys() != first.keys() for nest in nests):
            raise StackingError("its clients have values of different names")
        pairs = {name: stack_nest([nest[name] for nest in nests]) for name in first}
        return {name: pair[0] for name, pair in pairs.items()}, {name: pair[1] for name, pair in pairs.items()}
    if type(first) in (list, tuple):
        if any(len(nest) != len(first) for nest in nests):
            raise StackingError("its clients have lists of different lengths")
        found = [stack_nest(items) for items in zip(*nests, strict=True)]
        kind = type(first)
        return kind(item for item, _ in found), kind(dims for _, dims in found)
    if any(nest != first for nest in nests):
        raise StackingError(f"its clients have different values of {type(first).__name__}")
    return first, None


def rows_of(nest: Any, dims: Any, rows: slice | int) -> Any:
    """Rows, or one row, of a stacked nest: of the tensors whose dim is 0.

    >>> rows_of({"a": torch.tensor([1.0, 2.0, 3.0]), "n": 3}, {"a": 0, "n": None}, slice(1, 3))
    {'a': tensor([2., 3.]), 'n': 3}
    """
    if isinstance(nest, dict):
        return {name: rows_of(value, dims[name], rows) for name, value in nest.items()}
    if type(nest) in (list, tuple):
        return type(nest)(rows_of(value, dim, rows) for value, dim in zip(nest, dims, strict=True))
    return nest if dims is None else nest[rows]
