"""The federations that are timed: equal samples, first weights, cohorts and batches for everybody."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from time import perf_counter, process_time
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

SEED = 11
CLASSES = 10
CHARACTERS = 80
LENGTH = 40
"""Of the text: different ones, and those that the net reads to tell the next."""
LAM = 0.1
"""λ of Ditto."""
Samples = tuple[Tensor, Tensor]
Reading = tuple[float, float]
"""Seconds on the wall clock, and seconds of CPU that this process has used in all its threads."""
Result = tuple[list[Reading], float]
"""A reading at the start of every round and at the end of the last, and the accuracy reached."""


def now() -> Reading:
    return perf_counter(), process_time()


@dataclass(frozen=True)
class Workload:
    """A federation of `num_clients` clients, visited in a fixed order.

    Args:
        name: of the workload.
        net: the bare net, whose random weights are the first global ones.
        samples: gives the train and the test samples; client i owns the i-th part of the former.
        client_samples: n_i, of a client at least.
        spread: samples that a client may have beyond them; 0: all clients have equally many.
        batch_size: samples per local step.
        local_epochs: passes over them a round.
        lr: of the local optimizer.
        weight_decay: of the local SGD.
        rounds: of one block; the most, with those that are not measured, where each round is measured by itself.
        unmeasured: rounds that pass before the clock starts, of a block or of all.
        repeats: blocks of each variant, at most.
        seconds: in which all blocks are run, fewer of them where the time is not enough.
        momentum: of the local SGD, which starts from zero for each client and round.
        num_clients: N.
        cohort_size: clients a round.
        eval_batch_size: test samples per batch.
        short: whether a round takes milliseconds, so that blocks of rounds are measured, the first of which does not
            count; else every round is.
        pause: called at the start of every round with the accuracy so far, and after the last.
        adam: whether the local optimizer is Adam.
        method: FedAvg; FedRep, whose clients keep the last layer, which trains first, as many epochs; or Ditto, whose
            clients keep a model of their own, which trains as many epochs with the pull `LAM`.
        num_classes: C.
    """

    name: str
    net: Callable[[], nn.Module]
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
    pause: Callable[[float], None] | None = None
    spread: int = 0
    adam: bool = False
    method: Literal["FedAvg", "FedRep", "Ditto"] = "FedAvg"
    num_classes: int = CLASSES

    def first_net(self) -> nn.Module:
        """The net with the first global weights, always the same."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return self.net()

    def owned(self, client_id: int) -> range:
        """Positions of a client's samples among the train samples."""
        if not self.spread:
            return range(client_id * self.client_samples, (client_id + 1) * self.client_samples)
        sizes = [self.client_samples + 37 * i % (self.spread + 1) for i in range(client_id + 1)]
        return range(sum(sizes[:-1]), sum(sizes))

    @property
    def optimizer(self) -> Callable[..., Optimizer]:
        """Makes the optimizer of a client in a round, of its parameters."""
        if self.adam:
            return partial(Adam, lr=self.lr)
        return partial(SGD, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    def cohorts(self, rounds: int) -> list[list[int]]:
        """The client ids of each round, drawn without replacement."""
        draws = [torch.Generator().manual_seed(SEED + 1 + round_idx) for round_idx in range(rounds)]
        return [torch.randperm(self.num_clients, generator=g)[: self.cohort_size].tolist() for g in draws]


@cache
def digits(drawn: int = 100 * 15) -> tuple[Samples, Samples]:
    """scikit-learn's digits, 64 numbers in [0, 1]: so many drawn from 1,500 for all clients, 297 to test on."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 - `cnn` does without scikit-learn

    pixels, labels = load_digits(return_X_y=True)
    g = torch.Generator().manual_seed(SEED)
    order = torch.randperm(len(labels), generator=g)
    x = torch.tensor(pixels / 16, dtype=torch.float32)[order]
    y = torch.tensor(labels)[order]
    places = torch.randint(1500, (drawn,), generator=g)
    return (x[places], y[places]), (x[1500:], y[1500:])


@cache
def noise_images(client_samples: int = 250) -> tuple[Samples, Samples]:
    """32×32 colour noise around a coarse 4×4 pattern, from which a fixed linear rule makes the label."""
    rule = torch.randn(3 * 4 * 4, CLASSES, generator=torch.Generator().manual_seed(SEED))

    def draw(n: int, seed: int) -> Samples:
        g = torch.Generator().manual_seed(seed)
        pattern = torch.randn(n, 3, 4, 4, generator=g)
        x = torch.randn(n, 3, 32, 32, generator=g)
        x.view(n, 3, 4, 8, 4, 8).add_(pattern[:, :, :, None, :, None])
        return x, (pattern.flatten(1) @ rule).argmax(1)

    return draw(100 * client_samples, SEED + 1), draw(250, SEED + 2)


@cache
def sentences() -> tuple[Samples, Samples]:
    """Sequences of 40 characters and the one that follows, of a chain that mostly takes one way: 50 for each client."""
    g = torch.Generator().manual_seed(SEED)
    after = torch.randperm(CHARACTERS, generator=g)

    def draw(n: int) -> Samples:
        written = [torch.randint(CHARACTERS, (n,), generator=g)]
        for _ in range(LENGTH):
            strays = torch.rand(n, generator=g) < 0.2
            written.append(torch.where(strays, torch.randint(CHARACTERS, (n,), generator=g), after[written[-1]]))
        return torch.stack(written[:-1], 1), written[-1]

    return draw(100 * 50), draw(250)


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


def resnet() -> nn.Module:
    """ResNet-18 of torchvision with the stem for small images: 11,173,962 parameters."""
    from torchvision.models import resnet18  # noqa: PLC0415 - others do without torchvision

    net = resnet18(num_classes=CLASSES)
    net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    net.maxpool = nn.Identity()
    return net


class Characters(nn.Module):
    """Embeds characters and their places: (B, 40) -> (B, 40, width)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.character = nn.Embedding(CHARACTERS, width)
        self.place = nn.Parameter(torch.zeros(LENGTH, width))

    def forward(self, x: Tensor) -> Tensor:
        embedded: Tensor = self.character(x) + self.place
        return embedded


class Last(nn.Module):
    """Takes what belongs to the last character: (B, 40, width) -> (B, width)."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, -1]


def transformer(width: int = 144) -> nn.Sequential:
    """A transformer of four layers that reads characters: 1,031,696 parameters."""
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    return nn.Sequential(Characters(width), encoder, Last(), nn.Linear(width, CHARACTERS))


TINY = Workload(
    "tiny", two_layers, digits, client_samples=15, batch_size=16, local_epochs=1, lr=0.1,
    weight_decay=0.0, rounds=60, unmeasured=10, repeats=40, short=True,
)  # fmt: skip
CNN = Workload(
    "cnn", two_convolutions, noise_images, client_samples=250, batch_size=50, local_epochs=1, lr=0.01,
    weight_decay=1e-5, rounds=41, unmeasured=1, repeats=40, eval_batch_size=125,
)  # fmt: skip
WORKLOADS = {
    workload.name: workload
    for workload in (
        TINY,
        CNN,
        replace(CNN, name="resnet", net=resnet, samples=partial(noise_images, 20), client_samples=20, batch_size=4),
        replace(
            CNN, name="text", net=transformer, samples=sentences, client_samples=50, batch_size=10, adam=True, lr=1e-3,
            num_classes=CHARACTERS,
        ),
        replace(CNN, name="personal", method="FedRep"),
        replace(CNN, name="ditto", method="Ditto"),
        replace(
            TINY, name="adam", samples=partial(digits, 3456), client_samples=5, spread=60, local_epochs=5,
            adam=True, lr=0.01, rounds=12, unmeasured=2,
        ),
    )
}  # fmt: skip
