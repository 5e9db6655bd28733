"""Measures the accuracy on digits with two malicious clients of ten, by rule and partition: `python -m tools.attacks`.

It prints the table of `docs/attacks.md`, and writes a line for each run to `docs/attacks.csv`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, stdev

import torch

from fl_lightning import Aggregator, FederatedDataModule, FederatedLoop
from fl_lightning.aggregation import (
    GeometricMedianAggregator,
    KrumAggregator,
    MedianAggregator,
    NormClip,
    TrimmedMeanAggregator,
)
from fl_lightning.attacks import label_flip, noise, sign_flip
from fl_lightning.client import ClientModule
from fl_lightning.data import Digits, DirichletPartition, IIDPartition
from fl_lightning.methods import FedAvg
from fl_lightning.nets import Perceptron
from fl_lightning.utils.files import write_table
from tools.quiet import quiet_trainer, silent

RULES: dict[str, Callable[[], Aggregator]] = {
    "mean": Aggregator,
    "mean, `NormClip(1)`": Aggregator,
    "median": MedianAggregator,
    "trimmed mean, β = 0.2": TrimmedMeanAggregator,
    "Krum, f = 2": partial(KrumAggregator, 2),
    "multi-Krum, f = 2, 6 of 10": partial(KrumAggregator, 2, 6),
    "geometric median": GeometricMedianAggregator,
}
PARTITIONS = {"IID": IIDPartition(), "α = 1": DirichletPartition(alpha=1.0), "α = 0.1": DirichletPartition(alpha=0.1)}
ATTACKS = {"none": None, "sign flip × 10": sign_flip, "noise, std 1": noise, "label flip": label_flip}
ATTACKERS = [2, 7]
SEEDS = (0, 1, 2)
ROUNDS = 20
COLUMNS = ("partition", "rule", "attack", "seed", "accuracy")
FILE = Path(__file__).resolve().parents[1] / "docs" / "attacks.csv"


def digits_client(method: type[ClientModule]) -> ClientModule:
    """Make the client of a method with the net and the optimizer of all runs on digits."""
    return method(net=partial(Perceptron, hidden=(32,)), optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9))


def accuracy(rule: str, partition: str, attack: str, seed: int) -> float:
    """Return the accuracy after the last round, in [0, 1]. It is that of chance if the run ended in NaN."""
    poison = ATTACKS[attack]
    client = digits_client(FedAvg)
    if poison is not None:
        client = poison(client, attackers=ATTACKERS)
    loop = FederatedLoop(
        client,
        RULES[rule](),
        local_epochs=2,
        seed=seed,
        transforms=[NormClip(1.0)] if "NormClip" in rule else None,
    )
    data = FederatedDataModule(Digits(), partition=PARTITIONS[partition], seed=seed)
    try:
        quiet_trainer(ROUNDS).fit(loop, datamodule=data)
    except RuntimeError:
        # The weights are NaN.
        return 0.1
    return loop.round_metrics["global/acc"]


def table(rows: Iterable[Mapping[str, str]]) -> str:
    """Write the runs of `docs/attacks.csv` as the table of the page, a line for each partition and rule."""
    runs = defaultdict[tuple[str, str, str], list[float]](list)
    for row in rows:
        runs[row["partition"], row["rule"], row["attack"]].append(float(row["accuracy"]))
    lines = [
        f"| partition | rule | {' | '.join(ATTACKS)} |",
        "|---|---|" + "---|" * len(ATTACKS),
    ]
    for partition, rule in product(PARTITIONS, RULES):
        of_attacks = [runs[partition, rule, attack] for attack in ATTACKS]
        cells = [f"{mean(accuracies):.1f} ± {stdev(accuracies):.1f}" for accuracies in of_attacks]
        lines.append(f"| {partition} | {rule} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Make all runs."""
    torch.set_num_threads(1)
    rows = list[dict[str, str]]()
    with silent():
        for partition, rule, attack, seed in product(PARTITIONS, RULES, ATTACKS, SEEDS):
            percent = 100 * accuracy(rule=rule, partition=partition, attack=attack, seed=seed)
            row = {"partition": partition, "rule": rule, "attack": attack, "seed": str(seed)}
            rows.append({**row, "accuracy": f"{percent:.2f}"})
    write_table(FILE, [COLUMNS, *(row.values() for row in rows)])
    print(table(rows))


if __name__ == "__main__":
    main()
