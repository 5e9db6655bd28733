"""One communication round: every exchange with every client of the cohort, then the aggregation."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fl_lightning.aggregation.aggregator import Tally
from fl_lightning.client import ClientContext, ClientModule
from fl_lightning.functional.state import StateSum, flatten, mean_of
from fl_lightning.local import LocalTrainer
from fl_lightning.local.lending import finite_rows, lend, reduced
from fl_lightning.server.traffic import bytes_of_sets, per_exchange, traffic
from fl_lightning.strategy import Ranks
from fl_lightning.types import Broadcast, ClientUpdate, State

if TYPE_CHECKING:
    from fl_lightning.loop import FederatedLoop

Record = tuple[dict[str, Any], State | None]
CLIENT_HOOKS = ("on_client_start", "on_client_epoch_end", "on_client_end", "on_exchange_end")


class NonFiniteUpdateError(RuntimeError):
    """A client returned NaN or infinite weights; the global model is that of the round before."""


@dataclass
class RoundResult:
    """What a round leaves behind before anything is kept.

    Args:
        new: the new shared weights, or None: unchanged.
        records: memory and personal entries by client id.
        personal: mean of the participants' personal entries, or None where there is none: no client had data, or
            nothing is shared, so that there is no global model.
        values: what is logged.
    """

    new: State | None = None
    records: dict[int, Record] = field(default_factory=dict)
    personal: State | None = None
    values: dict[str, float] = field(default_factory=dict)


class RoundRunner:
    """Runs rounds in the loop's one client module.

    Args:
        loop: the fitted loop, set up.
    """

    def __init__(self, loop: FederatedLoop) -> None:
        assert loop.weights is not None
        self.loop, self.client, self.aggregator = loop, loop.client, loop.aggregator
        self.weights, self.server, self.store, self.book = loop.weights, loop.server, loop.store, loop.book
        self.data = loop.data
        self.ranks = Ranks(loop.device)
        self.skips = loop.nonfinite == "skip"
        self.local = LocalTrainer(loop.client, loop, loop.trainer.precision_plugin, loop.desk, loop.placement())
        shared = loop.weights.live(loop.weights.shared)
        fixed = shared.keys() - set(loop.weights.trainable)
        self.constants = {name for name in fixed if not bool(shared[name].isfinite().all())}
        """Untrained entries that were not finite at the start (a transformer's mask): they are no one's fault."""
        self.shared_bytes = traffic(shared, {})
        self.modules = list(loop.client.lightning_modules())
        self.parameters = list(loop.client.parameters())
        self.known = {*loop.weights.entries, *loop.weights.tied}
        self.receives = getattr(loop.client.receive, "__func__", None) is not ClientModule.receive
        self.current = object()
        """Tells this run of a round from every other, another fit's round of the same number too."""
        callbacks = loop.trainer.callbacks  # type: ignore[attr-defined]
        self.hooks: dict[str, list[Callable[..., None]]] = {
            name: [getattr(callback, name) for callback in callbacks if hasattr(callback, name)]
            for name in CLIENT_HOOKS
        }

    @contextmanager
    def inside(self) -> Iterator[State]:
        """Lend the client what it needs, and whatever happens leave whole rounds only in the module.

        Yields the module's entries at the round's start. After an error the module, the aggregator and the loop's row
        are as they were before.
        """
        loop, weights = self.loop, self.weights
        before = weights.snapshot(list(weights.entries))
        aggregator = {
            name: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
            for name, value in self.aggregator.state_dict().items()
        }
        loop.round_start = weights.saved(before)
        loop.round_start |= {f"aggregator.{name}": value for name, value in aggregator.items()}
        autocast = torch.autocast(loop.device.type, enabled=False)
        try:
            with autocast, torch.enable_grad(), lend(self.modules, loop.desk):
                yield before
        except BaseException:
            weights.load(before)
            if aggregator:
                self.aggregator.load_state_dict(aggregator)
            self.book.clear()
            loop.row, loop.row_round = {}, None
            raise
        finally:
            loop.round_start = {}
            self.server.weights = None
            self.aggregator.begin_exchange()
            for parameter in self.parameters:
                parameter.grad = None
            self.local.restore_modes()

    def run(self, round_idx: int, cohort: list[int], start: State) -> RoundResult:
        """All exchanges of a round; nothing is kept yet.

        Raises:
            NonFiniteUpdateError: naming client and round.
        """
        result = RoundResult()
        self.current = object()
        aggregator, server, ranks = self.aggregator, self.server, self.ranks
        server.round_idx, server.weights = round_idx, start
        mine = ranks.deal(cohort, lambda c: len(self.data.client_indices("train", c)), self.store.owners)
        flags: list[tuple[int, Tensor]] = []
        traffic_here = {exchange: [0, 0] for exchange in self.client.exchanges}
        aggregator.begin_round(cohort)
        for exchange in self.client.exchanges:
            aggregator.begin_exchange()
            personal = Tally()
            error: Exception | None = None
            try:
                for client_id in mine:
                    self._client(client_id, exchange, result, personal, flags, traffic_here)
            except Exception as problem:
                if ranks.world == 1:
                    raise
                error = problem
            if ranks.world > 1:
                self._merge(personal, error)
            if "own" in personal.sums and bool(personal.weight):
                result.personal = mean_of(personal.sums["own"], personal.weight)
            finished = aggregator.finish(exchange)
            if finished is not None:
                result.new = server.weights = {**server.weights, **finished}
            self.notify("on_exchange_end", exchange)
        self._close(result, flags, traffic_here, round_idx)
        return result

    def _check_entries(self) -> None:
        """Once, after the first client: refuse weights that began to exist in training, which would stay for the next.

        Raises:
            ValueError: naming the entry.
        """
        if self.known:
            new = [n for n, v in self.client.state_dict().items() if isinstance(v, Tensor) and n not in self.known]
            self.known = set()
            if new:
                raise ValueError(
                    f"the client's entries must exist before training, to be sent and saved, but {new[0]!r} came to be "
                    f"in it; allocate it in __init__ or configure_model"
                )

    def _client(
        self,
        client_id: int,
        exchange: str,
        result: RoundResult,
        personal: Tally,
        flags: list[tuple[int, Tensor]],
        traffic_here: dict[str, list[int]],
    ) -> None:
        """Train one client and hand its update to the aggregator."""
        round_idx = self.server.round_idx
        broadcast = self.aggregator.broadcast(exchange, client_id)
        update = self._train(broadcast, exchange, round_idx, client_id, result.records)
        self._check_entries()
        traffic_here[exchange][0] += self._bytes(broadcast)
        traffic_here[exchange][1] += self._bytes(update)
        own = result.records[client_id][1]
        total = self._sum(update, own)
        flags.append((client_id, total))
        if self.skips:
            finite = torch.isfinite(total)
            update = self._skipped(update, finite, self.server.weights)
            own = own and sanitised(own, finite, self.loop.initial_personal)
        if own is not None and self.weights.shared:
            personal.sums.setdefault("own", StateSum()).add(own, update.num_samples)
            personal.weight = personal.weight + update.num_samples
        self.aggregator.add(update)
        self.notify("on_client_end", update)

    def _merge(self, personal: Tally, error: Exception | None) -> None:
        """Bring the processes' sums and rows together, or learn that one of them failed."""
        tally, ranks = self.aggregator.tally, self.ranks
        sums = {**tally.sums, **{f"personal/{key}": value for key, value in personal.sums.items()}}
        rows = {c: to_device(row, torch.device("cpu")) for c, row in tally.rows.items()}
        here = ({key: total.layout for key, total in sums.items()}, int(tally.weight), int(personal.weight), rows)
        gathered = ranks.agree(here, error)
        merged = ranks.merge(sums, [layouts for layouts, *_ in gathered])
        personal.sums = {"own": merged.pop("personal/own")} if "personal/own" in merged else {}
        tally.sums = merged
        tally.weight, personal.weight = (sum(part[k] for part in gathered) for k in (1, 2))
        everyone = {c: row for *_, found in gathered for c, row in found.items()}
        tally.rows = {c: to_device(everyone[c], self.loop.device) for c in sorted(everyone)}

    def _train(
        self, broadcast: Broadcast, exchange: str, round_idx: int, client_id: int, records: dict[int, Record]
    ) -> ClientUpdate:
        """One client in one exchange."""
        client, weights, loop = self.client, self.weights, self.loop
        context = self.load(client_id, broadcast, records)
        client.switch(context)
        local = self.data.view(client_id, round_idx)
        loop.desk.note_batch(None)
        self.book.next_client()
        self.notify("on_client_start", client_id)
        if self.receives:
            self.local.seed(f"receive/{exchange}", local)
            client.receive(broadcast, local)
        if self.hooks["on_client_epoch_end"]:
            self.local.epoch_end = lambda epoch: self.notify("on_client_epoch_end", client_id, epoch)
        epochs = loop.local_epochs[client_id] if isinstance(loop.local_epochs, list) else loop.local_epochs
        self.local.train(local, exchange, epochs)
        extras = client.reply(exchange, local)
        shares = broadcast.weights is not None and bool(weights.shared)
        own = weights.snapshot(weights.personal_of(client_id)) if weights.personal else None
        records[client_id] = (context.memory, own)
        update = ClientUpdate(
            client_id,
            local.size(),
            context.num_steps,
            context.exposure,
            weights.live(weights.shared) if shares else None,
            extras,
        )
        asked = self.aggregator.asks(update)
        return replace(update, extras={**extras, **asked}) if asked else update

    def load(self, client_id: int, broadcast: Broadcast, records: Mapping[int, Record]) -> ClientContext:
        """Put a client into the module: the shared weights it was sent (else the global ones), its own entries."""
        weights = self.weights
        state = self.server.weights if broadcast.weights is None else broadcast.weights
        if len(state) < len(weights.shared):
            state = {**self.server.weights, **state}  # what was not sent is not the client's before
        weights.load(state)
        if client_id in records:
            memory, personal = records[client_id]
        else:
            memory = self.store.memory(client_id)
            personal = self.store.personal(client_id)
            if personal is None and weights.personal:
                personal = {name: self.loop.initial_personal[name] for name in weights.personal_of(client_id)}
        loaded = state
        if personal is not None:
            weights.load(personal)
            loaded = {**state, **personal}
        common = state is self.server.weights and not weights.personal
        key = (self.current, broadcast.exchange, None if common else client_id)
        received = {name: loaded[name] for name in weights.trainable if name in loaded}
        return ClientContext(client_id, received, dict(memory), weights_key=key)

    def notify(self, name: str, *args: Any) -> None:
        """Call the client hook `name` of the callbacks that have it, as `(trainer, loop, ...)`."""
        for hook in self.hooks[name]:
            hook(self.loop.trainer, self.loop, *args)

    def _bytes(self, message: Broadcast | ClientUpdate) -> int:
        """Bytes of one message; the shared entries as a whole are counted once for all."""
        weights = message.weights
        if weights is not None and len(weights) == len(self.weights.shared):
            return self.shared_bytes + (traffic(None, message.extras) if message.extras else 0)
        return traffic(weights, message.extras)

    def _sum(self, update: ClientUpdate, own: State | None) -> Tensor:
        """A float64 sum over everything that a client changed: finite exactly where all of it is."""
        sums = []
        weights = update.weights
        if self.constants and weights:
            weights = {name: value for name, value in weights.items() if name not in self.constants}
        for state in (weights, own):
            if state:
                vectors = flatten(state).items()
                sums += [vector.sum(dtype=torch.float64) for dtype, vector in vectors if dtype.is_floating_point]
        if update.extras:
            sums += [tensor.detach().sum(dtype=torch.float64) for tensor in tensors_in(update.extras)]
        if not sums:
            return torch.zeros((), dtype=torch.float64, device=self.loop.device)
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum()

    def _skipped(self, update: ClientUpdate, finite: Tensor, start: State) -> ClientUpdate:
        """The update, or on the device one without samples and without a change where it is not finite."""
        weights = update.weights and sanitised(update.weights, finite, start)
        extras = sanitised_tree(dict(update.extras), finite)
        num_samples = finite.to(torch.int64) * update.num_samples
        return replace(update, num_samples=num_samples, weights=weights, extras=extras, finite=finite)

    def _close(
        self, result: RoundResult, flags: list[tuple[int, Tensor]], traffic_here: dict[str, list[int]], round_idx: int
    ) -> None:
        """The round's one transfer to the host: is every update finite, and what was logged."""
        host, rows = self.book.drain([total for _, total in flags])
        broken = {client_id for (client_id, _), value in zip(flags, host, strict=True) if not math.isfinite(value)}
        keepers = [c for c, (memory, own) in result.records.items() if memory or own is not None]
        here = (broken, rows, traffic_here, keepers, self.book.metric_paths(self.client))
        gathered = self.ranks.agree(here, None)
        broken = set().union(*(part[0] for part in gathered))
        if broken and not self.skips:
            raise NonFiniteUpdateError(
                f"every client update must be finite, but client {min(broken)} returned NaN or infinite values in "
                f"round {round_idx}; {self.client.remedy()}"
            )
        for client_id in broken & result.records.keys():
            del result.records[client_id]
        books = [part[1] for part in gathered]
        if broken:
            books = [finite_rows(book) for book in books]
        result.values = reduced(books) | self.book.compute_metrics(self.client, [part[4] for part in gathered])
        if self.skips:
            result.values["train/skipped"] = float(len(broken))
        result.values |= per_exchange([part[2] for part in gathered])
        if round_idx == 0:
            result.values |= bytes_of_sets(self.data, self.client.needs)
        if self.ranks.world > 1:
            self.store.owners |= {c: rank for rank, part in enumerate(gathered) for c in part[3] if c not in broken}


def to_device(value: Any, device: torch.device) -> Any:
    """A nest with its tensors on `device`."""
    if isinstance(value, ClientUpdate):
        parts = ("num_samples", "weights", "extras", "finite")
        return replace(value, **{name: to_device(getattr(value, name), device) for name in parts})
    if isinstance(value, Tensor):
        return value.detach().to(device)
    if isinstance(value, Mapping):
        return {key: to_device(item, device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_device(item, device) for item in value]
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The floating tensors in a nest of dicts, lists and tuples."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def sanitised(state: State, finite: Tensor, fallback: State) -> State:
    """`state` where `finite`, else `fallback`, chosen on the device."""
    return {name: torch.where(finite, tensor, fallback[name]) for name, tensor in state.items()}


def sanitised_tree(value: Any, finite: Tensor) -> Any:
    """A nest of extras with its float tensors zeroed where not `finite`."""
    if isinstance(value, Tensor):
        return torch.where(finite, value, torch.zeros_like(value)) if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: sanitised_tree(item, finite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [sanitised_tree(item, finite) for item in value]
    return value
