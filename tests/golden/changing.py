"""Golden cases of data that change: weights, sizes, accuracies of tasks, and the measures of the table."""

from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch.optim import SGD

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.client import ClientModule
from fl_lightning.data import ClassIncremental, FixedPartition, ListedSamples, Scenario, TensorSource
from fl_lightning.functional import continual
from fl_lightning.methods import FedAvg, FedEWC, FedLwF, Replay
from fl_lightning.utils.keyed import keyed_numpy

from .end_to_end import GoldenNet

Inputs = dict[str, Any]


def client_of(name: str, problem: Inputs) -> ClientModule:
    layers = [["linear", len(problem["weight"][0]), len(problem["weight"])]]
    init = torch.tensor(np.concatenate([np.ravel(problem["weight"]), np.ravel(problem["bias"])]))
    net = partial(GoldenNet, layers=layers, init=init)
    optimizer = partial(SGD, lr=problem["lr"])
    if name == "FedEWC":
        return FedEWC(lam=problem["lam"], net=net, optimizer=optimizer)
    if name == "FedLwF":
        return FedLwF(alpha=problem["alpha"], temperature=problem["temperature"], net=net, optimizer=optimizer)
    if name in ("ER", "DER++"):
        return Replay(size=6, alpha=0.5 if name == "DER++" else 0.0, net=net, optimizer=optimizer)
    return FedAvg(net=net, optimizer=optimizer)


def delayed_seed(num_clients: int) -> int:
    """A seed by which client i begins i rounds late."""
    for seed in count():
        drawn = [keyed_numpy(seed, "scenario/delay", -1, client).integers(2) for client in range(num_clients)]
        if drawn == [client for client in range(num_clients)]:
            return seed
    raise AssertionError


def fitted(
    problem: Inputs,
    name: str,
    parts: list[list[int]],
    scenario: Scenario,
    *,
    seed: int = 0,
    rounds: int | None = None,
    chunk: int = 1,
) -> "Watch":
    rounds = rounds or problem["rounds"]
    data = FederatedDataModule(
        source=TensorSource(
            train=(torch.tensor(problem["x"], dtype=torch.float64), torch.tensor(problem["y"])),
            test=(torch.tensor(problem["test_x"], dtype=torch.float64), torch.tensor(problem["test_y"])),
            num_classes=len(problem["weight"]),
        ),
        partition=FixedPartition(parts),
        num_clients=len(parts),
        shuffle=False,
        batch_size="full",
        seed=seed,
        scenario=scenario,
    )
    watch = Watch()
    loop = FederatedLoop(client_of(name, problem), local_epochs=problem["local_epochs"], chunk=chunk)
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = pl.Trainer(
        max_epochs=rounds,
        accelerator="cpu",
        precision="64-true",
        callbacks=[watch],
        **dict.fromkeys(off, False),
    )
    trainer.fit(loop, datamodule=data)
    watch.sizes = [[data.size(client, t) for client in range(len(parts))] for t in range(rounds)]
    watch.tasks = loop._run.tasks
    return watch


class Watch(pl.Callback):
    """What a run had after each round."""

    def __init__(self) -> None:
        self.weight: list[Any] = []
        self.bias: list[Any] = []
        self.rows: list[dict[str, float]] = []
        self.sizes: list[list[int]] = []
        self.tasks: Any = None

    def on_train_batch_end(self, trainer: pl.Trainer, loop: FederatedLoop, *_: Any) -> None:
        values = {name.rpartition(".")[2]: value for name, value in loop.server.weights.items()}
        self.weight.append(values["weight"].tolist())
        self.bias.append(values["bias"].tolist())

    def on_train_epoch_end(self, trainer: pl.Trainer, loop: FederatedLoop) -> None:
        self.rows.append(dict(loop.round_metrics))


def run_tasks(case: Inputs, chunk: int = 1) -> dict[str, Any]:
    """A case of two tasks of classes, from the loop: its table too is that of the run.

    Args:
        case: The case.
        chunk: Number of clients that are trained at once.
    """
    problem = case["problem"]
    method, _, order = case["case"].partition("/")
    parts = problem["even"] if method in ("ER", "DER++") else problem["parts"]
    delay = int(order == "delayed")
    scenario = ClassIncremental(problem["tasks"], problem["rounds_per_task"], delay=delay)
    rounds = 3 if method in ("ER", "DER++") else None
    watch = fitted(problem, method, parts, scenario, seed=delayed_seed(len(parts)), rounds=rounds, chunk=chunk)
    names = [task.name for task in scenario.tasks]
    rows = watch.tasks.table.rows()
    curve = [[row[f"global/acc_task/{name}"] for name in names] for row in watch.rows]
    last = watch.rows[-1]
    return {
        "weight": watch.weight[-1],
        "bias": watch.bias[-1],
        "curve": curve,
        "initial": rows.initial.tolist(),
        "sizes": watch.sizes,
        "ends": ends_of(watch.tasks, curve, rows.table.tolist()),
        "first": rows.first.tolist(),
        "last": rows.last.tolist(),
        "acc": last["global/acc_tasks"],
        "forgetting": last["global/forgetting_tasks"],
        "bwt": last["global/backward_transfer"],
        "fwt": last["global/forward_transfer"],
    }


def ends_of(tasks: Any, curve: list[list[float]], table: list[list[float]]) -> list[int]:
    """The rounds that are rows of the table: before a stage of some client begins, and the last one."""
    stages = [tuple(tasks._scenario.stage(client, t) for client in tasks._clients) for t in range(len(curve))]
    ends = [t for t in range(len(curve)) if t + 1 == len(curve) or stages[t + 1] != stages[t]]
    assert [curve[end] for end in ends] == table
    return ends


def run_windows(case: Inputs) -> dict[str, Any]:
    """The case of listed samples."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "rounds.csv"
        lines = [",".join(map(str, line)) for line in case["lines"]]
        file.write_text("\n".join(["sample,first,last", *lines]))
        watch = fitted(case["problem"], "FedAvg", case["parts"], ListedSamples(file))
    return {
        "weight": watch.weight[-1],
        "bias": watch.bias[-1],
        "sizes": watch.sizes,
        "by_round": watch.weight,
    }


def by_hand(case: Inputs) -> dict[str, float]:
    """The measures of a table of three tasks, each trained on in one row."""
    table, initial, reference = (
        torch.tensor(case[name], dtype=torch.float64) for name in ("table", "initial", "reference")
    )
    rows = torch.arange(len(table))
    return {
        "acc": continual.tasks_accuracy(table, rows).item(),
        "forgetting": continual.tasks_forgetting(table, rows).item(),
        "bwt": continual.backward_transfer(table, rows).item(),
        "fwt": continual.forward_transfer(table, initial, rows).item(),
        "intransigence": continual.intransigence(table, reference, rows).item(),
    }


METHOD: dict[str, Callable[[Inputs], dict[str, Any]]] = {
    "scenarios": run_tasks,
    "scenarios/windows": run_windows,
    "scenarios/hand": by_hand,
}
E2E: dict[str, Any] = {}
