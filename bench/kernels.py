"""Measurements by which the package chooses: convolutions channels last, and optimizers by one kernel.

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
"""Nets by name, with the shape of a sample and the number of samples in a batch."""

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "MaxPool2d(2), 50 x 32 x 32 x 32": (nn.MaxPool2d(2), (50, 32, 32, 32)),
    "Conv2d(32, 64, 5), 50 x 32 x 16 x 16": (nn.Conv2d(32, 64, 5, padding=2), (50, 32, 16, 16)),
}
"""Layers of FedNTDCNN by name, with the shape of what they are given in a step."""

EVALUATED = 125
"""Number of samples in a batch of an evaluation."""

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD, momentum": partial(SGD, lr=0.01, momentum=0.9),
    "SGD": partial(SGD, lr=0.01),
    "Adam": partial(Adam, lr=0.001),
}
SIZES: dict[str, Callable[[], nn.Module]] = {"4,810": two_layers, "2.2 million": two_convolutions}
"""Nets by their number of parameters."""

Run = Callable[[], object]
"""Does once what is measured."""


def trained(name: str, *, channels_last: bool) -> Run:
    """Make a local step of a net: forward and backward pass, SGD with momentum."""
    make, shape, size = NETS[name]
    net = made(make, shape)
    x = torch.randn((size, *shape))
    if channels_last:
        net = net.to(memory_format=torch.channels_last)
    y = torch.arange(size) % CLASSES
    sgd = SGD(net.parameters(), lr=0.01, momentum=0.9)

    def step() -> None:
        sgd.zero_grad()
        cross_entropy(net(x), y).backward()
        sgd.step()

    return step


def passed(name: str, *, channels_last: bool) -> Run:
    """Make the forward and backward pass of a layer."""
    original, shape = LAYERS[name]
    layout = torch.channels_last if channels_last else torch.contiguous_format
    layer = copy.deepcopy(original).to(memory_format=layout)
    x = torch.randn(shape).contiguous(memory_format=layout)
    gradient = torch.ones_like(layer(x))
    x.requires_grad_()
    return lambda: layer(x).backward(gradient)


def made(make: Callable[..., nn.Module], shape: tuple[int, ...]) -> nn.Module:
    """Make a net whose weights are always the same."""
    torch.manual_seed(0)
    return make(num_classes=CLASSES, input_shape=shape)


def evaluated(name: str, *, channels_last: bool) -> Run:
    """Make the forward pass of a net, with images and weights in one layout."""
    make, shape, _ = NETS[name]
    net = made(make, shape).eval()
    x = torch.randn((EVALUATED, *shape))
    if channels_last:
        net = net.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)

    @torch.no_grad()
    def run() -> Tensor:
        logits: Tensor = net(x)
        return logits

    return run


def stepped(optimizer: str, size: str, *, fused: bool) -> Run:
    """Make a step of an optimizer alone."""
    parameters = list(SIZES[size]().parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return OPTIMIZERS[optimizer](parameters, fused=fused).step


def pairs() -> Iterator[tuple[str, Run, Run]]:
    """Yield the names of what is measured, with the plain way and the named one."""
    for name in NETS:
        what = f"step channels last: {name}"
        yield what, trained(name, channels_last=False), trained(name, channels_last=True)
    for name in evaluated_nets():
        net, _, _ = name.partition(",")
        what = f"evaluation channels last: {net}, {EVALUATED}"
        yield what, evaluated(name, channels_last=False), evaluated(name, channels_last=True)
    for name in LAYERS:
        what = f"layer channels last: {name}"
        yield what, passed(name, channels_last=False), passed(name, channels_last=True)
    for optimizer in OPTIMIZERS:
        for size in SIZES:
            what = f"fused: {optimizer}, {size}"
            yield what, stepped(optimizer, size, fused=False), stepped(optimizer, size, fused=True)


def evaluated_nets() -> list[str]:
    """Return the names of the nets of color images, each net once."""
    names: list[str] = []
    for name, (_, shape, size) in NETS.items():
        # ResNet-18 has another entry.
        if shape == COLOUR and size != 4:
            names.append(name)
    return names


def measure(repeats: int, seconds: float) -> Iterator[tuple[str, float, float, float, float]]:
    """Yield rows under `COLUMNS`: milliseconds of the named way, and the quartiles of its ratio to the plain one.

    Args:
        repeats: Largest number of runs of each way.
        seconds: Seconds of all rows, of which each has a like share.
    """
    measured = list(pairs())
    for what, plain, named in measured:
        # The first runs warm up.
        plain()
        named()
        taken = [(cpu(plain), cpu(named)) for _ in turns(repeats, seconds / len(measured))]
        low, middle, high = quartiles([own / base for base, own in taken])
        _, median, _ = quartiles([own for _, own in taken])
        yield what, 1e3 * median, middle, low, high


def cpu(run: Run, least: float = 0.02) -> float:
    """Measure the CPU seconds of a call, over as many calls as take `least` seconds."""
    begin = process_time()
    calls = 0
    spent = 0.0
    while spent < least:
        run()
        calls += 1
        spent = process_time() - begin
    return spent / calls
