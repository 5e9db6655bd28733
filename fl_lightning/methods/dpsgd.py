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
    """Hides single samples in a client's steps. `dp_sgd` derives a class from it and the class of a client.

    Attributes:
        noise_multiplier: The noise multiplier z.
        max_grad_norm: The greatest norm C of a sample's gradient.
        delta: δ.
        sample_rate: The probability q with which a sample is in a batch.
    """

    stackable = False  # torch.func vectorizes over the samples of one client
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
        optimizers, _ = parse_optimizers(configured, type(self).__name__)
        for optimizer in optimizers:
            if needs_closure(optimizer):
                raise ValueError(
                    f"dp_sgd has one noisy gradient a batch, and {type(optimizer).__name__} asks for more; take SGD "
                    f"or Adam"
                )
        return configured

    def receive(self, broadcast: Broadcast, local: ClientData) -> None:
        samples = PoissonSamples(local, self.sample_rate, broadcast.exchange)
        self.round["steps"] = 0
        self.round["samples"] = samples
        super().receive(broadcast, cast(ClientData, samples))

    def training_data(self, local: ClientData) -> ClientData:
        return cast(ClientData, self.round["samples"])

    def sample_loss(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of the client's method for a batch of one sample.

        Args:
            batch: The batch of one sample.
            batch_idx: The index of the sample's batch in its epoch.
        """
        return to_float32(super().training_step(batch, batch_idx))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return a loss of value 0 whose gradient is (Σ clipped gradients + N(0, (z C)²)) / (q n)."""
        params = {name: value for name, value in self.trained().items() if value.requires_grad}
        samples = self.round["samples"]
        step = self.round["steps"]
        self.round["steps"] = step + 1
        draws = samples.noise_generator(f"dp_sgd/noise/{samples.exchange}/{step}")
        total = self._sum(params, batch, batch_idx)
        batch_size = self.sample_rate * samples.local.size()
        terms = []
        for name, value in params.items():
            noise = gaussian_noise(value.shape, draws, value.device)
            noisy = total.get(name, 0.0) + self.noise_multiplier * self.max_grad_norm * noise
            gradient = (noisy / batch_size).to(value.dtype)
            terms.append((gradient * value).sum())
        loss = torch.stack(terms).sum()
        return loss - loss.detach()

    def _sum(self, params: State, batch: Batch, batch_idx: int) -> State:
        """Add up the clipped gradients of a batch, of as many samples at a time as fit in memory.

        Raises:
            RuntimeError: torch.func cannot differentiate the step for each sample.
        """
        loss = as_function(self, "sample_loss")
        total: State = {}

        def of_sample(state: State, sample: Batch) -> Tensor:
            return cast(Tensor, loss(state, sample, batch_idx))

        constants = {name: value.detach() for name, value in params.items()}
        parts = sample_gradients(of_sample, constants, batch, at_once=samples_at_once(params), randomness="different")
        # A logged value would be a sample's.
        silent = {"log": ignored, "log_dict": ignored}
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
        """Return the extras of the client's method, count the steps in the memory, and log their ε."""
        extras = super().reply(exchange, cast(ClientData, self.round["samples"]))
        terms = {"noise_multiplier": self.noise_multiplier, "sample_rate": self.sample_rate}
        steps = counted(self.memory, terms, more=self.round["steps"])
        spent = epsilon(rate=self.sample_rate, noise_multiplier=self.noise_multiplier, count=steps, delta=self.delta)
        self.log(EPSILON_SAMPLES, spent, reduce_fx="max", batch_size=1)
        return extras


def dp_sgd(  # noqa: PLR0917 - called by position
    client: LightningModule | TrainableModule,
    noise_multiplier: float,
    max_grad_norm: float = 1.0,
    delta: float = 1e-5,
    sample_rate: float = 0.1,
) -> ClientModule:
    """Make clients train by noisy sums of clipped gradients of single samples.

    The message of a client is then (ε, δ)-private if one of its samples is added or removed. The number of its samples
    counts as known. An epoch has 1 / q batches, and a batch has each sample with probability q. Every step costs, so
    that ε grows over the rounds of a client. The row of a round has the largest ε of its clients.

    Args:
        client: The client of a method without BatchNorm that reads its samples in training steps only, or a
            LightningModule.
        noise_multiplier: Noise z > 0 as a multiple of `max_grad_norm`.
        max_grad_norm: Greatest norm C > 0 of a sample's gradient over all that is trained.
        delta: δ in (0, 1), which should be below 1 / n_i.
        sample_rate: Probability q in (0, 1] with which a sample is in a batch. It takes the place of the batch size.

    Raises:
        ValueError: A setting is out of its range, or the client reads its data otherwise or steps by itself.
    """
    check_above(0, noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm)
    check_delta(delta)
    check_numbers(sample_rate=sample_rate)
    if not 0 < sample_rate <= 1:
        raise ValueError(f"sample_rate must lie in (0, 1], got {sample_rate}; 1 takes all samples in every step")
    reads = sorted(getattr(client, "reads", ()))
    if reads:
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
    whole = with_part(
        client,
        DPSGD,
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        delta=delta,
        sample_rate=sample_rate,
    )
    if not whole.automatic_optimization:
        raise ValueError(f"dp_sgd makes the gradients of each step, and {type(client).__name__} steps by itself")
    return whole


def ignored(*args: Any, **settings: Any) -> None:
    """Do nothing, in place of `log`."""
