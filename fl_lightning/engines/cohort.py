"""The cohort engine trains several clients at once, as rows of a stack, and all others one after the other."""

import copy
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor

from fl_lightning.client.context import ClientContext
from fl_lightning.client.hooks import overridden
from fl_lightning.client.module import ClientModule
from fl_lightning.client.progress import ClientProgress
from fl_lightning.client.services import MetricAccumulator
from fl_lightning.engines.execution import Chunk
from fl_lightning.engines.pytrees import StackingError
from fl_lightning.engines.sequential import SequentialEngine
from fl_lightning.engines.stack import ClientStack
from fl_lightning.engines.stack_training import StackedClient, StackTrainer, common_phases
from fl_lightning.engines.stacking import MIN_CLIENTS_PER_STEP, clients_at_once, why_not
from fl_lightning.engines.training import EpochHook
from fl_lightning.functional.state import FlatState
from fl_lightning.members.faults import client_error
from fl_lightning.types import ClientJob, ClientResult, Phase, State
from fl_lightning.utils.settings import check_at_least

IGNORES = "ignores_client_module"
"""The attribute that `ignores_module` sets."""

PLAIN_TYPES = frozenset((bool, int, float, str, type(None)))

Hook = TypeVar("Hook", bound=Callable[..., Any])


def ignores_module(hook: Hook) -> Hook:
    """Mark a callback's `on_client_end` that looks only at the update, and not at the client module.

    Clients that are trained at once are then not put into the module one by one. A marked
    `on_round_repeat` asks for no round to be repeated. A marked class of callbacks leaves the module
    alone in all its hooks.
    """
    setattr(hook, IGNORES, True)
    return hook


def need_module(hooks: Iterable[Callable[..., None]]) -> bool:
    """Return True if one of the hooks may look at the client module."""
    for hook in hooks:
        # The loop passes partials. The mark is on the function inside.
        function = getattr(hook, "func", hook)
        if not getattr(function, IGNORES, False):
            return True
    return False


class OwnAttributeError(StackingError):
    """Tells that a hook has set an attribute of the module to different values for the clients of a stack."""


def attributes_of(client: ClientModule) -> dict[str, Any]:
    """Collect the numbers, strings and tensors that modules have as attributes, by path and name.

    The modes of the modules (train or eval) are left out, because the trainer restores them.
    """
    attributes = {}
    for path, module in client.named_modules():
        for name, value in vars(module).items():
            is_plain = type(value) in PLAIN_TYPES or isinstance(value, Tensor)
            if is_plain and name != "training":
                attributes[f"{path}.{name}".lstrip(".")] = value
    return attributes


def differing_attribute(attributes: Mapping[str, Any], others: Mapping[str, Any]) -> str | None:
    """Return the name of an attribute with two values, or None if there is none.

    Tensors are the same only if they are one object.

    >>> differing_attribute({"mu": 0.1, "beta": 1.0}, {"mu": 0.2, "beta": 1.0})
    'mu'
    >>> differing_attribute({"mu": 0.1}, {"mu": 0.1})
    """
    for name in (*attributes, *others):
        value = attributes.get(name)
        other = others.get(name)
        if value is other:
            continue
        if isinstance(value, Tensor) or isinstance(other, Tensor) or value != other:
            return name
    return None


class CohortEngine(SequentialEngine):
    """Trains up to `chunk` clients at once (the `Engine` protocol).

    The results are those of the sequential engine up to the order of floating-point sums. The first stack
    of an exchange is a test. If it fails, its clients and all later ones are trained one after the
    other, and one line of the log says why.

    Args:
        *args: The arguments of `SequentialEngine`.
        chunk: The number of clients in a stack. `auto` chooses it, and stacks only if the results are
            known to be right and the training is faster.
        watches: Whether the user's own code may change the module between two rounds.
        **kwargs: The named arguments of `SequentialEngine`. With `tolerant` clients are trained one
            after the other.

    Raises:
        ValueError: `chunk` is below 1.
    """

    def __init__(self, *args: Any, chunk: Chunk = "auto", watches: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_at_least(1, chunk=None if chunk == "auto" else chunk)
        self.chunk = chunk
        self._watches = watches
        self._refused: str | None = None
        """The reason why no clients are stacked any more. None: they may be."""
        self._proven: set[str] = set()
        """The exchanges in which a stack was trained."""
        self._logged_reasons: set[str] = set()
        self._stacks = StackTrainer(self.client, self.local, cautious=chunk == "auto")
        self._announced_epochs = Counter[int]()
        """The number of epochs of the current stack that callbacks were told of, by client."""
        self._has_own_phases = overridden(self.client, "phases", ClientModule)

    def why_not(self) -> str | None:
        """Explain why clients are trained one after the other, or return None if they are stacked."""
        if self._refused is not None:
            return self._refused
        if self.tolerant:
            return "model.faults.on_error=skip leaves out single clients"
        for name in self.local.batch_hooks:
            return f"{name} of a callback of the module is called for one client at a time"
        if self.global_weights.extra.is_used:
            return "get_extra_state gives the state of one client"
        return why_not(
            self.client,
            settings=self.local.settings,
            chunk=self.chunk,
            global_weights=self.global_weights,
            precision=self.local.precision,
            device=self.local.device,
        )

    def _results(
        self, exchange: str, jobs: Iterable[ClientJob], announces: bool = True
    ) -> Generator[ClientResult, None, None]:
        """Train the jobs in stacks, or one after the other."""
        reason = self._refused
        # What was stacked before can be stacked again, unless somebody's code may have changed the module since.
        if exchange not in self._proven or self._watches or self.members.of("trained"):
            reason = self.why_not()
        stack_size = clients_at_once(self.client, self.chunk)
        if reason is not None or stack_size == 1:
            self._log_once(reason)
            yield from super()._results(exchange, jobs)
            return
        waiting: list[ClientJob] = []
        for job in jobs:
            if self._stacks.is_alone(job):
                yield from self._train_at_once(exchange, waiting)
                waiting = []
                yield from super()._results(exchange, [job])
                continue
            if waiting and waiting[0].broadcast.round_idx != job.broadcast.round_idx:
                # Clients of one stack start from the same version: their learning rates may differ from round to round.
                yield from self._train_at_once(exchange, waiting)
                waiting = []
            waiting.append(job)
            if len(waiting) == stack_size:
                yield from self._train_at_once(exchange, waiting)
                waiting = []
        yield from self._train_at_once(exchange, waiting)

    def _log_once(self, reason: str | None) -> None:
        """Log why clients are trained one after the other, once for each reason. None: nothing is logged."""
        if reason is not None and reason not in self._logged_reasons:
            self._logged_reasons.add(reason)
            rank_zero_info(f"Clients are trained one after the other (model.chunk={self.chunk}): {reason}")

    def _train_at_once(self, exchange: str, jobs: Sequence[ClientJob]) -> Iterator[ClientResult]:
        """Train the jobs as one stack, or one after the other if the stack is refused."""
        if len(jobs) < 2 or self._refused is not None:
            yield from super()._results(exchange, jobs)
            return
        if self.chunk == "auto" and self._stacks.clients_per_step(jobs) < MIN_CLIENTS_PER_STEP:
            self._log_once("the clients of a stack have batches of so different sizes that few can step together")
            yield from super()._results(exchange, jobs)
            return
        untouched_jobs = jobs
        if self._receives:
            # `receive` may change the memory of a client before the stack is refused.
            untouched_jobs = [job._replace(memory=copy.deepcopy(job.memory)) for job in jobs]
        try:
            trained = self._train_stack(exchange, jobs)
        except Exception as error:
            self.local.builder.forget()
            self._refuse_stack(exchange, jobs, error)
            # An attribute that a hook sets as a client starts must be set again.
            announces = isinstance(error, OwnAttributeError)
            yield from super()._results(exchange, untouched_jobs, announces=announces)
            return
        finally:
            self._announced_epochs.clear()
        checks = True
        for stacked, state in trained:
            try:
                result = self._finish(exchange, stacked, state=state, checks=checks)
            except Exception as error:
                raise client_error(stacked.job.client_id, stacked.job.named_round, error) from error
            # Between two results of a stack only `reply` can change the module.
            checks = self._replies
            yield result

    def _train_stack(self, exchange: str, jobs: Sequence[ClientJob]) -> list[tuple[StackedClient, State]]:
        """Train the jobs as one stack, and return each client with its trained entries, in the order of the jobs.

        Raises:
            StackingError: The clients cannot be stacked.
        """
        clients = self._enter_all(exchange, jobs)
        self._check_teachers(clients)
        phases = common_phases(clients)
        # The order has the place of each row among the jobs.
        order = list(range(len(clients)))
        if phases:
            order.sort(key=lambda place: self._stacks.passes(jobs[place], phases[0]))
        rows = [clients[place] for place in order]
        stack = ClientStack(
            self.client,
            states=[stacked.entries for stacked in rows],
            contexts=self._contexts(rows, phases),
            places=self.global_weights.entries,
            tied=self.global_weights.tied,
        )
        self._stacks.train(
            stack,
            rows,
            step=self.client.local_loss if self.client.is_fedavg_equivalent else self.client.training_step,
            on_epoch_end=self._end_epoch if self.hooks.get("on_client_epoch_end") else None,
        )
        if stack.proven:
            self._proven.add(exchange)
        states = dict(zip(order, self._trained_states(stack), strict=True))
        return [(stacked, states[place]) for place, stacked in enumerate(clients)]

    def _contexts(self, rows: Sequence[StackedClient], phases: Sequence[Phase]) -> list[ClientContext]:
        """Return the context of each row, where a row without a batch has that of a row with some.

        Nobody reads the context of such a row, which may lack what a client makes of its samples (Replay's buffer). If
        no row has a batch, all have the context of the first one.

        Args:
            rows: The clients of the stack, by row.
            phases: The phases of the exchange.
        """
        contexts = [stacked.context for stacked in rows]
        if not self._receives:
            return contexts
        idle: list[int] = []
        for place, stacked in enumerate(rows):
            if not any(self._stacks.passes(stacked.job, phase).steps for phase in phases):
                idle.append(place)
        stepped = [context for place, context in enumerate(contexts) if place not in idle]
        shared = stepped[0] if stepped else contexts[0]
        for place in idle:
            contexts[place] = shared
        return contexts

    def _trained_states(self, stack: ClientStack) -> Sequence[State]:
        """Return the trained entries of each row: all entries if somebody looks at them, else the transmitted ones."""
        looks_at_module = self._replies or self._needs_module()
        if looks_at_module or self.global_weights.personal or self.global_weights.freezes:
            return stack.list_states()
        return stack.copy_states(self.global_weights.transmitted_entries)

    def _enter_all(self, exchange: str, jobs: Sequence[ClientJob]) -> list[StackedClient]:
        """Make the module each client in turn, and copy what the client is before its training.

        Raises:
            OwnAttributeError: An attribute of the module differs between the clients. A stack has one value of it.
        """
        # Optimizers that may depend on the client are compared, until a stack was trained.
        compares_optimizers = exchange not in self._proven and not self.local.builder.settles()
        receives = self._receives and not self.client.is_fedavg_equivalent
        starts_hooks = bool(self.hooks.get("on_client_start"))
        prepares = compares_optimizers or receives or self._has_own_phases or starts_hooks
        clients: list[StackedClient] = []
        first_attributes: dict[str, Any] = {}
        factory = None
        for job in jobs:
            clients.append(self._enter(exchange, job, prepares=prepares))
            attributes = attributes_of(self.client) if prepares else {}
            if compares_optimizers:
                attributes |= self._stacks.optimizer_settings(clients[-1])
            first_attributes = first_attributes or attributes
            factory = factory or self.client.optimizer_factory
            name = differing_attribute(attributes, first_attributes)
            if self.client.optimizer_factory is not factory:
                name = "optimizer_factory"
            if name is not None:
                raise OwnAttributeError(f"its clients have different values of {name}")
        return clients

    def _enter(self, exchange: str, job: ClientJob, *, prepares: bool) -> StackedClient:
        """Make the module the client of a job, and copy what the client is before its training.

        Args:
            exchange: The name of the exchange.
            job: The job of the client.
            prepares: Whether somebody looks at the module or changes it before the training.
        """
        start = job.broadcast.weights if job.start is None else job.start
        if start is not None and len(start) == len(self.global_weights.entries) and not prepares:
            # The client starts from all entries that it was sent, and nobody looks at the module.
            context = self._context(job)
            entries = start
            self.services.begin(logged=MetricAccumulator())
        else:
            self._receive(exchange, job, fedavg_equivalent=self.client.is_fedavg_equivalent)
            context = self.client.context
            entries = self.global_weights.snapshot(self.global_weights.entries)
        if self._has_own_phases:
            self._stacks.draws.restart()
        phases = self.client.phases(exchange)
        if self._has_own_phases:
            self._stacks.draws.check("its phases")
        if not isinstance(phases, Sequence):
            raise StackingError("its phases run code between two of them")
        return StackedClient(job=job, context=context, logged=self.services.logged, entries=entries, phases=phases)

    def _needs_module(self) -> bool:
        """Return True if a callback looks at the module as a client ends."""
        return need_module(self.hooks.get("on_client_end", ()))

    def _end_epoch(self, stacked: StackedClient, state: State, progress: ClientProgress, epoch: int) -> None:
        """Put a client of the stack into the module, for the callbacks that look at it after an epoch.

        Args:
            stacked: The client.
            state: The entries of the client.
            progress: The progress of the client so far.
            epoch: The index of the epoch in its phase.
        """
        client_id = stacked.job.client_id
        self.global_weights.load(state)
        self.client.begin(replace(stacked.context, progress=progress))
        self.services.begin(logged=stacked.logged, num_samples=stacked.last_size)
        for hook in super()._epoch_hooks():
            hook(client_id, epoch)
        self._announced_epochs[client_id] += 1

    def _epoch_hooks(self) -> Sequence[EpochHook]:
        """Return the callables for the end of each epoch.

        They leave out the epochs that were announced before the stack was refused.
        """
        if self._announced_epochs:
            return [self._announce_epoch]
        return super()._epoch_hooks()

    def _announce_epoch(self, client_id: int, epoch: int) -> None:
        """Call the hooks for an epoch, unless they were called for it before."""
        if self._announced_epochs[client_id]:
            self._announced_epochs[client_id] -= 1
            return
        for hook in super()._epoch_hooks():
            hook(client_id, epoch)

    def _check_teachers(self, clients: Sequence[StackedClient]) -> None:
        """Check that the clients have the same teachers, because a stack has one net for each teacher.

        Raises:
            StackingError: A client has teachers of its own.
        """
        if not self._receives or self.client.is_fedavg_equivalent:
            return
        token = clients[0].context.weights_token
        if any(stacked.context.weights_token is not token for stacked in clients):
            token = None
        if not self.client.teaches_alike(token):
            raise StackingError("its clients have different teachers")

    def _finish(self, exchange: str, stacked: StackedClient, *, state: State, checks: bool) -> ClientResult:
        """Make the result of a trained client. The client is in the module again if somebody looks at it there.

        Args:
            exchange: The name of the exchange.
            stacked: The client.
            state: The trained entries.
            checks: Whether the structure of the module may have changed.
        """
        # The aggregator may ask for the progress of the client.
        self.client.begin(stacked.context)
        self.services.begin(logged=stacked.logged, num_samples=stacked.last_size)
        if isinstance(state, FlatState):
            return self._reply(exchange, stacked.job, checks=checks, trained=state)
        self.global_weights.load(state)
        if self._replies or self._needs_module():
            # The draws of the user's code then do not depend on other clients.
            self.local.seed(f"train/{exchange}", stacked.job.data)
        return self._reply(exchange, stacked.job, checks=checks)

    def _refuse_stack(self, exchange: str, jobs: Sequence[ClientJob], error: Exception) -> None:
        """Log why a stack is refused. After the first stack of an exchange all later ones are refused too.

        Args:
            exchange: The name of the exchange.
            jobs: The jobs of the stack.
            error: The error that the stack has raised.

        Raises:
            RuntimeError: The stack is not refused. It is an error of clients whose step was stacked before.
        """
        reason = str(error)
        kind = type(error).__name__
        is_refused = isinstance(error, StackingError)
        if exchange not in self._proven:
            self._refused = reason if is_refused else f"{kind}: {error}"
        elif not is_refused:
            ids = ", ".join(str(job.client_id) for job in jobs)
            raise RuntimeError(
                f"clients {ids}, trained at once in round {jobs[0].named_round}, raised {kind}: {error}; set "
                f"model.chunk=1 to see which of them it is"
            ) from error
        self._log_once(self._refused or reason)
