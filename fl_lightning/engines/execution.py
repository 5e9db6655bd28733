"""Settings of how a process computes: its threads, clients at once, and the memory layout of images."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from fl_lightning.client.module import ClientModule
from fl_lightning.utils.settings import check_count

Chunk = Literal["auto"] | int
"""The largest number of clients that are trained at once. `auto` chooses it."""

MIXED_PRECISIONS = ("bf16-mixed", "16-mixed")


@dataclass(frozen=True)
class Execution:
    """Holds settings that change the results in the last bits at most.

    Args:
        threads: The number of threads of this process for torch operations. None leaves it as it is.
        chunk: The number of clients that are trained at once: 1, K or `auto`.

    Raises:
        ValueError: A setting is below 1.
    """

    threads: int | None = None
    chunk: Chunk = 1

    def __post_init__(self) -> None:
        check_count(1, threads=self.threads)
        check_count(1, "'auto' chooses it", chunk=None if self.chunk == "auto" else self.chunk)

    def lay_out(self, client: ClientModule, device: torch.device, precision: str = "32-true") -> None:
        """Lay the weights of convolutions out channels last, if that is faster. Inputs then follow the weights.

        It is faster for a net (`net=`) with two-dimensional convolutions on a CPU, or on CUDA in half precision. A
        stack of clients has another layout. The weights of a LightningModule stay as its author made them.

        Args:
            client: The client module, with its net built.
            device: The device that the client is trained on.
            precision: The precision of the Trainer.
        """
        is_faster = device.type == "cpu"
        if device.type == "cuda":
            is_faster = precision in MIXED_PRECISIONS
        if self.chunk == 1 and is_faster and convolves(client):
            client.to(memory_format=torch.channels_last)

    def limit_threads(self) -> None:
        """Set the number of this process's threads."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)


def convolves(client: ClientModule) -> bool:
    """Return True if the client has a net (`net=`) with two-dimensional convolutions."""
    if client.net is None:
        return False
    return any(isinstance(module, nn.Conv2d) for module in client.net.modules())


def evaluates_channels_last(client: ClientModule, device: torch.device) -> bool:
    """Return True if batches of images are evaluated channels last. Everything that the net computes then follows them.

    This holds for a net (`net=`) with two-dimensional convolutions on a CPU. It also holds for stacks, whose weights
    have another layout. Images of one channel are laid out alike.

    Args:
        client: The client module, with its net built.
        device: The device that the client is evaluated on.
    """
    return device.type == "cpu" and convolves(client)
