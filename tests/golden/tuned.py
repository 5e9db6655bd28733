"""Adapter of the cases with fine-tuning before a test: `tuned` and `alma` of all clients, on their own samples."""

from functools import partial
from typing import Any

from fl_lightning import FederatedLoop, FineTuning
from fl_lightning.methods import FedAvg
from fl_lightning.types import State

from .end_to_end import Adapter, Inputs, Recorder, rounds, run

TRAINS = {"head": ["net.head.*"], "body": ["net.body.*"], None: None}


def settings_of(given: dict[str, Any]) -> FineTuning:
    """Return the settings of a case, where `steps` is the largest number of steps."""
    settings = dict(given)
    if "steps" in settings:
        settings["max_steps"] = settings.pop("steps")
    settings["trains"] = TRAINS[settings.get("trains")]
    return FineTuning(**settings)


def models_and_mean(loop: FederatedLoop) -> dict[str, Any]:
    """Return the fine-tuned models of all clients with test samples after a round, and their mean accuracy."""
    means, of_clients = loop.evaluation.of_clients.evaluate(loop.server.round_idx, "validation")
    models = [loop.client_model(client_id, tuned=True) for client_id in of_clients]
    return {"alma": means["local/tuned/alma"], "states": [model.state_dict() for model in models]}


def tuned_rounds(kind: Any, inputs: Inputs) -> dict[str, Any]:
    if not inputs["cfg"].get("fine_tuning"):
        return rounds(run(kind, inputs))
    cfg = {**inputs["cfg"], "tested_on_own": True}
    recorder = Recorder(side=models_and_mean)
    finished = run(
        kind,
        {**inputs, "cfg": cfg},
        recorder=recorder,
        fine_tuning=settings_of(cfg["fine_tuning"]),
        evaluate_clients_every=1,
    )
    found: list[dict[str, Any]] = rounds(finished)["rounds"]
    for of_round in found:
        states: list[State] = of_round.pop("states")
        of_round["tuned"] = [finished.weights(state) for state in states]
        of_round["tuned_buffers"] = [finished.buffers(state) for state in states]
    return {"rounds": found}


METHOD: dict[str, Adapter] = {}
E2E: dict[str, Adapter] = {"fedavg_tuned": partial(tuned_rounds, FedAvg)}
