"""The stack: the parameters, buffers and constants of several clients, and their losses in one call of their step."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fl_lightning.client.context import ClientContext
from fl_lightning.client.module import ClientModule
from fl_lightning.client.services import ClientServices, MetricAccumulator
from fl_lightning.engines.pytrees import Stacked, StackingError, rows_of, stack_pytrees, stacked_leaves, with_leaves
from fl_lightning.engines.stack_logits import RowLogits
from fl_lightning.functional.state import FlatState, flat_rows
from fl_lightning.types import Batch, State
from fl_lightning.utils.batches import batch_length

Step = Callable[[Batch, int], Tensor]
"""`(batch, batch_idx) -> loss` of one client."""


LogEntry = tuple[str, str, float, float | None]
"""Name, reduction, weight and value of what a step has logged. A value None stands for a tensor."""


Made = dict[tuple[str, str], Tensor]
"""Tensors that a step makes besides its loss, by kind and name: `buffer` for a new value, `logits` of a teacher."""


RowResult = tuple[Tensor, list[Tensor], Made]
"""The loss of a row, the tensors that it has logged, and what else it has made."""


@dataclass(frozen=True)
class Rows:
    """Holds neighboring rows of a stack, in the memory of the stack.

    Args:
        params: The parameters by name, each (k, ...), as leaves of autograd.
        buffers: The buffers by name, each (k, ...).
        constants: What differs between clients and is not trained.
        dims: The dims of the constants: 0 for a tensor with one value for each row, None for a shared value.
        num_rows: The number of rows k.
    """

    params: State
    buffers: State
    constants: Any
    dims: Any
    num_rows: int

    def view_only_row(self) -> tuple[State, State, Any]:
        """Return views of the parameters, buffers and constants of the only row, as one client has them."""
        params = {name: value.squeeze(0) for name, value in self.params.items()}
        buffers = {name: value.squeeze(0) for name, value in self.buffers.items()}
        return params, buffers, rows_of(self.constants, self.dims, 0)


class ClientStack:
    """Holds the parameters, buffers and round buffers of K clients, one row for each client.

    Args:
        client: The client module, whose step is taken.
        states: All entries of each client as its training begins, by row. The stack copies them.
        contexts: The context of each client, by row.
        places: The owner and the attribute of each entry.
        tied: The names of entries by their further names.

    Attributes:
        proven: Whether a step of several rows has been taken.
    """

    def __init__(
        self,
        client: ClientModule,
        *,
        states: Sequence[State],
        contexts: Sequence[ClientContext],
        places: Mapping[str, tuple[nn.Module, str]],
        tied: Mapping[str, str],
    ) -> None:
        self._client = client
        self._trainable = contexts[0].trainable
        self.params: State = {}
        self.buffers: State = {}
        for name, value in stacked_entries(states).items():
            owner, attribute = places[name]
            if isinstance(getattr(owner, attribute), nn.Parameter):
                self.params[name] = value
            else:
                self.buffers[name] = value
        starts = [context.start for context in contexts]
        share_start = all(start is starts[0] for start in starts)
        constants = [({} if share_start else context.received, context.round) for context in contexts]
        self._start = starts[0] if share_start else None
        """The weights that all clients start from. None: each row has its own among its constants."""
        self._constants, self._dims = stack_pytrees(constants)
        self._step = _StepModule(client, places=places, buffers=self.buffers, tied=tied)
        self._selected: dict[tuple[int, int], Rows] = {}
        self._no_client = ClientContext()
        self._absent: Any = _Absent()
        self.proven = False

    def list_states(self) -> list[State]:
        """List the entries of every client, in the memory of the stack."""
        entries = {**self.params, **self.buffers}
        by_entry = [value.unbind() for value in entries.values()]
        return [dict(zip(entries, row, strict=True)) for row in zip(*by_entry, strict=True)]

    def copy_states(self, names: Sequence[str]) -> list[FlatState]:
        """Copy the named entries of every client, and lay them end to end."""
        entries = {**self.params, **self.buffers}
        return flat_rows({name: entries[name] for name in names})

    def select(self, rows: slice) -> Rows:
        """Return some rows, which is the same object for the same rows."""
        key = (rows.start, rows.stop)
        if key not in self._selected:
            self._selected[key] = Rows(
                params={name: value[rows].detach().requires_grad_() for name, value in self.params.items()},
                buffers={name: value[rows] for name, value in self.buffers.items()},
                constants=rows_of(self._constants, self._dims, rows),
                dims=self._dims,
                num_rows=rows.stop - rows.start,
            )
        return self._selected[key]

    def differentiate(
        self,
        rows: Rows,
        batches: Stacked,
        *,
        index: int,
        trained: Sequence[str],
        step: Step,
        services: ClientServices,
        logged: Sequence[MetricAccumulator],
        known: State | None = None,
    ) -> tuple[dict[str, Tensor | None], State]:
        """Compute the gradients of the rows' losses, and update the buffers of the rows.

        Args:
            rows: The rows of this stack.
            batches: The batches of the rows.
            index: The index of the batch in its epoch.
            trained: The names of the parameters that are trained.
            step: The training step of the client.
            services: The services that are attached to the client.
            logged: Takes what each row logs, by row.
            known: The known logits of the batches by teacher, each (k, B, ...). None: no logits are kept.

        Returns:
            The gradients by name, each (k, ...), and the teachers' logits that were computed by teacher,
            each (k, B, ...). A gradient is None if the losses do not depend on the parameter.

        Raises:
            StackingError: The step cannot be taken for several clients at once.
        """
        batch, batch_dims = batches
        known_dims = None if known is None else dict.fromkeys(known, 0)
        inputs = (batch, known)
        input_dims = (batch_dims, known_dims)
        log_entries: list[LogEntry] = []
        row_loss = partial(self._row_loss, step=step, index=index, services=services, log_entries=log_entries)
        # For one row vmap would cost more than it saves.
        compute = self._single_loss if rows.num_rows == 1 else self._summed_loss
        loss, values, made = compute(row_loss, rows, inputs=inputs, input_dims=input_dims)
        params = [rows.params[name] for name in trained]
        gradients = torch.autograd.grad(loss, params, allow_unused=True)
        if rows.num_rows > 1:
            self.proven = True
        logits: State = {}
        with torch.no_grad():
            for (kind, name), value in made.items():
                if kind == "buffer":
                    rows.buffers[name].copy_(value)
                else:
                    logits[name] = value
        log_rows(logged, log_entries, values)
        return dict(zip(trained, gradients, strict=True)), logits

    def _row_loss(
        self,
        params: State,
        buffers: State,
        constants: Any,
        inputs: tuple[Batch, State | None],
        *,
        step: Step,
        index: int,
        services: ClientServices,
        log_entries: list[LogEntry],
    ) -> RowResult:
        """Compute the loss of one row, within `vmap` or without.

        Args:
            params: The parameters of the row.
            buffers: The buffers of the row.
            constants: The weights that the row has received and its round buffers.
            inputs: The batch of the row, and the known logits of the batch or None.
            step: The training step of the client.
            index: The index of the batch in its epoch.
            services: The services that are attached to the client.
            log_entries: Becomes what the row logs.
        """
        received, round_buffers = constants
        batch, known = inputs
        cache = None if known is None else RowLogits(batch[0], known)
        context = ClientContext(
            client_id=self._absent,
            start=received if self._start is None else self._start,
            trainable=self._trainable,
            memory=self._absent,
            round=round_buffers,
            progress=self._absent,
            logit_cache=cache,
        )
        self._client.begin(context)
        logged = MetricAccumulator()
        services.begin(logged=logged, num_samples=batch_length(batch))
        loss, new_buffers = self._step.call(params, buffers, (step, batch, index))
        if not isinstance(loss, Tensor) or loss.ndim:
            raise StackingError("its training_step returns no single loss")
        if logged.metrics:
            raise StackingError(f"it logs the metric object {next(iter(logged.metrics))!r}")
        values = logged_tensors(logged, log_entries)
        # What belongs to no row must not outlive the step.
        services.begin(logged=MetricAccumulator())
        self._client.begin(self._no_client)
        made = {("buffer", name): value for name, value in new_buffers.items() if value is not buffers[name]}
        if cache is not None:
            for name, logits in cache.computed.items():
                made["logits", name] = logits
        return loss, values, made

    def _single_loss(
        self, row_loss: Callable[..., RowResult], rows: Rows, *, inputs: Any, input_dims: Any
    ) -> RowResult:
        """Compute the loss of the only row. The other tensors are those of one row, (1, ...).

        Raises:
            StackingError: The step has drawn random numbers, which `vmap` refuses for several rows. No seed of a
                client is set here.
        """
        params, buffers, constants = rows.view_only_row()
        random_state = torch.default_generator.get_state()
        loss, values, made = row_loss(
            params=params,
            buffers=buffers,
            constants=constants,
            inputs=rows_of(inputs, input_dims, 0),
        )
        if not torch.equal(random_state, torch.default_generator.get_state()):
            raise StackingError("its training_step draws random numbers")
        stacked_values = [value.unsqueeze(0) for value in values]
        stacked_made = {key: value.unsqueeze(0) for key, value in made.items()}
        return loss, stacked_values, stacked_made

    def _summed_loss(
        self, row_loss: Callable[..., RowResult], rows: Rows, *, inputs: Any, input_dims: Any
    ) -> RowResult:
        """Compute the sum of the losses of all rows. The other tensors are those of all rows, (k, ...).

        `vmap` takes long over pytrees, so it gets plain tensors.
        """
        pytrees = (rows.constants, inputs)
        dims = (rows.dims, input_dims)
        keys: list[tuple[str, str]] = []

        def loss_of_tensors(*tensors: Tensor) -> tuple[Tensor, ...]:
            leaves = iter(tensors)
            params = {name: next(leaves) for name in rows.params}
            buffers = {name: next(leaves) for name in rows.buffers}
            row_constants, row_inputs = with_leaves(pytrees, dims, leaves)
            loss, values, made = row_loss(
                params=params,
                buffers=buffers,
                constants=row_constants,
                inputs=row_inputs,
            )
            keys[:] = made
            return loss, *values, *made.values()

        tensors = [*rows.params.values(), *rows.buffers.values(), *stacked_leaves(pytrees, dims)]
        losses, *others = vmap(loss_of_tensors)(*tensors)
        num_values = len(others) - len(keys)
        made = dict(zip(keys, others[num_values:], strict=True))
        return losses.sum(), others[:num_values], made


def stacked_entries(states: Sequence[State]) -> State:
    """Copy the entries of all clients into one tensor (K, ...) for each name."""
    first = states[0]
    if any(state is not first for state in states):
        return {name: torch.stack([state[name] for state in states]) for name in first}
    number = len(states)
    return {name: value.expand((number, *value.shape)).clone() for name, value in first.items()}


def logged_tensors(logged: MetricAccumulator, log_entries: list[LogEntry]) -> list[Tensor]:
    """Return the tensors that a row has logged.

    Args:
        logged: What the row has logged.
        log_entries: Becomes the names, reductions, weights and plain numbers.
    """
    values: list[Tensor] = []
    log_entries.clear()
    for name, (reduction, pairs) in logged.rows.items():
        for value, weight in pairs:
            if isinstance(value, Tensor):
                values.append(value)
                log_entries.append((name, reduction, weight, None))
            else:
                log_entries.append((name, reduction, weight, value))
    return values


def log_rows(logged: Sequence[MetricAccumulator], log_entries: Sequence[LogEntry], values: Sequence[Tensor]) -> None:
    """Log for every row what its step has logged.

    Args:
        logged: Takes what each row logs, by row.
        log_entries: The names, reductions, weights and plain numbers, which are the same for all rows.
        values: The logged tensors, each (k, ...), in the order of the entries without a plain number.
    """
    tensors = iter(values)
    for name, reduction, weight, number in log_entries:
        of_rows: Sequence[float | Tensor]
        if number is None:
            of_rows = next(tensors).detach().unbind()
        else:
            of_rows = [number] * len(logged)
        for accumulator, value in zip(logged, of_rows, strict=True):
            accumulator.log(name, value, weight, reduce_fx=reduction)


class _StepModule(nn.Module):
    """Takes the step of the client as its forward, for `functional_call`.

    Args:
        client: The client module.
        places: The owner and the attribute of each entry.
        buffers: The names of the entries whose values after the step are returned.
        tied: The names of entries by their further names.
    """

    def __init__(
        self,
        client: ClientModule,
        *,
        places: Mapping[str, tuple[nn.Module, str]],
        buffers: Collection[str],
        tied: Mapping[str, str],
    ) -> None:
        super().__init__()
        self.client = client
        self._buffer_places = [(name, *places[name]) for name in buffers]
        names = {(id(owner), attribute): name for name, (owner, attribute) in places.items()}
        for alias in tied:
            # In a module with two paths both names have one place, which must not be replaced twice.
            path, _, attribute = alias.rpartition(".")
            owner = client.get_submodule(path)
            names.setdefault((id(owner), attribute), alias)
        self._aliases = {name: tied[name] for name in names.values() if name in tied}

    def call(self, params: State, buffers: State, arguments: tuple[Any, ...]) -> tuple[Any, State]:
        """Take the step with other parameters and buffers in the client, and return its loss and the new buffers.

        Args:
            params: The parameters by name.
            buffers: The buffers by name.
            arguments: The arguments of `forward`.
        """
        entries = params | buffers
        for alias, name in self._aliases.items():
            entries[alias] = entries[name]
        replaced = {f"client.{name}": value for name, value in entries.items()}
        result: tuple[Any, State] = functional_call(self, replaced, arguments, tie_weights=False)
        return result

    def forward(self, step: Step, batch: Batch, index: int) -> tuple[Any, State]:
        loss = step(batch, index)
        # The outputs belong to no client, and must not outlive the step.
        self.client.outputs.clear()
        buffers = {name: getattr(owner, attribute) for name, owner, attribute in self._buffer_places}
        return loss, buffers


class _Absent:
    """Stands for what a step of several clients cannot read, because there is no single client."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise StackingError(
            "its training_step reads client_id, memory, num_steps or accumulated_lr, which differ between clients"
        )

    __getattr__ = _refuse
    __getitem__ = _refuse
    __contains__ = _refuse
    __iter__ = _refuse
    __len__ = _refuse
    __eq__ = _refuse
    __hash__ = _refuse
    __index__ = _refuse

    def __setitem__(self, name: str, value: Any) -> None:
        self._refuse()
