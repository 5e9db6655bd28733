"""Clients, transforms and rules that fail in one way each, at client 2 in round 1."""

import math
import time
from dataclasses import replace

import torch
from torch import nn

from fl_lightning import Aggregator, FederatedLoop
from fl_lightning.aggregation import UpdateTransform
from fl_lightning.methods import FedAvg
from tests.toys import BatchNormNet, folded, sgd

CLIENT = 2
ROUND = 1
WEIGHTS = "net.head.weight"

VALUES = {"NaN": math.nan, "Inf": math.inf, "3e38": 3e38}
"""Values of the parameters that the client sends."""

COUNTS = {"n = 10^15": 10**15, "n = -5": -5, "n = 2.5": 2.5, "n = True": True, "n = NaN": math.nan, "n is None": None}
"""Numbers of samples that client 2, which has 5, cannot have."""

SENT = ("shape", "key", "type", "dtype")
RAISED = ("exception", "receive", "reply", "StopIteration", "MemoryError", "time-out")
STRUCTURE = ("adds", "replaces", "reshapes", "removes")
WEIGHT = ("negative weight",)
KINDS = (*VALUES, *SENT, *COUNTS, *WEIGHT, *RAISED, *STRUCTURE)


def is_failing(client_id, round_idx):
    return client_id == CLIENT and round_idx == ROUND


class Faulty(FedAvg):
    """Fails in the way that is asked: client 2 in round 1, or every client in every round."""

    def __init__(self, how="", *, always=False, **base):
        super().__init__(**base)
        self.how = how
        self.always = always

    def fails(self, local):
        return self.always or is_failing(local.client_id, local.round_idx)

    def receive(self, broadcast, local):
        self.round["fails"] = self.fails(local)
        if self.how == "receive" and self.fails(local):
            raise ValueError("no disk")

    def training_step(self, batch, batch_idx):
        if self.round["fails"]:
            self.fail()
        return super().training_step(batch, batch_idx)

    def fail(self):
        net = self.net
        if self.how == "exception":
            raise ZeroDivisionError("a bug\nof two lines")
        if self.how == "StopIteration":
            next(iter(()))
        if self.how == "MemoryError":
            raise MemoryError
        if self.how == "time-out":
            time.sleep(1.1)
        if self.how == "adds":
            net.extra = nn.Linear(2, 2)
        if self.how == "replaces":
            net.head = nn.Linear(8, 3)
        if self.how == "removes":
            del net.head.bias
            net.head.bias = None
        if self.how == "freezes":
            net.head.requires_grad_(requires_grad=False)

    def reply(self, exchange, local):
        if not self.fails(local):
            return {}
        if self.how in VALUES:
            with torch.no_grad():
                next(iter(self.params().values())).fill_(VALUES[self.how])
        if self.how == "reshapes":
            self.net.head.weight.data = torch.zeros(4, 8)
        return [] if self.how == "reply" else {}


class Sends(UpdateTransform):
    """Sends something else than it should."""

    def __init__(self, how):
        super().__init__()
        self.how = how

    def on_client(self, update, broadcast):
        if not is_failing(update.client_id, broadcast.round_idx):
            return update
        weights = dict(update.weights)
        if self.how == "shape":
            weights[WEIGHTS] = weights[WEIGHTS][:2]
        if self.how == "key":
            del weights[WEIGHTS]
        if self.how == "type":
            weights[WEIGHTS] = weights[WEIGHTS].tolist()
        if self.how == "dtype":
            weights[WEIGHTS] = weights[WEIGHTS].double()
        if self.how in COUNTS:
            return replace(update, num_samples=COUNTS[self.how])
        return replace(update, weights=weights)


class Weighs(Aggregator):
    """Gives a client an invalid weight."""

    def __init__(self, weight):
        super().__init__()
        self.bad = weight

    def weight(self, update):
        if is_failing(update.client_id, self.server.round_idx):
            return self.bad
        return super().weight(update)


def faulty(how, mode, **settings):
    """Return a loop in which a fault happens.

    Args:
        how: One of `KINDS`, or another way of `Faulty`.
        mode: Policy of faults, `error` or `skip`.
        settings: Further settings of the loop.
    """
    client = Faulty(how, net=BatchNormNet, optimizer=sgd())
    settings = {"nonfinite": mode, "on_error": mode, "seed": 3, "threads": 1, **settings}
    if how == "3e38":
        settings["max_update_norm"] = 100.0
    if how == "time-out":
        settings["client_timeout"] = 1.0
    if how in (*SENT, *COUNTS):
        settings["transforms"] = [Sends(how)]
    if how == "negative weight":
        settings["aggregator"] = Weighs(-1.0)
    return FederatedLoop(client, **folded(settings))
