"""Writes run folders by hand, as a fit leaves them."""

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
    """Return a configuration as a run saves it.

    Args:
        client: Class of the client.
        seed: Seed of the run and of its data.
        own: Arguments of the client.
    """
    class_path = f"fl_lightning.methods.{client}"
    return {
        "seed_everything": seed,
        "trainer": {"max_epochs": 4},
        "model": {"local_epochs": 1, "client": {"class_path": class_path, "init_args": own}},
        "data": {"num_clients": 2, "seed": seed, "sampling_seed": None, "batch_size": 32},
    }


def write_run(folder: Path, accuracies, config: dict | None = None, *, classes=CLASSES, partition=None) -> Path:
    """Write a run whose classes are 0.1 apart around the accuracy of each round.

    Args:
        folder: The new folder.
        accuracies: Accuracy of each round.
        config: Configuration of the run. None writes none.
        classes: Names of the classes.
        partition: Numbers of samples, (clients, classes). None writes none.
    """
    folder.mkdir(parents=True)
    by_class = [f"global/acc_class/{name}" for name in classes]
    header = ["round", "train/ce", "comm/bytes_down", "comm/bytes_up", "global/acc", "global/loss", *by_class]
    rows = []
    for round_idx, accuracy in enumerate(accuracies):
        of_classes = [accuracy + 0.1 * (c - 1) for c in range(len(classes))]
        rows.append([round_idx, 2 - accuracy, 1000, 500, accuracy, 1 - accuracy, *of_classes])
    write_table(folder / "metrics.csv", header, rows)
    if config is not None:
        (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    if partition is not None:
        rows = [[client_id, *counts] for client_id, counts in enumerate(partition)]
        write_table(folder / "partition.csv", ["client", *classes], rows)
    return folder
