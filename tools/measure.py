"""Measures the times in docs/decisions.md: `python -m tools.measure`, about a minute."""

import logging
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from pytorch_lightning import LightningModule
from torch import Tensor
from torch.optim import SGD

from fl_lightning.data import DirichletPartition, PartitionInput
from fl_lightning.data.transforms import Normalize
from fl_lightning.functional.state import FlatState, StateLike, StateSum, flatten
from fl_lightning.nets import Perceptron
from tools.quiet import quiet_trainer


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Return the seconds of a call, in the shortest of five blocks of `repeats` calls."""
    work()
    blocks = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            work()
        blocks.append((time.perf_counter() - start) / repeats)
    return min(blocks)


class Logs(LightningModule):
    """Makes one step an epoch that only logs `keys` values."""

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
    """Return the seconds of an epoch of one step that logs so many keys, in the shortest of five runs."""

    def fit() -> None:
        quiet_trainer(epochs).fit(Logs(keys), train_dataloaders=[0])

    return seconds(fit, 1) / epochs


def self_log() -> str:
    """Measure Lightning's own `self.log`, on top of an epoch without it."""
    keys = 20
    seconds_of_key = (epoch_of(keys) - epoch_of(0)) / keys
    return f"{1e3 * seconds_of_key:.2f} ms a key and round"


def normalize() -> str:
    """Measure two ways to normalize a batch of uint8 images."""
    x = torch.randint(256, (50, 3, 32, 32), dtype=torch.uint8)
    transform = Normalize((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    slope = torch.full((3, 1, 1), 1 / 63.75)
    offset = torch.full((3, 1, 1), -2.0)
    ours = seconds(lambda: transform(x), 200)
    other = seconds(lambda: torch.addcmul(offset, x.float(), slope), 200)
    return f"mul and add {1e6 * ours:.0f} µs, addcmul {1e6 * other:.0f} µs for a batch of 50 x 3 x 32 x 32"


def optimizers() -> str:
    """Measure two ways to get a local optimizer for the next client."""
    params = list(Perceptron(10, (1, 8, 8)).parameters())
    kept = SGD(params, lr=0.1, momentum=0.9)
    group = dict(kept.param_groups[0])

    def reset() -> None:
        kept.state.clear()
        kept.param_groups[0].update(group)

    seconds_built = seconds(lambda: SGD(params, lr=0.1, momentum=0.9), 500)
    seconds_reset = seconds(reset, 500)
    return f"built anew {1e6 * seconds_built:.0f} µs, reset {1e6 * seconds_reset:.1f} µs"


def sums() -> str:
    """Measure the check of a client's update for finiteness with its addition to the sum.

    The update is laid end to end once, twice or not at all.
    """
    deep = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(60)])
    return "; ".join([sums_of("Perceptron", Perceptron(10, (1, 8, 8))), sums_of("60 layers", deep)])


def sums_of(name: str, net: torch.nn.Module) -> str:
    """Measure `sums` for the weights of a net."""
    entries = {key: value.detach() for key, value in net.state_dict().items()}
    total = StateSum()
    totals = {key: torch.zeros_like(value, dtype=torch.float64) for key, value in entries.items()}

    def end_to_end(state: StateLike) -> None:
        for vector in flatten(state).values():
            vector.sum(dtype=torch.float64)
        total.add(state, 32)

    def once() -> None:
        end_to_end(FlatState(entries))

    def twice() -> None:
        end_to_end(dict(entries))

    def by_entry() -> None:
        torch.stack([value.sum(dtype=torch.float64) for value in entries.values()]).sum()
        for key, value in entries.items():
            totals[key].add_(value, alpha=32)

    times = [round(1e6 * seconds(work, 100)) for work in (once, twice, by_entry)]
    return f"{name}: once {times[0]} µs, twice {times[1]} µs, entry by entry {times[2]} µs"


def grouping() -> str:
    """Count the entries of a mean that another order of summation changes."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 1000, (10,), generator=generator).tolist()
    weights = [torch.randn(1_000_000, generator=generator) for _ in sizes]

    def mean_of_sums(order: list[int]) -> Tensor:
        """Add integer weights in float64, and divide once."""
        total = torch.zeros(1_000_000, dtype=torch.float64)
        for client_id in order:
            total += weights[client_id].double() * sizes[client_id]
        return (total / sum(sizes)).float()

    def sum_of_shares(order: list[int]) -> Tensor:
        """Add weighted shares in float32."""
        total = torch.zeros(1_000_000)
        for client_id in order:
            total += weights[client_id] * (sizes[client_id] / sum(sizes))
        return total

    def changed(mean: Callable[[list[int]], Tensor]) -> int:
        forth = list(range(10))
        back = list(reversed(forth))
        return int((mean(forth) != mean(back)).sum())

    exact = changed(mean_of_sums)
    shares = changed(sum_of_shares)
    return f"{exact} of 1,000,000 means of 10 clients depend on their order; summed as shares in float32, {shares:,}"


def unreachable() -> str:
    """Draw a partition with alpha = 0.05 for 100 clients of 50,000 samples, and return its error."""
    labels = np.repeat(np.arange(10), 5000)
    samples = PartitionInput(len(labels), labels, 10)
    try:
        DirichletPartition(0.05)(samples, 100, np.random.default_rng(0))
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
