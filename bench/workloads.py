"""The two pieces of FedAvg that are timed: equal samples, first weights, cohorts and batches for everybody.

`cnn` is bound by arithmetic (0.3 TFLOP a round); in `tiny` ten clients take one step each: all is overhead.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from time import perf_counter, process_time

import torch
from torch import Tensor, nn

SEED = 11
CLASSES = 10
Samples = tuple[Tensor, Tensor]
Reading = tuple[float, float]
"""Seconds on the wall clock, and seconds of CPU that this process has used in all its threads."""
Result = tuple[list[Reading], float]
"""A reading at the start of every round and at the end of the last, and the accuracy reached."""


def now() -> Reading:
    return perf_counter(), process_time()


@dataclass(frozen=True)
class Workload:
    """A federation of `num_clients` clients with equally many samples, visited in a fixed order.

    Args:
        name: of the workload.
        net: the bare net, whose random weights are the first global ones.
        samples: gives the train and the test samples; client i owns the i-th part of the former.
        client_samples: n_i, the same for every client.
        batch_size: samples per local step.
        local_epochs: passes over them a round.
        lr: of the local SGD.
        weight_decay: of the local SGD.
        rounds: of one block.
        unmeasured: rounds of a block that pass before its clock starts.
        repeats: blocks of each variant, at most.
        seconds: in which all blocks are run, fewer of them where the time is not enough.
        momentum: of the local SGD, which starts from zero for each client and round.
        num_clients: N.
        cohort_size: clients a round.
        eval_batch_size: test samples per batch.
        short: whether a round takes milliseconds, so that a whole block passes before the first that counts.
    """

    name: str
    net: Callable[[], nn.Sequential]
    samples: Callable[[], tuple[Samples, Samples]]
    client_samples: int
    batch_size: int
    local_epochs: int
    lr: float
    weight_decay: float
    rounds: int
    unmeasured: int
    repeats: int
    seconds: float = 90.0
    momentum: float = 0.9
    num_clients: int = 100
    cohort_size: int = 10
    eval_batch_size: int = 250
    short: bool = False

    def first_net(self) -> nn.Sequential:
        """The net with the first global weights, always the same."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return self.net()

    def owned(self, client_id: int) -> range:
        """Positions of a client's samples among the train samples."""
        return range(client_id * self.client_samples, (client_id + 1) * self.client_samples)

    def cohorts(self, rounds: int) -> list[list[int]]:
        """The client ids of each round, drawn without replacement."""
        draws = [torch.Generator().manual_seed(SEED + 1 + round_idx) for round_idx in range(rounds)]
        return [torch.randperm(self.num_clients, generator=g)[: self.cohort_size].tolist() for g in draws]


@cache
def digits() -> tuple[Samples, Samples]:
    """scikit-learn's digits, 64 numbers in [0, 1]: 15 drawn from 1,500 for each client, 297 to test on."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 - `cnn` does without scikit-learn

    pixels, labels = load_digits(return_X_y=True)
    g = torch.Generator().manual_seed(SEED)
    order = torch.randperm(len(labels), generator=g)
    x, y = torch.tensor(pixels / 16, dtype=torch.float32)[order], torch.tensor(labels)[order]
    drawn = torch.randint(1500, (100 * 15,), generator=g)
    return (x[drawn], y[drawn]), (x[1500:], y[1500:])


@cache
def noise_images() -> tuple[Samples, Samples]:
    """32×32 colour noise around a coarse 4×4 pattern, from which a fixed linear rule makes the label."""
    rule = torch.randn(3 * 4 * 4, CLASSES, generator=torch.Generator().manual_seed(SEED))

    def draw(n: int, seed: int) -> Samples:
        g = torch.Generator().manual_seed(seed)
        pattern = torch.randn(n, 3, 4, 4, generator=g)
        x = torch.randn(n, 3, 32, 32, generator=g)
        x.view(n, 3, 4, 8, 4, 8).add_(pattern[:, :, :, None, :, None])
        return x, (pattern.flatten(1) @ rule).argmax(1)

    return draw(100 * 250, SEED + 1), draw(250, SEED + 2)


def two_layers() -> nn.Sequential:
    """64 -> 64 -> 10, the `Perceptron` of the package with its default width."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def two_convolutions() -> nn.Sequential:
    """The `FedNTDCNN` of the package, layer by layer: 2,156,490 parameters."""
    layers: list[nn.Module] = []
    for channels, filters in ((3, 32), (32, 64)):
        layers += [nn.Conv2d(channels, filters, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(64 * 8 * 8, 512), nn.ReLU(), nn.Linear(512, CLASSES)]
    return nn.Sequential(*layers)


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "tiny", two_layers, digits, client_samples=15, batch_size=16, local_epochs=1, lr=0.1,
            weight_decay=0.0, rounds=60, unmeasured=10, repeats=40, short=True,
        ),
        Workload(
            "cnn", two_convolutions, noise_images, client_samples=250, batch_size=50, local_epochs=1, lr=0.01,
            weight_decay=1e-5, rounds=2, unmeasured=1, repeats=20, eval_batch_size=125,
        ),
    )
}  # fmt: skip
