"""Golden cases of simulated time: schedule, weights and controls of rounds, FedBuff and FedAsync."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytorch_lightning as pl
from torch import Tensor
from torch.optim import SGD

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.aggregation import Aggregator, FedAsync, FedBuff, Pacing, Rounds
from fl_lightning.data import FixedPartition, TensorSource
from fl_lightning.data.devices import Devices
from fl_lightning.methods import SCAFFOLD, FedAvg, FedProx
from tests.toys import trainer

from .adapters_fn import Inputs
from .end_to_end import joined, linear_net

CLIENTS = {"FedAvg": FedAvg, "FedProx": FedProx, "SCAFFOLD": SCAFFOLD}


def pacing_of(case: Inputs) -> Pacing:
    rule = case["rule"]
    if rule["kind"] == "sync":
        return Rounds(**given(case, ("deadline", "late", "over_selection")))
    kind = {"FedBuff": FedBuff, "FedAsync": FedAsync}[rule["kind"]]
    settings = given(case, ("buffer", "timeout", "max_staleness")) | given(rule, ("a", "b", "alpha"))
    return kind(form=rule["staleness"], **settings)


def given(case: Inputs, names: tuple[str, ...]) -> Inputs:
    return {name: case[name] for name in names if name in case}


def loop_of(case: Inputs, **settings: Any) -> FederatedLoop:
    own = {"mu": case["mu"]} if case["method"] == "FedProx" else {}
    net = linear_net(case["W0"], case["b0"])
    client = CLIENTS[case["method"]](net=net, optimizer=partial(SGD, lr=case["lr"]), **own)
    rule = case["rule"]
    server_lr = rule.get("server_lr", 1.0)
    return FederatedLoop(
        client,
        Aggregator(rule.get("weighting", "samples")),
        local_epochs=case["epochs"],
        server_optimizer=None if server_lr == 1 else partial(SGD, lr=server_lr),
        pacing=pacing_of(case),
        **settings,
    )


def data_of(case: Inputs, **settings: Any) -> FederatedDataModule:
    data = [(np.array(client["x"]), np.array(client["y"], dtype=np.int64)) for client in case["clients"]]
    samples, parts = joined(data)
    return FederatedDataModule(
        source=TensorSource(train=samples, test=samples, num_classes=len(case["W0"])),
        partition=FixedPartition(parts),
        num_clients=len(parts),
        cohort_size=case.get("size", case["concurrency"]),
        sampling_seed=case["seed"],
        shuffle=False,
        batch_size="full",
        devices=Devices(**case["devices"]),
        **settings,
    )


class Watch(pl.Callback):
    """Notes the weights, the controls, the metrics and the clients' steps of each round."""

    def __init__(self) -> None:
        self.weights: list[list[Any]] = []
        self.controls: list[list[Any]] = []
        self.rows: list[dict[str, float]] = []
        self.steps: list[dict[int, int]] = []
        self.now: dict[int, int] = {}

    def on_client_end(self, trainer: pl.Trainer, loop: FederatedLoop, update: Any) -> None:
        self.now[update.client_id] = update.num_steps

    def on_train_batch_end(self, trainer: pl.Trainer, loop: FederatedLoop, *_: Any) -> None:
        self.rows.append(dict(loop.round_metrics))
        self.steps.append(self.now)
        self.now = {}
        self.weights.append(by_entry(loop.server.weights))
        if hasattr(loop.server_module, "control"):
            self.controls.append(by_entry(loop.server_module.control))


def by_entry(state: Any) -> list[Any]:
    values: dict[str, Tensor] = {name.rpartition(".")[2]: value for name, value in state.items()}
    return [values["weight"].tolist(), values["bias"].tolist()]


def run(case: Inputs) -> dict[str, Any]:
    """Return what a case expects, from the loop. The schedule too is that of the run."""
    watch = Watch()
    loop = loop_of(case)
    fitting = trainer(case["rounds"], precision="64-true", limit_val_batches=0, callbacks=[watch])
    fitting.fit(loop, datamodule=data_of(case))
    timeline = loop._rounds.pace.timeline
    is_sync = case["rule"]["kind"] == "sync"
    schedule = []
    started = 0
    for round_idx in range(case["rounds"]):
        timed = timeline.round(round_idx)
        started += len(timed.started)
        arrivals = [[job.client_id, job.version] for job in timed.arrivals]
        if is_sync:
            arrivals.sort()
        row = watch.rows[round_idx]
        found = {
            "arrivals": arrivals,
            "seconds": row["time/seconds"],
            "lost": row.get("time/lost", 0.0),
            "started": started,
            "steps": [steps for _, steps in sorted(watch.steps[round_idx].items())],
        }
        schedule.append(found)
    return {
        "schedule": schedule,
        "starts": starts_of(timeline, case["rounds"], is_sync=is_sync),
        "weights": watch.weights,
        "controls": watch.controls,
    }


def starts_of(timeline: Any, rounds: int, *, is_sync: bool) -> list[dict[str, Any]]:
    """Return the starts up to the last step, with the starts that fill the slots that the step leaves."""
    jobs = []
    for round_idx in range(rounds):
        jobs += timeline.round(round_idx).started
    if not is_sync:
        end = timeline.round(rounds - 1).end
        free = len(timeline.round(rounds - 1).arrivals)
        jobs += [job for job in timeline.round(rounds).started if job.start == end][:free]
    return [{"client": job.client_id, "version": job.version, "seconds": job.start} for job in jobs]


METHOD: dict[str, Callable[[Inputs], dict[str, Any]]] = {"async": run}
E2E: dict[str, Any] = {}
