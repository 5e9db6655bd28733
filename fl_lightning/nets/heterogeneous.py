"""Nets of different architectures for different clients, for methods that share no weights."""

import copy
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fl_lightning.nets.backbone import Backbone


class HeterogeneousNets(Backbone):
    """Several nets, of which client i uses net i mod len(nets).

    As many nets as clients give each its own.

    All clients of one net start from one initialisation; a net that is listed twice is initialised twice.

    Args:
        num_classes: C ≥ 1.
        input_shape: sizes of one input.
        nets: factories `(num_classes, input_shape) -> net`.

    Raises:
        ValueError: without a net.
    """

    def __init__(
        self, num_classes: int, input_shape: tuple[int, ...], nets: list[Callable[[int, tuple[int, ...]], Backbone]]
    ) -> None:
        super().__init__()
        if not nets:
            raise ValueError("HeterogeneousNets needs at least one net, got none; list them under nets")
        self.nets = nn.ModuleList(net(num_classes, input_shape) for net in nets)
        self.client_id = 0
        self._input_shape = input_shape

    @property
    def chosen(self) -> Backbone:
        """The net of the client that is being trained."""
        return cast("Backbone", self.nets[self.client_id % len(self.nets)])

    def choose(self, client_id: int) -> None:
        """Use the net of this client from now on."""
        self.client_id = client_id

    def has(self, client_id: int, name: str) -> bool:
        """Tell whether the entry (or module) `name` of this net's state dict is the client's."""
        place = name.split(".")
        return place[0] != "nets" or len(place) == 1 or place[1] == str(client_id % len(self.nets))

    @torch.no_grad()
    def cost(self, client_id: int) -> int:
        """Count the operations of one sample in the net of a client, at least 1."""
        net = copy.deepcopy(self.nets[client_id % len(self.nets)]).eval().cpu()
        with FlopCounterMode(display=False) as counter:
            net(torch.zeros(1, *self._input_shape))
        return max(1, counter.get_total_flops())

    def features(self, x: Tensor) -> Tensor:
        return self.chosen.features(x)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.chosen(x))
