"""FedAMP: each client is pulled towards a mean of all clients' models in which similar models weigh more.

Source: Huang et al., AAAI 2021, arXiv:2007.03797, Eqs. 3-7; HeurFedAMP, its heuristic form, is `attention: cosine`.
Server: the latest model of every client, and for the evaluation of a global model the mean of the cohort's.
Note: a client trains from u_i, the mean that it is sent, and not from its own model. With the paper's alpha the pull is
so weak that a start from its own model would be no collaboration. The paper's decay of alpha, ×0.1 every 30 rounds, is
left out. A client that has not trained has the initial model, and nobody else is sent a part of it.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fl_lightning.aggregation import LatestModels, StateBuffers
from fl_lightning.client import OwnModelClient
from fl_lightning.functional.losses import proximal
from fl_lightning.functional.state import State, StateLike, StateSum, clone, mean_of
from fl_lightning.types import Batch, Broadcast, ClientData, ClientUpdate
from fl_lightning.utils.settings import check_above, check_at_least, check_at_most, check_choice


def exp_attention(squares: Tensor, alpha: float, sigma: float) -> Tensor:
    """Compute ξ_ij = (α/σ) e^(−‖w_i − w_j‖²/σ), of A(x) = 1 − e^(−x/σ) (Eq. 5), of squared distances: (M,) -> (M,).

    >>> exp_attention(torch.tensor([0.0, 2.0]), alpha=0.5, sigma=2.0)
    tensor([0.2500, 0.0920])
    """
    return alpha / sigma * (-squares / sigma).exp()


def cosine_attention(cosines: Tensor, sigma: float, self_weight: float) -> Tensor:
    """Compute ξ_ij = (1 − ξ_ii) softmax_j(σ cos(w_i, w_j)) (HeurFedAMP): (M,) -> (M,), with the sum 1 − ξ_ii.

    >>> cosine_attention(torch.tensor([0.5, 0.5]), sigma=5.0, self_weight=0.4)
    tensor([0.3000, 0.3000])
    """
    return (1 - self_weight) * (sigma * cosines).softmax(0)


def mixed(own: StateLike, others: Sequence[StateLike], weights: Tensor) -> State:
    """Compute u_i = w_i + Σ_j ξ_ij (w_j − w_i) (Eq. 6), in which w_i weighs 1 − Σ_j ξ_ij.

    Entries that all models have alike keep their bits. Integers are rounded half to even.

    Args:
        own: The model w_i.
        others: The M models w_j.
        weights: ξ_i, (M,), ≥ 0, with a sum of at most 1.

    >>> mixed({"w": torch.tensor([1.0])}, [{"w": torch.tensor([3.0])}], torch.tensor([0.25]))
    {'w': tensor([1.5000])}
    """
    total = StateSum()
    own_weight = (1 - weights.double().sum()).clamp(min=0)
    total.add(own, own_weight.item(), sent=own)
    for model, weight in zip(others, weights.tolist(), strict=True):
        total.add(model, weight, sent=own)
    return mean_of(total, sent=own)


class FedAMPServer(LatestModels):
    """Sends each client a mean of all latest models, its own among them.

    A client that has trained no model deploys the initial one.

    Attributes:
        initial: The initial model, which stands for the model of a client that has not trained.
    """

    initial: StateBuffers

    def setup(self) -> None:
        client = self.client_of(FedAMP)
        self.check_shares()
        if client.attention == "exp":
            check_alpha(client.alpha, sigma=client.sigma, num_clients=self.server.num_clients)
        super().setup()
        self.initial = StateBuffers(clone(self.server.weights))

    def attention(self, client_id: int) -> dict[int, float]:
        """Compute how much the models of others weigh for a client, by their ids, ascending."""
        client = self.client_of(FedAMP)
        others = [n for n in self.clients_with_model() if n != client_id]
        if not others:
            return {}
        own = self._trained_entries(self.present(client_id))
        # One model after the other is laid end to end, since all of them would be N copies in float64.
        if client.attention == "exp":
            squares = torch.stack([self._square(own, client_id=n) for n in others])
            weights = exp_attention(squares, alpha=client.alpha, sigma=client.sigma)
        else:
            cosines = torch.stack([self._cosine(own, client_id=n) for n in others])
            weights = cosine_attention(cosines, sigma=client.sigma, self_weight=client.self_weight)
        return dict(zip(others, weights.tolist(), strict=True))

    def _square(self, own: Tensor, *, client_id: int) -> Tensor:
        """Return the squared distance of a model, (n,), from the latest one of a client, () float64."""
        return (self._trained_entries(self.latest(client_id)) - own).square().sum()

    def _cosine(self, own: Tensor, *, client_id: int) -> Tensor:
        """Return the cosine of a model, (n,), and the latest one of a client, () float64."""
        return F.cosine_similarity(self._trained_entries(self.latest(client_id)), own, dim=0)

    def _trained_entries(self, model: StateLike) -> Tensor:
        """Return the trained entries of a model end to end, (n,) float64."""
        return torch.cat([model[name].double().flatten() for name in self.server.trainable])

    def present(self, client_id: int) -> StateBuffers:
        """Return the model w_i of a client, the initial one if it has trained none."""
        return self.latest(client_id) if self.has_model(client_id) else self.initial

    def broadcast(self, exchange: str, client_id: int) -> Broadcast:
        attention = self.attention(client_id)
        others = [self.latest(n) for n in attention]
        weights = torch.tensor(list(attention.values()), dtype=torch.float64)
        mean = mixed(self.present(client_id), others, weights)
        return Broadcast(round_idx=self.server.round_idx, exchange=exchange, weights=mean)

    def deployment(self, client_id: int) -> Mapping[str, Any]:
        return {} if self.has_model(client_id) else {"initial": dict(self.initial)}

    def add(self, update: ClientUpdate) -> None:
        self.gather(update)

    def finish(self, exchange: str, aggregate: State | None) -> State | None:
        # A client that does not send its number of steps has taken some if it has samples.
        sends_counts = self.client_of(FedAMP).sends_counts
        self.keep(row for row in self.rows_with("num_samples").values() if row.num_steps or not sends_counts)
        return aggregate


class FedAMP(OwnModelClient):
    """Trains from u_i with the loss L + (lam / (2 alpha)) ‖w − u_i‖² over the shared trainable parameters.

    A client deploys the model that it has trained last.

    Args:
        alpha: Step size α of the server towards similar models, > 0. With `exp`, at most sigma / (N − 1) for N clients
            that train, so that no model has a negative weight.
        sigma: σ > 0. With `exp` it is the scale of squared distances at which models are alike, with `cosine` the
            sharpness of the softmax, such as 25.
        lam: Weight λ of the pull towards u_i, >= 0.
        attention: Form of the weights. `exp` is FedAMP, `cosine` HeurFedAMP.
        self_weight: Weight ξ_ii of the client's own model with `cosine`, in [0, 1].
        base: Arguments of `ClientModule`.
    """

    server_class = FedAMPServer
    own_start = True
    stackable = True

    def __init__(  # noqa: PLR0917 - called by position
        self,
        alpha: float = 1e4,
        sigma: float = 1e6,
        lam: float = 1.0,
        attention: Literal["exp", "cosine"] = "exp",
        self_weight: float = 0.5,
        **base: Any,
    ) -> None:
        super().__init__(**base)
        check_above(0, alpha=alpha, sigma=sigma)
        check_at_least(0, lam=lam, self_weight=self_weight)
        check_at_most(1, self_weight=self_weight)
        check_choice(("exp", "cosine"), attention=attention)
        self.alpha = alpha
        self.sigma = sigma
        self.lam = lam
        self.attention = attention
        self.self_weight = self_weight

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.local_loss(batch, batch_idx)
        pull = proximal(self.params(), self.received)
        self.log("train/proximal", pull)
        return loss + self.lam / self.alpha * pull

    def receive_deployment(self, extras: Mapping[str, Any], local: ClientData) -> None:
        self.load_model(extras["initial"])


def check_alpha(alpha: float, sigma: float, num_clients: int) -> None:
    """Refuse an α with which a client's own model may have a negative weight.

    Args:
        alpha: α.
        sigma: σ.
        num_clients: N, the number of clients that train.

    Raises:
        ValueError: α is above σ / (N − 1).
    """
    if num_clients < 2:
        return
    largest = sigma / (num_clients - 1)
    if alpha > largest:
        raise ValueError(
            f"alpha must be at most sigma / (N - 1) for N={num_clients} clients, so that no model has a negative "
            f"weight, got alpha={alpha} with sigma={sigma}; set model.client.alpha to {largest}"
        )
