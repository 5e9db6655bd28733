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
from fl_lightning.types import Broadcast, ClientData, ClientUpdate, TrainableModule
from fl_lightning.utils.settings import check_above

NOTHING: dict[str, Any] = {"num_steps": 0, "accumulated_lr": 0.0, "lr": 0.0, "idle_steps": 0, "uncounted_steps": 0}
"""Numbers of steps and rates of an update that tells nothing of them: they would show how many samples it has."""


class LocalDP(ClientModule):
    """Part of a client that sends its weights under noise of its own, made by `local_dp`.

    Attributes:
        noise_multiplier: z.
        max_norm: C.
        delta: δ.
    """

    stackable = False  # each client draws its own noise
    is_private = True
    sends_counts = False
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
        floats = {name: value.double() for name, value in start.items() if value.is_floating_point()}
        before = {name: value for name, value in floats.items() if name not in fixed}
        rows = {  # a mask of −∞ stays where it is
            name: torch.where(value.isfinite(), update.weights[name].double() - value, 0.0)[None]
            for name, value in before.items()
        }
        short = clipped_sum(rows, self.max_norm)
        draws = local.noise_generator(f"local_dp/{broadcast.exchange}")
        for name, value in short.items():
            noise = gaussian_noise(value.shape, draws, value.device)
            moved = before[name] + value + self.noise_multiplier * self.max_norm * noise
            start[name] = kept_positive(name, moved, before[name]).to(start[name].dtype)
        releases = counted(self.memory, {"noise_multiplier": self.noise_multiplier}, 1)
        # another client's data in place of this one's may move it by 2 C
        spent = epsilon(1.0, self.noise_multiplier / 2, releases, self.delta)
        self.log(EPSILON_LOCAL, spent, reduce_fx="max", batch_size=1)
        return replace(update, weights=start, num_samples=min(1, update.num_samples), **NOTHING)


def local_dp(
    client: LightningModule | TrainableModule,
    noise_multiplier: float,
    max_norm: float = 1.0,
    delta: float = 1e-5,
) -> ClientModule:
    """Make clients send their weights under noise of their own, so that the server need not be trusted.

    The guarantee is of local privacy: it compares a client's data with any other data in their place (replace one), so
    that noise of the same size costs more than at the server, where a client is added or removed. How many samples and
    steps it has is not sent, only whether it has samples: all clients weigh the same.

    Args:
        client: of a method that sends weights only; or a LightningModule.
        noise_multiplier: z > 0, the noise as a multiple of `max_norm`.
        max_norm: C > 0, greatest norm of what a client moved.
        delta: δ in (0, 1).

    Raises:
        ValueError: a setting out of its range, or a client that sends more than weights.
    """
    check_above(0, noise_multiplier=noise_multiplier, max_norm=max_norm)
    check_delta(delta)
    if others := sorted({*getattr(client, "sends", ())} - {"weights", "personal means"}):
        raise ValueError(
            f"local_dp adds noise to weights, and {type(client).__name__} also sends {' and '.join(others)}; take "
            f"another method, such as FedAvg, FedProx or FedNTD"
        )
    return with_part(client, LocalDP, noise_multiplier=noise_multiplier, max_norm=max_norm, delta=delta)
