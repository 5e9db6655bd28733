"""Adapters of the rules, server optimizers and server sides: FedNova, FedAvgM, FedOpt, FedDF, the robust ones."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.optim import SGD

from fl_lightning import FederatedLoop
from fl_lightning.client.optimizers import Exposure
from fl_lightning.methods import FedNovaAggregator, FedProx
from fl_lightning.types import ClientUpdate

from .adapters_fn import Inputs
from .end_to_end import Recorder, Run, rounds, run
from .feded import Server
from .fedka import fedka_run


def exposure(lrs: Iterable[float], rho: float, nesterov: bool = False, mu: float = 0.0) -> float:
    """E after one step with each lr, of FedProx's client."""
    sgd = SGD([nn.Parameter(torch.zeros(()))], lr=1.0, momentum=rho, nesterov=nesterov)
    counted = Exposure([sgd], FedProx(mu=mu).exposure_slope)
    for lr in lrs:
        sgd.param_groups[0]["lr"] = lr
        counted.step()
    return counted.value


def states(inputs: Inputs) -> tuple[dict[str, Tensor], list[dict[str, Tensor]], list[str]]:
    """The server's state, the clients', and the trainable names."""
    named = "global" in inputs
    start, clients = (inputs["global"], inputs["locals"]) if named else ({"w": inputs["x"]}, inputs["ys"])
    clients = clients if named else [{"w": y} for y in clients]
    found = [{name: torch.from_numpy(value) for name, value in state.items()} for state in [start, *clients]]
    return found[0], found[1:], inputs.get("trainable", ["w"])


def fednova(inputs: Inputs) -> dict[str, Any]:
    lr, settings = inputs.get("lr"), (inputs["rho"], inputs.get("nesterov", False), inputs.get("mu", 0.0))
    if "n" not in inputs:
        E = exposure(inputs["lrs"] if "lrs" in inputs else [lr] * inputs["K"], *settings)
        return {"E": E, "a": E / (lr or 1.0)}
    start, clients, trainable = states(inputs)
    rule, lengths = FedNovaAggregator(), [exposure([lr] * K, *settings) for K in inputs["K"]]
    rule.attach(Server(start, trainable))
    for client_id, (state, n, K, E) in enumerate(zip(clients, inputs["n"], inputs["K"], lengths, strict=True)):
        update = ClientUpdate(client_id, n, K, E, state)
        rule.add(ClientUpdate(client_id, n, K, E, state, rule.client_statistics(update)))
    state = rule.finish()
    wrong = None
    if "bn.running_var" in state:
        p = torch.tensor(inputs["n"]).double() / sum(inputs["n"])
        name, step = "bn.running_var", rule.tau_eff * p / torch.tensor(lengths)
        wrong = start[name] + sum(s * (one[name] - start[name]) for s, one in zip(step, clients, strict=True))
    return {
        "state": state,
        "x_new": state["w"],
        "a": [E / lr for E in lengths],
        "tau_eff": rule.tau_eff / lr,
        "wrong_if_buffers_extrapolated": wrong,
    }


# --- whole rounds


class Noting(Recorder):
    """Notes further values of the loop after each round."""

    def __init__(self, note: Callable[[FederatedLoop], dict[str, Any]]) -> None:
        super().__init__()
        self.note, self.noted = note, []

    def on_train_batch_end(self, trainer: pl.Trainer, loop: FederatedLoop, *rest: Any) -> None:
        super().on_train_batch_end(trainer, loop, *rest)
        self.noted.append(self.note(loop))

    def added(self, result: dict[str, Any]) -> dict[str, Any]:
        """The rounds of `result` with what was noted of each."""
        for one, noted in zip(result["rounds"], self.noted, strict=True):
            one.update(noted)
        return result


def client_of(cfg: dict[str, Any]) -> Callable[..., FedProx]:
    return partial(FedProx, mu=cfg.get("mu", 0.0))


def with_fednova(runs: Callable[..., tuple[Run, dict[str, Any]]], inputs: Inputs) -> dict[str, Any]:
    recorder = Noting(lambda loop: {"tau_eff": float(loop.aggregator.tau_eff)})
    finished, result = runs(inputs, recorder=recorder, aggregator=FedNovaAggregator())
    for r, one in enumerate(recorder.added(result)["rounds"]):
        updates = recorder.updates[r]
        one["a"] = [updates[c].exposure / one["lr"] for c in finished.schedule[r]]
        one["tau_eff"] /= one["lr"]
    return result


def plain(inputs: Inputs, **loop: Any) -> tuple[Run, dict[str, Any]]:
    finished = run(client_of(inputs["cfg"]), inputs, **loop)
    return finished, rounds(finished)


METHOD: dict[str, Callable[[Inputs], Any]] = {"fednova": fednova}
FN: dict[str, Callable[[Inputs], Any]] = {}
E2E: dict[str, Callable[[Inputs], dict[str, Any]]] = {
    "fednova": partial(with_fednova, plain),
    "fedka+fednova": partial(with_fednova, fedka_run),
}
