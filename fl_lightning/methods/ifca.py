"""IFCA: k models, of which each client trains the one with the least loss on its own training samples.

Source: Ghosh et al., NeurIPS 2020, arXiv:2006.04088, Algorithm 1, option II (averages of models).
Server: k models, each the mean of the clients that chose it. A model that nobody chose stays as it is.
Note: a cluster's mean weighs clients as the rule does, by their samples as in the authors' femnist code (the paper has
equal weights: `weighting: uniform`). A test chooses by the training loss, too, never by test labels. The global model
is the mean of all participants, and serves the evaluation only.
"""

import copy
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import combinations
from typing import Any, cast

import torch
from torch import Tensor, nn

from fl_lightning.aggregation import Aggregator, ServerModule, StateBuffers
from fl_lightning.client import WholeModelClient, check_loss_returned
from fl_lightning.functional.state import State, StateLike, clone
from fl_lightning.types import Broadcast, ClientData, ClientUpdate
from fl_lightning.utils.settings import as_list, check_count, check_kind

NO_CHOICE = -1
"""The choice of a client without samples."""

CLUSTER = "train/cluster/{}"
"""Log key of the share of the clients that chose a cluster."""

CHANGED = "train/cluster_changed"
"""Log key of the share of the clients that chose another cluster than the last time."""


class IFCAServer(ServerModule):
    """Keeps k models, and makes each the mean of the clients that chose it.

    Attributes:
        models: The clustered entries of the k models. All other entries are the global model's.
        choices: The last choice of each client, (N,) int64, in the order of the ids of the clients that train. -1 is
            none.
    """

    models: nn.ModuleList
    choices: Tensor

    def snapshot(self) -> dict[str, Any]:
        # Models and choices are replaced and never edited.
        return dict(self.state_dict())

    def setup(self) -> None:
        client = self.client_of(IFCA)
        self.check_shares()
        names = self.clustered(client.shared)
        weights = self.server.weights
        first = clone({name: weights[name] for name in names})
        starts = [first, *(self.drawn(cluster, names) for cluster in range(1, client.k))]
        check_different(starts, trainable=self.server.trainable)
        like = next(iter(weights.values()))
        self.models = nn.ModuleList(StateBuffers(start) for start in starts)
        self.choices = nn.Buffer(torch.full((self.server.num_clients,), NO_CHOICE, device=like.device))
        self._place = {client_id: place for place, client_id in enumerate(self.server.clients)}
        self._start: State = {}
        self._row: dict[str, float] = {}

    def check_aggregator(self, aggregator: Aggregator) -> None:
        super().check_aggregator(aggregator)
        # A cluster's mean weighs clients as the rule's mean of all participants does.
        self._weight = aggregator.weight

    def clustered(self, shared: Sequence[str]) -> list[str]:
        """Return the names of the entries that each cluster has of its own. Frozen parameters are the same in all.

        Args:
            shared: `fnmatch` patterns of entries that all clusters share.

        Raises:
            ValueError: A pattern matches no entry.
        """
        weights = self.server.weights
        for pattern in shared:
            if not any(fnmatchcase(name, pattern) for name in weights):
                raise ValueError(
                    f"shared must match entries that the clients share, got {pattern!r}, which matches none of "
                    f"{list(weights)[:8]}; give such as {next(iter(weights))!r}"
                )
        trainable = self.server.trainable
        frozen = {name for name, _ in self.server.module.named_parameters() if name not in trainable}
        free = [name for name in weights if name not in frozen]
        return [name for name in free if not any(fnmatchcase(name, pattern) for pattern in shared)]

    def drawn(self, cluster: int, names: Sequence[str]) -> State:
        """Draw the clustered entries of a further model, by `reset_parameters` of the layers that own them.

        Args:
            cluster: Number of the model, ≥ 1. It keys the draws.
            names: The names of the clustered entries.

        Raises:
            ValueError: A layer with trained clustered entries has no `reset_parameters`.
        """
        weights = self.server.weights
        start: State = {}
        for name in names:
            path, _, attribute = name.rpartition(".")
            layer = self.server.module.get_submodule(path)
            check_redraws(layer, path=path, attribute=attribute)
            seed = self.server.generator(f"ifca/{cluster}/{path}").initial_seed()
            start[name] = redrawn(layer, attribute, seed=seed).to(weights[name])
        return start

    def begin_round(self, cohort: list[int]) -> None:
        self._row = {}
        # One object for all clients of the round.
        self._start = {**self.server.weights, **self.model(0)}

    def model(self, cluster: int) -> StateBuffers:
        """Return the clustered entries of a model."""
        return cast(StateBuffers, self.models[cluster])

    def broadcast(self, exchange: str, client_id: int) -> Broadcast:
        others = [dict(self.model(cluster)) for cluster in range(1, len(self.models))]
        return Broadcast(
            round_idx=self.server.round_idx,
            exchange=exchange,
            weights=self._start,
            extras={"models": others},
        )

    def deployment(self, client_id: int) -> Mapping[str, Any]:
        return {"models": [dict(self.model(cluster)) for cluster in range(len(self.models))]}

    def add(self, update: ClientUpdate) -> None:
        cluster = update.extras["cluster"]
        if cluster == NO_CHOICE:
            return
        self.gather(update, weights=False)
        if update.weights is not None:
            model = self.model(cluster)
            members = {name: update.weights[name] for name in model}
            self.sum(str(cluster), members, self._weight(update), sent=model)

    def finish(self, exchange: str, aggregate: State | None) -> State | None:
        for cluster in range(len(self.models)):
            model = self.model(cluster)
            mean = self.partial.mean(str(cluster), partial(dict, model), sent=model)
            if mean is not None:
                self.models[cluster] = StateBuffers(clone(mean))
        self._count(self.rows_with("included"))
        return aggregate

    def _count(self, rows: Mapping[int, ClientUpdate]) -> None:
        """Keep the choices of the round's clients, and the shares of the row."""
        if not rows:
            return
        before = self.choices.tolist()
        choices = self.choices.clone()
        sizes = [0] * len(self.models)
        num_changed = 0
        for client_id, row in rows.items():
            cluster = row.extras["cluster"]
            place = self._place[client_id]
            sizes[cluster] += 1
            if before[place] not in (NO_CHOICE, cluster):
                num_changed += 1
            choices[place] = cluster
        self.choices = nn.Buffer(choices)
        self._row = {CLUSTER.format(cluster): size / len(rows) for cluster, size in enumerate(sizes)}
        self._row[CHANGED] = num_changed / len(rows)

    def row_values(self) -> Mapping[str, float]:
        return self._row


class IFCA(WholeModelClient):
    """Trains with the loss as it is, from the one of k models with the least mean loss on its training samples.

    Args:
        k: Number of models, >= 1. With 1 the method is FedAvg.
        shared: `fnmatch` patterns of entries that are one for all models, such as `net.body.*`. They are averaged over
            all participants. None: each model has all entries of its own. Frozen parameters are always shared.
        base: Arguments of `ClientModule`.
    """

    server_class = IFCAServer
    own_start = True
    stackable = True
    sends = frozenset({"weights", "statistics"})
    reads = frozenset({"batches"})

    def __init__(self, k: int = 2, shared: str | Sequence[str] | None = None, **base: Any) -> None:
        super().__init__(**base)
        check_loss_returned(self)
        check_count(1, "1 is FedAvg", k=k)
        patterns = as_list(shared)
        for pattern in patterns:
            check_kind(str, "names or patterns of entries", "give such as 'net.body.*'", shared=pattern)
        self.k = k
        self.shared = tuple(patterns)

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        self.round["cluster"] = torch.tensor(NO_CHOICE)
        if not local.size():
            return
        others: list[State] = broadcast.extras["models"]
        clustered = others[0] if others else {}
        first = {name: self.context.start[name] for name in clustered}
        models = [first, *others]
        cluster = self.choose(models, local)
        self.round["cluster"] = torch.tensor(cluster)
        if cluster:
            self.context.move_start(models[cluster])

    def choose(self, models: Sequence[StateLike], local: ClientData) -> int:
        """Load the model with the least loss, the first one of equal ones, and return its number.

        Args:
            models: The clustered entries of the k models.
            local: The client's data, with samples.
        """
        losses = self.losses(models, local)
        cluster = int(losses.where(losses.isfinite(), torch.inf).argmin())
        self.load_model(models[cluster])
        return cluster

    @torch.no_grad()
    def losses(self, models: Sequence[StateLike], local: ClientData) -> Tensor:
        """Return the mean loss of each model over the client's training samples in eval mode, (k,) float64.

        The module has the entries of the last model afterwards.
        """
        losses: list[Tensor] = []
        for model in models:
            self.load_model(model)
            losses.append(self.mean_over(local, lambda batch: self.local_loss(batch, 0)))
        return torch.stack(losses).cpu()

    def reply(self, exchange: str, local: ClientData) -> dict[str, Any]:
        return {"cluster": int(self.round["cluster"])}

    def receive_deployment(self, extras: Mapping[str, Any], local: ClientData) -> None:
        if local.size():
            self.choose(extras["models"], local)

    @property
    def deploys_own_model(self) -> bool:
        return True


def check_redraws(layer: nn.Module, *, path: str, attribute: str) -> None:
    """Refuse a layer with a trained entry that cannot be drawn anew.

    Args:
        layer: The layer.
        path: Path of the layer in the client module.
        attribute: Name of the entry in the layer. A buffer need not be drawn.

    Raises:
        ValueError: The layer has no `reset_parameters`.
    """
    is_trained = isinstance(getattr(layer, attribute), nn.Parameter)
    if is_trained and not callable(getattr(layer, "reset_parameters", None)):
        raise ValueError(
            f"IFCA draws its k models by reset_parameters of their layers, which {type(layer).__name__} {path!r} does "
            f"not have; define it there, or set model.client.shared to [{path}.{attribute}]"
        )


def redrawn(layer: nn.Module, attribute: str, *, seed: int) -> Tensor:
    """Return an entry of a layer as `reset_parameters` draws it, on the CPU, whose generator draws alike everywhere.

    Args:
        layer: The layer, which stays as it is.
        attribute: Name of the entry in the layer.
        seed: Seed of the draw.

    >>> layer = nn.Linear(2, 3)
    >>> torch.equal(redrawn(layer, "bias", seed=1), redrawn(layer, "bias", seed=1))
    True
    """
    copied = copy.deepcopy(layer).cpu()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        reset: Any = getattr(copied, "reset_parameters", None)
        if callable(reset):
            reset()
    entry: Tensor = getattr(copied, attribute)
    return entry.detach()


def check_different(starts: Sequence[StateLike], trainable: Sequence[str]) -> None:
    """Refuse models that begin alike, of which clients would always choose the first.

    Args:
        starts: The clustered entries of the models.
        trainable: The names of the trained entries.

    Raises:
        ValueError: Two models have the same trained entries.
    """
    names = [name for name in starts[0] if name in trainable]
    for (one, first), (other, second) in combinations(enumerate(starts), 2):
        if all(torch.equal(first[name], second[name]) for name in names):
            raise ValueError(
                f"IFCA needs k={len(starts)} models that begin differently, got equal ones ({one} and {other}), of "
                f"which nobody would choose the second; leave more entries out of model.client.shared, or set "
                f"model.client.k to 1"
            )
