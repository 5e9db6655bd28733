"""Measures the tables of docs/compression.md: `python -m tools.compression`, about five minutes of CPU time.

Every run is a line of docs/compression.csv, and one that is there is not run again. Digits, 10 clients, all in every
round, α = 0.3, 20 rounds of two local epochs; test accuracy after the last round. Nothing is tuned.
"""

import csv
import logging
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from fl_lightning import Aggregator, FederatedDataModule, FederatedLoop
from fl_lightning.aggregation import (
    FP16,
    QSGD,
    Codec,
    KrumAggregator,
    MedianAggregator,
    NormClip,
    RandomK,
    Sign,
    TopK,
)
from fl_lightning.attacks import sign_flip
from fl_lightning.data import Digits, DirichletPartition
from fl_lightning.functional.summary import paired_difference
from fl_lightning.methods import DPFedAvg, FedAvg, FedNTD
from fl_lightning.nets import Perceptron
from fl_lightning.types import State


class UnscaledRandomK(RandomK):
    """Sends the numbers at drawn places as they are: E‖x − C(x)‖² = (1 − k / n) ‖x‖²."""

    contracts = True

    def encode(self, vector: Tensor, draws: torch.Generator) -> State:
        return {"values": vector[self.places(len(vector), draws, vector.device)]}


FILE = Path(__file__).resolve().parents[1] / "docs" / "compression.csv"
COLUMNS = ("method", "codec", "rule", "attack", "seed", "accuracy", "bytes_up", "bytes_down")
SEEDS = (0, 1, 2)
ROUNDS = 20

CODECS: dict[str, Callable[[], Codec | None]] = {
    "dense": lambda: None,
    "FP16": FP16,
    "QSGD, 8 bits": QSGD,
    "QSGD, 8 bits, `down`": partial(QSGD, down=True),
    "QSGD, 4 bits": partial(QSGD, 4),
    "QSGD, 4 bits, `down`": partial(QSGD, 4, down=True),
    "QSGD, 2 bits": partial(QSGD, 2),
    "QSGD, 2 bits, feedback": partial(QSGD, 2, feedback=True),
    "TopK, 5 %, feedback": TopK,
    "TopK, 5 %": partial(TopK, feedback=False),
    "TopK, 1 %, feedback": partial(TopK, 0.01),
    "TopK, 1 %": partial(TopK, 0.01, feedback=False),
    "RandomK, 5 %": RandomK,
    "RandomK, 5 %, unscaled, feedback": partial(UnscaledRandomK, feedback=True),
    "Sign, feedback": Sign,
    "Sign": partial(Sign, feedback=False),
}
METHODS: dict[str, Any] = {"FedAvg": FedAvg, "FedNTD": FedNTD}
RULES: dict[str, Callable[[], Aggregator]] = {
    "mean": Aggregator,
    "mean, `NormClip(1)`": Aggregator,
    "median": MedianAggregator,
    "multi-Krum, f = 2, 6 of 10": partial(KrumAggregator, 2, 6),
    "`DPFedAvg`, z = 0.3, clip 1": partial(DPFedAvg, noise_multiplier=0.3, delta=0.01, accountant="rdp"),
}
UNDER_ATTACK = ("dense", "QSGD, 4 bits", "TopK, 5 %, feedback", "Sign, feedback")


def run(method: str, codec: str, rule: str, attack: str, seed: int) -> dict[str, Any]:
    """Run a federation, and give its line."""
    settings = {"net": partial(Perceptron, hidden=(32,)), "optimizer": partial(torch.optim.SGD, lr=0.05, momentum=0.9)}
    client = METHODS[method](**settings)
    loop = FederatedLoop(
        sign_flip(client, attackers=[2, 7]) if attack else client,
        RULES[rule](),
        codec=CODECS[codec](),
        local_epochs=2,
        seed=seed,
        transforms=[NormClip(1.0)] if "NormClip" in rule else None,
    )
    trainer = pl.Trainer(
        max_epochs=ROUNDS,
        check_val_every_n_epoch=ROUNDS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = FederatedDataModule(Digits(), partition=DirichletPartition(alpha=0.3), seed=seed)
    trainer.fit(loop, datamodule=data)
    row = {name.removeprefix("unprotected/"): value for name, value in loop.round_metrics.items()}
    values = row["global/acc"], int(row["comm/bytes_up"]), int(row["comm/bytes_down"])
    return dict(zip(COLUMNS, (method, codec, rule, attack, seed, *values), strict=True))


def cells() -> list[tuple[str, str, str, str, int]]:
    """List all runs, a seed after the other."""
    plain = [(method, codec, "mean", "") for method in METHODS for codec in CODECS]
    attacked = [
        ("FedAvg", codec, rule, "sign flip × 10")
        for rule in RULES
        for codec in UNDER_ATTACK
        if not (rule == "median" and "TopK" in codec)
    ]
    return [(*cell, seed) for seed in SEEDS for cell in (*plain, *attacked)]


def recorded() -> dict[tuple[Any, ...], dict[str, str]]:
    """Read the lines that are there."""
    if not FILE.exists():
        return {}
    with FILE.open(encoding="utf-8", newline="") as file:
        return {(*(row[name] for name in COLUMNS[:4]), int(row["seed"])): row for row in csv.DictReader(file)}


def measure() -> None:
    """Run what is not there."""
    done = recorded()
    with FILE.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not done:
            writer.writeheader()
        for cell in cells():
            if cell not in done:
                writer.writerow(run(*cell))
                file.flush()


def accuracies(lines: Sequence[dict[str, str]]) -> list[float]:
    """Give the accuracies in %, by seed."""
    return [100 * float(line["accuracy"]) for line in lines]


def tables() -> None:
    """Print both tables."""
    lines = recorded()

    def of(method: str, codec: str, rule: str = "mean", attack: str = "") -> list[dict[str, str]]:
        return [
            lines[method, codec, rule, attack, seed] for seed in SEEDS if (method, codec, rule, attack, seed) in lines
        ]

    def shown(found: list[float]) -> str:
        return f"{mean(found):.1f} ± {stdev(found):.1f}" if len(found) > 1 else "–"

    print("| codec | bytes up a round | times fewer |", *(f"{m} | − dense |" for m in METHODS))
    print("|---|---|---|" + "---|---|" * len(METHODS))
    for codec in CODECS:
        up = [int(of("FedAvg", name)[0]["bytes_up"]) for name in ("dense", codec)]
        parts = [codec, f"{up[1]:,}", f"{up[0] / up[1]:.1f}"]
        for method in METHODS:
            ours = accuracies(of(method, codec))
            dense = accuracies(of(method, "dense"))
            change = "" if codec == "dense" else difference(ours, dense)
            parts += [shown(ours), change]
        print("|", " | ".join(parts), "|")
    print("\n| rule |", " | ".join(UNDER_ATTACK), "|\n|---|" + "---|" * len(UNDER_ATTACK))
    for rule in RULES:
        found = [accuracies(of("FedAvg", codec, rule, "sign flip × 10")) for codec in UNDER_ATTACK]
        print(f"| {rule} |", " | ".join(map(shown, found)), "|")


def difference(ours: Sequence[float], others: Sequence[float]) -> str:
    """Write a mean difference, paired by seed, with Student's 95 % interval."""
    low, high = paired_difference(ours, others)[1:]
    return f"{mean(ours) - mean(others):+.1f} [{low:+.1f}, {high:+.1f}]".replace("-", "−")


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    measure()
    tables()
