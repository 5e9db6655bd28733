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
    distance = distances(epd)
    weights = fusion_weights(distance, inputs["beta"], inputs["eps"])
    return {"epd": epd, "distances": distance, "weights": weights, "fused": fused_knowledge(weights, knowledge)}


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
    """Every client's model and reply after each exchange, by round, exchange and client."""

    def __init__(self) -> None:
        super().__init__()
        self.models: list[list[dict[int, Tensor]]] = []
        self.replies: list[list[dict[int, ClientUpdate]]] = []
        self.epochs: list[dict[int, list[tuple[int, Tensor]]]] = []
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
            self.server_sides.append({name: getattr(loop.server_module, name, None) for name in ("fused", "fusion")})


def own_models(kind: Callable[..., Any], inputs: Inputs, **settings: Any) -> dict[str, Any]:
    cfg = inputs["cfg"]
    recorder = OwnModels()
    nets = [partial(GoldenNet, layers=m["layers"], init=torch.from_numpy(m["init"])) for m in inputs["models"]]
    settings |= {"finetune_epochs": cfg["finetune_epochs"]}

    def client(optimizer: Any, **_: Any) -> Any:
        return kind(net=partial(HeterogeneousNets, nets=nets), optimizer=optimizer, **settings)

    run(client, inputs, sets=("transfer",) if "transfer" in inputs else (), recorder=recorder)
    rounds = []
    for r, cohort in enumerate(cfg["schedule"]):
        (trained, final), (first, second) = recorder.models[r], recorder.replies[r]
        steps = {c: (first[c].num_steps, second[c].num_steps if second else 0) for c in cohort}
        if not final:  # Local: one exchange, two phases
            final = dict(trained)
            for c, epochs in recorder.epochs[r].items():
                number = cfg["epochs"] if isinstance(cfg["epochs"], int) else cfg["epochs"][c]
                before, trained[c] = epochs[number - 1]
                steps[c] = before, steps[c][0] - before
        assert sorted(trained) == sorted(final) == sorted(cohort)
        (lr,) = recorder.lrs[r]
        one = {
            "participants": cohort,
            "lr": lr,
            "K": [steps[c][0] for c in cohort],
            "clients_trained": [trained[c] for c in cohort],
            "K_finetune": [steps[c][1] for c in cohort],
            "clients": [final[c] for c in cohort],
            "bytes_down": [recorder.down[r][c] for c in cohort],
            "bytes_up": [recorder.up[r][c] for c in cohort],
        }
        if side := recorder.server_sides[r]["fused"]:
            one["knowledge"] = [first[c].extras["knowledge"] for c in cohort]
            one["fused"] = [side[c] for c in cohort]
        if fusion := recorder.server_sides[r]["fusion"]:
            place = [fusion.client_ids.index(c) for c in cohort]
            one["epd"] = fusion.epd[place]
            one |= {name: getattr(fusion, name)[place][:, place] for name in ("distances", "weights")}
        rounds.append(one)
    return {"rounds": rounds}


def codistilled(kind: Callable[..., Any], *names: str) -> Callable[[Inputs], dict[str, Any]]:
    """An adapter of a method with a transfer set; `names` of its own settings."""

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
