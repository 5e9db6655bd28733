"""One communication round: every exchange with every client of the cohort, then the aggregation."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fl_lightning.client import ClientContext
from fl_lightning.data.client_data import ClientView
from fl_lightning.functional.state import StateSum, flatten, mean_of
from fl_lightning.local import LocalTrainer
from fl_lightning.local.lending import lend
from fl_lightning.server import traffic
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
        personal: mean of the participants' personal entries, or None where there are none.
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
        self.skips = loop.nonfinite == "skip"
        self.local = LocalTrainer(loop.client, loop, loop.trainer.precision_plugin, loop.desk, loop.device)
        self.shared_bytes = traffic(loop.weights.live(loop.weights.shared), {})
        self.modules = list(loop.client.lightning_modules())
        callbacks = loop.trainer.callbacks  # type: ignore[attr-defined]
        self.hooks: dict[str, list[Callable[..., None]]] = {
            name: [getattr(callback, name) for callback in callbacks if hasattr(callback, name)]
            for name in CLIENT_HOOKS
        }

    @contextmanager
    def inside(self) -> Iterator[State]:
        """Lend the client what it needs, and whatever happens leave whole rounds only in the module.

        Yields the shared weights of the round's start. After an error the module, the aggregator and the loop's row
        are as they were before.
        """
        loop, weights = self.loop, self.weights
        before = weights.snapshot(list(weights.entries))
        aggregator = {
            name: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)
            for name, value in self.aggregator.state_dict().items()
        }
        loop.round_start = {f"client.{name}": value for name, value in before.items()}
        loop.round_start |= {f"aggregator.{name}": value for name, value in aggregator.items()}
        autocast = torch.autocast(loop.device.type, enabled=False)
        try:
            with autocast, torch.enable_grad(), lend(self.modules, loop.desk):
                yield {name: before[name] for name in weights.shared}
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
            self.client.zero_grad()
            self.local.restore_modes()

    def run(self, round_idx: int, cohort: list[int], start: State) -> RoundResult:
        """All exchanges of a round; nothing is kept yet.

        Raises:
            NonFiniteUpdateError: naming client and round.
        """
        result = RoundResult()
        aggregator, server = self.aggregator, self.server
        server.round_idx, server.weights = round_idx, start
        sums: list[Tensor] = []
        bytes_down = bytes_up = 0
        aggregator.begin_round(cohort)
        for exchange in self.client.exchanges:
            aggregator.begin_exchange()
            personal, samples = StateSum(), 0
            for client_id in cohort:
                broadcast = aggregator.broadcast(exchange, client_id)
                update = self._train(broadcast, exchange, round_idx, client_id, result.records)
                bytes_down += self._bytes(broadcast)
                bytes_up += self._bytes(update)
                own = result.records[client_id][1]
                finite_sum = self._sum(update, own)
                sums.append(finite_sum)
                if self.skips:
                    finite = torch.isfinite(finite_sum)
                    update = self._skipped(update, finite, start)
                    own = own and sanitised(own, finite, self.loop.initial_personal)
                if own is not None:
                    personal.add(own, update.num_samples)
                    samples = samples + update.num_samples  # type: ignore[assignment]
                aggregator.add(update)
                self.notify("on_client_end", update)
            if personal.layout and bool(samples):
                result.personal = mean_of(personal, samples)
            finished = aggregator.finish(exchange)
            if finished is not None:
                result.new = server.weights = {**server.weights, **finished}
            self.notify("on_exchange_end", exchange)
        result.values = self._to_host(sums, cohort, round_idx, result)
        result.values |= {"comm/bytes_down": float(bytes_down), "comm/bytes_up": float(bytes_up)}
        return result

    def _train(
        self, broadcast: Broadcast, exchange: str, round_idx: int, client_id: int, records: dict[int, Record]
    ) -> ClientUpdate:
        """One client in one exchange."""
        client, weights, loop = self.client, self.weights, self.loop
        context = self.load(client_id, broadcast, records)
        client.switch(context)
        local = ClientView(self.data, client_id, round_idx)
        loop.desk.note_batch(None)
        self.notify("on_client_start", client_id)
        client.receive(broadcast, local)
        if self.hooks["on_client_epoch_end"]:
            self.local.epoch_end = lambda epoch: self.notify("on_client_epoch_end", client_id, epoch)
        epochs = loop.local_epochs if isinstance(loop.local_epochs, int) else loop.local_epochs[client_id]
        self.local.train(local, exchange, epochs)
        extras = client.reply(exchange, local)
        shares = broadcast.weights is not None and bool(weights.shared)
        own = weights.snapshot(weights.personal) if weights.personal else None
        records[client_id] = (context.memory, own)
        return ClientUpdate(
            client_id,
            local.size(),
            context.num_steps,
            context.exposure,
            weights.live(weights.shared) if shares else None,
            extras,
        )

    def load(self, client_id: int, broadcast: Broadcast, records: Mapping[int, Record]) -> ClientContext:
        """Put a client into the module: the shared weights it was sent (else the global ones), its own entries."""
        weights = self.weights
        state = self.server.weights if broadcast.weights is None else broadcast.weights
        weights.load(state)
        if client_id in records:
            memory, personal = records[client_id]
        else:
            memory = self.store.memory(client_id)
            personal = self.store.personal(client_id) or (
                self.loop.initial_personal if weights.personal else None
            )
        loaded = state
        if personal is not None:
            weights.load(personal)
            loaded = {**state, **personal}
        common = state is self.server.weights and not weights.personal
        key = (broadcast.round_idx, broadcast.exchange, None if common else client_id)
        received = {name: loaded[name] for name in weights.trainable}
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
        for state in (update.weights, own):
            if state:
                vectors = flatten(state).items()
                sums += [
                    vector.sum(dtype=torch.float64) for dtype, vector in vectors if dtype.is_floating_point
                ]
        if update.extras:
            sums += [tensor.detach().sum(dtype=torch.float64) for tensor in tensors_in(update.extras)]
        if not sums:
            return torch.zeros((), dtype=torch.float64, device=self.loop.device)
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum()

    def _skipped(self, update: ClientUpdate, finite: Tensor, start: State) -> ClientUpdate:
        """The update, or on the device one without samples and without a change where it is not finite."""
        weights = update.weights and sanitised(update.weights, finite, start)
        extras = sanitised_tree(dict(update.extras), finite)
        return replace(
            update, num_samples=finite.to(torch.int64) * update.num_samples, weights=weights, extras=extras
        )

    def _to_host(
        self, sums: list[Tensor], cohort: list[int], round_idx: int, result: RoundResult
    ) -> dict[str, float]:
        """The round's one transfer to the host: is every update finite, and what was logged."""
        logged = self.book.values()
        names = list(logged)
        on_host = torch.stack(sums + [logged[name].double().to(sums[0].device) for name in names]).tolist()
        clients = cohort * len(self.client.exchanges)
        broken = {
            c: None
            for c, value in zip(clients, on_host[: len(sums)], strict=True)
            if not abs(value) < float("inf")
        }
        if broken and not self.skips:
            client_id = next(iter(broken))
            raise NonFiniteUpdateError(
                f"every client update must be finite, but client {client_id} returned NaN or infinite values in round "
                f"{round_idx}; lower the learning rate, set model.clip_norm, or set model.nonfinite to skip"
            )
        for client_id in broken:
            del result.records[client_id]
        values = dict(zip(names, on_host[len(sums) :], strict=True))
        if self.skips:
            values["train/skipped"] = float(len(broken))
        return values


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
