"""Local privacy: each client sends its weights under noise of its own, so that the server need not be trusted.

Source: Dwork and Roth 2014, "The Algorithmic Foundations of Differential Privacy", Definition 12.1 and Appendix A (the
Gaussian mechanism).
"""

from dataclasses import replace
from typing import Any

import torch
from pytorch_lightning import LightningModule

from fl_lightning.client import ClientModule
from fl_lightning.client.deriving import with_part
from fl_lightning.functional.privacy import check_delta, clipped_sum, counted, epsilon, gaussian_noise, kept_positive
from fl_lightning.metrics.history import EPSILON_LOCAL
from fl_lightning.types import Broadcast, ClientData, ClientUpdate, State, TrainableModule
from fl_lightning.utils.settings import check_above

NOTHING: dict[str, Any] = {"num_steps": 0, "accumulated_lr": 0.0, "lr": 0.0, "idle_steps": 0, "uncounted_steps": 0}
"""Numbers of steps and rates in an update that hides them, because they would show the number of samples."""


class LocalDP(ClientModule):
    """Sends a client's weights under noise of its own. `local_dp` derives a class from it and the class of a client.

    Attributes:
        noise_multiplier: The noise multiplier z.
        max_norm: The greatest norm C of a client's move.
        delta: δ.
    """

    stackable = False  # each client draws its own noise
    is_private = True
    sends_counts = False
    noise_multiplier: float
    max_norm: float
    delta: float

    def transmitted(self, update: ClientUpdate, broadcast: Broadcast, local: ClientData) -> ClientUpdate:
        """Replace the client's move by its clipped and noisy form, and log ε.

        Raises:
            ValueError: The client sends more than weights.
        """
        update = super().transmitted(update, broadcast, local)
        if update.extras:
            raise ValueError(
                f"local_dp adds noise to weights, and an update also has {min(update.extras)!r}, which would reach the "
                f"server as it is; send weights only"
            )
        if update.weights is None:
            return update
        sent = {name: self.context.start[name] for name in update.weights}
        fixed = {name for name, parameter in self.named_parameters() if not parameter.requires_grad}
        before: State = {}
        rows: State = {}
        for name, value in sent.items():
            if not value.is_floating_point() or name in fixed:
                continue
            before[name] = value.double()
            # A number that is not finite, such as −∞ in a mask, stays as it is.
            move = torch.where(before[name].isfinite(), update.weights[name].double() - before[name], 0.0)
            rows[name] = move[None]
        short = clipped_sum(rows, bound=self.max_norm)
        draws = local.noise_generator(f"local_dp/{broadcast.exchange}")
        for name, value in short.items():
            noise = gaussian_noise(value.shape, draws, value.device)
            moved = before[name] + value + self.noise_multiplier * self.max_norm * noise
            sent[name] = kept_positive(name, new=moved, old=before[name]).to(sent[name].dtype)
        releases = counted(self.memory, {"noise_multiplier": self.noise_multiplier}, more=1)
        # Other data in place of the client's may change the clipped move by 2 C.
        spent = epsilon(rate=1.0, noise_multiplier=self.noise_multiplier / 2, count=releases, delta=self.delta)
        self.log(EPSILON_LOCAL, spent, reduce_fx="max", batch_size=1)
        return replace(update, weights=sent, num_samples=min(1, update.num_samples), **NOTHING)


def local_dp(
    client: LightningModule | TrainableModule,
    noise_multiplier: float,
    max_norm: float = 1.0,
    delta: float = 1e-5,
) -> ClientModule:
    """Make clients send their weights under noise of their own, so that the server need not be trusted.

    The guarantee is one of local privacy. It compares a client's data with any other data in their place (replace one).
    Noise of the same size therefore costs more than at the server, where a client is added or removed. A client does
    not send its numbers of samples and steps, only whether it has samples, so that all clients weigh the same.

    Args:
        client: The client of a method that sends weights only, or a LightningModule.
        noise_multiplier: Noise z > 0 as a multiple of `max_norm`.
        max_norm: Greatest norm C > 0 of a client's move.
        delta: δ in (0, 1).

    Raises:
        ValueError: A setting is out of its range, or the client sends more than weights.
    """
    check_above(0, noise_multiplier=noise_multiplier, max_norm=max_norm)
    check_delta(delta)
    others = sorted({*getattr(client, "sends", ())} - {"weights", "personal means"})
    if others:
        raise ValueError(
            f"local_dp adds noise to weights, and {type(client).__name__} also sends {' and '.join(others)}; take "
            f"another method, such as FedAvg, FedProx or FedNTD"
        )
    return with_part(client, LocalDP, noise_multiplier=noise_multiplier, max_norm=max_norm, delta=delta)
