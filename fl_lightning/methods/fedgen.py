"""FedGen: the server trains a generator of features on the clients' heads, and the clients train on what it makes.

Source: Zhu et al., ICML 2021, arXiv:2105.10056, Eqs. 4-5, Algorithm 1, and its code. Server: FedAvg, and the training
of the generator G, between the clients' training and the mean.
Note: the paper has one term at the clients, without a decay. The released code lets it fade, has a second one (beta),
and weighs each client's loss by its share of a class (`ensemble: losses`). The paper takes the loss of the mean logits.
In the code all samples of a batch have the client's mean share, because (B,) losses meet (B, 1) shares. Here each has
the share of its class. The code counts one sample too many of each class. Here the counts are the samples. The code's
alpha = beta = 10 are for SGD with lr 0.01 without momentum. A robust rule guards the weights only: G learns from every
head.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Adam

from fl_lightning.aggregation import ServerModule
from fl_lightning.aggregation.server_parts import StateBuffers
from fl_lightning.client import ClientModule
from fl_lightning.client.personal import HEAD, check_head
from fl_lightning.functional.losses import cross_entropy, kl_divergence, true_class
from fl_lightning.functional.state import zeros_like
from fl_lightning.types import Batch, Broadcast, ClientData, ClientUpdate, State
from fl_lightning.utils.devices import copy_to_device
from fl_lightning.utils.life import heartbeat
from fl_lightning.utils.settings import check_above, check_at_least, check_choice

Ensemble = Literal["losses", "logits"]

STATISTICS = ("norm.running_mean", "norm.running_var")
"""The names of the entries of G that are not trained."""

LEAST = 1e-4
"""Smallest value to which a coefficient of the clients' terms decays."""


def new_generator(*, noise_dim: int, num_classes: int, hidden: int, width: int, draws: torch.Generator) -> State:
    """Draw the first entries of G as torch.nn.Linear and BatchNorm1d have them, float64 on the CPU.

    Args:
        noise_dim: Number of noise values k.
        num_classes: Number of classes C.
        hidden: Number of hidden units h.
        width: Number of features d.
        draws: The generator of the draws.
    """

    def uniform(*shape: int, fan_in: int) -> Tensor:
        return (2 * torch.rand(*shape, generator=draws, dtype=torch.float64) - 1) / math.sqrt(fan_in)

    inputs = noise_dim + num_classes
    ones = torch.ones(hidden, dtype=torch.float64)
    return {
        "hidden.weight": uniform(hidden, inputs, fan_in=inputs),
        "hidden.bias": uniform(hidden, fan_in=inputs),
        "norm.weight": ones,
        "norm.bias": torch.zeros_like(ones),
        "norm.running_mean": torch.zeros_like(ones),
        "norm.running_var": ones.clone(),
        "output.weight": uniform(width, hidden, fan_in=hidden),
        "output.bias": uniform(width, fan_in=hidden),
    }


def generated(generator: Mapping[str, Tensor], labels: Tensor, noise: Tensor, *, training: bool = False) -> Tensor:
    """Compute G(y, ε), features of classes: (n,) integers, (n, k) -> (n, d).

    Args:
        generator: Entries of G.
        labels: Classes y.
        noise: ε, in the type of the entries.
        training: Whether BatchNorm takes the statistics of the batch, and updates the running ones in place.
    """
    num_classes = generator["hidden.weight"].shape[1] - noise.shape[1]
    inputs = torch.cat([noise, true_class(labels, num_classes).to(noise.dtype)], dim=1)
    hidden = F.batch_norm(
        F.linear(inputs, generator["hidden.weight"], generator["hidden.bias"]),
        running_mean=generator["norm.running_mean"],
        running_var=generator["norm.running_var"],
        weight=generator["norm.weight"],
        bias=generator["norm.bias"],
        training=training,
    )
    return F.linear(hidden.relu(), generator["output.weight"], generator["output.bias"])


def ensemble_loss(logits: Tensor, labels: Tensor, counts: Tensor, form: Ensemble = "losses") -> Tensor:
    """Average over generated features how wrong the clients' heads find their classes: (K, n, C), (n,), (K, C) -> ().

    Args:
        logits: Logits of the features by each of K heads.
        labels: Classes of the features.
        counts: Number of samples of each class that each client has. `logits` does not read them.
        form: `losses`: Σ_k of the cross-entropy of head k, weighted by the client's share of the class. `logits`: the
            cross-entropy of the heads' mean logits.

    >>> logits = torch.tensor([[[0.0, 0.0]], [[9.0, 0.0]]])
    >>> ensemble_loss(logits, torch.tensor([1]), torch.tensor([[0, 2], [5, 0]]))
    tensor(0.6931)
    """
    if form == "logits":
        return cross_entropy(logits.mean(0), labels)
    losses = F.cross_entropy(logits.transpose(1, 2), labels.expand(len(logits), -1), reduction="none")
    of_labels = counts[:, labels].to(losses.dtype)
    return (of_labels / of_labels.sum(0) * losses).sum(0).mean()


def likeness(features: Tensor, noise: Tensor) -> Tensor:
    """Compute exp(−mean_ij of mean|z_i − z_j| · mean(ε_i − ε_j)²), which is 1 if noise has no effect on features.

    Args:
        features: z, (n, d).
        noise: ε, (n, k).

    >>> likeness(torch.zeros(2, 3), torch.tensor([[0.0], [1.0]]))
    tensor(1.)
    """
    far = (features[:, None] - features[None]).abs().mean(2)
    unlike = (noise[:, None] - noise[None]).square().mean(2)
    return (-(far * unlike).mean()).exp()


def decayed(coefficient: float, decay: float, round_idx: int) -> float:
    """Compute a coefficient in a round: max(coefficient · decay^r, 1e-4), and 0 for 0.

    >>> decayed(10.0, 0.5, 2), decayed(10.0, 0.5, 99), decayed(0.0, 0.5, 2)
    (2.5, 0.0001, 0.0)
    """
    return max(coefficient * decay**round_idx, LEAST) if coefficient else 0.0


class FedGenServer(ServerModule):
    """Trains G on the heads of the clients with data, and sends it from the round on in which it has been trained.

    Attributes:
        generator: Entries of G, float64. This and all that follows is empty where FedGen is FedAvg.
        steps: Adam's steps so far, of each entry of G that is trained. They and the moments live on over the rounds.
        first_moments: Adam's mean gradients, float64.
        second_moments: Adam's mean squared gradients, float64.
        seen: Which classes a participant has had, `classes` (C,) bool.
    """

    stale_reason = "trains its generator on the clients' heads, which would be no longer theirs"

    def __init__(self) -> None:
        super().__init__()
        self.generator = StateBuffers({})
        self.steps = StateBuffers({})
        self.first_moments = StateBuffers({})
        self.second_moments = StateBuffers({})
        self.seen = StateBuffers({})
        self._message: dict[str, Any] = {}

    @property
    def client(self) -> "FedGen":
        """The client module, whose settings the server reads."""
        return self.client_of(FedGen)

    @property
    def takes_stale(self) -> bool:  # type: ignore[override]
        """Whether updates may be of earlier rounds. Only without a generator, which is FedAvg."""
        return not self.client.generates

    def setup(self) -> None:
        client = self.client
        if not client.generates:
            return
        check_head(client, needs_body=False)
        head = client.built_net.head
        kept = [name for name in head_names(head) if name not in self.server.weights]
        if kept:
            raise ValueError(
                f"FedGen learns from the heads that the clients send, but {kept[0]!r} stays with each client; leave "
                f"model.personal unset, or take a method with a personal head, such as FedRep"
            )
        device = head.weight.device
        drawn = new_generator(
            noise_dim=client.noise_dim,
            num_classes=head.out_features,
            hidden=client.gen_hidden,
            width=head.in_features,
            draws=self.server.generator("generator"),
        )
        entries = {name: value.to(device) for name, value in drawn.items()}
        trained = {name: value for name, value in entries.items() if name not in STATISTICS}
        self.generator = StateBuffers(entries)
        # Adam counts in float32.
        self.steps = StateBuffers({name: torch.zeros((), dtype=torch.float32) for name in trained})
        self.first_moments = StateBuffers(zeros_like(trained))
        self.second_moments = StateBuffers(zeros_like(trained))
        self.seen = StateBuffers({"classes": torch.zeros(head.out_features, dtype=torch.bool, device=device)})

    def begin_round(self, cohort: list[int]) -> None:
        self._message = {}
        # Round 0 of a further fit is without G, too.
        if not self.seen or not self.server.round_idx or not self.seen["classes"].any():
            return
        like = self.server.weights[f"{HEAD}weight"]
        # G is edited when the clients have been trained.
        sent = {name: value.to(like.dtype, copy=True) for name, value in self.generator.items()}
        self._message = {"generator": sent, "seen": self.seen["classes"].clone()}

    def broadcast(self, exchange: str, client_id: int) -> Broadcast:
        return self.sends(exchange, **self._message)

    def add(self, update: ClientUpdate) -> None:
        if "counts" not in update.extras or update.weights is None:
            return
        # A frozen head is not sent.
        known = {**self.server.weights, **update.weights}
        head = {name: known[name] for name in head_names(self.client.built_net.head)}
        self.gather(replace(update, weights=head, extras={"counts": update.extras["counts"]}))

    def finish(self, exchange: str, aggregate: State | None) -> State | None:
        rows = self.rows_with("num_samples")
        if rows:
            counts = torch.stack([row.extras["counts"] for row in rows.values()])
            self._train([row.weights or {} for row in rows.values()], counts)
        return aggregate

    def _train(self, heads: list[State], counts: Tensor) -> None:
        """Train G on the heads of K clients with so many samples of each class, (K, C)."""
        client = self.client
        weights = torch.stack([head[f"{HEAD}weight"].double() for head in heads])
        biases = weights.new_zeros(weights.shape[:2])
        if f"{HEAD}bias" in heads[0]:
            biases = torch.stack([head[f"{HEAD}bias"].double() for head in heads])
        counts = counts.to(weights.device)
        had = counts.sum(0) > 0
        self.seen["classes"].logical_or_(had)
        classes = had.nonzero().flatten()
        trained = {name: self.generator[name].detach().requires_grad_() for name in self.steps}
        optimizer = self._optimizer(trained)
        for step in range(client.gen_steps):
            heartbeat()
            labels, noise = self.draws(step, classes)
            with torch.enable_grad():
                features = generated({**self.generator, **trained}, labels, noise, training=True)
                logits = torch.einsum("nd,kcd->knc", features, weights) + biases[:, None]
                loss = ensemble_loss(logits, labels, counts, form=client.ensemble)
                if client.diversity:
                    loss = loss + client.diversity * likeness(features, noise)
            gradients = torch.autograd.grad(loss, [*trained.values()])
            for entry, gradient in zip(trained.values(), gradients, strict=True):
                entry.grad = gradient
            optimizer.step()
        for name, entry in trained.items():
            self.steps[name].copy_(optimizer.state[entry]["step"])

    def _optimizer(self, trained: State) -> Adam:
        """Make the Adam of a round, which edits G and the moments of the rounds before in their buffers.

        Args:
            trained: The entries of G that are trained, which share the memory of the buffers.
        """
        client = self.client
        lr = client.gen_lr * client.decay**self.server.round_idx
        optimizer = Adam(trained.values(), lr=lr, weight_decay=client.gen_wd)
        for name, entry in trained.items():
            optimizer.state[entry] = {
                # Adam reads the number in each step. On the host it need not wait for the device.
                "step": self.steps[name].cpu(),
                "exp_avg": self.first_moments[name],
                "exp_avg_sq": self.second_moments[name],
            }
        return optimizer

    def draws(self, step: int, classes: Tensor) -> tuple[Tensor, Tensor]:
        """Draw what a step of G's training begins from: classes (n,) among some, (c,) int64, and noise (n, k) float64.

        Args:
            step: Index of the step in the round, from 0.
            classes: The classes that the clients of the round have.
        """
        client = self.client
        draws = self.server.generator(f"generator, step {step}")
        chosen = torch.randint(len(classes), (client.gen_batch,), generator=draws)
        noise = torch.rand(client.gen_batch, client.noise_dim, generator=draws, dtype=torch.float64)
        return classes[copy_to_device(chosen, classes.device)], copy_to_device(noise, classes.device)


class FedGen(ClientModule):
    """Trains with CE + α_r (B_g / B) · CE of generated features + β_r · KL(generated ‖ local model) from round 1 on.

    α_r is max(α · decay^r, 1e-4), or 0 for α = 0, and β_r likewise.

    Args:
        alpha: Weight α of the head's cross-entropy on B_g features of classes that anybody has had, >= 0.
        beta: Weight β of the divergence from the head's answers to generated features of the batch's classes, >= 0.
            FedGen with alpha = beta = 0 is FedAvg.
        decay: Factor of α, β and `gen_lr` from one round to the next, in (0, 1]. 1 is the paper's.
        ensemble: Loss of G. `losses`: the clients' losses, weighted by their shares of the class (released code).
            `logits`: the loss of their mean logits (paper).
        noise_dim: Number k of noise values that G reads, >= 1.
        gen_hidden: Number h of G's hidden units, >= 1.
        gen_steps: Number of Adam's steps on G in a round, >= 1.
        gen_batch: Number B_g of generated features in a step of G, and in a step of a client, >= 2. B is the data
            module's batch size.
        gen_lr: Adam's learning rate in round 0, > 0.
        gen_wd: Adam's weight decay, a term of the gradient, >= 0.
        diversity: Weight η of the term that keeps features of unlike noise apart, >= 0.
        base: Arguments of `ClientModule`, which must include `net` unless alpha and beta are 0.
    """

    server_class = FedGenServer
    needs = frozenset({"logits"})
    fedavg_equivalent = {"alpha": 0, "beta": 0}
    stackable = False  # each step draws from a generator of its client's own
    sends = frozenset({"weights", "label counts"})
    reads = frozenset({"label counts"})

    def __init__(
        self,
        alpha: float = 1.0,
        beta: float = 0.0,
        *,
        decay: float = 0.98,
        ensemble: Ensemble = "losses",
        noise_dim: int = 32,
        gen_hidden: int = 256,
        gen_steps: int = 50,
        gen_batch: int = 32,
        gen_lr: float = 3e-4,
        gen_wd: float = 0.01,
        diversity: float = 1.0,
        **base: Any,
    ) -> None:
        super().__init__(**base)
        check_at_least(0, "0 leaves its part out", alpha=alpha, beta=beta, gen_wd=gen_wd, diversity=diversity)
        check_above(0, decay=decay, gen_lr=gen_lr)
        if decay > 1:
            raise ValueError(f"decay must be at most 1, got {decay}; 1 keeps alpha, beta and gen_lr as they are")
        check_choice(("losses", "logits"), ensemble=ensemble)
        check_at_least(1, noise_dim=noise_dim, gen_hidden=gen_hidden, gen_steps=gen_steps)
        check_at_least(2, "the generator's BatchNorm needs two", gen_batch=gen_batch)
        self.alpha = alpha
        self.beta = beta
        self.decay = decay
        self.ensemble: Ensemble = ensemble
        self.noise_dim = noise_dim
        self.gen_hidden = gen_hidden
        self.gen_steps = gen_steps
        self.gen_batch = gen_batch
        self.gen_lr = gen_lr
        self.gen_wd = gen_wd
        self.diversity = diversity

    @property
    def generates(self) -> bool:
        """Whether a term of the loss needs G. None does where FedGen is FedAvg, also under an attack."""
        return bool(self.alpha or self.beta)

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        if "generator" not in broadcast.extras:
            return
        self.round_buffer("generator", broadcast.extras["generator"])
        self.round_buffer("classes", broadcast.extras["seen"].nonzero().flatten())
        share = self.gen_batch / local.samples_per_batch("train")
        self.round["alpha"] = decayed(self.alpha, self.decay, broadcast.round_idx) * share
        self.round["beta"] = decayed(self.beta, self.decay, broadcast.round_idx)
        # Draws of its own shift none of the net's, such as those of dropout.
        self.round["draws"] = local.generator("generated features")

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = cross_entropy(logits, y)
        self.log("train/ce", loss)
        if "generator" not in self.round:
            return loss
        if self.beta:
            divergence = kl_divergence(logits, self.answers(y, self.noise(len(y))))
            self.log("train/kd", divergence)
            loss = loss + self.round["beta"] * divergence
        if self.alpha:
            labels = self.labels()
            wrong = cross_entropy(self.answers(labels, self.noise(len(labels))), labels)
            self.log("train/generated", wrong)
            loss = loss + self.round["alpha"] * wrong
        return loss

    def answers(self, labels: Tensor, noise: Tensor) -> Tensor:
        """Compute the head's logits of generated features, (n, C): of classes (n,) and noise (n, k)."""
        features = generated(self.round["generator"], labels, noise)
        with self.forward_context():
            logits: Tensor = self.built_net.head(features)
        return logits

    def labels(self) -> Tensor:
        """Draw the classes of B_g generated features, (B_g,) int64, among the classes that anybody has had."""
        classes: Tensor = self.round["classes"]
        chosen = torch.randint(len(classes), (self.gen_batch,), generator=self.round["draws"])
        return classes[copy_to_device(chosen, classes.device)]

    def noise(self, size: int) -> Tensor:
        """Draw noise for generated features, (size, k), in the type of the model."""
        entry: Tensor = self.round["generator"]["hidden.weight"]
        drawn = torch.rand(size, self.noise_dim, generator=self.round["draws"], dtype=entry.dtype)
        return copy_to_device(drawn, entry.device)

    def reply(self, exchange: str, local: ClientData) -> dict[str, Any]:
        if not self.generates:
            return {}
        return {"counts": local.label_counts.to(self.built_net.head.weight.device)}


def head_names(head: nn.Linear) -> list[str]:
    """Return the names of a head's entries in the messages."""
    return [f"{HEAD}{name}" for name, _ in head.named_parameters()]
