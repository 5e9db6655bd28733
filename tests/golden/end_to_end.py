"""Whole federated runs of golden cases, through the loop, the data module and the stock Trainer."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.optim import SGD

from fl_lightning import ClientModule, FederatedDataModule, FederatedLoop
from fl_lightning.aggregation import ServerModule
from fl_lightning.data import FixedPartition, TensorSource
from fl_lightning.federation.recorder import traffic
from fl_lightning.methods import FedAvg, FedNTD, FedProx
from fl_lightning.nets import Backbone
from fl_lightning.types import Broadcast, ClientUpdate, State

Inputs = dict[str, Any]


# --- problems: a net or module with its first weights, and the clients' data


class GoldenNet(Backbone):
    """The net of a `kind: net` problem; its parameters come in the order of the problem's flat vectors."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...], layers: list[list[Any]], init: Tensor) -> None:
        super().__init__()
        make = {"linear": nn.Linear, "bn": nn.BatchNorm1d, "gn": nn.GroupNorm, "ln": nn.LayerNorm, "relu": nn.ReLU}
        *body, head = [make[kind](*sizes) for kind, *sizes in layers]
        self.body, self.head = nn.Sequential(*body), head
        self.double()
        nn.utils.vector_to_parameters(init.clone(), self.parameters())

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)


class Quadratic(pl.LightningModule):
    """½(w−b)ᵀA(w−b), a module as a user writes one; a batch holds equal rows (A, b)."""

    def __init__(self, init: Tensor, optimizer: Callable[[Iterable[Any]], SGD]) -> None:
        super().__init__()
        self.w = nn.Parameter(init.clone())
        self.optimizer = optimizer

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        A, b = batch
        away = self.w - b
        return (away.unsqueeze(1) @ A @ away.unsqueeze(2)).mean() / 2

    def configure_optimizers(self) -> SGD:
        return self.optimizer(self.parameters())


@dataclass
class Problem:
    """What a problem of a golden file means for the product."""

    client: dict[str, Any]
    """Arguments of the client: `net` and `optimizer`, or `module`."""

    data: list[tuple[np.ndarray, np.ndarray]]
    """Samples and targets of each client."""

    named: bool = False
    """Weights are compared as a dict of names, else as one flat vector."""


def problem_of(problem: dict[str, Any], optimizer: Callable[[Iterable[Any]], SGD]) -> Problem:
    kind = problem["kind"]
    if kind == "quadratic":
        rows = zip(problem["A"], problem["b"], problem["n"], strict=True)
        data = [(np.repeat(A[None], n, 0), np.repeat(b[None], n, 0)) for A, b, n in rows]
        return Problem({"module": Quadratic(torch.from_numpy(problem["init"]["w"]), optimizer)}, data, named=True)
    data = [(client["X"], client["y"]) for client in problem["clients"]]
    if kind == "softmax":
        init = np.concatenate([problem["init"][name].ravel() for name in ("weight", "bias")])
        layers = [["linear", problem["d"], problem["C"]]]
    elif kind == "net":
        init, layers = problem["init"], problem["layers"]
    else:
        raise NotImplementedError(f"no adapter for problems of kind {kind!r}")
    net = partial(GoldenNet, layers=layers, init=torch.from_numpy(init))
    return Problem({"net": net, "optimizer": optimizer}, data, named=kind == "softmax")


def data_module(problem: Problem, cfg: dict[str, Any], sets: dict[str, Any] | None = None) -> FederatedDataModule:
    """All clients' samples in their order, and the cohorts of the schedule; `sets`: {X, y} by name."""
    sizes = [len(X) for X, _ in problem.data]
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    samples = tuple(torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*problem.data, strict=True))
    return FederatedDataModule(
        source=TensorSource(train=samples, test=samples),
        partition=FixedPartition([part.tolist() for part in parts]),
        num_clients=len(sizes),
        schedule=cfg["schedule"],
        shuffle=False,
        batch_size=cfg["batch"] or "full",
        extra_splits={name: source_of(one) for name, one in (sets or {}).items()},
    )


def source_of(samples: dict[str, np.ndarray]) -> TensorSource:
    pair = torch.from_numpy(samples["X"]), torch.from_numpy(samples["y"])
    return TensorSource(train=pair, test=pair)


# --- running


@dataclass(eq=False)
class Recorder(pl.Callback):
    """What happened in each round: the clients' updates, their lr, bytes per client, the server's weights.

    `note` gives further values of a loop after each round, by the names that a case has for them.
    """

    note: Callable[[FederatedLoop], dict[str, Any]] = lambda loop: {}
    noted: list[dict[str, Any]] = field(default_factory=list)
    updates: list[dict[int, ClientUpdate]] = field(default_factory=list)
    lrs: list[set[float]] = field(default_factory=list)
    down: list[Counter[int]] = field(default_factory=list)
    up: list[Counter[int]] = field(default_factory=list)
    servers: list[State] = field(default_factory=list)
    evaluated: list[State] = field(default_factory=list)
    velocities: list[list[Tensor | None]] = field(default_factory=list)

    def on_train_epoch_start(self, trainer: pl.Trainer, loop: FederatedLoop) -> None:
        self.updates.append({})
        self.lrs.append(set())
        self.down.append(Counter())
        self.up.append(Counter())

    def watch(self, server_module: ServerModule) -> None:
        """Count the bytes of each broadcast by client."""
        inner = server_module.broadcast

        def broadcast(exchange: str, client_id: int) -> Broadcast:
            sent = inner(exchange, client_id)
            self.down[-1][client_id] += traffic(sent.weights, sent.extras)
            return sent

        server_module.broadcast = broadcast

    def on_client_end(self, trainer: pl.Trainer, loop: FederatedLoop, update: ClientUpdate) -> None:
        weights = loop.weights.snapshot(update.weights)  # the client's own, whatever a transform has made of them
        kept = {"num_steps": update.num_steps, "exposure": update.exposure, "num_samples": update.num_samples}
        self.updates[-1][update.client_id] = ClientUpdate(update.client_id, weights=weights, **kept)
        self.up[-1][update.client_id] += traffic(update.weights, update.extras)
        if update.num_steps:
            self.lrs[-1] |= local_lrs(loop)

    def on_train_batch_end(self, trainer: pl.Trainer, loop: FederatedLoop, *_: Any) -> None:
        assert trainer.callback_metrics["comm/bytes_down"] == self.down[-1].total()
        assert trainer.callback_metrics["comm/bytes_up"] == self.up[-1].total()
        self.servers.append({name: value.detach().clone() for name, value in loop.client.state_dict().items()})
        self.evaluated.append(loop.evaluated_weights(self.servers[-1]))
        (server,) = trainer.optimizers
        params = [p for group in server.param_groups for p in group["params"]]
        buffers = [server.state[p].get("momentum_buffer") if p in server.state else None for p in params]
        self.noted.append(self.note(loop))
        self.velocities.append([None if buffer is None else buffer.clone() for buffer in buffers])


def local_lrs(loop: FederatedLoop) -> set[float]:
    """Of the client that was trained last."""
    optimizers = loop.engine.services.optimizers(use_pl_optimizer=False)
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    return {group["lr"] for optimizer in optimizers for group in optimizer.param_groups}


@dataclass
class Run:
    """A finished run: how to write its states as the golden files do."""

    problem: Problem
    client: ClientModule
    recorder: Recorder
    cfg: dict[str, Any]

    @property
    def schedule(self) -> list[list[int]]:
        cohorts: list[list[int]] = self.cfg["schedule"]
        return cohorts

    def weights(self, state: State) -> Any:
        """The trainable entries: a dict by last name, or one flat vector in the order of the parameters."""
        params = {name: state[name] for name, _ in self.client.named_parameters()}
        if self.problem.named:
            return {name.rpartition(".")[2]: value for name, value in params.items()}
        return flat(params.values())

    def buffers(self, state: State) -> list[dict[str, Any]]:
        """The entries of each BatchNorm layer, in the order of the layers."""
        layers: dict[str, dict[str, Any]] = {}
        for name, _ in self.client.named_buffers():
            layer, _, entry = name.rpartition(".")
            layers.setdefault(layer, {})[entry] = state[name]
        return list(layers.values())

    def round(self, r: int) -> dict[str, Any]:
        """What every method's rounds have in common; lists follow the cohort's order in the schedule."""
        updates = self.recorder.updates[r]
        assert sorted(updates) == sorted(self.schedule[r])
        cohort = [updates[client_id] for client_id in self.schedule[r]]
        (lr,) = self.recorder.lrs[r] or {self.cfg["lr"] * self.cfg["lr_decay"] ** r}  # nobody had anything to train on
        server = self.recorder.servers[r]
        return {
            "participants": [update.client_id for update in cohort],
            "lr": lr,
            "K": [update.num_steps for update in cohort],
            "clients": [self.weights(update.weights) for update in cohort],
            "client_buffers": [self.buffers(update.weights) for update in cohort],
            "server": self.weights(server),
            "server_buffers": self.buffers(server),
            "bytes_down": [self.recorder.down[r][client_id] for client_id in self.schedule[r]],
            "bytes_up": [self.recorder.up[r][client_id] for client_id in self.schedule[r]],
            **self.recorder.noted[r],
        }


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def run(
    client: Callable[..., ClientModule],
    inputs: Inputs,
    local_optimizer: Callable[..., Any] = lambda sgd: sgd,
    sets: tuple[str, ...] = (),
    recorder: Recorder | None = None,
    **loop: Any,
) -> Run:
    """Train through the product; `client` is called with the problem's net and optimizer, or its module.

    `local_optimizer` makes the clients' optimizer of the factory of plain SGD; `sets` names inputs that are data.
    """
    cfg, recorder = inputs["cfg"], recorder or Recorder()
    optimizer = partial(SGD, lr=cfg["lr"], momentum=cfg["rho"], weight_decay=cfg["wd"])
    problem = problem_of(inputs["problem"], local_optimizer(optimizer))
    module = client(**problem.client)
    fitted = FederatedLoop(
        client=module,
        local_epochs=cfg["epochs"],
        lr_decay=cfg["lr_decay"],
        weighting=cfg.get("weighting", "samples"),
        **loop,
    )
    recorder.watch(fitted.server_module)
    trainer = pl.Trainer(
        max_epochs=len(cfg["schedule"]),
        precision="64-true",
        accelerator="cpu",
        limit_val_batches=0,
        callbacks=[recorder],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(fitted, datamodule=data_module(problem, cfg, {name: inputs[name] for name in sets}))
    return Run(problem, module, recorder, cfg)


# --- methods


def rounds(finished: Run) -> dict[str, Any]:
    return {"rounds": [finished.round(r) for r in range(len(finished.schedule))]}


def fedavg(inputs: Inputs) -> dict[str, Any]:
    return rounds(run(FedAvg, inputs))


def fedprox(inputs: Inputs) -> dict[str, Any]:
    return rounds(run(partial(FedProx, mu=inputs["cfg"]["mu"]), inputs))


def fedntd_client(cfg: dict[str, Any]) -> Callable[..., FedNTD]:
    distance = cfg.get("distance", "kl")
    return partial(FedNTD, beta=cfg["beta"], temperature=cfg["tau"], ntd_weight=cfg["lam"], distance=distance)


def fedntd(inputs: Inputs) -> dict[str, Any]:
    return rounds(run(fedntd_client(inputs["cfg"]), inputs))


def fedntd_fedavgm(inputs: Inputs) -> dict[str, Any]:
    cfg = inputs["cfg"]
    server = partial(SGD, lr=cfg["server_lr"], momentum=cfg["server_beta"])
    finished = run(fedntd_client(cfg), inputs, server_optimizer=server)
    result = rounds(finished)
    for r, one in enumerate(result["rounds"]):
        one["v"] = flat(finished.recorder.velocities[r])
    return result


ADAPTERS: dict[str, Callable[[Inputs], dict[str, Any]]] = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "fedntd": fedntd,
    "fedntd+fedavgm": fedntd_fedavgm,
}
