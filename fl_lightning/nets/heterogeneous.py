"""Nets of different architectures for different clients, for methods that share no weights."""

from typing import cast

from torch import Tensor, nn

from fl_lightning.nets.backbone import Backbone, NetFactory


class HeterogeneousNets(Backbone):
    """Holds several nets, of which client i uses net i mod len(nets).

    Give as many nets as clients to let every client have a net for itself. All clients of a net start from the
    same initialization. A net that is listed twice is initialized twice.

    Args:
        num_classes: The number of classes C, ≥ 1.
        input_shape: The sizes of one input, without the batch.
        nets: One factory `(num_classes, input_shape) -> net` for each net.

    Attributes:
        nets: The nets, in the order of their factories.
        client_id: The id of the client whose net is used now.
        input_shape: The sizes of one input, without the batch.

    Raises:
        ValueError: `nets` is empty.
    """

    def __init__(
        self,
        num_classes: int,
        input_shape: tuple[int, ...],
        nets: list[NetFactory],
    ) -> None:
        super().__init__()
        if not nets:
            raise ValueError("HeterogeneousNets needs at least one net, got none; list them under nets")
        self.nets = nn.ModuleList(make(num_classes, input_shape) for make in nets)
        self.client_id = 0
        self.input_shape = input_shape

    @property
    def chosen(self) -> Backbone:
        """The net of the client that is trained or tested now."""
        return cast("Backbone", self.nets[self.client_id % len(self.nets)])

    @property
    def head(self) -> nn.Linear:  # type: ignore[override]
        """The head of the net of the client that is trained or tested now."""
        return self.chosen.head

    def choose(self, client_id: int) -> None:
        """Use the net of this client from now on."""
        self.client_id = client_id

    def has(self, client_id: int, name: str) -> bool:
        """Return True if an entry or a module belongs to the net of a client.

        Args:
            client_id: The id of the client.
            name: The name of the entry or module in this module, such as `nets.0.head.weight`. A name outside
                `nets` belongs to every client.
        """
        parts = name.split(".")
        if parts[0] != "nets" or len(parts) == 1:
            return True
        return parts[1] == str(client_id % len(self.nets))

    def features(self, x: Tensor) -> Tensor:
        return self.chosen.features(x)

    def forward(self, x: Tensor) -> Tensor:
        return cast("Tensor", self.chosen(x))
