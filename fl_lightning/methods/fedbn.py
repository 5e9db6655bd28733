"""FedBN: the layers that normalize stay with the client, everything else is averaged.

Source: Li et al., ICLR 2021, arXiv:2102.07623, Algorithm 1. Server: FedAvg.
Note: the layers are found by type, not by name: no BatchNorm layer of torchvision's MobileNetV2 has "bn" in its name.
"""

from torch import nn

from fl_lightning.client import ClientModule

NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
"""Norms of torch that never have running statistics."""

HAS_STATISTICS = "track_running_stats"
"""Attribute of every batch and instance norm of torch, lazy ones and subclasses in other packages too.

A subclass may derive from none of torch's public classes.
"""


class FedBN(ClientModule):
    """Trains with the loss as it is, and keeps the parameters and buffers of every norm layer at the client.

    A client begins with the norm layers of the initial model. Their mean over the participants serves the evaluation of
    the global model only.
    """

    stackable = True
    sends = frozenset({"weights", "personal means"})

    def is_personal(self, name: str, owner: nn.Module) -> bool:
        return isinstance(owner, NORMS) or hasattr(owner, HAS_STATISTICS)
