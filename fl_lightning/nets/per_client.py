"""Different architectures for different clients, for methods that share no weights."""

from collections.abc import Callable

from torch import Tensor, nn

from fl_lightning.nets.backbone import Backbone


class PerClient(Backbone):
    """Client i has net i mod len(nets): a few nets go round, as many as clients give each its own.

    Args:
        num_classes: C ≥ 1.
        input_shape: sizes of one input.
        nets: factories `(num_classes, input_shape) -> net`.

    Raises:
        ValueError: without a net.
    """

    chosen: Backbone
    """The net of the client that is being trained."""

    def __init__(
        self,
        num_classes: int,
        input_shape: tuple[int, ...],
        nets: list[Callable[[int, tuple[int, ...]], Backbone]],
    ) -> None:
        super().__init__()
        if not nets:
            raise ValueError("PerClient needs at least one net, got none; list them under nets")
        self.nets = nn.ModuleList(net(num_classes, input_shape) for net in nets)
        self.choose(0)

    def choose(self, client_id: int) -> None:
        """Stand for the net of one client; the loop calls it."""
        self.__dict__["chosen"] = self.nets[client_id % len(self.nets)]  # not a submodule a second time

    def has(self, client_id: int, name: str) -> bool:
        """Whether the entry (or module) `name` of this net's state dict is the client's."""
        place = name.split(".")
        return place[0] != "nets" or len(place) == 1 or place[1] == str(client_id % len(self.nets))

    def features(self, x: Tensor) -> Tensor:
        out: Tensor = self.chosen.features(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.chosen(x)
        return out
