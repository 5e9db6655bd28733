"""DP-SGD: train so that nobody can tell from what a client sends whether one sample was among its data.

Source: Abadi et al., CCS 2016, arXiv:1607.00133, Algorithm 1.
"""

from typing import Any, cast

import torch
from pytorch_lightning import LightningModule
from torch import Tensor

from fl_lightning.client import ClientModule
from fl_lightning.client.deriving import with_part
from fl_lightning.client.optimizers import needs_closure, parse_optimizers
from fl_lightning.client.services import attach_services
from fl_lightning.data.poisson import PoissonSamples
from fl_lightning.federation import private
from fl_lightning.functional.importance import as_function, samples_at_once
from fl_lightning.functional.privacy import check_delta, clipped_sum, counted, epsilon, gaussian_noise
from fl_lightning.functional.sample_gradients import sample_gradients
from fl_lightning.functional.state import State, to_float32
from fl_lightning.metrics.history import EPSILON_SAMPLES
from fl_lightning.types import Batch, Broadcast, ClientData, TrainableModule
from fl_lightning.utils.settings import check_above, check_numbers


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
        private.check_samples_apart(self)

    def configure_model(self) -> None:
        super().configure_model()
        private.check_samples_apart(self)

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
        samples = PoissonSamples(local, self.sample_rate, broadcast.exchange)
        self.round.update(steps=0, samples=samples)
        super().receive(broadcast, cast(ClientData, samples))

    def training_data(self, local: ClientData) -> ClientData:
        return cast(ClientData, self.round["samples"])

    def sample_loss(self, batch: Batch, batch_idx: int) -> Tensor:
        """Compute the method's own loss of a batch of one sample."""
        return to_float32(super().training_step(batch, batch_idx))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Give a loss of value 0 whose gradient is the noisy one: (Σ clipped gradients + N(0, (z C)²)) / (q n)."""
        params = {name: value for name, value in self.trained().items() if value.requires_grad}
        samples = self.round["samples"]
        step = self.round["steps"]
        self.round["steps"] = step + 1
        draws = samples.noise_generator(f"dp_sgd/noise/{samples.exchange}/{step}")
        total = self._sum(params, batch, batch_idx)
        terms = []
        for name, value in params.items():
            noise = gaussian_noise(value.shape, draws, value.device)
            noisy = total.get(name, 0.0) + self.noise_multiplier * self.max_grad_norm * noise
            terms.append(((noisy / (self.sample_rate * samples.local.size())).to(value.dtype) * value).sum())
        loss = torch.stack(terms).sum()
        return loss - loss.detach()

    def _sum(self, params: State, batch: Batch, batch_idx: int) -> State:
        """Add up the clipped gradients of a batch, of as many samples at a time as fit in memory.

        Raises:
            RuntimeError: a step that torch.func cannot differentiate for each sample.
        """
        loss = as_function(self, "sample_loss")
        total = State()

        def of_sample(state: State, sample: Batch) -> Tensor:
            return cast(Tensor, loss(state, sample, batch_idx))

        constants = State({name: value.detach() for name, value in params.items()})
        parts = sample_gradients(of_sample, constants, batch, at_once=samples_at_once(params), randomness="different")
        silent = {"log": ignored, "log_dict": ignored}  # a logged value would be a sample's
        with attach_services(self.lightning_modules(), silent), self.in_full_precision():
            try:
                for gradients in parts:
                    for name, value in clipped_sum(gradients, self.max_grad_norm).items():
                        total[name] = total.get(name, 0.0) + value
            except RuntimeError as error:
                raise RuntimeError(
                    f"dp_sgd takes gradients of single samples by torch.func, whose rules the step of "
                    f"{type(self).__name__} must keep (no .item(), no branch on a tensor's value), got: {error}"
                ) from error
        return total

    def reply(self, exchange: str, local: ClientData) -> dict[str, Any]:
        """Count the steps in the client's memory, and log what they cost."""
        extras = super().reply(exchange, cast(ClientData, self.round["samples"]))
        terms = {"noise_multiplier": self.noise_multiplier, "sample_rate": self.sample_rate}
        steps = counted(self.memory, terms, self.round["steps"])
        spent = epsilon(self.sample_rate, self.noise_multiplier, steps, self.delta)
        self.log(EPSILON_SAMPLES, spent, reduce_fx="max", batch_size=1)
        return extras


def dp_sgd(
    client: LightningModule | TrainableModule,
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
    check_above(0, noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm)
    check_delta(delta)
    check_numbers(sample_rate=sample_rate)
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate must lie in (0, 1], got {sample_rate}; 1 takes all samples in every step")
    if reads := sorted(getattr(client, "reads", ())):
        raise ValueError(
            f"dp_sgd hides samples in the gradients of training steps, and {type(client).__name__} also reads "
            f"{' and '.join(reads)} of its data, which shows in what it sends; take another method, such as FedAvg, "
            f"FedProx or FedNTD"
        )
    if getattr(client, "own_gradients", False):
        raise ValueError(
            f"dp_sgd takes the gradients of single samples in one model, and a step of {type(client).__name__} has "
            f"gradients of its own; take another method, such as FedAvg, FedProx or Ditto"
        )
    private.check_hooks_apart(client)
    settings = {"delta": delta, "noise_multiplier": noise_multiplier, "max_grad_norm": max_grad_norm}
    whole = with_part(client, DPSGD, sample_rate=sample_rate, **settings)
    if not whole.automatic_optimization:
        raise ValueError(f"dp_sgd makes the gradients of each step, and {type(client).__name__} steps by itself")
    return whole


def ignored(*args: Any, **settings: Any) -> None:
    """Stand in for `log`."""
