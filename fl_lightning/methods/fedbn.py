"""FedBN: the layers that normalize stay with the client, everything else is averaged.

Source: Li et al., ICLR 2021, arXiv:2102.07623, Algorithm 1. Server: FedAvg.
Note: the layers are found by type, not by name: no BatchNorm layer of torchvision's MobileNetV2 has "bn" in its name.
"""

from torch import nn

from fl_lightning.client import ClientModule
from fl_lightning.client.modes import BATCH_NORMS

INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
LAZY_NORMS = (
    nn.LazyBatchNorm1d,
    nn.LazyBatchNorm2d,
    nn.LazyBatchNorm3d,
    nn.LazyInstanceNorm1d,
    nn.LazyInstanceNorm2d,
    nn.LazyInstanceNorm3d,
)
"""Norms that learn their size from the first batch, and are of another type until then."""

NORMS = (*BATCH_NORMS, *INSTANCE_NORMS, *LAZY_NORMS, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


class FedBN(ClientModule):
    """Trains with the loss as it is, and keeps the parameters and buffers of every norm layer at the client.

    A client begins with the norm layers of the initial model. Their mean over the participants serves the evaluation of
    the global model only.
    """

    stackable = True
    sends = frozenset({"weights", "personal means"})

    def is_personal(self, name: str, owner: nn.Module) -> bool:
        return isinstance(owner, NORMS)
