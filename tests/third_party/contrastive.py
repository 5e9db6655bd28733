"""SimCLR, BYOL and MoCo on small nets, of the heads, losses and functions that lightly has for them."""

import copy

import torch
import torchvision
from lightly.loss import NegativeCosineSimilarity, NTXentLoss
from lightly.models import modules
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.utils.scheduler import cosine_schedule
from pytorch_lightning import LightningModule
from torch import Tensor, nn

NUM_FEATURES = 64
NUM_ROUNDS = 10

Views = tuple[tuple[Tensor, Tensor], Tensor]
"""A batch: two views of its pictures, and their classes, which nobody reads."""


def features() -> nn.Sequential:
    """Return the first layers of a ResNet-18, with one value a channel."""
    layers = list(torchvision.models.resnet18().children())
    return nn.Sequential(*layers[:4], nn.AdaptiveAvgPool2d(1), nn.Flatten())


class SelfSupervised(LightningModule):
    """Learns from pictures without their classes."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.06)


class SimCLR(SelfSupervised):
    """Draws two views of a picture together."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(features(), modules.SimCLRProjectionHead(NUM_FEATURES, 32, 16))
        self.loss = NTXentLoss()

    def training_step(self, batch: Views, batch_idx: int) -> Tensor:
        one, other = batch[0]
        return self.loss(self.net(one), self.net(other))


class Followed(SelfSupervised):
    """Has a second net that follows the first one, and is not trained."""

    def follow(self, net: nn.Module) -> None:
        """Make the second net."""
        self.net = net
        self.slow_net = copy.deepcopy(net)
        deactivate_requires_grad(self.slow_net)

    def on_train_batch_start(self, batch: Views, batch_idx: int) -> None:
        momentum = cosine_schedule(self.current_epoch, max_steps=NUM_ROUNDS, start_value=0.996, end_value=1)
        update_momentum(self.net, self.slow_net, m=momentum)


class BYOL(Followed):
    """Predicts what the second net makes of another view."""

    def __init__(self) -> None:
        super().__init__()
        self.follow(nn.Sequential(features(), modules.BYOLProjectionHead(NUM_FEATURES, 32, 16)))
        self.predictor = modules.BYOLPredictionHead(16, 32, 16)
        self.loss = NegativeCosineSimilarity()

    def training_step(self, batch: Views, batch_idx: int) -> Tensor:
        one, other = batch[0]
        of_one = self.loss(self.predictor(self.net(one)), self.slow_net(other).detach())
        of_other = self.loss(self.predictor(self.net(other)), self.slow_net(one).detach())
        return (of_one + of_other) / 2


class MoCo(Followed):
    """Compares with views that the second net has seen in earlier batches."""

    def __init__(self) -> None:
        super().__init__()
        self.follow(nn.Sequential(features(), modules.MoCoProjectionHead(NUM_FEATURES, 64, 16)))
        self.loss = NTXentLoss(memory_bank_size=(16, 16))

    def training_step(self, batch: Views, batch_idx: int) -> Tensor:
        query, key = batch[0]
        return self.loss(self.net(query), self.slow_net(key).detach())
