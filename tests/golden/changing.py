"""Golden cases of data that change: weights, sizes, accuracies of tasks, and the measures of the table."""

from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytorch_lightning as pl
import torch
from torch.optim import SGD

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.client import ClientModule
from fl_lightning.data import ClassIncremental, FixedPartition, ListedSamples, Scenario, TensorSource
from fl_lightning.functional import continual
from fl_lightning.methods import FedAvg, FedEWC, FedLwF, Replay
from fl_lightning.utils.keyed import keyed_numpy
from tests.toys import trainer

from .adapters_fn import Inputs, float64
from .end_to_end import linear_net

REPLAYS = {"ER": 0.0, "DER++": 0.5}
"""The methods that repeat samples, with the weight of the stored logits."""


def client_of(name: str, problem: Inputs) -> ClientModule:
    net = linear_net(problem["weight"], problem["bias"])
    optimizer = partial(SGD, lr=problem["lr"])
    if name == "FedEWC":
        return FedEWC(lam=problem["lam"], net=net, optimizer=optimizer)
    if name == "FedLwF":
        return FedLwF(alpha=problem["alpha"], temperature=problem["temperature"], net=net, optimizer=optimizer)
    if name in REPLAYS:
        return Replay(size=6, alpha=REPLAYS[name], net=net, optimizer=optimizer)
    return FedAvg(net=net, optimizer=optimizer)


def delayed_seed(num_clients: int) -> int:
    """Return the first seed by which client i begins i rounds late."""
    for seed in count():
        delays = []
        for client_id in range(num_clients):
            draws = keyed_numpy(seed=seed, purpose="scenario/delay", round_idx=-1, client_id=client_id)
            delays.append(draws.integers(2))
        if delays == list(range(num_clients)):
            return seed
    raise AssertionError


def fitted(
    problem: Inputs,
    name: str,
    *,
    parts: list[list[int]],
    scenario: Scenario,
    seed: int = 0,
    rounds: int | None = None,
    chunk: int = 1,
) -> "Watch":
    """Run a method.

    Args:
        problem: Samples, first weights and settings.
        name: Name of the method.
        parts: Indices of the samples of each client.
        scenario: Scenario of the data.
        seed: Seed of the data.
        rounds: Number of rounds. None is that of the problem.
        chunk: Number of clients that are trained at once.
    """
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
    trainer(rounds, precision="64-true", callbacks=[watch]).fit(loop, datamodule=data)
    for round_idx in range(rounds):
        watch.sizes.append([data.size(client_id, round_idx) for client_id in range(len(parts))])
    watch.tasks = loop._run.tasks
    return watch


class Watch(pl.Callback):
    """Notes the weights and the metrics after each round."""

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
    """Run a case of two tasks of classes. Its table too is that of the loop.

    Args:
        case: The case.
        chunk: Number of clients that are trained at once.
    """
    problem = case["problem"]
    method, _, order = case["case"].partition("/")
    parts = problem["parts"]
    rounds = None
    if method in REPLAYS:
        parts = problem["even"]
        rounds = 3
    delay = 1 if order == "delayed" else 0
    scenario = ClassIncremental(problem["tasks"], problem["rounds_per_task"], delay=delay)
    watch = fitted(
        problem,
        method,
        parts=parts,
        scenario=scenario,
        seed=delayed_seed(len(parts)),
        rounds=rounds,
        chunk=chunk,
    )
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
    """Return the rounds that are rows of the table: those before a stage of some client begins, and the last one."""
    rounds = len(curve)
    stages = []
    for round_idx in range(rounds):
        stages.append([tasks._scenario.stage(client_id, round_idx) for client_id in tasks._clients])
    ends = [r for r in range(rounds) if r + 1 == rounds or stages[r + 1] != stages[r]]
    assert [curve[end] for end in ends] == table
    return ends


def run_windows(case: Inputs) -> dict[str, Any]:
    """Run the case of listed samples."""
    with TemporaryDirectory() as folder:
        file = Path(folder) / "rounds.csv"
        lines = [",".join(map(str, line)) for line in case["lines"]]
        file.write_text("\n".join(["sample,first,last", *lines]))
        watch = fitted(case["problem"], "FedAvg", parts=case["parts"], scenario=ListedSamples(file))
    return {
        "weight": watch.weight[-1],
        "bias": watch.bias[-1],
        "sizes": watch.sizes,
        "by_round": watch.weight,
    }


def by_hand(case: Inputs) -> dict[str, float]:
    """Return the measures of a table of three tasks, each trained on in one row."""
    table = float64(case["table"])
    initial = float64(case["initial"])
    reference = float64(case["reference"])
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
