"""Three architectures, a transfer set and models of the store, for the tests of KnFu, FedMD and Local."""

from functools import partial

import torch

from fl_lightning.data import TensorSource
from fl_lightning.nets import HeterogeneousNets, Perceptron
from tests.toys import BatchNormNet, samples, toy_data

Deep = partial(Perceptron, hidden=(6, 5))
Flat = partial(Perceptron, hidden=())
Wide = partial(Perceptron, hidden=(9,))
THREE = partial(HeterogeneousNets, nets=[Deep, Flat, Wide])
WITH_NORM = partial(HeterogeneousNets, nets=[Deep, Flat, partial(BatchNormNet, dropout=0.0)])
TRANSFER = 11
"""Samples of the transfer set."""


def transfer_data(dtype=torch.float32, number=TRANSFER, **settings):
    """Return the toy clients, and a transfer set that all parties have."""
    source = TensorSource(samples(number, seed=5, dtype=dtype), samples(2, dtype=dtype), num_classes=3)
    return toy_data(dtype=dtype, extra_splits={"transfer": source}, **settings)


def model_of(loop, client_id):
    """Return the entries of a client's own net in the store, or those with which it begins."""
    net = loop.client.net
    state = loop.store.personal(client_id) or loop.initial_personal
    place = "net."
    if isinstance(net, HeterogeneousNets):
        place = f"net.nets.{client_id % len(net.nets)}."
    return {name.removeprefix(place): value for name, value in state.items() if name.startswith(place)}


def models_of(loop):
    return [model_of(loop, client_id) for client_id in range(loop.data.num_clients)]


def stepped(net, batches, loss, *, lr, momentum):
    """Train a net by a fresh SGD over (batch, rows) pairs."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=momentum)
    for batch, rows in batches:
        optimizer.zero_grad()
        loss(net, batch, rows).backward()
        optimizer.step()
