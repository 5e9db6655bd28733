"""Whole federated runs of golden cases, through the loop, the data module and the stock Trainer."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from fl_lightning import ClientModule, FederatedDataModule, FederatedLoop
from fl_lightning.aggregation import ServerModule
from fl_lightning.data import FixedPartition, TensorSource
from fl_lightning.engines.sequential import SequentialEngine
from fl_lightning.functional.traffic import traffic
from fl_lightning.methods import FedAvg, FedNTD, FedProx
from fl_lightning.nets import Backbone
from fl_lightning.types import Broadcast, ClientJob, ClientResult, ClientUpdate, State
from tests.toys import folded

Inputs = dict[str, Any]
Adapter = Callable[[Inputs], dict[str, Any]]


# --- problems: a net or module with its first weights, and the clients' data


class GoldenNet(Backbone):
    """The net of a `kind: net` problem; its parameters come in the order of the problem's flat vectors."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...], layers: list[list[Any]], init: Tensor) -> None:
        super().__init__()
        make = {"linear": nn.Linear, "bn": nn.BatchNorm1d, "gn": nn.GroupNorm, "ln": nn.LayerNorm, "relu": nn.ReLU}
        *body, head = [make[kind](*sizes) for kind, *sizes in layers]
        self.body = nn.Sequential(*body)
        self.head = head
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


NAMES = {
    "softmax": ("weight", "bias"),
    "linear2": ("features.weight", "classifier.weight", "classifier.bias"),
}
"""Names of the weights in problems whose weights are compared by name."""


@dataclass
class Problem:
    """What a problem of a golden file means for the product."""

    client: dict[str, Any]
    """Arguments of the client: `net` and `optimizer`, or `module`."""

    data: list[tuple[np.ndarray, np.ndarray]]
    """Samples and targets of each client."""

    names: tuple[str, ...] = ()
    """Names of the weights where they are compared as a dict, in the order of the parameters; else one flat vector."""


def problem_of(problem: dict[str, Any], optimizer: Callable[[Iterable[Any]], SGD]) -> Problem:
    kind = problem["kind"]
    if kind == "quadratic":
        rows = zip(problem["A"], problem["b"], problem["n"], strict=True)
        data = [(np.repeat(A[None], n, 0), np.repeat(b[None], n, 0)) for A, b, n in rows]
        return Problem({"module": Quadratic(torch.from_numpy(problem["init"]["w"]), optimizer)}, data, ("w",))
    data = [(client["X"], client["y"]) for client in problem["clients"]]
    if kind == "softmax":
        init = np.concatenate([problem["init"][name].ravel() for name in ("weight", "bias")])
        layers = [["linear", problem["d"], problem["C"]]]
    elif kind == "linear2":
        init = problem["w0_flat"]
        layers = [["linear", problem["d"], problem["k"], False], ["linear", problem["k"], problem["C"]]]
    elif kind == "net":
        init = problem["init"]
        layers = problem["layers"]
    else:
        raise NotImplementedError(f"no adapter for problems of kind {kind!r}")
    net = partial(GoldenNet, layers=layers, init=torch.from_numpy(init))
    return Problem({"net": net, "optimizer": optimizer}, data, NAMES.get(kind, ()))


def data_module(problem: Problem, cfg: dict[str, Any], sets: dict[str, Any] | None = None) -> FederatedDataModule:
    """All clients' samples in their order, and the cohorts of the schedule; `sets`: {X, y} by name."""
    sizes = [len(X) for X, _ in problem.data]
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    samples = tuple(torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*problem.data, strict=True))
    return FederatedDataModule(
        source=TensorSource(train=samples, test=samples),
        partition=(TestedOnOwn if cfg.get("tested_on_own") else FixedPartition)([part.tolist() for part in parts]),
        num_clients=len(sizes),
        schedule=cfg["schedule"],
        shuffle=False,
        batch_size=cfg["batch"] or "full",
        extra_splits={name: source_of(one) for name, one in (sets or {}).items()},
    )


class TestedOnOwn(FixedPartition):
    """Tests each client on its own training samples."""

    __test__ = False  # no class of tests

    def partition_test(self, dealt: Any, test: Any, size: int | None = None) -> list[np.ndarray]:
        return [part.copy() for part in self.indices]


def source_of(samples: dict[str, np.ndarray]) -> TensorSource:
    pair = torch.from_numpy(samples["X"]), torch.from_numpy(samples["y"])
    return TensorSource(train=pair, test=pair)


# --- running


def paper_traffic(*contents: Any) -> int:
    """Bytes as the papers count them: 4 for every float, whatever the precision, and none for whole numbers."""
    counts: list[int] = []
    apply_to_collection(contents, Tensor, lambda t: counts.append(t.numel() if t.is_floating_point() else 0))
    apply_to_collection(contents, float, lambda _: counts.append(1))
    return 4 * sum(counts)


@dataclass(eq=False)
class Recorder(pl.Callback):
    """What happened in each round: the clients' first updates, their lr, bytes per client, the server's weights."""

    updates: list[dict[int, ClientUpdate]] = field(default_factory=list)
    lrs: list[set[float]] = field(default_factory=list)
    down: list[Counter[int]] = field(default_factory=list)
    up: list[Counter[int]] = field(default_factory=list)
    moved: list[Counter[str]] = field(default_factory=list)
    """Bytes by way as the run counts them: the statistics of a rule are taken at the server, and are no traffic."""
    servers: list[State] = field(default_factory=list)
    evaluated: list[State] = field(default_factory=list)
    client_states: list[dict[int, dict[str, Any]]] = field(default_factory=list)
    """Of each client after its training: its round buffers, and over them its memory."""
    server_states: list[State] = field(default_factory=list)
    """What the method's server side keeps."""
    passes: list[dict[int, list[tuple[int, set[float]]]]] = field(default_factory=list)
    """Number of steps and learning rates after each local epoch."""
    note: Callable[[Any, ClientUpdate], dict[str, Any]] = lambda client, update: {}
    """`(client, update) -> ` what else a case expects of each client, by name; a dict of all entries is a model."""
    side: Callable[[FederatedLoop], dict[str, Any]] = lambda loop: {}
    """What else it expects of the server after each round."""
    notes: list[dict[int, dict[str, Any]]] = field(default_factory=list)
    sides: list[dict[str, Any]] = field(default_factory=list)

    def on_train_epoch_start(self, trainer: pl.Trainer, loop: FederatedLoop) -> None:
        self.updates.append({})
        self.client_states.append({})
        self.lrs.append(set())
        self.down.append(Counter())
        self.up.append(Counter())
        self.moved.append(Counter())
        self.passes.append({})
        self.notes.append({})

    def on_client_epoch_end(self, trainer: pl.Trainer, loop: FederatedLoop, client_id: int, epoch: int) -> None:
        self.passes[-1].setdefault(client_id, []).append((loop.client.num_steps, local_lrs(loop)))

    def watch(self, server_module: ServerModule) -> None:
        """Count the bytes of each broadcast by client."""
        inner = server_module.broadcast

        def broadcast(exchange: str, client_id: int) -> Broadcast:
            sent = inner(exchange, client_id)
            self.down[-1][client_id] += paper_traffic(sent.weights, dict(sent.extras))
            self.moved[-1]["down"] += traffic(sent.weights, sent.extras)
            return sent

        server_module.broadcast = broadcast

    def on_client_end(self, trainer: pl.Trainer, loop: FederatedLoop, update: ClientUpdate) -> None:
        # The entries are the client's own, whatever a transform has made of them.
        weights = loop.global_weights.snapshot(loop.global_weights.entries)
        kept = {
            "num_steps": update.num_steps,
            "accumulated_lr": update.accumulated_lr,
            "num_samples": update.num_samples,
        }
        self.updates[-1].setdefault(update.client_id, ClientUpdate(update.client_id, weights=weights, **kept))
        self.up[-1][update.client_id] += paper_traffic(update.weights, dict(update.extras))
        taken = traffic(None, dict(loop.aggregator.client_statistics(update)))
        self.moved[-1]["up"] += traffic(update.weights, update.extras) - taken
        self.client_states[-1][update.client_id] = {**loop.client.round, **loop.client.memory}
        self.notes[-1].setdefault(update.client_id, {}).update(self.note(loop.client, update))
        if update.num_steps:
            self.lrs[-1] |= local_lrs(loop)

    def on_train_batch_end(self, trainer: pl.Trainer, loop: FederatedLoop, *_: Any) -> None:
        for way in ("down", "up"):
            assert trainer.callback_metrics[f"comm/bytes_{way}"] == self.moved[-1][way]
        self.servers.append({name: value.detach().clone() for name, value in loop.client.state_dict().items()})
        self.evaluated.append(
            loop.server_module.evaluation_weights(loop.aggregator.evaluation_weights(self.servers[-1]))
        )
        self.server_states.append({name: value.clone() for name, value in loop.server_module.state_dict().items()})
        self.sides.append(self.side(loop))


def local_lrs(loop: FederatedLoop) -> set[float]:
    """Of the client that was trained last."""
    optimizers = loop.engine.services.optimizers(use_pl_optimizer=False)
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    return {group["lr"] for optimizer in optimizers for group in optimizer.param_groups}


def moments(optimizer: Optimizer, **names: str) -> dict[str, Tensor]:
    """What an optimizer keeps under some names, each flat, in the order of the parameters."""
    states = [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]]
    return {key: flat(state[name] for state in states) for key, name in names.items() if name in states[0]}


def server_moments(**names: str) -> Callable[[FederatedLoop], dict[str, Tensor]]:
    """`moments` of the server optimizer, as a Recorder's `side`."""
    return lambda loop: moments(loop.trainer.optimizers[0], **names)


def server_buffer(part: str, name: str) -> Callable[[FederatedLoop], dict[str, Tensor]]:
    """A buffer of a part of the server (`aggregator`, `server_module`), as a Recorder's `side`."""
    return lambda loop: {name: getattr(getattr(loop, part), name).clone()}


@dataclass
class Run:
    """A finished run: how to write its states as the golden files do."""

    problem: Problem
    client: ClientModule
    recorder: Recorder
    cfg: dict[str, Any]

    @property
    def parts(self) -> list[str]:
        """Head and body, where the net has both."""
        names = {name[:9] for name, _ in self.client.named_parameters()}
        return ["body", "head"] if "net.head." in names and len(names) > 1 else []

    @property
    def schedule(self) -> list[list[int]]:
        cohorts: list[list[int]] = self.cfg["schedule"]
        return cohorts

    def weights(self, state: State, part: str = "") -> Any:
        """The parameters: by the problem's names, or one flat vector in their order; so always `part`: head or body."""
        params = {name: state[name] for name, _ in self.client.named_parameters() if name[:4] in ("net.", "modu")}
        if part:
            return flat(x for name, x in params.items() if name.startswith("net.head.") == (part == "head"))
        if self.problem.names:
            return dict(zip(self.problem.names, params.values(), strict=True))
        return flat(params.values())

    def buffers(self, state: State) -> list[dict[str, Any]]:
        """The entries of each BatchNorm layer, in the order of the layers."""
        layers: dict[str, dict[str, Any]] = {}
        for name, _ in self.client.named_buffers():
            layer, _, entry = name.rpartition(".")
            layers.setdefault(layer, {})[entry] = state[name]
        return list(layers.values())

    def server_state(self, r: int, name: str) -> Tensor:
        """A state that the server keeps after a round, flat."""
        return flat(value for entry, value in self.recorder.server_states[r].items() if entry.startswith(f"{name}."))

    def memories(self, r: int, name: str) -> list[Tensor]:
        """A state in the memory of all clients after a round, each flat; zeros where it has none."""
        found: dict[int, Tensor] = {}
        for states in self.recorder.client_states[: r + 1]:
            found |= {i: flat(state[name].values()) for i, state in states.items() if name in state}
        zeros = torch.zeros_like(flat(self.client.params().values()))
        return [found.get(client_id, zeros) for client_id in range(len(self.problem.data))]

    def cohort(self, r: int) -> list[ClientUpdate]:
        """The updates of a round, in the order of the schedule."""
        updates = self.recorder.updates[r]
        assert sorted(updates) == sorted(self.schedule[r])
        return [updates[client_id] for client_id in self.schedule[r]]

    def states(self, r: int) -> list[dict[str, Any]]:
        """Round buffers and memory of the cohort's clients, in the order of the schedule."""
        return [self.recorder.client_states[r][client_id] for client_id in self.schedule[r]]

    def round(self, r: int) -> dict[str, Any]:
        """What every method's rounds have in common; lists follow the cohort's order in the schedule."""
        cohort = self.cohort(r)
        (lr,) = self.recorder.lrs[r] or {self.cfg["lr"] * self.cfg["lr_decay"] ** r}  # nobody had anything to train on
        server = self.recorder.servers[r]
        return {
            "participants": [update.client_id for update in cohort],
            "lr": lr,
            "K": [update.num_steps for update in cohort],
            "clients": [self.weights(update.weights) for update in cohort],
            "client_buffers": [self.buffers(update.weights) for update in cohort],
            "server": self.weights(server),
            **{f"server_{part}": self.weights(server, part) for part in self.parts},
            **(self.of_head(r) if "head_epochs" in self.cfg else {}),
            **self.noted(r),
            "server_buffers": self.buffers(server),
            "bytes_down": [self.recorder.down[r][client_id] for client_id in self.schedule[r]],
            "bytes_up": [self.recorder.up[r][client_id] for client_id in self.schedule[r]],
        }

    def noted(self, r: int) -> dict[str, Any]:
        """What was noted of the participants and of the server, models as the golden files write them."""
        notes = [self.recorder.notes[r][client_id] for client_id in self.schedule[r]]
        found: dict[str, Any] = {name: [note[name] for note in notes] for name in notes[0]}
        for name, values in [*found.items()]:
            if any(isinstance(value, dict) for value in values):
                found[name] = [state and self.weights(state) for state in values]
                found[f"{name}_buffers"] = [state and self.buffers(state) for state in values]
        return {**found, **self.recorder.sides[r]}

    def of_head(self, r: int) -> dict[str, Any]:
        """Steps of the participants' heads (0 of a client without data) and bodies, and the heads' learning rate."""
        epochs = self.cfg["head_epochs"]
        updates = self.recorder.updates[r]
        seen = {c: self.recorder.passes[r].get(c, [(0, set[float]())] * epochs)[epochs - 1] for c in self.schedule[r]}
        steps = {client_id: k for client_id, (k, _) in seen.items()}
        body = [updates[client_id].num_steps - k for client_id, k in steps.items()]
        lrs = set[float]().union(*(lrs for _, lrs in seen.values()))
        return {"K_head": [*steps.values()], "K_body": body, "head_lr": next(iter(lrs), None)}


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
    cfg = {"lr_decay": 1.0, "batch": None, **inputs["cfg"]}
    recorder = recorder or Recorder()
    optimizer = partial(SGD, lr=cfg["lr"], momentum=cfg["rho"], weight_decay=cfg["wd"])
    problem = problem_of(inputs["problem"], local_optimizer(optimizer))
    module = client(**problem.client)
    settings = {"weighting": cfg.get("weighting", "samples"), "clip_norm": cfg.get("clip_norm"), **loop}
    fitted = FederatedLoop(module, local_epochs=cfg["epochs"], lr_decay=cfg["lr_decay"], **folded(settings))
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


class GivenGradients(pl.LightningModule):
    """A module with weights w, whose gradient is the batch of one; keeps w after each step.

    `inputs`: x (first w), grads, lrs (of each step), rho, wd.
    """

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.from_numpy(inputs["x"]).clone())
        self.inputs = inputs
        self.steps = list[Tensor]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return batch[0][0] @ self.w

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps.append(self.w.detach().clone())

    def configure_optimizers(self) -> Any:
        lrs = self.inputs["lrs"]
        optimizer = SGD([self.w], lrs[0], self.inputs["rho"], weight_decay=self.inputs["wd"])
        schedule = LambdaLR(optimizer, lambda k: [*lrs, 0.0][k] / lrs[0])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train_given(client: ClientModule, memory: dict[str, Any], **extras: Any) -> ClientResult:
    """Train a client around `GivenGradients`, by the engine; `extras` of the broadcast."""
    module: Any = client.module
    grads = np.stack(module.inputs["grads"])
    problem = Problem({}, [(grads, np.zeros(len(grads)))])
    data = data_module(problem, {"schedule": [[0]], "batch": 1})
    data.setup("fit")
    broadcast = Broadcast(0, "train", {"module.w": module.w.detach().clone()}, extras)
    (result,) = SequentialEngine(client).run("train", [ClientJob(0, broadcast, data.view(0, 0), memory)])
    return result


# --- methods


def rounds(finished: Run) -> dict[str, Any]:
    return {"rounds": [finished.round(r) for r in range(len(finished.schedule))]}


def whole(
    kind: Callable[..., ClientModule],
    names: str = "",
    note: Callable[[Any, ClientUpdate], dict[str, Any]] | None = None,
    side: Callable[[Any], dict[str, Any]] | None = None,
    more: Callable[[Run, int], dict[str, Any]] = lambda finished, r: {},
    **loop: Any,
) -> Adapter:
    """An adapter of whole rounds, with the case's server lr.

    Args:
        kind: the client's class; an object of it finds the case's inputs under `case`.
        names: of the client's settings, `setting` or `setting=name in cfg`, those that cfg has; "rule" is None.
        note: of the Recorder.
        side: of the Recorder.
        more: what a round has besides, `(run, r) -> ` values by key.
        loop: settings of the run or the loop; classes are called.
    """

    def adapted(inputs: Inputs) -> dict[str, Any]:
        cfg = inputs["cfg"]
        settings = {}
        for setting, _, name in (word.partition("=") for word in names.split()):
            if (name or setting) in cfg:
                value = cfg[name or setting]
                settings[setting] = None if value == "rule" else value

        def client(**given: Any) -> ClientModule:
            made = kind(**settings, **given)
            made.case = inputs
            return made

        seen = {"note": note, "side": side}
        recorder = Recorder(**{name: given for name, given in seen.items() if given is not None})
        made = {name: value() if isinstance(value, type) else value for name, value in loop.items()}
        if "server_lr" in cfg:
            made.setdefault("server_optimizer", partial(SGD, lr=cfg["server_lr"]))
        finished = run(client, inputs, recorder=recorder, **made)
        return {"rounds": [{**one, **more(finished, r)} for r, one in enumerate(rounds(finished)["rounds"])]}

    return adapted


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
    recorder = Recorder(side=server_moments(v="momentum_buffer"))
    return rounds(run(fedntd_client(cfg), inputs, recorder=recorder, server_optimizer=server))


ADAPTERS: dict[str, Callable[[Inputs], dict[str, Any]]] = {
    "fedavg": fedavg,
    "fedprox": fedprox,
    "fedntd": fedntd,
    "fedntd+fedavgm": fedntd_fedavgm,
}
