"""Trains several clients' steps at once, to see that a method's `training_step` allows it."""

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from fl_lightning import ClientModule


class Step(nn.Module):
    """A client's training step as a module's forward."""

    def __init__(self, client: ClientModule) -> None:
        super().__init__()
        self.client = client
        client.log = client.log_dict = lambda *args, **kwargs: None
        client.fix_trainable()

    def forward(self, batch):
        return self.client.training_step(batch, 0)


def stacked_and_alone(client: ClientModule, buffers, x, y):
    """Losses and gradients of K clients, by vmap and one by one.

    Args:
        client: built, its teachers made.
        buffers: round buffers of all clients, each (K, ...).
        x: samples, (K, B, ...).
        y: targets, (K, B).
    """
    step = Step(client)
    number = len(x)
    params = {name: value.detach() for name, value in step.named_parameters()}
    params = {name: torch.stack([value + 0.05 * k for k in range(number)]) for name, value in params.items()}
    others = {name: torch.stack([value] * number) for name, value in step.named_buffers()}

    def loss(params, others, buffers, x, y):
        client.context.round = buffers
        return functional_call(step, (params, others), ((x, y),))

    def of(k, state):
        return {name: of(k, value) if isinstance(value, dict) else value[k] for name, value in state.items()}

    together = vmap(grad_and_value(loss))(params, {n: v.clone() for n, v in others.items()}, buffers, x, y)
    alone = [
        grad_and_value(loss)(
            of(k, params), {n: v.clone() for n, v in of(k, others).items()}, of(k, buffers), x[k], y[k]
        )
        for k in range(number)
    ]
    gradients = {name: torch.stack([gradient[name] for gradient, _ in alone]) for name in params}
    return together, (gradients, torch.stack([value for _, value in alone]))
