"""Adapters of KnFu, FedMD and Local."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from fl_lightning import FederatedLoop
from fl_lightning.federation.codistillation import soft_label_divergence, soft_labels
from fl_lightning.functional.classes import estimated_distribution
from fl_lightning.functional.losses import cross_entropy
from fl_lightning.functional.traffic import traffic
from fl_lightning.methods import FedMD, KnFu, Local
from fl_lightning.methods.fedmd import consensus, mean_absolute_error
from fl_lightning.methods.knfu import distances, fused_knowledge, fusion_weights
from fl_lightning.nets import HeterogeneousNets
from fl_lightning.types import ClientUpdate

from .adapters_fn import Inputs, float64
from .end_to_end import GoldenNet, Recorder, flat, local_lrs, paper_traffic, run


def fuse(inputs: Inputs) -> dict[str, Any]:
    knowledge = float64(inputs["F"])
    epd = estimated_distribution(knowledge)
    away = distances(epd)
    weights = fusion_weights(away, inputs["beta"], inputs["eps"])
    return {"epd": epd, "distances": away, "weights": weights, "fused": fused_knowledge(weights, knowledge)}


def finetune(inputs: Inputs) -> dict[str, Any]:
    logits = float64(inputs["logits"])
    target = torch.tensor(inputs["targets"])
    divergence = soft_label_divergence(logits, float64(inputs["F_agg"]))
    return {"value": cross_entropy(logits, target) + inputs["lam"] ** 2 * divergence}


FN: dict[str, Callable[[Inputs], Any]] = {"knfu_fuse": fuse, "knfu_finetune": finetune}


def fedmd(inputs: Inputs) -> dict[str, Any]:
    logits = torch.stack([torch.from_numpy(one) for one in inputs["logits"]])
    scores = consensus(logits)
    labels = consensus(soft_labels(logits))
    own = logits[0].requires_grad_()
    absolute = mean_absolute_error(own, scores)
    divergence = soft_label_divergence(own, labels)
    return {
        "consensus_logits": scores,
        "mae_loss_client0": absolute,
        "mae_grad": torch.autograd.grad(absolute, own)[0],
        "mean_soft_labels": labels,
        "kl_client0": divergence,
        "kl_grad": torch.autograd.grad(divergence, own)[0],
    }


METHOD: dict[str, Callable[[Inputs], Any]] = {"fedmd": fedmd}


class OwnModels(Recorder):
    """Notes every client's model and reply after each exchange, by round, exchange and client."""

    def __init__(self) -> None:
        super().__init__()
        self.models: list[list[dict[int, Tensor]]] = []
        self.replies: list[list[dict[int, ClientUpdate]]] = []
        self.epochs: list[dict[int, list[tuple[int, Tensor]]]] = []
        """Number of steps and model after each local epoch, by round and client."""
        self.server_sides: list[dict[str, Any]] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, loop: FederatedLoop) -> None:
        super().on_train_epoch_start(trainer, loop)
        self.models.append([{}])
        self.replies.append([{}])
        self.epochs.append({})

    def on_client_epoch_end(self, trainer: pl.Trainer, loop: FederatedLoop, client_id: int, epoch: int) -> None:
        self.epochs[-1].setdefault(client_id, []).append((loop.client.num_steps, self.model(loop)))

    @staticmethod
    def model(loop: FederatedLoop) -> Tensor:
        return flat(value.detach().clone() for value in loop.client.trained().values())

    def on_client_end(self, trainer: pl.Trainer, loop: FederatedLoop, update: ClientUpdate) -> None:
        assert update.weights is None
        self.models[-1][-1][update.client_id] = self.model(loop)
        self.replies[-1][-1][update.client_id] = update
        self.up[-1][update.client_id] += paper_traffic(dict(update.extras))
        self.moved[-1]["up"] += traffic(None, update.extras)
        if update.num_steps:
            self.lrs[-1] |= local_lrs(loop)

    def on_exchange_end(self, trainer: pl.Trainer, loop: FederatedLoop, exchange: str) -> None:
        if exchange == "train":
            self.models[-1].append({})
            self.replies[-1].append({})
            fused = getattr(loop.server_module, "fused", None)
            fusion = getattr(loop.server_module, "fusion", None)
            self.server_sides.append({"fused": fused, "fusion": fusion})


def own_models(kind: Callable[..., Any], inputs: Inputs, **settings: Any) -> dict[str, Any]:
    """Run a method whose clients have models of their own.

    Args:
        kind: Class of the client.
        inputs: The case.
        settings: Further settings of the client.
    """
    cfg = inputs["cfg"]
    recorder = OwnModels()
    nets = []
    for model in inputs["models"]:
        nets.append(partial(GoldenNet, layers=model["layers"], init=torch.from_numpy(model["init"])))
    settings |= {"finetune_epochs": cfg["finetune_epochs"]}

    def client(optimizer: Any, **_: Any) -> Any:
        return kind(net=partial(HeterogeneousNets, nets=nets), optimizer=optimizer, **settings)

    sets = ("transfer",) if "transfer" in inputs else ()
    run(client, inputs, sets=sets, recorder=recorder)
    return {"rounds": [of_own_models(recorder, cfg, r) for r in range(len(cfg["schedule"]))]}


def of_own_models(recorder: OwnModels, cfg: dict[str, Any], r: int) -> dict[str, Any]:
    """Return what is compared of a round. Lists have the cohort's order in the schedule."""
    cohort = cfg["schedule"][r]
    first, second = recorder.replies[r]
    trained, final = recorder.models[r]
    steps = {c: first[c].num_steps for c in cohort}
    finetune_steps = {c: second[c].num_steps if second else 0 for c in cohort}
    if not final:
        # Local has one exchange with two phases.
        final = dict(trained)
        for c, epochs in recorder.epochs[r].items():
            number = cfg["epochs"] if isinstance(cfg["epochs"], int) else cfg["epochs"][c]
            before, trained[c] = epochs[number - 1]
            finetune_steps[c] = steps[c] - before
            steps[c] = before
    assert sorted(trained) == sorted(final) == sorted(cohort)
    (lr,) = recorder.lrs[r]
    found = {
        "participants": cohort,
        "lr": lr,
        "K": [steps[c] for c in cohort],
        "clients_trained": [trained[c] for c in cohort],
        "K_finetune": [finetune_steps[c] for c in cohort],
        "clients": [final[c] for c in cohort],
        "bytes_down": [recorder.down[r][c] for c in cohort],
        "bytes_up": [recorder.up[r][c] for c in cohort],
    }
    fused = recorder.server_sides[r]["fused"]
    if fused:
        found["knowledge"] = [first[c].extras["knowledge"] for c in cohort]
        found["fused"] = [fused[c] for c in cohort]
    fusion = recorder.server_sides[r]["fusion"]
    if fusion:
        places = [fusion.client_ids.index(c) for c in cohort]
        found["epd"] = fusion.epd[places]
        found["distances"] = fusion.distances[places][:, places]
        found["weights"] = fusion.weights[places][:, places]
    return found


def codistilled(kind: Callable[..., Any], *names: str) -> Callable[[Inputs], dict[str, Any]]:
    """Make an adapter of a method with a transfer set.

    Args:
        kind: Class of the client.
        names: Names of the client's settings that other such methods lack.
    """

    def adapter(inputs: Inputs) -> dict[str, Any]:
        cfg = inputs["cfg"]
        settings = {name: cfg[name] for name in (*names, "lam", "temperature", "ce_on")}
        return own_models(kind, inputs, finetune_batch=cfg["finetune_batch"] or "full", **settings)

    return adapter


E2E: dict[str, Callable[[Inputs], dict[str, Any]]] = {
    "knfu": codistilled(KnFu, "beta", "kd_direction"),
    "fedmd": codistilled(FedMD, "targets"),
    "local": partial(own_models, Local),
}
