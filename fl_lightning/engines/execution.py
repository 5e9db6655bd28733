"""Settings of how a process computes: threads and clients at once.

And how tensors of images are laid out.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from fl_lightning.client.module import ClientModule
from fl_lightning.utils.settings import check_count

HALF = ("bf16-mixed", "16-mixed")


@dataclass(frozen=True)
class Execution:
    """Settings that change the results in the last bits at most.

    Args:
        threads: of this process for torch operations; None: left alone.
        chunk: clients trained at once: 1, K or `auto`.

    Raises:
        ValueError: naming the setting, its range and the value.
    """

    threads: int | None = None
    chunk: Literal["auto"] | int = 1

    def __post_init__(self) -> None:
        check_count(1, threads=self.threads)
        check_count(1, "'auto' chooses it", chunk=None if self.chunk == "auto" else self.chunk)

    def lay_out(self, client: ClientModule, device: torch.device, precision: str = "32-true") -> None:
        """Lay the weights of the client's convolutions out channels last, where that is faster.

        Inputs follow them.

        That is for a net (`net=`) with two-dimensional convolutions on a CPU, or on CUDA in half precision. A stack
        of clients has another layout; the weights of a LightningModule stay as its author made them.

        Args:
            client: with its net built.
            device: that it is trained on.
            precision: the Trainer's.
        """
        fast = precision in HALF if device.type == "cuda" else device.type == "cpu"
        if self.chunk == 1 and fast and convolves(client):
            client.to(memory_format=torch.channels_last)

    def limit_threads(self) -> None:
        """Set the number of this process's threads."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)


def convolves(client: ClientModule) -> bool:
    """Return True for a net (`net=`) with two-dimensional convolutions."""
    return client.net is not None and any(isinstance(part, nn.Conv2d) for part in client.net.modules())


def evaluates_channels_last(client: ClientModule, device: torch.device) -> bool:
    """Return True where batches of images are evaluated channels last, and what the net computes follows them.

    That is for a net (`net=`) with two-dimensional convolutions on a CPU, in stacks, too, whose weights are not laid
    out so; images of one channel are laid out alike.

    Args:
        client: with its net built.
        device: that it is evaluated on.
    """
    return device.type == "cpu" and convolves(client)
