"""FedFOMO: a client moves towards those models of others that do better than its own on its validation samples.

Source: Zhang et al., ICLR 2021, arXiv:2012.08565, Eqs. 3-4 and Algorithm 1; 5 candidates, ε = 0.3 less 0.05 a round as
in the authors' code. Server: no model of its own. The mean of the cohort's models serves the evaluation only.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fl_lightning.aggregation import LatestModels
from fl_lightning.client import InitialModelClient, check_loss_returned
from fl_lightning.functional.state import State, StateLike, clone, inner, sub, weighted_mean
from fl_lightning.types import Broadcast, ClientData, ClientUpdate, Phase
from fl_lightning.utils.settings import check_above, check_at_least, check_at_most, check_below


def helpfulness(own_loss: Tensor, losses: Tensor, distances: Tensor, floor: float = 1e-5) -> Tensor:
    """Compute (L(θ_i) − L(θ_n)) / (‖θ_n − θ_i‖ + floor) (Eq. 4): (), (M,), (M,) -> (M,).

    Args:
        own_loss: L(θ_i).
        losses: L(θ_n) of the candidates.
        distances: ‖θ_n − θ_i‖ of the candidates.
        floor: Number that keeps the quotient finite.

    >>> helpfulness(torch.tensor(3.0), torch.tensor([1.0, 4.0]), torch.tensor([2.0, 1.0]), floor=0.0)
    tensor([ 1., -1.])
    """
    return (own_loss - losses) / (distances + floor)


def candidate_weights(raw: Tensor) -> Tensor:
    """Divide the positive part by its sum, all zero if no candidate helps: (M,) -> (M,).

    >>> candidate_weights(torch.tensor([1.0, -2.0, 3.0])), candidate_weights(torch.tensor([-1.0]))
    (tensor([0.2500, 0.0000, 0.7500]), tensor([0.]))
    """
    return nn.functional.normalize(raw.clamp(min=0), p=1, dim=0, eps=torch.finfo(raw.dtype).tiny)


def moved_towards(model: StateLike, candidates: Sequence[StateLike], weights: Tensor) -> State:
    """Compute θ_i + Σ_n w_n (θ_n − θ_i) (Eq. 3), in which θ_i weighs 1 − Σ_n w_n, ≥ 0.

    Args:
        model: The client's model θ_i.
        candidates: The M models θ_n.
        weights: The weights w_n, (M,).

    >>> moved_towards({"w": torch.tensor([1.0])}, [{"w": torch.tensor([3.0])}], torch.tensor([0.25]))
    {'w': tensor([1.5000])}
    """
    own_weight = (1 - weights.double().sum()).clamp(min=0)
    return weighted_mean([model, *candidates], [own_weight.item(), *weights.tolist()])


class FedFOMOServer(LatestModels):
    """Keeps every client's latest model and the affinity of each pair, and sends a client the most promising ones.

    Attributes:
        affinity: P, (N, N) float64, the sum of the unclipped helpfulness so far, plus 1 on the diagonal. Rows and
            columns are the clients that train, in the order of their ids.
    """

    affinity: Tensor

    def setup(self) -> None:
        self.client_of(FedFOMO)
        self.check_shares()
        super().setup()
        self.affinity = nn.Buffer(torch.eye(self.server.num_clients, dtype=torch.float64, device=self.trained.device))

    def candidates(self, client_id: int) -> list[int]:
        """Return the ids of the clients whose models a client is sent, ascending."""
        client = self.client_of(FedFOMO)
        if not self.server.size(client_id):
            return []
        others = [n for n in self.clients_with_model() if n != client_id]
        if client.num_candidates == "all":
            return others
        epsilon = client.epsilon - client.epsilon_decay * self.server.round_idx
        order = self.explored(client_id, others, epsilon)
        if order is None:
            affinity = self.affinity[self.place_of(client_id)].tolist()
            # Of equal clients the one with the lower id comes first.
            order = sorted(others, key=lambda n: -affinity[self.place_of(n)])
        return sorted(order[: client.num_candidates])

    def explored(self, client_id: int, others: list[int], epsilon: float) -> list[int] | None:
        """Draw an order of the candidates with probability epsilon, else return None.

        A study may override the draw.

        Args:
            client_id: The id of the client.
            others: The ids of the candidates, ascending.
            epsilon: The probability of a draw.
        """
        generator = self.server.generator(f"candidates/{client_id}")
        explores = torch.rand((), generator=generator, dtype=torch.float64).item() < epsilon
        if not explores:
            return None
        return [others[place] for place in torch.randperm(len(others), generator=generator)]

    def broadcast(self, exchange: str, client_id: int) -> Broadcast:
        models = {n: dict(self.latest(n)) for n in self.candidates(client_id)}
        initial = self.client_of(FedFOMO).initial
        weights: State | None = None
        if initial is not None and not self.has_model(client_id):
            weights = {name: initial[name] for name in self.server.weights}
        return Broadcast(
            round_idx=self.server.round_idx,
            exchange=exchange,
            weights=weights,
            extras={"candidates": models},
        )

    def add(self, update: ClientUpdate) -> None:
        self.gather(update)

    def finish(self, exchange: str, aggregate: State | None) -> State | None:
        self.affinity = nn.Buffer(self.affinity.clone())
        rows = self.rows_with("included")
        for client_id, row in rows.items():
            self.affinity[self.place_of(client_id)] += row.extras["helpfulness"].double()
        self.keep(row for row in rows.values() if row.num_steps)
        return aggregate


class FedFOMO(InitialModelClient):
    """Trains with the loss as it is, from the client's last model moved towards the candidates that help it.

    Args:
        num_candidates: Number M of models that a client is sent, >= 1, or `all`.
        epsilon: Probability in round 0 that all candidates of a client are drawn at random, in [0, 1].
        epsilon_decay: Fall of the probability from one round to the next, >= 0. At 0 the probability stays.
        val_share: Share of the client's samples that judge the candidates, in (0, 1), at least one sample. They are the
            same in every round. A client whose samples are all in one part, such as a single one, trains and judges by
            all of them.
        base: Arguments of `ClientModule`.
    """

    server_class = FedFOMOServer
    own_start = True
    stackable = False  # a client judges models one by one before it trains
    sends = frozenset({"weights", "statistics"})
    reads = frozenset({"batches"})

    def __init__(
        self,
        num_candidates: int | Literal["all"] = 5,
        epsilon: float = 0.3,
        epsilon_decay: float = 0.05,
        val_share: float = 0.2,
        **base: Any,
    ) -> None:
        super().__init__(**base)
        check_loss_returned(self)
        if num_candidates != "all":
            check_at_least(1, "'all' sends every model", num_candidates=num_candidates)
        check_at_least(0, epsilon=epsilon, epsilon_decay=epsilon_decay)
        check_at_most(1, epsilon=epsilon)
        check_above(0, val_share=val_share)
        check_below(1, val_share=val_share)
        self.num_candidates = num_candidates
        self.epsilon = epsilon
        self.epsilon_decay = epsilon_decay
        self.val_share = val_share

    def parts(self, local: ClientData) -> tuple[Tensor, Tensor]:
        """Return the positions of the client's samples for training and of those for validation, each int64.

        A sample is in the same part in every round, whichever other samples the client has.
        """
        n, present = local.dealt()
        order = torch.randperm(n, generator=local.generator("validation", per_round=False))
        num_held = max(1, int(self.val_share * n + 1e-9))
        is_held = torch.zeros(n, dtype=torch.bool)
        is_held[order[:num_held]] = True
        trained = (~is_held[present]).nonzero().flatten()
        held = is_held[present].nonzero().flatten()
        if len(trained) and len(held):
            return trained, held
        everything = torch.arange(len(present))
        return everything, everything

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        self.load_model(self.own_model() or {})
        place = {client_id: place for place, client_id in enumerate(local.clients)}
        raw = torch.zeros(len(place), dtype=torch.float64)
        if local.size():
            trained, held = self.parts(local)
            self.round["trained"] = trained
            models = broadcast.extras["candidates"]
            if models:
                places = [place[n] for n in models]
                raw[places] = self.move(list(models.values()), held=local.restricted("train", held))
        self.round_buffer("helpfulness", raw)

    @torch.no_grad()
    def move(self, candidates: Sequence[Mapping[str, Tensor]], held: ClientData) -> Tensor:
        """Move the module towards the candidates, and return their helpfulness, (M,) float64.

        The helpfulness of a candidate whose loss is not finite is 0.

        Args:
            candidates: The models of the candidates, at least one.
            held: The client's samples that judge the candidates.
        """
        last = clone(self.entries())
        losses = []
        distances = []
        for model in (last, *candidates):
            self.load_model(model)
            losses.append(self.mean_over(held, lambda batch: self.local_loss(batch, 0)))
            away = sub({name: model[name].double() for name in self.params()}, last)
            distances.append(inner(away, away).sqrt())
        own_loss, *others = losses
        losses_of_others = torch.stack(others)
        raw = helpfulness(own_loss, losses=losses_of_others, distances=torch.stack(distances[1:]))
        raw = raw.masked_fill(~losses_of_others.isfinite(), 0).cpu()
        shared = {name: last[name] for name in candidates[0]}
        moved = moved_towards(shared, candidates, weights=candidate_weights(raw))
        self.load_model(last | moved)
        return raw

    def phases(self, exchange: str) -> tuple[Phase, ...]:
        return (Phase(indices=self.round.get("trained")),)

    def reply(self, exchange: str, local: ClientData) -> dict[str, Any]:
        return {**super().reply(exchange, local), "helpfulness": self.round["helpfulness"]}
