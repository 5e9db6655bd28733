"""What the package chooses by: convolutions channels last over contiguous, and optimizers by one kernel over many.

CPU seconds of steps and forward passes on one thread, in turn in one process.
"""

import copy
from collections.abc import Callable, Iterator
from functools import partial
from time import process_time

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adam, Optimizer

from bench.blocks import quartiles, turns
from bench.workloads import CLASSES, two_convolutions, two_layers
from fl_lightning import nets

COLUMNS = ("what", "ms", "ratio", "low", "high")
COLOUR = (3, 32, 32)
GREY = (1, 28, 28)
NETS: dict[str, tuple[Callable[..., nn.Module], tuple[int, ...], int]] = {
    "FedNTDCNN, 50": (nets.FedNTDCNN, COLOUR, 50),
    "FedNTDCNN, 10, grey": (nets.FedNTDCNN, GREY, 10),
    "FedCLCIFARCNN, 32": (nets.FedCLCIFARCNN, COLOUR, 32),
    "FedCLMNISTCNN, 32": (nets.FedCLMNISTCNN, GREY, 32),
    "FedKATCNN, 32": (nets.FedKATCNN, COLOUR, 32),
    "KnFuM1, 32": (nets.KnFuM1, GREY, 32),
    "KnFuM2, 32": (nets.KnFuM2, GREY, 32),
    "CIFARResNet, 32": (nets.CIFARResNet, COLOUR, 32),
    "FedAlignResNet, 16": (nets.FedAlignResNet, COLOUR, 16),
    "CIFARMobileNetV2, 16": (nets.CIFARMobileNetV2, COLOUR, 16),
    "ResNet-18, 32": (partial(nets.ResNet, stem="cifar"), COLOUR, 32),
    "ResNet-18, 4": (partial(nets.ResNet, stem="cifar"), COLOUR, 4),
}
"""Nets, a sample's shape, and samples in a batch."""
LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "MaxPool2d(2), 50 x 32 x 32 x 32": (nn.MaxPool2d(2), (50, 32, 32, 32)),
    "Conv2d(32, 64, 5), 50 x 32 x 16 x 16": (nn.Conv2d(32, 64, 5, padding=2), (50, 32, 16, 16)),
}
"""Layers of FedNTDCNN, and what they are given in a step."""
EVALUATED = 125
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD, momentum": partial(SGD, lr=0.01, momentum=0.9),
    "SGD": partial(SGD, lr=0.01),
    "Adam": partial(Adam, lr=0.001),
}
SIZES: dict[str, Callable[[], nn.Module]] = {"4,810": two_layers, "2.2 million": two_convolutions}
Run = Callable[[], object]


def trained(name: str, channels_last: bool) -> Run:
    """A local step: forward and backward pass, SGD with momentum."""
    make, shape, size = NETS[name]
    net = made(make, shape)
    x = torch.randn(size, *shape)
    if channels_last:
        net = net.to(memory_format=torch.channels_last)
    y = torch.arange(size) % CLASSES
    sgd = SGD(net.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        sgd.zero_grad()
        cross_entropy(net(x), y).backward()
        sgd.step()

    return step


def passed(name: str, channels_last: bool) -> Run:
    """A layer's forward and backward pass."""
    layer, shape = LAYERS[name]
    layout = torch.channels_last if channels_last else torch.contiguous_format
    layer = copy.deepcopy(layer).to(memory_format=layout)
    x = torch.randn(shape).contiguous(memory_format=layout)
    given = torch.ones_like(layer(x))
    x.requires_grad_()
    return lambda: layer(x).backward(given)


def made(make: Callable[..., nn.Module], shape: tuple[int, ...]) -> nn.Module:
    torch.manual_seed(0)
    return make(num_classes=CLASSES, input_shape=shape)


def evaluated(name: str, channels_last: bool) -> Run:
    """A forward pass, of images and weights in one layout."""
    make, shape, _ = NETS[name]
    net = made(make, shape).eval()
    x = torch.randn(EVALUATED, *shape)
    if channels_last:
        net = net.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)

    @torch.no_grad()
    def run() -> Tensor:
        logits: Tensor = net(x)
        return logits

    return run


def stepped(optimizer: str, size: str, fused: bool) -> Run:
    """A step of an optimizer alone."""
    parameters = list(SIZES[size]().parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return OPTIMIZERS[optimizer](parameters, fused=fused).step


def pairs() -> Iterator[tuple[str, Run, Run]]:
    """Yield what is measured and its two ways, the plain one first."""
    for name in NETS:
        yield f"step channels last: {name}", trained(name, False), trained(name, True)
    for name in (name for name, (_, shape, _) in NETS.items() if shape == COLOUR and not name.endswith(", 4")):
        what = f"evaluation channels last: {name.split(',')[0]}, {EVALUATED}"
        yield what, evaluated(name, False), evaluated(name, True)
    for name in LAYERS:
        yield f"layer channels last: {name}", passed(name, False), passed(name, True)
    for optimizer in OPTIMIZERS:
        for size in SIZES:
            yield f"fused: {optimizer}, {size}", stepped(optimizer, size, False), stepped(optimizer, size, True)


def measure(repeats: int, seconds: float) -> Iterator[tuple[str, float, float, float, float]]:
    """Rows under `COLUMNS`: milliseconds of the way that is named, and the quartiles of its ratio to the plain one.

    Each has a like share of the seconds, `repeats` pairs at most.
    """
    measured = list(pairs())
    for what, plain, named in measured:
        for run in (plain, named):
            run()
        taken = [(cpu(plain), cpu(named)) for _ in turns(repeats, seconds / len(measured))]
        low, middle, high = quartiles([own / base for base, own in taken])
        yield what, 1e3 * quartiles([own for _, own in taken])[1], middle, low, high


def cpu(run: Run, least: float = 0.02) -> float:
    """CPU seconds of a call, over as many calls as take `least`."""
    begin = process_time()
    calls = 0
    while (spent := process_time() - begin) < least or not calls:
        run()
        calls += 1
    return spent / calls
