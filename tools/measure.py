"""Measures the times in docs/decisions.md: `python tools/measure.py`, about a minute."""

import logging
import time
import warnings
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from pytorch_lightning import LightningModule, Trainer
from torch import Tensor
from torch.optim import SGD

from fl_lightning.data import DirichletPartition, PartitionInput
from fl_lightning.data.transforms import Normalize
from fl_lightning.functional.state import FlatState, StateLike, StateSum, flatten
from fl_lightning.nets import Perceptron


def seconds(work: Callable[[], object], repeats: int) -> float:
    """The shortest of five blocks, per call."""
    work()
    blocks = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        blocks.append((time.perf_counter() - start) / repeats)
    return min(blocks)


class Logs(LightningModule):
    """One step an epoch that does nothing but log `keys` values."""

    def __init__(self, keys: int) -> None:
        super().__init__()
        self.keys = keys
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        for k in range(self.keys):
            self.log(f"value{k}", torch.zeros(()), on_step=False, on_epoch=True, batch_size=1)

    def configure_optimizers(self) -> SGD:
        return SGD(self.parameters())


def epoch_of(keys: int, epochs: int = 100) -> float:
    """Seconds of an epoch of one step in which so many keys are logged, the shortest of five runs."""

    def fit() -> None:
        settings = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        )
        trainer = Trainer(max_epochs=epochs, accelerator="cpu", **settings)  # type: ignore[arg-type]
        trainer.fit(Logs(keys), train_dataloaders=[0])

    return seconds(fit, 1) / epochs


def self_log() -> str:
    """Lightning's own `self.log`, on top of an epoch without."""
    return f"{1e3 * (epoch_of(20) - epoch_of(0)) / 20:.2f} ms a key and round"


def normalize() -> str:
    """Two ways to normalise a batch of uint8 images."""
    x = torch.randint(256, (50, 3, 32, 32), dtype=torch.uint8)
    transform = Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    slope, offset = (torch.full((3, 1, 1), value) for value in (1 / 63.75, -2.0))
    ours = seconds(lambda: transform(x), 200)
    other = seconds(lambda: torch.addcmul(offset, x.float(), slope), 200)
    return f"mul and add {1e6 * ours:.0f} µs, addcmul {1e6 * other:.0f} µs for a batch of 50 x 3 x 32 x 32"


def optimizers() -> str:
    """A local optimizer for the next client."""
    params = list(Perceptron(10, (1, 8, 8)).parameters())
    kept = SGD(params, lr=0.1, momentum=0.9)
    group = dict(kept.param_groups[0])

    def reset() -> None:
        kept.state.clear()
        kept.param_groups[0].update(group)

    built = seconds(lambda: SGD(params, lr=0.1, momentum=0.9), 500)
    return f"built anew {1e6 * built:.0f} µs, reset {1e6 * seconds(reset, 500):.1f} µs"


def sums() -> str:
    """One client's update checked for finiteness and added to the sum: laid end to end once, twice, not at all."""
    deep = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(60)])
    parts = []
    for name, net in (("Perceptron", Perceptron(10, (1, 8, 8))), ("60 layers", deep)):
        entries = {key: value.detach() for key, value in net.state_dict().items()}
        total = StateSum()
        each = {key: torch.zeros_like(value, dtype=torch.float64) for key, value in entries.items()}

        def laid(state: StateLike, total: StateSum = total) -> None:
            for vector in flatten(state).values():
                vector.sum(dtype=torch.float64)
            total.add(state, 32)

        def by_entry(entries: StateLike = entries, each: StateLike = each) -> None:
            torch.stack([value.sum(dtype=torch.float64) for value in entries.values()]).sum()
            for key, value in entries.items():
                each[key].add_(value, alpha=32)

        once, twice = (partial(lambda kind, state: laid(kind(state)), kind, entries) for kind in (FlatState, dict))
        times = [round(1e6 * seconds(work, 100)) for work in (once, twice, by_entry)]
        parts.append(f"{name}: once {times[0]} µs, twice {times[1]} µs, entry by entry {times[2]} µs")
    return "; ".join(parts)


def grouping() -> str:
    """Entries of a mean that another order of summation changes."""
    g = torch.Generator().manual_seed(0)
    n = torch.randint(1, 1000, (10,), generator=g).tolist()
    w = [torch.randn(1_000_000, generator=g) for _ in n]

    def mean(order: list[int], share: bool) -> Tensor:
        total = torch.zeros(1_000_000, dtype=torch.float64 if not share else torch.float32)
        for i in order:
            total += w[i].to(total.dtype) * (n[i] / sum(n) if share else n[i])
        return total.float() if share else (total / sum(n)).float()

    forth = list(range(10))
    back = list(range(9, -1, -1))
    exact, shares = (int((mean(forth, s) != mean(back, s)).sum()) for s in (False, True))
    return f"{exact} of 1,000,000 means of 10 clients depend on their order; summed as shares in float32, {shares:,}"


def unreachable() -> str:
    """Smallest share with alpha = 0.05 for 100 clients of 50,000 samples."""
    labels = np.repeat(np.arange(10), 5000)
    try:
        DirichletPartition(0.05)(PartitionInput(len(labels), labels, 10), 100, np.random.default_rng(0))
    except ValueError as error:
        return str(error)
    return "reached"


def main() -> None:
    """Print one line per measurement."""
    warnings.filterwarnings("ignore")
    for package in ("pytorch_lightning", "lightning_fabric"):
        logging.getLogger(package).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    for measure in (self_log, normalize, optimizers, sums, grouping, unreachable):
        print(f"{measure.__name__:12} {measure()}", flush=True)


if __name__ == "__main__":
    main()
