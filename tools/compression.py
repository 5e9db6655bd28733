"""Measures the tables of docs/compression.md: `python -m tools.compression`, about five minutes of CPU time.

Every run is a line of docs/compression.csv. A run that has a line is not made again. All runs have digits, 10 clients
that take part in every round, α = 0.3 and 20 rounds of two local epochs. Their accuracy is that of the test samples
after the last round. Nothing is tuned.
"""

import csv
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

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
from fl_lightning.papers.stored import csv_rows
from fl_lightning.types import State
from tools.attacks import ATTACKERS, digits_client
from tools.quiet import quiet_trainer, silent

FILE = Path(__file__).resolve().parents[1] / "docs" / "compression.csv"
COLUMNS = ("method", "codec", "rule", "attack", "seed", "accuracy", "bytes_up", "bytes_down")
SEEDS = (0, 1, 2)
ROUNDS = 20


class UnscaledRandomK(RandomK):
    """Sends the numbers at drawn places as they are: E‖x − C(x)‖² = (1 − k / n) ‖x‖²."""

    contracts = True

    def encode(self, vector: Tensor, draws: torch.Generator) -> State:
        return {"values": vector[self.places(len(vector), draws, vector.device)]}


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
    "multi-Krum, f = 2, 6 of 10": partial(KrumAggregator, f=2, num_selected=6),
    "`DPFedAvg`, z = 0.3, clip 1": partial(DPFedAvg, noise_multiplier=0.3, delta=0.01, accountant="rdp"),
}
ATTACK = "sign flip × 10"
UNDER_ATTACK = ("dense", "QSGD, 4 bits", "TopK, 5 %, feedback", "Sign, feedback")


@dataclass(frozen=True)
class Cell:
    """Names a run by its keys in the tables above. No attack is an empty string."""

    method: str
    codec: str
    rule: str
    attack: str
    seed: int


def run(cell: Cell) -> dict[str, Any]:
    """Run a federation, and return its line."""
    client = digits_client(METHODS[cell.method])
    if cell.attack:
        client = sign_flip(client, attackers=ATTACKERS)
    loop = FederatedLoop(
        client,
        RULES[cell.rule](),
        codec=CODECS[cell.codec](),
        local_epochs=2,
        seed=cell.seed,
        transforms=[NormClip(1.0)] if "NormClip" in cell.rule else None,
    )
    data = FederatedDataModule(Digits(), partition=DirichletPartition(alpha=0.3), seed=cell.seed)
    quiet_trainer(ROUNDS, check_val_every_n_epoch=ROUNDS).fit(loop, datamodule=data)
    metrics = {name.removeprefix("unprotected/"): value for name, value in loop.round_metrics.items()}
    return {
        **asdict(cell),
        "accuracy": metrics["global/acc"],
        "bytes_up": int(metrics["comm/bytes_up"]),
        "bytes_down": int(metrics["comm/bytes_down"]),
    }


def cells() -> list[Cell]:
    """List all runs, a seed after the other."""
    found = []
    for seed in SEEDS:
        for method, codec in product(METHODS, CODECS):
            found.append(Cell(method=method, codec=codec, rule="mean", attack="", seed=seed))
        for rule, codec in product(RULES, UNDER_ATTACK):
            if rule == "median" and "TopK" in codec:
                continue
            found.append(Cell(method="FedAvg", codec=codec, rule=rule, attack=ATTACK, seed=seed))
    return found


def recorded() -> dict[Cell, dict[str, str]]:
    """Read the lines of the runs that were made."""
    lines = {}
    for row in csv_rows(FILE):
        cell = Cell(
            method=row["method"],
            codec=row["codec"],
            rule=row["rule"],
            attack=row["attack"],
            seed=int(row["seed"]),
        )
        lines[cell] = row
    return lines


def measure() -> None:
    """Make the runs that have no line."""
    done = recorded()
    with FILE.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not done:
            writer.writeheader()
        for cell in cells():
            if cell not in done:
                writer.writerow(run(cell))
                file.flush()


def accuracies(lines: Sequence[dict[str, str]]) -> list[float]:
    """Return the accuracies in %, by seed."""
    return [100 * float(line["accuracy"]) for line in lines]


def tables() -> None:
    """Print both tables."""
    print_codecs()
    print()
    print_rules()


def lines_of(method: str, codec: str, rule: str = "mean", attack: str = "") -> list[dict[str, str]]:
    """Return the lines of all seeds that were run."""
    lines = recorded()
    found = [Cell(method=method, codec=codec, rule=rule, attack=attack, seed=seed) for seed in SEEDS]
    return [lines[cell] for cell in found if cell in lines]


def print_codecs() -> None:
    """Print the table of the codecs."""
    print("| codec | bytes up a round | times fewer |", *(f"{method} | − dense |" for method in METHODS))
    print("|---|---|---|" + "---|---|" * len(METHODS))
    bytes_dense = int(lines_of("FedAvg", "dense")[0]["bytes_up"])
    for codec in CODECS:
        bytes_up = int(lines_of("FedAvg", codec)[0]["bytes_up"])
        parts = [codec, f"{bytes_up:,}", f"{bytes_dense / bytes_up:.1f}"]
        for method in METHODS:
            of_codec = accuracies(lines_of(method, codec))
            change = ""
            if codec != "dense":
                change = difference(of_codec, accuracies(lines_of(method, "dense")))
            parts += [mean_and_spread(of_codec), change]
        print("|", " | ".join(parts), "|")


def print_rules() -> None:
    """Print the table of the rules under attack."""
    print("| rule |", " | ".join(UNDER_ATTACK), "|\n|---|" + "---|" * len(UNDER_ATTACK))
    for rule in RULES:
        found = [accuracies(lines_of("FedAvg", codec, rule=rule, attack=ATTACK)) for codec in UNDER_ATTACK]
        print(f"| {rule} |", " | ".join(mean_and_spread(of_codec) for of_codec in found), "|")


def mean_and_spread(values: Sequence[float]) -> str:
    """Write a mean and a standard deviation, or a dash for fewer than two values."""
    return f"{mean(values):.1f} ± {stdev(values):.1f}" if len(values) > 1 else "–"


def difference(ours: Sequence[float], others: Sequence[float]) -> str:
    """Write a mean difference, paired by seed, with Student's 95 % interval."""
    _, low, high = paired_difference(ours, others)
    return f"{mean(ours) - mean(others):+.1f} [{low:+.1f}, {high:+.1f}]".replace("-", "−")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with silent():
        measure()
    tables()
