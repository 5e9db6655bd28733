"""Runs whole federations of golden cases, through the loop, the data module and the stock Trainer."""

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
from tests.toys import folded, trainer

Inputs = dict[str, Any]
Adapter = Callable[[Inputs], dict[str, Any]]


# --- problems: a net or module with its first weights, and the clients' data


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "linear": nn.Linear,
    "bn": nn.BatchNorm1d,
    "gn": nn.GroupNorm,
    "ln": nn.LayerNorm,
    "relu": nn.ReLU,
}


class GoldenNet(Backbone):
    """Is the net of a `kind: net` problem, with its parameters in the order of the problem's flat vectors."""

    def __init__(self, num_classes: int, input_shape: tuple[int, ...], layers: list[list[Any]], init: Tensor) -> None:
        super().__init__()
        *body, head = [LAYERS[kind](*sizes) for kind, *sizes in layers]
        self.body = nn.Sequential(*body)
        self.head = head
        self.double()
        nn.utils.vector_to_parameters(init.clone(), self.parameters())

    def features(self, x: Tensor) -> Tensor:
        return self.body(x)


class Quadratic(pl.LightningModule):
    """Has the loss ½(w−b)ᵀA(w−b), as a user's own module. A batch holds equal rows (A, b)."""

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
    "quadratic": ("w",),
    "softmax": ("weight", "bias"),
    "linear2": ("features.weight", "classifier.weight", "classifier.bias"),
}
"""Names of the weights in problems whose weights are compared by name, in the order of the parameters."""


@dataclass
class Problem:
    """Holds what a problem of a golden file means for the product."""

    client: dict[str, Any]
    """Arguments of the client: `net` and `optimizer`, or `module`."""

    data: list[tuple[np.ndarray, np.ndarray]]
    """Samples and targets of each client."""

    names: tuple[str, ...] = ()
    """Names of the weights, in the order of the parameters. Without names they are compared as one flat vector."""


def problem_of(problem: dict[str, Any], optimizer: Callable[[Iterable[Any]], SGD]) -> Problem:
    """Return the client and the data of a problem.

    Raises:
        NotImplementedError: No adapter knows the kind of the problem.
    """
    kind = problem["kind"]
    if kind == "quadratic":
        module = Quadratic(torch.from_numpy(problem["init"]["w"]), optimizer)
        return Problem({"module": module}, quadratic_data(problem), NAMES[kind])
    if kind == "softmax":
        layers = [["linear", problem["d"], problem["C"]]]
        init = np.concatenate([problem["init"][name].ravel() for name in NAMES[kind]])
    elif kind == "linear2":
        layers = [["linear", problem["d"], problem["k"], False], ["linear", problem["k"], problem["C"]]]
        init = problem["w0_flat"]
    elif kind == "net":
        layers = problem["layers"]
        init = problem["init"]
    else:
        raise NotImplementedError(f"no adapter for problems of kind {kind!r}")
    net = partial(GoldenNet, layers=layers, init=torch.from_numpy(init))
    data = [(client["X"], client["y"]) for client in problem["clients"]]
    return Problem({"net": net, "optimizer": optimizer}, data, NAMES.get(kind, ()))


def quadratic_data(problem: dict[str, Any]) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return equal rows (A, b) for each client, as many as it has samples."""
    data = []
    for A, b, n in zip(problem["A"], problem["b"], problem["n"], strict=True):
        data.append((np.repeat(A[None], n, axis=0), np.repeat(b[None], n, axis=0)))
    return data


def linear_net(weight: list[list[float]], bias: list[float]) -> Callable[..., GoldenNet]:
    """Return the factory of a linear classifier with these first weights, (C, d) and (C,)."""
    layers = [["linear", len(weight[0]), len(weight)]]
    init = torch.tensor(np.concatenate([np.ravel(weight), np.ravel(bias)]))
    return partial(GoldenNet, layers=layers, init=init)


def joined(data: list[tuple[np.ndarray, np.ndarray]]) -> tuple[tuple[Tensor, ...], list[list[int]]]:
    """Join the clients' samples and targets in their order, and list the indices of each client."""
    samples = tuple(torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*data, strict=True))
    sizes = [len(x) for x, _ in data]
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    return samples, [part.tolist() for part in parts]


def data_module(problem: Problem, cfg: dict[str, Any], sets: dict[str, Any] | None = None) -> FederatedDataModule:
    """Return all clients' samples in their order, with the cohorts of the schedule.

    Args:
        problem: The problem with the samples.
        cfg: Settings of the case.
        sets: Further splits by name, each {X, y}.
    """
    samples, parts = joined(problem.data)
    partition = TestedOnOwn if cfg.get("tested_on_own") else FixedPartition
    return FederatedDataModule(
        source=TensorSource(train=samples, test=samples),
        partition=partition(parts),
        num_clients=len(parts),
        schedule=cfg["schedule"],
        shuffle=False,
        batch_size=cfg["batch"] or "full",
        extra_splits={name: source_of(given) for name, given in (sets or {}).items()},
    )


class TestedOnOwn(FixedPartition):
    """Tests each client on its own training samples."""

    # pytest would take it for a class of tests.
    __test__ = False

    def partition_test(self, dealt: Any, test: Any, size: int | None = None) -> list[np.ndarray]:
        return [part.copy() for part in self.indices]


def source_of(samples: dict[str, np.ndarray]) -> TensorSource:
    x = torch.from_numpy(samples["X"])
    y = torch.from_numpy(samples["y"])
    return TensorSource(train=(x, y), test=(x, y))


# --- running


def paper_traffic(*contents: Any) -> int:
    """Count bytes as the papers do: 4 for every float, whatever the precision, and none for whole numbers."""
    counts: list[int] = []

    def count(value: Tensor) -> None:
        if value.is_floating_point():
            counts.append(value.numel())

    apply_to_collection(contents, Tensor, count)
    apply_to_collection(contents, float, lambda _: counts.append(1))
    return 4 * sum(counts)


@dataclass(eq=False)
class Recorder(pl.Callback):
    """Notes each round: the clients' first updates, their learning rates, bytes by client, the server's weights."""

    updates: list[dict[int, ClientUpdate]] = field(default_factory=list)
    lrs: list[set[float]] = field(default_factory=list)
    down: list[Counter[int]] = field(default_factory=list)
    up: list[Counter[int]] = field(default_factory=list)
    moved: list[Counter[str]] = field(default_factory=list)
    """Bytes by way, as the run counts them. The server computes the statistics of a rule, so they are no traffic."""
    servers: list[State] = field(default_factory=list)
    evaluated: list[State] = field(default_factory=list)
    client_states: list[dict[int, dict[str, Any]]] = field(default_factory=list)
    """The round buffers of each client after its training, and over them its memory."""
    server_states: list[State] = field(default_factory=list)
    """The state of the method's server side."""
    passes: list[dict[int, list[tuple[int, set[float]]]]] = field(default_factory=list)
    """Number of steps and learning rates after each local epoch."""
    note: Callable[[Any, ClientUpdate], dict[str, Any]] = lambda client, update: {}
    """What else a case expects of each client, by name. A dict of all entries is a model."""
    side: Callable[[FederatedLoop], dict[str, Any]] = lambda loop: {}
    """What else a case expects of the server after each round, by name."""
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
        first = ClientUpdate(
            client_id=update.client_id,
            num_samples=update.num_samples,
            num_steps=update.num_steps,
            accumulated_lr=update.accumulated_lr,
            # The entries are the client's own, whatever a transform has made of them.
            weights=loop.global_weights.snapshot(loop.global_weights.entries),
        )
        self.updates[-1].setdefault(update.client_id, first)
        self.up[-1][update.client_id] += paper_traffic(update.weights, dict(update.extras))
        statistics = traffic(None, dict(loop.aggregator.client_statistics(update)))
        self.moved[-1]["up"] += traffic(update.weights, update.extras) - statistics
        self.client_states[-1][update.client_id] = {**loop.client.round, **loop.client.memory}
        self.notes[-1].setdefault(update.client_id, {}).update(self.note(loop.client, update))
        if update.num_steps:
            self.lrs[-1] |= local_lrs(loop)

    def on_train_batch_end(self, trainer: pl.Trainer, loop: FederatedLoop, *_: Any) -> None:
        for way in ("down", "up"):
            assert trainer.callback_metrics[f"comm/bytes_{way}"] == self.moved[-1][way]
        server = {name: value.detach().clone() for name, value in loop.client.state_dict().items()}
        self.servers.append(server)
        of_rule = loop.aggregator.evaluation_weights(server)
        self.evaluated.append(loop.server_module.evaluation_weights(of_rule))
        self.server_states.append({name: value.clone() for name, value in loop.server_module.state_dict().items()})
        self.sides.append(self.side(loop))


def local_lrs(loop: FederatedLoop) -> set[float]:
    """Return the learning rates of the client that was trained last."""
    optimizers = loop.engine.services.optimizers(use_pl_optimizer=False)
    if not isinstance(optimizers, list):
        optimizers = [optimizers]
    lrs = set()
    for optimizer in optimizers:
        lrs |= {group["lr"] for group in optimizer.param_groups}
    return lrs


def moments(optimizer: Optimizer, **names: str) -> dict[str, Tensor]:
    """Return entries of an optimizer's state, each flat, in the order of the parameters.

    Args:
        optimizer: The optimizer.
        names: Names in the state by the names of the result. An entry that the state lacks is left out.
    """
    states = []
    for group in optimizer.param_groups:
        states += [optimizer.state[parameter] for parameter in group["params"]]
    known = {key: name for key, name in names.items() if name in states[0]}
    return {key: flat(state[name] for state in states) for key, name in known.items()}


def server_moments(**names: str) -> Callable[[FederatedLoop], dict[str, Tensor]]:
    """Return `moments` of the server optimizer, as the `side` of a Recorder."""
    return lambda loop: moments(loop.trainer.optimizers[0], **names)


def server_buffer(part: str, name: str) -> Callable[[FederatedLoop], dict[str, Tensor]]:
    """Return a buffer of the `aggregator` or the `server_module`, as the `side` of a Recorder."""
    return lambda loop: {name: getattr(getattr(loop, part), name).clone()}


@dataclass
class Run:
    """Holds a finished run, and writes its states as the golden files do."""

    problem: Problem
    client: ClientModule
    recorder: Recorder
    cfg: dict[str, Any]

    @property
    def parts(self) -> list[str]:
        """Head and body, if the net has both."""
        roots = {name[: len("net.head.")] for name, _ in self.client.named_parameters()}
        return ["body", "head"] if "net.head." in roots and len(roots) > 1 else []

    @property
    def schedule(self) -> list[list[int]]:
        cohorts: list[list[int]] = self.cfg["schedule"]
        return cohorts

    def weights(self, state: State) -> Any:
        """Return the parameters by the problem's names, or else as one flat vector in their order."""
        params = self._params(state)
        if self.problem.names:
            return dict(zip(self.problem.names, params.values(), strict=True))
        return flat(params.values())

    def part_weights(self, state: State, part: str) -> Tensor:
        """Return the parameters of the `head` or the `body` as one flat vector."""
        params = self._params(state)
        return flat(value for name, value in params.items() if name.startswith("net.head.") == (part == "head"))

    def _params(self, state: State) -> dict[str, Tensor]:
        """Return the parameters of the net or the user's module, in their order."""
        names = [name for name, _ in self.client.named_parameters()]
        return {name: state[name] for name in names if name.startswith(("net.", "module."))}

    def buffers(self, state: State) -> list[dict[str, Any]]:
        """Return the entries of each BatchNorm layer, in the order of the layers."""
        layers: dict[str, dict[str, Any]] = {}
        for name, _ in self.client.named_buffers():
            layer, _, entry = name.rpartition(".")
            layers.setdefault(layer, {})[entry] = state[name]
        return list(layers.values())

    def server_state(self, r: int, name: str) -> Tensor:
        """Return a state that the server keeps after a round, flat."""
        entries = self.recorder.server_states[r]
        return flat(value for entry, value in entries.items() if entry.startswith(f"{name}."))

    def memories(self, r: int, name: str) -> list[Tensor]:
        """Return a state in the memory of all clients after a round, each flat, with zeros for a client without it."""
        found: dict[int, Tensor] = {}
        for states in self.recorder.client_states[: r + 1]:
            for client_id, state in states.items():
                if name in state:
                    found[client_id] = flat(state[name].values())
        zeros = torch.zeros_like(flat(self.client.params().values()))
        return [found.get(client_id, zeros) for client_id in range(len(self.problem.data))]

    def cohort(self, r: int) -> list[ClientUpdate]:
        """Return the updates of a round, in the order of the schedule."""
        updates = self.recorder.updates[r]
        assert sorted(updates) == sorted(self.schedule[r])
        return [updates[client_id] for client_id in self.schedule[r]]

    def round(self, r: int) -> dict[str, Any]:
        """Return what the rounds of all methods have in common. Lists have the cohort's order in the schedule."""
        cohort = self.cohort(r)
        lr_without_samples = self.cfg["lr"] * self.cfg["lr_decay"] ** r
        (lr,) = self.recorder.lrs[r] or {lr_without_samples}
        server = self.recorder.servers[r]
        found = {
            "participants": [update.client_id for update in cohort],
            "lr": lr,
            "K": [update.num_steps for update in cohort],
            "clients": [self.weights(update.weights) for update in cohort],
            "client_buffers": [self.buffers(update.weights) for update in cohort],
            "server": self.weights(server),
            "server_buffers": self.buffers(server),
            "bytes_down": [self.recorder.down[r][client_id] for client_id in self.schedule[r]],
            "bytes_up": [self.recorder.up[r][client_id] for client_id in self.schedule[r]],
        }
        for part in self.parts:
            found[f"server_{part}"] = self.part_weights(server, part)
        if "head_epochs" in self.cfg:
            found |= self.of_head(r)
        return found | self.noted(r)

    def noted(self, r: int) -> dict[str, Any]:
        """Return the notes about the participants and the server, with models as the golden files write them."""
        notes = [self.recorder.notes[r][client_id] for client_id in self.schedule[r]]
        found: dict[str, Any] = {}
        for name in notes[0]:
            values = [note[name] for note in notes]
            found[name] = values
            if any(isinstance(value, dict) for value in values):
                found[name] = [state and self.weights(state) for state in values]
                found[f"{name}_buffers"] = [state and self.buffers(state) for state in values]
        return {**found, **self.recorder.sides[r]}

    def of_head(self, r: int) -> dict[str, Any]:
        """Return the steps of the participants' heads and bodies, and the heads' learning rate.

        A client without samples has 0 steps.
        """
        steps_of_head = []
        steps_of_body = []
        lrs = set[float]()
        for update in self.cohort(r):
            passes = self.recorder.passes[r].get(update.client_id)
            if passes is None:
                num_steps = 0
            else:
                num_steps, lrs_of_client = passes[self.cfg["head_epochs"] - 1]
                lrs |= lrs_of_client
            steps_of_head.append(num_steps)
            steps_of_body.append(update.num_steps - num_steps)
        return {"K_head": steps_of_head, "K_body": steps_of_body, "head_lr": next(iter(lrs), None)}


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def last_own_model(client: Any) -> State | None:
    """Return the last of the models that a client keeps, or None."""
    return next(reversed(client.own_models()), None)


def run(
    client: Callable[..., ClientModule],
    inputs: Inputs,
    *,
    local_optimizer: Callable[..., Any] = lambda sgd: sgd,
    sets: tuple[str, ...] = (),
    recorder: Recorder | None = None,
    **loop: Any,
) -> Run:
    """Train through the product.

    Args:
        client: Factory of the client, called with the problem's net and optimizer, or its module.
        inputs: The case.
        local_optimizer: Makes the clients' optimizer of the factory of plain SGD.
        sets: Names of the inputs that are data.
        recorder: Notes the rounds. None is a plain one.
        loop: Further settings of the loop.
    """
    cfg = {"lr_decay": 1.0, "batch": None, **inputs["cfg"]}
    recorder = recorder or Recorder()
    optimizer = partial(SGD, lr=cfg["lr"], momentum=cfg["rho"], weight_decay=cfg["wd"])
    problem = problem_of(inputs["problem"], local_optimizer(optimizer))
    module = client(**problem.client)
    settings = {"weighting": cfg.get("weighting", "samples"), "clip_norm": cfg.get("clip_norm"), **loop}
    fitted = FederatedLoop(module, local_epochs=cfg["epochs"], lr_decay=cfg["lr_decay"], **folded(settings))
    recorder.watch(fitted.server_module)
    data = data_module(problem, cfg, {name: inputs[name] for name in sets})
    fitting = trainer(len(cfg["schedule"]), precision="64-true", limit_val_batches=0, callbacks=[recorder])
    fitting.fit(fitted, datamodule=data)
    return Run(problem=problem, client=module, recorder=recorder, cfg=cfg)


class GivenGradients(pl.LightningModule):
    """Has weights w, whose gradient is the batch of one sample, and keeps w after each step.

    Args:
        inputs: The case: `x` the first w, `grads`, `lrs` of each step, `rho`, `wd`.
    """

    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.from_numpy(inputs["x"]).clone())
        self.inputs = inputs
        self.steps = list[Tensor]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        gradients, _ = batch
        return gradients[0] @ self.w

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps.append(self.w.detach().clone())

    def configure_optimizers(self) -> Any:
        lrs = self.inputs["lrs"]
        optimizer = SGD([self.w], lr=lrs[0], momentum=self.inputs["rho"], weight_decay=self.inputs["wd"])
        schedule = LambdaLR(optimizer, lambda k: [*lrs, 0.0][k] / lrs[0])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def train_given(client: ClientModule, memory: dict[str, Any], **extras: Any) -> ClientResult:
    """Train a client around `GivenGradients` by the engine.

    Args:
        client: The client.
        memory: Its memory.
        extras: Extras of the broadcast.
    """
    module: Any = client.module
    grads = np.stack(module.inputs["grads"])
    problem = Problem(client={}, data=[(grads, np.zeros(len(grads)))])
    data = data_module(problem, {"schedule": [[0]], "batch": 1})
    data.setup("fit")
    weights = {"module.w": module.w.detach().clone()}
    broadcast = Broadcast(round_idx=0, exchange="train", weights=weights, extras=extras)
    job = ClientJob(client_id=0, broadcast=broadcast, data=data.view(0, 0), memory=memory)
    (result,) = SequentialEngine(client).run("train", [job])
    return result


# --- methods


def rounds(finished: Run) -> dict[str, Any]:
    return {"rounds": [finished.round(r) for r in range(len(finished.schedule))]}


def whole(
    kind: Callable[..., ClientModule],
    names: str = "",
    *,
    note: Callable[[Any, ClientUpdate], dict[str, Any]] | None = None,
    side: Callable[[Any], dict[str, Any]] | None = None,
    more: Callable[[Run, int], dict[str, Any]] = lambda finished, r: {},
    **loop: Any,
) -> Adapter:
    """Make an adapter of whole rounds, with the case's server lr.

    Args:
        kind: Class of the client. The client finds the case's inputs under `case`.
        names: Settings of the client, `setting` or `setting=name in cfg`. Those that cfg lacks are left out.
        note: That of the Recorder.
        side: That of the Recorder.
        more: Further values of a round by name, `(run, r) -> dict`.
        loop: Settings of the run or the loop. A class is called in each run.
    """

    def adapted(inputs: Inputs) -> dict[str, Any]:
        cfg = inputs["cfg"]
        settings = settings_in(cfg, names)

        def client(**given: Any) -> ClientModule:
            made = kind(**settings, **given)
            made.case = inputs
            return made

        recorder = Recorder()
        if note is not None:
            recorder.note = note
        if side is not None:
            recorder.side = side
        of_run = {name: value() if isinstance(value, type) else value for name, value in loop.items()}
        if "server_lr" in cfg:
            of_run.setdefault("server_optimizer", partial(SGD, lr=cfg["server_lr"]))
        finished = run(client, inputs, recorder=recorder, **of_run)
        found = rounds(finished)["rounds"]
        return {"rounds": [{**of_round, **more(finished, r)} for r, of_round in enumerate(found)]}

    return adapted


def settings_in(cfg: dict[str, Any], names: str) -> dict[str, Any]:
    """Return the settings of `whole` that a case has. Its value "rule" is None."""
    settings = {}
    for word in names.split():
        setting, _, name = word.partition("=")
        name = name or setting
        if name in cfg:
            settings[setting] = None if cfg[name] == "rule" else cfg[name]
    return settings


def fedavg(inputs: Inputs) -> dict[str, Any]:
    return rounds(run(FedAvg, inputs))


def fedprox(inputs: Inputs) -> dict[str, Any]:
    return rounds(run(partial(FedProx, mu=inputs["cfg"]["mu"]), inputs))


def fedntd_client(cfg: dict[str, Any]) -> Callable[..., FedNTD]:
    return partial(
        FedNTD,
        beta=cfg["beta"],
        temperature=cfg["tau"],
        ntd_weight=cfg["lam"],
        distance=cfg.get("distance", "kl"),
    )


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
