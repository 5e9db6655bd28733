"""The stack: parameters, buffers and constants of several clients, and their losses in one call of their step."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fl_lightning.client.context import ClientContext
from fl_lightning.client.module import ClientModule
from fl_lightning.client.services import ClientServices, MetricAccumulator, batch_length
from fl_lightning.engines.pytrees import Stacked, StackingError, rows_of, stack_pytrees, stacked_leaves, with_leaves
from fl_lightning.engines.stack_logits import RowLogits
from fl_lightning.functional.state import FlatState, flat_rows
from fl_lightning.types import Batch, State

Step = Callable[[Batch, int], Tensor]
"""`(batch, batch_idx) -> loss` of one client."""


Result = TypeVar("Result")


Row = tuple[Tensor, list[Tensor], dict[tuple[str, str], Tensor]]
"""Loss and logged values, and by kind and name further tensors: `buffer`s that were assigned, teachers' `logits`."""


LogEntry = tuple[str, str, float, float | None]
"""Name, reduction, weight and, if it is a plain number, value of what a step has logged."""


@dataclass(frozen=True)
class Rows:
    """Neighbouring rows of a stack, which share its memory.

    Args:
        params: trained parameters by name, each (k, ...), leaves of autograd.
        buffers: by name, each (k, ...).
        constants: what differs between clients and is not trained.
        dims: of the constants: 0 where a tensor has one value per row, None where all rows share it.
        number: of rows, k.
    """

    params: State
    buffers: State
    constants: Any
    dims: Any
    number: int

    def single(self) -> tuple[State, State, Any]:
        """Parameters, buffers and constants of the only row, as of one client.

        Views of the rows.
        """
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
        self._client = client
        self._trainable = contexts[0].trainable
        first = states[0]
        number = len(states)
        if all(state is first for state in states):
            entries = {name: value.expand(number, *value.shape).clone() for name, value in first.items()}
        else:
            entries = {name: torch.stack([state[name] for state in states]) for name in first}
        parameters = {name for name, place in places.items() if isinstance(getattr(*place), nn.Parameter)}
        self.params = {name: value for name, value in entries.items() if name in parameters}
        self.buffers = {name: value for name, value in entries.items() if name not in parameters}
        starts = [context.start for context in contexts]
        alike = all(start is starts[0] for start in starts)
        constants = [({} if alike else context.received, context.round) for context in contexts]
        self._start = starts[0] if alike else None
        self._constants, self._dims = stack_pytrees(constants)
        self._step = _Step(client, places, set(self.buffers), tied)
        self._views: dict[tuple[int, int], Rows] = {}
        self._nobody = ClientContext()
        self.proven = False

    def states(self) -> list[State]:
        """The entries of every client, live."""
        entries = {**self.params, **self.buffers}
        columns = zip(*(value.unbind() for value in entries.values()), strict=True)
        return [dict(zip(entries, row, strict=True)) for row in columns]

    def flat_states(self, names: Sequence[str]) -> list[FlatState]:
        """The named entries of every client, copied, end to end."""
        entries = {**self.params, **self.buffers}
        return flat_rows({name: entries[name] for name in names})

    def rows(self, rows: slice) -> Rows:
        """Some rows.

        The same object for the same rows.
        """
        key = (rows.start, rows.stop)
        if key not in self._views:
            self._views[key] = Rows(
                {name: value[rows].detach().requires_grad_() for name, value in self.params.items()},
                {name: value[rows] for name, value in self.buffers.items()},
                rows_of(self._constants, self._dims, rows),
                self._dims,
                rows.stop - rows.start,
            )
        return self._views[key]

    def differentiate(
        self,
        rows: Rows,
        trained: Sequence[str],
        step: Step,
        batches: Stacked,
        index: int,
        services: ClientServices,
        logged: Sequence[MetricAccumulator],
        known: State | None = None,
    ) -> tuple[dict[str, Tensor | None], State]:
        """Compute the gradients of the rows' losses by parameter, each (k, ...), and update their buffers.

        None for a parameter that they do not depend on. Beside them stand the teachers' logits that were computed, by
        teacher (k, B, ...).

        Args:
            rows: of this stack.
            trained: names of the parameters to which they are computed.
            step: the client's training step.
            batches: of the rows.
            index: of the batch in its epoch.
            services: attached to the client.
            logged: takes what each of the rows logs.
            known: teachers' logits of the batches, (k, B, ...) by teacher; None: they are computed and not kept.

        Raises:
            StackingError: if the step cannot be stacked, with the reason.
        """
        entries: list[LogEntry] = []
        row_loss = partial(self._row, step, index, services, entries)
        dims = None if known is None else dict.fromkeys(known, 0)
        given = (batches[0], known), (batches[1], dims)
        params = [rows.params[name] for name in trained]
        gradients: Sequence[Tensor | None]
        if rows.number == 1:  # vmap would cost more than it saves
            single = rows.single()
            loss, values, after = _without_draws(lambda: row_loss(*single, rows_of(*given, 0)))
            gradients = torch.autograd.grad(loss, params, allow_unused=True)
            values = [value.unsqueeze(0) for value in values]
            after = {name: value.unsqueeze(0) for name, value in after.items()}
        else:
            places = [number for number, name in enumerate(rows.params) if name in trained]
            gradients, values, after = self._together(row_loss, rows, given, places)
            self.proven = True
        logits = {}
        with torch.no_grad():
            for (kind, name), value in after.items():
                if kind == "buffer":
                    rows.buffers[name].copy_(value)
                else:
                    logits[name] = value
        tensors = iter(values)
        for name, kind, weight, number in entries:
            of_rows = [number] * rows.number if number is not None else next(tensors).detach().unbind()
            for accumulator, item in zip(logged, of_rows, strict=True):
                accumulator.log(name, item, weight, kind)
        return dict(zip(trained, gradients, strict=True)), logits

    def _row(
        self,
        step: Step,
        index: int,
        services: ClientServices,
        entries: list[LogEntry],
        params: State,
        buffers: State,
        constants: Any,
        given: tuple[Batch, State | None],
    ) -> Row:
        """Compute the loss of one row, within `vmap` or without.

        `entries` becomes what it has logged.
        """
        (received, round_), (batch, known) = constants, given
        start = received if self._start is None else self._start
        absent: Any = _Absent()
        cache = None if known is None else RowLogits(batch[0], known)
        context = ClientContext(absent, start, self._trainable, absent, None, round_, absent, cache)
        self._client.begin(context)
        logged = MetricAccumulator()
        services.begin(logged=logged, num_samples=batch_length(batch))
        loss, after = self._step.call(params, buffers, (step, batch, index))
        if not isinstance(loss, Tensor) or loss.ndim:
            raise StackingError("its training_step returns no single loss")
        if logged.metrics:
            raise StackingError(f"it logs the metric object {next(iter(logged.metrics))!r}")
        values: list[Tensor] = []
        entries.clear()
        for name, (kind, pairs) in logged.rows.items():
            for value, weight in pairs:
                values += [value] if isinstance(value, Tensor) else []
                entries.append((name, kind, weight, None if isinstance(value, Tensor) else value))
        services.begin(logged=MetricAccumulator())  # what belongs to no row must not outlive the step
        self._client.begin(self._nobody)
        further = {("buffer", name): value for name, value in after.items() if value is not buffers[name]}
        if cache is not None:
            further |= {("logits", name): value for name, value in cache.computed.items()}
        return loss, values, further

    def _together(
        self, row_loss: Callable[..., Row], rows: Rows, given: Stacked, trained: Sequence[int]
    ) -> tuple[Sequence[Tensor | None], list[Tensor], dict[tuple[str, str], Tensor]]:
        """Compute for all rows at once.

        `vmap` is handed plain tensors, since it takes long over pytrees of them.
        """
        dims = (rows.dims, given[1])
        constants = (rows.constants, given[0])
        assigned = list[tuple[str, str]]()

        def flat(*tensors: Tensor) -> tuple[Tensor, ...]:
            leaves = iter(tensors)
            params, buffers = ({name: next(leaves) for name in of} for of in (rows.params, rows.buffers))
            loss, values, after = row_loss(params, buffers, *with_leaves(constants, dims, leaves))
            assigned[:] = after
            return loss, *values, *after.values()

        tensors = [*rows.params.values(), *rows.buffers.values(), *stacked_leaves(constants, dims)]
        losses, *made = vmap(flat)(*tensors)
        gradients = torch.autograd.grad(losses.sum(), [tensors[i] for i in trained], allow_unused=True)
        split = len(made) - len(assigned)
        return gradients, made[:split], dict(zip(assigned, made[split:], strict=True))


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
    """A module whose forward is the client's step, for `functional_call`.

    It returns the buffers after it as well.
    """

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
        result: tuple[Any, State] = functional_call(self, entries, arguments, tie_weights=False)
        return result

    def forward(self, step: Step, batch: Batch, index: int) -> tuple[Any, State]:
        loss = step(batch, index)
        self.client.outputs.clear()  # of no client: they must not outlive the step
        return loss, {name: getattr(owner, attribute) for name, owner, attribute in self._owners}


class _Absent:
    """Stands for what a step of several clients cannot read: there is no one client."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise StackingError(
            "its training_step reads client_id, memory, num_steps or accumulated_lr, which differ between clients"
        )

    __getattr__ = __getitem__ = __contains__ = __iter__ = __len__ = __eq__ = __hash__ = __index__ = _refuse

    def __setitem__(self, name: str, value: Any) -> None:
        self._refuse()
