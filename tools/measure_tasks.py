"""Writes docs/tasks.md, the tasks of a newcomer in a fresh clone and an empty home.

python -m tools.measure_tasks --before COMMIT      compares with the commit of an earlier version
"""

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
LONGEST = 110
"""The most characters of a printed line that the table shows."""

BEFORE = "0.2.0"
"""The version that is compared with."""

HEAD = """# Tasks

{count} things that four people want, done in this order, by these commands. *Pages* are the pages that a
reader opens to find the commands, the README first. CPU seconds are the sum over a task's commands, in
{before} and now, by turns, each in a fresh clone with an empty home: `python -m tools.measure_tasks --before COMMIT`;
{machine}, {day}. A command that trains loads torch, Lightning and the options anew, which is {load:.0f} s of its time.

A command takes 0.3 to 1 s more than in 0.2.0. Importing the command line loads 115 further modules of the package
(0.25 s). A run draws a fourth picture, its confusion matrices (0.4 s under a profiler), and gives pictures to the
loggers that take them (0.6 s under a profiler, where TensorBoard is installed). A page takes 2 s more: its curves are
drawn for the pointer, too.
"""

COLUMNS = f"| task | commands | pages | CPU s in {BEFORE} | CPU s now | what is printed |\n|---|---|---|---:|---:|---|"

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
DATA = """import torch
from pytorch_lightning import LightningDataModule
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
class Digits8(LightningDataModule):
    def setup(self, stage=None):
        x, y = load_digits(return_X_y=True)
        self.samples = TensorDataset(torch.tensor(x / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(y))
    def train_dataloader(self):
        return DataLoader(torch.utils.data.Subset(self.samples, range(1400)), batch_size=32, shuffle=True)
    def val_dataloader(self):
        return DataLoader(torch.utils.data.Subset(self.samples, range(1400, 1797)), batch_size=100)
"""
PYTHON = """from pytorch_lightning import Trainer
from fl_lightning import Digits, DirichletPartition, FederatedDataModule, FederatedLoop, FedNTD
trainer = Trainer(max_epochs=3, logger=False, enable_checkpointing=False, enable_progress_bar=False)
data = FederatedDataModule(Digits(), num_clients=10, partition=DirichletPartition(alpha=0.3))
trainer.fit(FederatedLoop(client=FedNTD()), datamodule=data)
print(f"accuracy {trainer.callback_metrics['global/acc']:.3f}")
"""


LOSS = """import torch
from fl_lightning.functional.losses import kl_divergence
student, teacher = torch.randn(8, 10, requires_grad=True), torch.randn(8, 10)
true = torch.nn.functional.one_hot(torch.arange(8), 10).bool()
loss = kl_divergence(student, teacher, temperature=2.0, exclude=true)
loss.backward()
print(f"loss {loss.item():.3f}, norm of its gradient {student.grad.norm():.3f}")
"""
METRIC = """import torch
from fl_lightning.metrics import Forgetting
metric = Forgetting(num_classes=3)
for round_idx, answers in enumerate(([0, 1, 2], [0, 1, 1])):
    metric.update(torch.tensor(answers), torch.tensor([0, 1, 2]), round_idx=round_idx)
print(f"forgetting {metric.compute():.3f}")
"""
THEIRS = """trainer: {max_epochs: 5, accelerator: cpu}
model: {class_path: my_task.Mine}
data: {class_path: digits_module.Digits8}
"""


class Task(NamedTuple):
    """Holds a wish and the commands that fulfil it.

    Attributes:
        wish: The wish.
        commands: Lines of a shell.
        pages: Pages that a reader opens to find the commands, the README left out.
        before: Lines of a shell for the earlier version. None: the same lines. An empty list: it had no way.
        files: Texts of files that are written first, by name.
        shown: Beginning of the line that is shown of a list or a help text. It is empty for other commands.
    """

    wish: str
    commands: Sequence[str]
    pages: Sequence[str] = ()
    before: Sequence[str] | None = None
    files: Mapping[str, str] = {}
    shown: str = ""


FIT = "fl-lightning fit -c experiment/digits_fedavg"
COMPARE = "fl-lightning compare -c experiment/digits_fedavg --methods FedAvg FedProx --seeds 0 1"
USERS: dict[str, list[Task]] = {
    "A student with a deadline": [
        Task("See what there is", ["fl-lightning"], shown="fit "),
        Task("Train a first federation", ["fl-lightning fit -c experiment/digits_fedntd"]),
        Task("Test its best round", ["fl-lightning test -c experiment/digits_fedntd --ckpt_path best"]),
        Task(
            "Train it for longer",
            ["fl-lightning fit -c experiment/digits_fedntd --trainer.max_epochs 32 --ckpt_path last"],
        ),
        Task("Try another method", [f"{FIT} --model.client FedProx --model.client.mu 0.1 {SHORT}"]),
        Task("Make the classes more uneven", [f"{FIT} --data.partition.alpha 0.05 {SHORT}"]),
        Task("Take more clients, half of them in each round", [f"{FIT} {MANY} {SHORT}"], pages=["data.md"]),
        Task("Change the seed", [f"{FIT} --seed_everything 1 --data.seed 1 {SHORT}"], pages=["running.md"]),
        Task("Compare two methods over two seeds", [f"{COMPARE} --output table {SHORT}"]),
        Task(
            "Get one table of methods and settings for a paper",
            [f"{COMPARE} --set data.partition.alpha=0.1,1 --output paper {SHORT}", "head -n 6 paper/results.tex"],
            pages=["compare.md"],
        ),
        Task("Make a page of a run", ["fl-lightning report runs/digits_fedntd"], pages=["compare.md"]),
        Task("See what a figure of a paper costs", ["fl-lightning reproduce fedntd/2 --plan"], pages=["compare.md"]),
    ],
    "A Lightning user": [
        Task("See the options of a run", ["fl-lightning fit --help"], shown="--model.local_epochs"),
        Task(
            "Keep the merged configuration",
            [f"{FIT} --print_config > mine.yaml", f"fl-lightning fit -c mine.yaml {SHORT}"],
        ),
        Task(
            "Federate a LightningModule",
            [f"fl-lightning fit --model.client my_task.Mine {SHORT}"],
            files={"my_task.py": MODULE},
        ),
        Task(
            "Begin with the file of a LightningCLI",
            [f"fl-lightning fit --from theirs.yaml --data.num_clients 10 {SHORT}"],
            pages=["your-module.md"],
            before=[],
            files={"my_task.py": MODULE, "digits_module.py": DATA, "theirs.yaml": THEIRS},
        ),
        Task("Change the net", [f"{FIT} --model.client.net.hidden [128] {SHORT}"], pages=["running.md"]),
        Task("Train longer at the clients", [f"{FIT} --model.local_epochs 10 {SHORT}"], pages=["running.md"]),
        Task("Use a server optimizer", [f"{FIT} -c method/fedavgm {SHORT}"], pages=["methods/index.md"]),
        Task(
            "Write its predictions",
            ["fl-lightning predict -c experiment/digits_fedntd --ckpt_path best"],
            pages=["running.md"],
        ),
        Task("Give each client a head of its own", [f"{FIT} -c method/fedper {SHORT}"], pages=["personal.md"]),
        Task("Do it in Python", ["python mine.py"], files={"mine.py": PYTHON}),
    ],
    "Somebody who takes parts": [
        Task("Take a loss", ["python loss.py"], pages=["reuse.md"], files={"loss.py": LOSS}),
        Task("Take a metric", ["python metric.py"], pages=["reuse.md"], files={"metric.py": METRIC}),
        Task(
            "Measure what clients forget",
            [f"{FIT} --trainer.callbacks ForgettingMonitor {SHORT}"],
            pages=["measuring.md"],
        ),
        Task("Aggregate by the median", [f"{FIT} --model.aggregator MedianAggregator {SHORT}"], pages=["attacks.md"]),
    ],
    "A maintainer who adds a feature": [
        Task("List the configuration files", ["fl-lightning configs"], shown="experiment/digits_fedntd"),
        Task(
            "See the arguments of a method",
            ["fl-lightning fit --model.client.help FedNTD"],
            shown="--model.client.beta",
        ),
        Task(
            "Write a method and train it", ["fl-lightning new method FedLS", f"fl-lightning fit -c fedls.yaml {SHORT}"]
        ),
        Task(
            "Write a monitor and run its test",
            ["fl-lightning new monitor LossSpread", "python -m pytest -q -p no:cacheprovider test_lossspread.py"],
            pages=["contributing"],
        ),
    ],
}


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


def measured(task: Task, commands: Sequence[str], folder: Path, clone: Path) -> tuple[float, str]:
    """Do a task, and return the CPU seconds and what was printed at the end.

    Args:
        task: The task.
        commands: Its commands.
        folder: Working folder.
        clone: Folder of the clone whose package runs.
    """
    for name, text in task.files.items():
        (folder / name).write_text(text, encoding="utf-8")
    printed = ""
    began = cpu_seconds_of_children()
    for command in commands:
        printed = run(command, folder, clone, shown=task.shown)
    return cpu_seconds_of_children() - began, printed


def row_of(task: Task, before: str, seconds: float, printed: str) -> str:
    """Write the row of a task.

    Args:
        task: The task.
        before: CPU seconds of the earlier version, or a dash.
        seconds: CPU seconds now.
        printed: What was printed at the end.
    """
    if len(printed) > LONGEST:
        printed = f"{printed[:LONGEST]} …"
    printed = printed.replace("|", "&#124;")
    commands = "<br>".join(f"`{command}`" for command in task.commands)
    pages = ["README", *task.pages]
    return f"| {task.wish} | {commands} | {', '.join(pages)} | {before} | {seconds:.1f} | {printed} |"


def clone_of(name: str, place: Path, commit: str = "HEAD") -> Path:
    """Clone this repository at a commit, and make the working folder and the home of its user.

    Args:
        name: Name of the folder.
        place: Where it lies.
        commit: The commit.

    Returns:
        The folder, with `clone`, `work` and `home`.
    """
    folder = place / name
    subprocess.run(["git", "clone", "-q", ROOT, folder / "clone"], check=True)
    subprocess.run(["git", "checkout", "-q", commit], cwd=folder / "clone", check=True)
    (folder / "work").mkdir()
    (folder / "home").mkdir()
    return folder


def main() -> None:
    """Do every task with both versions, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m tools.measure_tasks", description="Writes docs/tasks.md.")
    parser.add_argument("--before", required=True, help=f"commit of version {BEFORE}")
    given = parser.parse_args()
    parts: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        old = clone_of("old", Path(name), given.before)
        new = clone_of("new", Path(name))
        began = cpu_seconds_of_children()
        run("python -c 'import fl_lightning.cli.main'", new / "work", new / "clone")
        load = cpu_seconds_of_children() - began
        for user, tasks in USERS.items():
            parts += [f"\n## {user}\n", COLUMNS]
            for task in tasks:
                earlier = task.commands if task.before is None else task.before
                before = "no way"
                if earlier:
                    seconds_before, _ = measured(task, earlier, folder=old / "work", clone=old / "clone")
                    before = f"{seconds_before:.1f}"
                seconds, printed = measured(task, task.commands, folder=new / "work", clone=new / "clone")
                parts.append(row_of(task, before=before, seconds=seconds, printed=printed))
                print(parts[-1], flush=True)
    head = HEAD.format(
        count=sum(map(len, USERS.values())),
        before=BEFORE,
        machine=f"{os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}",
        day=date.today().isoformat(),
        load=load,
    )
    (ROOT / "docs/tasks.md").write_text(head + "\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
