"""The cohort engine: trains several clients at once, as rows of one stack, and one after the other where it cannot."""

import copy
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from pytorch_lightning.utilities import rank_zero_info
from torch import Tensor

from fl_lightning.client.hooks import overridden
from fl_lightning.client.module import ClientModule
from fl_lightning.client.progress import LocalProgress
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
from fl_lightning.types import ClientJob, ClientResult, State
from fl_lightning.utils.settings import check_at_least

IGNORES = "ignores_client_module"
PLAIN = frozenset((bool, int, float, str, type(None)))
Hook = TypeVar("Hook", bound=Callable[..., Any])


def ignores_module(hook: Hook) -> Hook:
    """Mark a callback's `on_client_end` that does not look at the client module, only at the update.

    Clients trained at once are then not put into the module one by one. A marked `on_round_repeat` asks for no round to
    be repeated. A marked class of callbacks leaves the module alone in all its hooks.
    """
    setattr(hook, IGNORES, True)
    return hook


def need_module(hooks: Iterable[Callable[..., None]]) -> bool:
    """Return True where one of the hooks may look at the client module."""
    return not all(getattr(getattr(hook, "func", hook), IGNORES, False) for hook in hooks)


class OwnAttributeError(StackingError):
    """Raised by clients for whom a hook has set attributes of the module to different values."""


def held_by(client: ClientModule) -> dict[str, Any]:
    """Collect the numbers, strings and tensors that modules hold as attributes.

    Modes are restored by themselves.
    """
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in client.named_modules()
        for name, value in vars(module).items()
        if name != "training" and (type(value) in PLAIN or isinstance(value, Tensor))
    }


def differing(held: Mapping[str, Any], other: Mapping[str, Any]) -> str | None:
    """Name an attribute with another value.

    None: there is none.

    >>> differing({"mu": 0.1, "beta": 1.0}, {"mu": 0.2, "beta": 1.0}), differing({"mu": 0.1}, {"mu": 0.1})
    ('mu', None)
    """
    for name in (*held, *other):
        pair = held.get(name), other.get(name)
        if pair[0] is not pair[1] and (any(isinstance(value, Tensor) for value in pair) or pair[0] != pair[1]):
            return name
    return None


class CohortEngine(SequentialEngine):
    """Trains up to `chunk` clients at once (the `Engine` protocol).

    Results are those of the sequential engine up to the order of floating-point sums. The first stack of an exchange
    is a test: where it fails, its clients and all later ones are trained one after the other, and one line says why.

    Args:
        client, settings, weights, services, device, precision, datamodule, hooks, batch_hooks, tolerant: as of
            `SequentialEngine`; with `tolerant` clients are trained one after the other.
        chunk: clients in a stack; `auto`: chosen, and only where it is known to be right and faster.
        watches: whether somebody's own code may change the module between two rounds.
    """

    def __init__(self, *args: Any, chunk: Chunk = "auto", watches: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_at_least(1, chunk=None if chunk == "auto" else chunk)
        self.chunk = chunk
        self._watches = watches
        self._refused: str | None = None
        self._proven: set[str] = set()
        self._notified: set[str] = set()
        self._stacks = StackTrainer(self.client, self.local, cautious=chunk == "auto")
        self._epochs_notified = Counter[int]()
        """Epochs of the stack under way of which callbacks know, by client."""
        self._phased = overridden(self.client, "phases", ClientModule)

    def why_not(self) -> str | None:
        """Explain why clients are trained one after the other.

        None: they are not.
        """
        if self._refused is not None:
            return self._refused
        if self.tolerant:
            return "model.faults.on_error=skip leaves out single clients"
        for name in self.local.batch_hooks:
            return f"{name} of a callback of the module is called for one client at a time"
        if self.weights.extra.is_used:
            return "get_extra_state gives the state of one client"
        local = self.local
        return why_not(
            self.client,
            settings=local.settings,
            chunk=self.chunk,
            weights=self.weights,
            precision=local.precision,
            device=local.device,
        )

    def _results(
        self, exchange: str, jobs: Iterable[ClientJob], announces: bool = True
    ) -> Generator[ClientResult, None, None]:
        """Train the jobs in stacks, or one after the other."""
        # what was stacked before still can be, where nobody's own code may have changed the module since
        asks = exchange not in self._proven or self._watches or self.members.of("trained")
        most = clients_at_once(self.client, self.chunk)
        reason = self.why_not() if asks else self._refused
        if reason is not None or most == 1:
            self._tell(reason)
            yield from super()._results(exchange, jobs)
            return
        waiting: list[ClientJob] = []
        for job in jobs:
            alone = self._stacks.is_alone(job)
            if not alone:
                waiting.append(job)
            if alone or len(waiting) == most:
                yield from self._together(exchange, waiting)
                waiting = []
            if alone:
                yield from super()._results(exchange, [job])
        yield from self._together(exchange, waiting)

    def _tell(self, reason: str | None) -> None:
        if reason is not None and reason not in self._notified:
            self._notified.add(reason)
            rank_zero_info(f"Clients are trained one after the other (model.chunk={self.chunk}): {reason}")

    def _together(self, exchange: str, jobs: Sequence[ClientJob]) -> Iterator[ClientResult]:
        """Train the jobs as one stack, if it is not refused."""
        if len(jobs) < 2 or self._refused is not None:
            yield from super()._results(exchange, jobs)
            return
        if self.chunk == "auto" and self._stacks.clients_per_step(jobs) < MIN_CLIENTS_PER_STEP:
            self._tell("the clients of a stack have batches of so different sizes that few can step together")
            yield from super()._results(exchange, jobs)
            return
        # what `receive` may have changed when the stack turns out to be none
        again = [job._replace(memory=copy.deepcopy(job.memory)) if self._receives else job for job in jobs]
        try:
            trained = self._train_stack(exchange, jobs)
        except Exception as error:
            self.local.builder.forget()
            self._give_up(exchange, jobs, error)
            # an attribute that is set where a client starts is set anew
            yield from super()._results(exchange, again, announces=isinstance(error, OwnAttributeError))
            return
        finally:
            self._epochs_notified.clear()
        checks = True
        for stacked, state in trained:
            try:
                result = self._finish(exchange, stacked, state, checks)
            except Exception as error:
                raise client_error(stacked.job.client_id, stacked.job.broadcast.round_idx, error) from error
            checks = self._replies  # what else happens between two results of a stack leaves the module alone
            yield result

    def _train_stack(self, exchange: str, jobs: Sequence[ClientJob]) -> Iterator[tuple[StackedClient, State]]:
        """Train the jobs as one stack.

        Gives, in their order, each client and its entries.

        Raises:
            StackingError: if they cannot be stacked.
        """
        clients = self._joined(exchange, jobs)
        self._check_teachers(clients)
        phases = common_phases(clients)
        order = list(range(len(clients)))
        if phases:
            order.sort(key=lambda place: self._stacks.passes(jobs[place], phases[0]))
        rows = [clients[place] for place in order]
        states = [stacked.entries for stacked in rows]
        contexts = [stacked.context for stacked in rows]
        step = self.client.local_loss if self.client.is_fedavg_equivalent else self.client.training_step
        notified = self.hooks.get("on_client_epoch_end")
        stack = ClientStack(
            self.client,
            states=states,
            contexts=contexts,
            places=self.weights.entries,
            tied=self.weights.tied,
        )
        self._stacks.train(stack, rows, step, self._end_epoch if notified else None)
        if stack.proven:
            self._proven.add(exchange)
        looks = self._replies or self._needs_module() or self.weights.personal or self.weights.freezes
        trained: Sequence[State] = stack.list_states() if looks else stack.copy_states(self.weights.transmitted_entries)
        return ((rows[row], trained[row]) for row in sorted(range(len(rows)), key=order.__getitem__))

    def _joined(self, exchange: str, jobs: Sequence[ClientJob]) -> list[StackedClient]:
        """Make the module each client in turn, and copy what it is before training.

        Raises:
            StackingError: if its attributes differ then, of which a stack has one value.
        """
        asks = exchange not in self._proven and not self.local.builder.settles()  # what they make, before it is trusted
        receives = self._receives and not self.client.is_fedavg_equivalent
        prepares = asks or receives or self._phased or self.hooks.get("on_client_start")
        clients = list[StackedClient]()
        first = dict[str, Any]()
        factory = None
        for job in jobs:
            clients.append(self._join(exchange, job, bool(prepares)))
            held = held_by(self.client) if prepares else {}
            if asks:
                held |= self._stacks.optimizer_settings()
            first = first or held
            factory = factory or self.client.optimizer_factory
            if self.client.optimizer_factory is not factory:
                raise OwnAttributeError("its clients have different values of optimizer_factory")
            if (name := differing(held, first)) is not None:
                raise OwnAttributeError(f"its clients have different values of {name}")
        return clients

    def _join(self, exchange: str, job: ClientJob, prepares: bool) -> StackedClient:
        """Make the module the client of a job, and copy what it is before training."""
        start = job.broadcast.weights if job.start is None else job.start
        if start is not None and len(start) == len(self.weights.entries) and not prepares:
            context, entries = self._context(job), start  # all that it starts from: nobody looks at the module
            self.services.begin(logged=MetricAccumulator())
        else:
            self._receive(exchange, job, self.client.is_fedavg_equivalent)
            context = self.client.context
            entries = self.weights.snapshot(self.weights.entries)
        phases = self.client.phases(exchange)
        if not isinstance(phases, Sequence):
            raise StackingError("its phases run code between two of them")
        return StackedClient(job, context, self.services.logged, entries, phases)

    def _needs_module(self) -> bool:
        """Return True where a callback looks at the module when a client ends."""
        return need_module(self.hooks.get("on_client_end", ()))

    def _end_epoch(self, stacked: StackedClient, state: State, progress: LocalProgress, epoch: int) -> None:
        """Put a client of the stack into the module, for the callbacks that look at it after an epoch."""
        client_id = stacked.job.client_id
        self.weights.load(state)
        self.client.begin(replace(stacked.context, progress=progress))
        self.services.begin(logged=stacked.logged, num_samples=stacked.last_size)
        for hook in super()._epoch_hooks():
            hook(client_id, epoch)
        self._epochs_notified[client_id] += 1

    def _epoch_hooks(self) -> Sequence[EpochHook]:
        """Leave out the epochs that were told before the stack turned out to be none."""
        return [self._tell_epoch] if self._epochs_notified else super()._epoch_hooks()

    def _tell_epoch(self, client_id: int, epoch: int) -> None:
        """Call the hooks for an epoch that was not told."""
        if self._epochs_notified[client_id]:
            self._epochs_notified[client_id] -= 1
            return
        for hook in super()._epoch_hooks():
            hook(client_id, epoch)

    def _check_teachers(self, clients: Sequence[StackedClient]) -> None:
        """Refuse clients with teachers of their own: there is one teacher for the whole stack.

        Raises:
            StackingError: if they have.
        """
        token = clients[0].context.weights_token
        alike = all(stacked.context.weights_token is token for stacked in clients)
        receives = self._receives and not self.client.is_fedavg_equivalent
        if receives and not self.client.teaches_alike(token if alike else None):
            raise StackingError("its clients have different teachers")

    def _finish(self, exchange: str, stacked: StackedClient, state: State, checks: bool) -> ClientResult:
        """Make a trained client's result, which is in the module again where somebody looks at it there."""
        self.client.begin(stacked.context)  # the rule may ask how it has trained
        self.services.begin(logged=stacked.logged, num_samples=stacked.last_size)
        if isinstance(state, FlatState):
            return self._reply(exchange, stacked.job, checks, state)
        self.weights.load(state)
        if self._replies or self._needs_module():
            self.local.seed(f"train/{exchange}", stacked.job.data)  # what they draw does not depend on other clients
        return self._reply(exchange, stacked.job, checks)

    def _give_up(self, exchange: str, jobs: Sequence[ClientJob], error: Exception) -> None:
        """Refuse a stack, and all later ones if it was the first of the exchange.

        Say why.

        Raises:
            RuntimeError: if it is no refusal, but an error of clients whose step could be stacked before.
        """
        stacks = isinstance(error, StackingError)
        if exchange not in self._proven:
            self._refused = str(error) if stacks else f"{type(error).__name__}: {error}"
        elif not stacks:
            ids = ", ".join(str(job.client_id) for job in jobs)
            kind = type(error).__name__
            raise RuntimeError(
                f"clients {ids}, trained at once in round {jobs[0].broadcast.round_idx}, raised {kind}: {error}; set "
                f"model.chunk=1 to see which of them it is"
            ) from error
        self._tell(self._refused or str(error))
