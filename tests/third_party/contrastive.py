"""BYOL, MoCo and SimCLR as the examples of lightly write them, on smaller nets."""

import copy

import torch
import torchvision
from lightly.loss import NegativeCosineSimilarity, NTXentLoss
from lightly.models.modules import (
    BYOLPredictionHead,
    BYOLProjectionHead,
    MoCoProjectionHead,
    SimCLRProjectionHead,
)
from lightly.models.utils import deactivate_requires_grad, update_momentum
from lightly.utils.scheduler import cosine_schedule
from pytorch_lightning import LightningModule
from torch import nn


def backbone() -> nn.Module:
    resnet = torchvision.models.resnet18()
    return nn.Sequential(*list(resnet.children())[:4], nn.AdaptiveAvgPool2d(1))


class SimCLR(LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = backbone()
        self.projection_head = SimCLRProjectionHead(64, 32, 16)
        self.criterion = NTXentLoss()

    def forward(self, x):
        x = self.backbone(x).flatten(start_dim=1)
        return self.projection_head(x)

    def training_step(self, batch, batch_index):
        (x0, x1) = batch[0]
        return self.criterion(self.forward(x0), self.forward(x1))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.06)


class BYOL(LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = backbone()
        self.projection_head = BYOLProjectionHead(64, 32, 16)
        self.prediction_head = BYOLPredictionHead(16, 32, 16)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = NegativeCosineSimilarity()

    def forward(self, x):
        y = self.backbone(x).flatten(start_dim=1)
        return self.prediction_head(self.projection_head(y))

    def forward_momentum(self, x):
        y = self.backbone_momentum(x).flatten(start_dim=1)
        return self.projection_head_momentum(y).detach()

    def training_step(self, batch, batch_idx):
        momentum = cosine_schedule(self.current_epoch, 10, 0.996, 1)
        update_momentum(self.backbone, self.backbone_momentum, m=momentum)
        update_momentum(self.projection_head, self.projection_head_momentum, m=momentum)
        (x0, x1) = batch[0]
        p0 = self.forward(x0)
        z0 = self.forward_momentum(x0)
        p1 = self.forward(x1)
        z1 = self.forward_momentum(x1)
        return 0.5 * (self.criterion(p0, z1) + self.criterion(p1, z0))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.06)


class MoCo(LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = backbone()
        self.projection_head = MoCoProjectionHead(64, 64, 16)
        self.backbone_momentum = copy.deepcopy(self.backbone)
        self.projection_head_momentum = copy.deepcopy(self.projection_head)
        deactivate_requires_grad(self.backbone_momentum)
        deactivate_requires_grad(self.projection_head_momentum)
        self.criterion = NTXentLoss(memory_bank_size=(16, 16))

    def forward(self, x):
        return self.projection_head(self.backbone(x).flatten(start_dim=1))

    def forward_momentum(self, x):
        return self.projection_head_momentum(self.backbone_momentum(x).flatten(start_dim=1)).detach()

    def training_step(self, batch, batch_idx):
        momentum = cosine_schedule(self.current_epoch, 10, 0.996, 1)
        update_momentum(self.backbone, self.backbone_momentum, m=momentum)
        update_momentum(self.projection_head, self.projection_head_momentum, m=momentum)
        x_query, x_key = batch[0]
        return self.criterion(self.forward(x_query), self.forward_momentum(x_key))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.06)
