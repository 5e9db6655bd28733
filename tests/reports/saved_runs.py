"""Run folders written by hand: what a fit leaves, without a fit."""

import csv
from pathlib import Path

import yaml

CLASSES = ("cat", "dog", "emu")


def write_table(path: Path, header, rows) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)


def settings(client: str, seed: int, **own) -> dict:
    """A configuration as a run saves it: nested, with class_path and init_args."""
    return {
        "seed_everything": seed,
        "trainer": {"max_epochs": 4},
        "model": {"local_epochs": 1, "client": {"class_path": f"fl_lightning.methods.{client}", "init_args": own}},
        "data": {"num_clients": 2, "seed": seed, "sampling_seed": None, "batch_size": 32},
    }


def write_run(folder: Path, accuracies, config: dict | None = None, classes=CLASSES, partition=None) -> Path:
    """Write a run whose classes are 0.1 apart around the given accuracy of each round."""
    folder.mkdir(parents=True)
    by_class = [f"global/acc_class/{name}" for name in classes]
    header = ["round", "train/ce", "comm/bytes_down", "comm/bytes_up", "global/acc", "global/loss", *by_class]
    rows = [
        [r, 2 - a, 1000, 500, a, 1 - a, *(a + 0.1 * (c - 1) for c in range(len(classes)))]
        for r, a in enumerate(accuracies)
    ]
    write_table(folder / "metrics.csv", header, rows)
    if config is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    if partition is not None:
        write_table(folder / "partition.csv", ["client", *classes], [[i, *row] for i, row in enumerate(partition)])
    return folder
