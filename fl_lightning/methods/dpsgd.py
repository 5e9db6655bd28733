"""DP-SGD: train so that nobody can tell from what a client sends whether one sample was among its data.

Source: Abadi et al., CCS 2016, arXiv:1607.00133, Algorithm 1 (`dp_sgd`). And local privacy, where a client hides all it
has from the server, too (`local_dp`): Dwork and Roth 2014, Definition 12.1, by the Gaussian mechanism.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from pytorch_lightning import LightningModule
from torch import Tensor
from torch.func import grad, vmap

from fl_lightning.client import ClientModule
from fl_lightning.client.deriving import with_part
from fl_lightning.client.modes import BATCH_NORMS
from fl_lightning.client.optimizers import needs_closure, parse_optimizers
from fl_lightning.client.services import attach_services, batch_length
from fl_lightning.functional.importance import GRADIENT_FLOATS, as_function
from fl_lightning.functional.privacy import SLACK, epsilon
from fl_lightning.functional.state import State, to_float32
from fl_lightning.types import Batch, Broadcast, ClientData, ClientUpdate
from fl_lightning.utils.settings import check_above, check_numbers

EPSILON = "privacy/epsilon_samples"
"""Log key of ε of the samples of the client, of those in the round, that has spent most."""

EPSILON_LOCAL = "privacy/epsilon_local"
"""The same of a client's whole data against the server."""


def clipped_sum(gradients: State, bound: float) -> State:
    """Add up gradients of samples, each scaled to a norm of at most `bound`: (B, ...) -> (...), float64.

    >>> clipped_sum({"w": torch.tensor([[3.0, 4.0], [0.3, 0.4]])}, 1.0)["w"].round(decimals=9)
    tensor([0.9000, 1.2000], dtype=torch.float64)
    """
    rows = {name: value.double() for name, value in gradients.items()}
    norms = torch.stack([value.flatten(1).square().sum(1) for value in rows.values()]).sum(0).sqrt()
    factors = (bound * SLACK / norms).clamp(max=1.0)  # ∞ where a gradient is 0
    return {name: torch.tensordot(factors, value, dims=1) for name, value in rows.items()}


class PoissonSamples:
    """A client's data whose training batches hold each sample with one probability (the `ClientData` protocol).

    An epoch has 1 / `rate` batches, however many samples there are.

    Args:
        local: the client's data.
        rate: q in (0, 1].
        exchange: under way, which the draws are keyed by, too.
    """

    def __init__(self, local: ClientData, rate: float, exchange: str) -> None:
        self.local, self.rate, self.exchange = local, rate, exchange
        self._epochs = 0

    def __getattr__(self, name: str) -> Any:
        if name in ("local", "rate", "exchange"):  # not there yet: this is being copied
            raise AttributeError(name)
        return getattr(self.local, name)

    def size(self, split: str = "train") -> int:
        """Count the batches of an epoch as if they were samples, 0 of a client without samples."""
        size = self.local.size(split)
        return max(1, round(1 / self.rate)) if split == "train" and size else size

    def samples_per_batch(self, split: str, given: Any = None) -> int:
        """Take each of these as a batch of its own."""
        return 1 if split == "train" else self.local.samples_per_batch(split, given)

    def augments(self, split: str = "train") -> bool:
        """Tell that no epoch is like the one before."""
        return split == "train" or self.local.augments(split)

    def restricted(self, split: str, positions: Tensor) -> ClientData:
        """Restrict another split.

        Raises:
            ValueError: of the training samples, whose draws then had another probability.
        """
        if split == "train":
            raise ValueError(
                "dp_sgd draws from all training samples of a client, and a phase asks for some of them "
                "(Phase(indices=...)); train on all"
            )
        return self.local.restricted(split, positions)

    def batches(
        self, split: str = "train", epoch: int | None = None, batch_size: int | None = None, **settings: Any
    ) -> Iterator[Batch]:
        """Yield the batches of a training epoch, empty ones too, and those of another split as they are."""
        if split != "train" or epoch is None:
            yield from self.local.batches(split, epoch, batch_size, **settings)
            return
        number, steps, n = self._epochs, self.size(), self.local.size()
        self._epochs += 1
        draws = self.local.noise_generator(f"dp_sgd/batches/{self.exchange}/{number}")
        for index in range(steps):
            drawn = torch.nonzero(torch.rand(n, generator=draws, dtype=torch.float64) < self.rate).flatten()
            taken = drawn if len(drawn) else torch.zeros(1, dtype=torch.int64)
            some = self.local.restricted("train", taken)
            (batch,) = some.batches("train", number * steps + index, len(taken), shuffle=False, **settings)
            yield batch if len(drawn) else apply_to_collection(batch, Tensor, lambda t: t[:0])


class DPSGD(ClientModule):
    """Part of a client whose steps hide single samples, made by `dp_sgd`.

    Attributes:
        noise_multiplier: z.
        max_grad_norm: C.
        delta: δ.
        sample_rate: q.
    """

    stackable = False  # gradients of single samples are taken in place of those of single clients
    is_private = True
    noise_multiplier: float
    max_grad_norm: float
    delta: float
    sample_rate: float

    def build(self, num_classes: int | None, input_shape: tuple[int, ...] | None) -> None:
        super().build(num_classes, input_shape)
        self._check_norms()

    def configure_model(self) -> None:
        super().configure_model()
        self._check_norms()

    def _check_norms(self) -> None:
        """Refuse nets in which a sample's gradient depends on others.

        Raises:
            ValueError: naming the layer.
        """
        for name, part in self.named_modules():
            if isinstance(part, BATCH_NORMS):
                raise ValueError(
                    f"dp_sgd bounds the gradient of each sample, which {type(part).__name__} {name!r} makes of the "
                    f"whole batch; take GroupNorm or LayerNorm"
                )

    def configure_optimizers(self) -> Any:
        configured = super().configure_optimizers()
        for optimizer in parse_optimizers(configured, type(self).__name__)[0]:
            if needs_closure(optimizer):
                raise ValueError(
                    f"dp_sgd has one noisy gradient a batch, and {type(optimizer).__name__} asks for more; take SGD "
                    f"or Adam"
                )
        return configured

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        self.round.update(steps=0, samples=PoissonSamples(local, self.sample_rate, broadcast.exchange))
        super().receive(broadcast, local)

    def training_data(self, local: ClientData) -> ClientData:
        return cast(ClientData, self.round["samples"])

    def sample_loss(self, batch: Batch, batch_idx: int) -> Tensor:
        """Compute the method's own loss of a batch of one sample."""
        return to_float32(super().training_step(batch, batch_idx))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Give a loss of value 0 whose gradient is the noisy one: (Σ clipped gradients + N(0, (z C)²)) / (q n)."""
        params = {name: value for name, value in self.trained().items() if value.requires_grad}
        samples, step = self.round["samples"], self.round["steps"]
        self.round["steps"] = step + 1
        draws = samples.noise_generator(f"dp_sgd/noise/{samples.exchange}/{step}")
        total, terms = self._sum(params, batch, batch_idx), []
        for name, value in params.items():
            noise = torch.randn(value.shape, generator=draws, dtype=torch.float64).to(value.device)
            noisy = total.get(name, 0.0) + self.noise_multiplier * self.max_grad_norm * noise
            terms.append(((noisy / (self.sample_rate * samples.local.size())).to(value.dtype) * value).sum())
        loss = torch.stack(terms).sum()
        return loss - loss.detach()

    def _sum(self, params: State, batch: Batch, batch_idx: int) -> State:
        """Add up the clipped gradients of a batch, of as many samples at a time as fit in memory.

        Raises:
            RuntimeError: a step that torch.func cannot differentiate for each sample.
        """
        loss, total = as_function(self, "sample_loss"), State()

        def of_one(state: State, sample: Batch) -> Tensor:
            return cast(Tensor, loss(state, apply_to_collection(sample, Tensor, lambda t: t.unsqueeze(0)), batch_idx))

        gradients_of = vmap(grad(of_one), in_dims=(None, 0), randomness="different")
        constants = {name: value.detach() for name, value in params.items()}
        at_once = max(1, GRADIENT_FLOATS // sum(value.numel() for value in params.values()))
        silent = {"log": ignored, "log_dict": ignored}  # a logged value would be a sample's
        with attach_services(self.lightning_modules(), silent):
            for first in range(0, batch_length(batch), at_once):
                part = apply_to_collection(batch, Tensor, lambda t, i=first: t[i : i + at_once])
                try:
                    gradients = gradients_of(constants, part)
                except RuntimeError as error:
                    raise RuntimeError(
                        f"dp_sgd takes gradients of single samples by torch.func, whose rules the step of "
                        f"{type(self).__name__} must keep (no .item(), no branch on a tensor's value), got: {error}"
                    ) from error
                for name, value in clipped_sum(gradients, self.max_grad_norm).items():
                    total[name] = total.get(name, 0.0) + value
        return total

    def reply(self, exchange: str, local: ClientData) -> dict[str, Any]:
        """Count the steps in the client's memory, and log what they cost."""
        extras = super().reply(exchange, local)
        steps = self.memory["private_steps"] = self.memory.get("private_steps", 0) + self.round["steps"]
        spent = epsilon(self.sample_rate, self.noise_multiplier, steps, self.delta)
        self.log(EPSILON, spent, reduce_fx="max", batch_size=1)
        return extras


class LocalDP(ClientModule):
    """Part of a client that sends its weights under noise of its own, made by `local_dp`.

    Attributes:
        noise_multiplier: z.
        max_norm: C.
        delta: δ.
    """

    stackable = False  # each client draws its own noise
    is_private = True
    noise_multiplier: float
    max_norm: float
    delta: float

    def transmitted(self, update: ClientUpdate, broadcast: Broadcast, local: ClientData) -> ClientUpdate:
        """Replace what the client moved by what is left of it under clip and noise, and log what that costs.

        Raises:
            ValueError: naming what it sends besides weights.
        """
        update = super().transmitted(update, broadcast, local)
        if update.extras:
            raise ValueError(
                f"local_dp adds noise to weights, and an update also has {min(update.extras)!r}, which would reach the "
                f"server as it is; send weights only"
            )
        if update.weights is None:
            return update
        start = {name: self.context.start[name] for name in update.weights}
        fixed = {n for n, p in self.named_parameters() if not p.requires_grad}
        moving = {n for n, v in start.items() if v.is_floating_point() and n not in fixed and bool(v.isfinite().all())}
        rows = {name: (update.weights[name].double() - start[name].double())[None] for name in sorted(moving)}
        short = clipped_sum(rows, self.max_norm)
        draws = local.noise_generator(f"local_dp/{broadcast.exchange}")
        for name, value in short.items():
            noise = torch.randn(value.shape, generator=draws, dtype=torch.float64).to(value.device)
            moved = start[name].double() + value + self.noise_multiplier * self.max_norm * noise
            start[name] = moved.to(start[name].dtype)
        releases = self.memory["releases"] = self.memory.get("releases", 0) + 1
        # another client's data in place of this one's may move it by 2 C
        spent = epsilon(1.0, self.noise_multiplier / 2, releases, self.delta)
        self.log(EPSILON_LOCAL, spent, reduce_fx="max", batch_size=1)
        return replace(update, weights=start)


def dp_sgd(
    client: LightningModule,
    noise_multiplier: float,
    max_grad_norm: float = 1.0,
    delta: float = 1e-5,
    sample_rate: float = 0.1,
) -> ClientModule:
    """Make clients train by noisy sums of clipped gradients of single samples.

    What a client sends then changes by (ε, δ) only where one of its samples is added or removed; how many it has counts
    as known. An epoch has 1 / q batches, each with every sample with probability q, and every step costs: ε grows over
    the rounds in which a client takes part, and the row has that of the client in the round that has spent most.

    Args:
        client: of a method that reads its samples in training steps only, without BatchNorm; or a LightningModule.
        noise_multiplier: z > 0, the noise as a multiple of `max_grad_norm`.
        max_grad_norm: C > 0, greatest norm of a sample's gradient over all that is trained.
        delta: δ in (0, 1), which should be below 1 / n_i.
        sample_rate: q in (0, 1], which takes the place of the batch size.

    Raises:
        ValueError: a setting out of its range, or a client that reads its data otherwise or steps by itself.
    """
    check_settings(delta, noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm)
    check_numbers(sample_rate=sample_rate)
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate must lie in (0, 1], got {sample_rate}; 1 takes all samples in every step")
    if reads := sorted(getattr(client, "reads", ())):
        raise ValueError(
            f"dp_sgd hides samples in the gradients of training steps, and {type(client).__name__} also reads "
            f"{' and '.join(reads)} of its data, which shows in what it sends; take another method, such as FedAvg, "
            f"FedProx or FedNTD"
        )
    settings = {"delta": delta, "noise_multiplier": noise_multiplier, "max_grad_norm": max_grad_norm}
    whole = with_part(client, DPSGD, sample_rate=sample_rate, **settings)
    if not whole.automatic_optimization:
        raise ValueError(f"dp_sgd makes the gradients of each step, and {type(client).__name__} steps by itself")
    return whole


def local_dp(
    client: LightningModule, noise_multiplier: float, max_norm: float = 1.0, delta: float = 1e-5
) -> ClientModule:
    """Make clients send their weights under noise of their own, so that the server need not be trusted.

    The guarantee is of local privacy: it compares a client's data with any other data in their place (replace one), so
    that noise of the same size costs more than at the server, where a client is added or removed.

    Args:
        client: of a method that sends weights only; or a LightningModule.
        noise_multiplier: z > 0, the noise as a multiple of `max_norm`.
        max_norm: C > 0, greatest norm of what a client moved.
        delta: δ in (0, 1).

    Raises:
        ValueError: a setting out of its range, or a client that sends more than weights.
    """
    check_settings(delta, noise_multiplier=noise_multiplier, max_norm=max_norm)
    if others := sorted({*getattr(client, "sends", ())} - {"weights", "personal means"}):
        raise ValueError(
            f"local_dp adds noise to weights, and {type(client).__name__} also sends {' and '.join(others)}; take "
            f"another method, such as FedAvg, FedProx or FedNTD"
        )
    return with_part(client, LocalDP, noise_multiplier=noise_multiplier, max_norm=max_norm, delta=delta)


def check_settings(delta: float, **positive: float) -> None:
    """Refuse settings out of their range.

    Raises:
        ValueError: naming the setting.
    """
    check_above(0, **positive)
    check_numbers(delta=delta)
    if not 0 < delta < 1:
        raise ValueError(f"delta must lie in (0, 1), got {delta}")


def ignored(*args: Any, **settings: Any) -> None:
    """Stand in for `log`."""
