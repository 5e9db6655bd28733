"""The federations that are timed: equal samples, first weights, cohorts and batches for everybody."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from time import perf_counter, process_time
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

SEED = 11
CLASSES = 10
CHARACTERS = 80
"""Number of different characters of the text."""

LENGTH = 40
"""Number of characters that the net reads to tell the next one."""

LAM = 0.1
"""λ of Ditto."""

Samples = tuple[Tensor, Tensor]
"""Inputs and labels."""


class Reading(NamedTuple):
    """Has the reading of two clocks.

    Args:
        wall: Seconds on the wall clock.
        cpu: CPU seconds that this process has used in all its threads.
    """

    wall: float
    cpu: float


Result = tuple[list[Reading], float]
"""A reading at the start of every round and at the end of the last, and the accuracy reached."""


def now() -> Reading:
    """Read the clocks."""
    return Reading(wall=perf_counter(), cpu=process_time())


@dataclass(frozen=True)
class Workload:
    """Describes a federation of `num_clients` clients that are visited in a fixed order.

    Args:
        name: Name of the workload.
        net: Makes the bare net, whose random weights are the first global ones.
        samples: Gives the train and the test samples. Client i owns the i-th part of the train samples.
        client_samples: Smallest number n_i of samples of a client.
        batch_size: Samples per local step.
        local_epochs: Passes of a client over its samples in a round.
        lr: Learning rate of the local optimizer.
        weight_decay: Weight decay of the local SGD.
        rounds: Number of rounds of a block. If each round is measured by itself, the largest number of rounds,
            including those that are not measured.
        unmeasured: Number of rounds before the clock starts, of a block or of all.
        repeats: Largest number of blocks of each variant.
        seconds: Seconds within which all blocks are begun. There are fewer blocks if the time is not enough.
        momentum: Momentum of the local SGD, which starts from zero for each client and round.
        num_clients: Number N of clients.
        cohort_size: Number of clients in a round.
        eval_batch_size: Test samples per batch.
        short: Whether a round takes milliseconds. Blocks of rounds are measured then, of which the first does not
            count. Otherwise every round is measured.
        pause: Function that is called at the start of every round and after the last, with the accuracy so far.
        spread: Largest number of samples that a client has beyond `client_samples`. 0: all clients have equally many.
        adam: Whether the local optimizer is Adam.
        method: `FedAvg`. `FedRep`: clients keep the last layer, which trains first, as many epochs. `Ditto`: clients
            keep a model of their own, which trains as many epochs with the pull `LAM`.
        num_classes: Number C of classes.
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
        """Make the net with the first global weights, which are always the same."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(SEED)
            return self.net()

    def owned(self, client_id: int) -> range:
        """Return the places of a client's samples among the train samples."""
        if not self.spread:
            return range(client_id * self.client_samples, (client_id + 1) * self.client_samples)
        sizes = [self.client_samples + 37 * i % (self.spread + 1) for i in range(client_id + 1)]
        return range(sum(sizes[:-1]), sum(sizes))

    @property
    def optimizer(self) -> Callable[..., Optimizer]:
        """Function that makes the optimizer of a client in a round of its parameters."""
        if self.adam:
            return partial(Adam, lr=self.lr)
        return partial(SGD, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)

    def cohorts(self, rounds: int) -> list[list[int]]:
        """Draw the client ids of each round without replacement."""
        cohorts: list[list[int]] = []
        for round_idx in range(rounds):
            generator = torch.Generator().manual_seed(SEED + 1 + round_idx)
            order = torch.randperm(self.num_clients, generator=generator)
            cohorts.append(order[: self.cohort_size].tolist())
        return cohorts


@cache
def digits(drawn: int = 100 * 15) -> tuple[Samples, Samples]:
    """Return scikit-learn's digits, 64 numbers in [0, 1] each.

    Args:
        drawn: Number of samples of all clients together, drawn from 1,500. The other 297 are to test on.
    """
    from sklearn.datasets import load_digits  # noqa: PLC0415 - `cnn` does without scikit-learn

    pixels, labels = load_digits(return_X_y=True)
    generator = torch.Generator().manual_seed(SEED)
    order = torch.randperm(len(labels), generator=generator)
    x = torch.tensor(pixels / 16, dtype=torch.float32)[order]
    y = torch.tensor(labels)[order]
    places = torch.randint(1500, (drawn,), generator=generator)
    return (x[places], y[places]), (x[1500:], y[1500:])


@cache
def noise_images(client_samples: int = 250) -> tuple[Samples, Samples]:
    """Return 32×32 color noise around a coarse 4×4 pattern, from which a fixed linear rule makes the label.

    Args:
        client_samples: Number of samples of each of 100 clients.
    """
    rule = torch.randn(3 * 4 * 4, CLASSES, generator=torch.Generator().manual_seed(SEED))

    def draw(count: int, seed: int) -> Samples:
        generator = torch.Generator().manual_seed(seed)
        pattern = torch.randn((count, 3, 4, 4), generator=generator)
        x = torch.randn((count, 3, 32, 32), generator=generator)
        # A cell of the pattern is added to 8×8 pixels.
        blocks = x.view((count, 3, 4, 8, 4, 8))
        blocks.add_(pattern[:, :, :, None, :, None])
        y = (pattern.flatten(1) @ rule).argmax(1)
        return x, y

    return draw(100 * client_samples, SEED + 1), draw(250, SEED + 2)


@cache
def sentences() -> tuple[Samples, Samples]:
    """Return sequences of 40 characters and the one that follows, of a chain that mostly takes one way.

    Each of 100 clients has 50 sequences.
    """
    generator = torch.Generator().manual_seed(SEED)
    usual_next = torch.randperm(CHARACTERS, generator=generator)

    def draw(count: int) -> Samples:
        written = [torch.randint(CHARACTERS, (count,), generator=generator)]
        for _ in range(LENGTH):
            is_stray = torch.rand(count, generator=generator) < 0.2
            stray = torch.randint(CHARACTERS, (count,), generator=generator)
            written.append(torch.where(is_stray, stray, usual_next[written[-1]]))
        *read, following = written
        return torch.stack(read, 1), following

    return draw(100 * 50), draw(250)


def two_layers() -> nn.Sequential:
    """Make the `Perceptron` of the package with its default width: 64 -> 64 -> 10."""
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, CLASSES))


def two_convolutions() -> nn.Sequential:
    """Make the `FedNTDCNN` of the package, layer by layer: 2,156,490 parameters."""
    layers: list[nn.Module] = []
    for channels, filters in ((3, 32), (32, 64)):
        layers += [nn.Conv2d(channels, filters, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Linear(64 * 8 * 8, 512), nn.ReLU(), nn.Linear(512, CLASSES)]
    return nn.Sequential(*layers)


def resnet() -> nn.Module:
    """Make ResNet-18 of torchvision with the stem for small images: 11,173,962 parameters."""
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
    """Make a transformer of four layers that reads characters: 1,031,696 parameters.

    Args:
        width: Number of features of a character, divisible by 4.
    """
    layer = nn.TransformerEncoderLayer(
        d_model=width,
        nhead=4,
        dim_feedforward=4 * width,
        dropout=0.0,
        batch_first=True,
        norm_first=True,
    )
    encoder = nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)
    layers = [Characters(width), encoder, Last(), nn.Linear(width, CHARACTERS)]
    return nn.Sequential(*layers)


TINY = Workload(
    name="tiny",
    net=two_layers,
    samples=digits,
    client_samples=15,
    batch_size=16,
    local_epochs=1,
    lr=0.1,
    weight_decay=0.0,
    rounds=60,
    unmeasured=10,
    repeats=40,
    short=True,
)
ADAM = replace(
    TINY,
    name="adam",
    samples=partial(digits, 3456),
    client_samples=5,
    spread=60,
    local_epochs=5,
    adam=True,
    lr=0.01,
    rounds=12,
    unmeasured=2,
)
CNN = Workload(
    name="cnn",
    net=two_convolutions,
    samples=noise_images,
    client_samples=250,
    batch_size=50,
    local_epochs=1,
    lr=0.01,
    weight_decay=1e-5,
    rounds=41,
    unmeasured=1,
    repeats=40,
    eval_batch_size=125,
)
RESNET = replace(
    CNN,
    name="resnet",
    net=resnet,
    samples=partial(noise_images, 20),
    client_samples=20,
    batch_size=4,
)
TEXT = replace(
    CNN,
    name="text",
    net=transformer,
    samples=sentences,
    client_samples=50,
    batch_size=10,
    adam=True,
    lr=1e-3,
    num_classes=CHARACTERS,
)
PERSONAL = replace(CNN, name="personal", method="FedRep")
DITTO = replace(CNN, name="ditto", method="Ditto")

WORKLOADS = {workload.name: workload for workload in (TINY, CNN, RESNET, TEXT, PERSONAL, DITTO, ADAM)}
"""All workloads by name."""
