"""Trains several clients' steps at once, to see that a method's `training_step` allows it."""

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from fl_lightning import ClientModule


def ignore(*args, **kwargs):
    """Log nothing, since `vmap` could not."""


class Step(nn.Module):
    """Makes a client's training step the forward of a module."""

    def __init__(self, client: ClientModule) -> None:
        super().__init__()
        self.client = client
        client.log = ignore
        client.log_dict = ignore
        client.fix_trainable()

    def forward(self, batch):
        return self.client.training_step(batch, 0)


def stacked_and_alone(client: ClientModule, buffers, x, y):
    """Compute the gradients and losses of K clients by vmap, and one by one.

    Args:
        client: The client, with its teachers.
        buffers: Round buffers of all clients, each (K, ...).
        x: Samples, (K, B, ...).
        y: Targets, (K, B).

    Returns:
        The gradients by name, each (K, ...), and the losses, (K,), of both.
    """
    step = Step(client)
    number = len(x)
    params = {}
    for name, value in step.named_parameters():
        params[name] = torch.stack([value.detach() + 0.05 * k for k in range(number)])
    others = {name: torch.stack([value] * number) for name, value in step.named_buffers()}

    def loss(params, others, buffers, batch):
        client.context.round = buffers
        return functional_call(step, (params, others), (batch,))

    # vmap takes its arguments by position.
    of_all = (params, copied(others), buffers, (x, y))
    together = vmap(grad_and_value(loss))(*of_all)
    gradients = []
    losses = []
    for k in range(number):
        of_client = (row(params, k), copied(row(others, k)), row(buffers, k), (x[k], y[k]))
        gradient, value = grad_and_value(loss)(*of_client)
        gradients.append(gradient)
        losses.append(value)
    stacked = {name: torch.stack([gradient[name] for gradient in gradients]) for name in params}
    return together, (stacked, torch.stack(losses))


def row(state, k):
    """Return the values of client k in nested states of all clients."""
    found = {}
    for name, value in state.items():
        found[name] = row(value, k) if isinstance(value, dict) else value[k]
    return found


def copied(state):
    return {name: value.clone() for name, value in state.items()}
