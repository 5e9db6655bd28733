"""Writes docs/tasks.md, the tasks of a newcomer in a fresh clone and an empty home: `python -m tools.measure_tasks`."""

import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 110
"""The most characters of a printed line that the table shows."""

HEAD = """# Tasks

Twenty-five things that a newcomer does, in this order, in one empty folder: the commands, the seconds of CPU of all of
them, and what they print: the line with the accuracy, else the last one; of a list or a help text the number of
lines, and one of them. Done by `python -m tools.measure_tasks` in a
fresh clone with an empty home folder; {machine}, {day}. Each command that trains or evaluates loads torch, Lightning
and the options anew, which is {load:.0f} s of its time.

| task | commands | CPU s | what is printed |
|---|---|---:|---|
"""

SHORT = "--trainer.max_epochs 3"
MANY = "--data.num_clients 20 --data.participation 0.5 --data.partition.min_samples 1"
MODULE = """import torch
from pytorch_lightning import LightningModule
class Mine(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
    def validation_step(self, batch, batch_idx):
        self.log("val_acc", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""
PYTHON = """from pytorch_lightning import Trainer
from fl_lightning import Digits, DirichletPartition, FederatedDataModule, FederatedLoop, FedNTD
trainer = Trainer(max_epochs=3, logger=False, enable_checkpointing=False, enable_progress_bar=False)
data = FederatedDataModule(Digits(), num_clients=10, partition=DirichletPartition(alpha=0.3))
trainer.fit(FederatedLoop(client=FedNTD()), datamodule=data)
print(f"accuracy {trainer.callback_metrics['global/acc']:.3f}")
"""


class Task(NamedTuple):
    """Holds a wish of the newcomer and the commands that fulfil it.

    Attributes:
        wish: The wish.
        commands: Lines of a shell.
        file: Name and text of a Python file that is written first, or None.
        shown: Beginning of the line that is shown of a list or a help text. It is empty for other commands.
    """

    wish: str
    commands: Sequence[str]
    file: tuple[str, str] | None = None
    shown: str = ""


FIT = "fl-lightning fit -c experiment/digits_fedavg"
TASKS = [
    Task("See what there is", ["fl-lightning"], shown="fit "),
    Task("See the options of a run", ["fl-lightning fit --help"], shown="--model.local_epochs"),
    Task("List the configuration files", ["fl-lightning configs"], shown="experiment/digits_fedntd"),
    Task("List the methods", ["fl-lightning methods --output csv"], shown="FedNTD,"),
    Task("Train a first federation", ["fl-lightning fit -c experiment/digits_fedntd"]),
    Task("Test its best round", ["fl-lightning test -c experiment/digits_fedntd --ckpt_path best"]),
    Task("Write its predictions", ["fl-lightning predict -c experiment/digits_fedntd --ckpt_path best"]),
    Task(
        "Train it for longer", ["fl-lightning fit -c experiment/digits_fedntd --trainer.max_epochs 32 --ckpt_path last"]
    ),
    Task("Try another method", [f"{FIT} --model.client FedProx --model.client.mu 0.1 {SHORT}"]),
    Task(
        "See the arguments of a method",
        ["fl-lightning fit --model.client.help FedNTD"],
        shown="weight of the distillation",
    ),
    Task("Make the classes more uneven", [f"{FIT} --data.partition.alpha 0.05 {SHORT}"]),
    Task(
        "Take more clients, half of them in each round",
        [f"{FIT} {MANY} {SHORT}"],
    ),
    Task("Train longer at the clients", [f"{FIT} --model.local_epochs 10 {SHORT}"]),
    Task("Change the net", [f"{FIT} --model.client.net.hidden [128] {SHORT}"]),
    Task("Change the seed", [f"{FIT} --seed_everything 1 --data.seed 1 {SHORT}"]),
    Task("Aggregate by the median", [f"{FIT} --model.aggregator MedianAggregator {SHORT}"]),
    Task("Use a server optimizer", [f"{FIT} -c method/fedavgm {SHORT}"]),
    Task("Keep the head at the clients", [f"{FIT} -c method/fedper {SHORT}"]),
    Task("Measure what clients forget", [f"{FIT} --trainer.callbacks ForgettingMonitor {SHORT}"]),
    Task(
        "Keep the merged configuration", [f"{FIT} --print_config > mine.yaml", f"fl-lightning fit -c mine.yaml {SHORT}"]
    ),
    Task(
        "Compare two methods over two seeds",
        [
            "fl-lightning compare -c experiment/digits_fedavg --methods FedAvg FedProx --seeds 0 1 --output table "
            f"{SHORT}"
        ],
    ),
    Task("Make a page of a run", ["fl-lightning report runs/digits_fedntd"]),
    Task(
        "Federate a LightningModule",
        [f"fl-lightning fit --model.client my_task.Mine {SHORT}"],
        file=("my_task.py", MODULE),
    ),
    Task("Write a method", ["fl-lightning new method FedLS", f"fl-lightning fit -c fedls.yaml {SHORT}"]),
    Task("Do it in Python", ["python mine.py"], file=("mine.py", PYTHON)),
]


SHELL = f'python() {{ "{sys.executable}" "$@"; }}\nfl-lightning() {{ python -m fl_lightning "$@"; }}\n'
"""Functions of the shell that run this Python."""


def run(command: str, folder: Path, clone: Path, shown: str = "") -> str:
    """Run a line of a shell with the clone's package.

    Args:
        command: The line.
        folder: Working folder, beside the home folder.
        clone: Folder of the clone.
        shown: Beginning of the line to return, or empty.

    Returns:
        With `shown` the number of printed lines, and the one that begins so. Otherwise the line with the accuracy, or
        the last line.

    Raises:
        SystemExit: The command failed, or no line begins as `shown`.
    """
    home = {"HOME": str(folder.parent / "home"), "PYTHONPATH": str(clone), "COLUMNS": "100"}
    done = subprocess.run(
        ["bash", "-c", SHELL + command],
        cwd=folder,
        env=os.environ | home,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line.strip() for line in (done.stdout or done.stderr).splitlines() if line.strip(" ─")]
    chosen = [line for line in lines if line.startswith(shown)]
    if done.returncode or (shown and not chosen):
        raise SystemExit(f"{command}\n{done.stdout}\n{done.stderr}")
    if shown:
        return f"{len(lines)} lines: {' '.join(chosen[0].split())}"
    if not lines:
        return "(nothing)"
    accuracies = [line for line in lines if line.startswith("accuracy")]
    line = accuracies[-1] if accuracies else lines[-1]
    return line.replace(f"{folder}/", "")


def cpu_seconds_of_children() -> float:
    """Add up the CPU seconds of all commands so far, which other programs on the machine do not change much."""
    times = os.times()
    return times.children_user + times.children_system


def measured(task: Task, folder: Path, clone: Path) -> str:
    """Do a task, and return its row of the table."""
    if task.file is not None:
        name, text = task.file
        (folder / name).write_text(text, encoding="utf-8")
    began = cpu_seconds_of_children()
    for command in task.commands:
        printed = run(command, folder, clone, shown=task.shown)
    seconds = cpu_seconds_of_children() - began
    if len(printed) > LONGEST:
        printed = f"{printed[:LONGEST]} …"
    printed = printed.replace("|", "&#124;")
    commands = "<br>".join(f"`{command}`" for command in task.commands)
    return f"| {task.wish} | {commands} | {seconds:.1f} | {printed} |"


def main() -> None:
    """Do every task, and write the page."""
    with tempfile.TemporaryDirectory() as name:
        clone = Path(name, "clone")
        folder = Path(name, "work")
        subprocess.run(["git", "clone", "-q", ROOT, clone], check=True)
        folder.mkdir()
        Path(name, "home").mkdir()
        began = cpu_seconds_of_children()
        run("python -c 'import fl_lightning.cli.main'", folder, clone)
        load = cpu_seconds_of_children() - began
        rows = list[str]()
        for task in TASKS:
            row = measured(task, folder, clone)
            rows.append(row)
            print(row)
    machine = f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}"
    head = HEAD.format(machine=machine, day=date.today().isoformat(), load=load)
    (ROOT / "docs/tasks.md").write_text(head + "\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
