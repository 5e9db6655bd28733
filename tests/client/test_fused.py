"""Where the package lets an optimizer of torch move all parameters in one kernel, and where it does not."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, RMSprop

from fl_lightning.client.optimizers import fuse
from fl_lightning.methods import SAM, FedAvg
from fl_lightning.nets import Backbone, Perceptron
from fl_lightning.nets.backbone import Stages
from tests.hooks.toy import Updates
from tests.toys import equal, fit, sgd, toy_data, weights_of
from tests.user_modules import Classifier


class Fused(Updates):
    """Notes whether the client's optimizer is fused."""

    said = None

    def on_client_end(self, trainer, loop, update):
        super().on_client_end(trainer, loop, update)
        self.said = loop.engine.services.optimizers(False).param_groups[0].get("fused")


def fitted(client, **settings):
    watch = Fused()
    loop = fit(client, 2, toy_data(), callbacks=[watch], **settings)
    return watch.said, weights_of(loop)


def parameters(**where):
    return [nn.Parameter(torch.randn(3, 2, **where)), nn.Parameter(torch.randn(2, **where))]


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW], ids=lambda kind: kind.__name__)
def test_torchs_own_are_fused_where_nothing_is_said(kind):
    optimizer = kind(parameters(), lr=0.1)
    fuse(optimizer)
    assert all(group["fused"] for group in optimizer.param_groups)


@pytest.mark.parametrize(
    "optimizer",
    [
        SGD(parameters(), lr=0.1, fused=False),
        SGD(parameters(), lr=0.1, foreach=True),
        SGD(parameters(), lr=0.1, differentiable=True),
        Adam(parameters(), lr=0.1, capturable=True),
        RMSprop(parameters(), lr=0.1),
        SAM(parameters(), partial(SGD, lr=0.1)),
        SGD(parameters(device="meta"), lr=0.1),
    ],
    ids=["fused-false", "foreach", "differentiable", "capturable", "rmsprop", "sam", "another-device"],
)
def test_what_was_told_or_cannot_be_is_left_as_it_is(optimizer):
    before = [group.get("fused") for group in optimizer.param_groups]
    fuse(optimizer)
    assert [group.get("fused") for group in optimizer.param_groups] == before


@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.01}, {"nesterov": True}], ids=str)
def test_a_client_learns_the_same_with_one_kernel_as_with_one_for_each_parameter(settings):
    one, fused = fitted(FedAvg(net=Perceptron, optimizer=sgd(**settings)), precision="64-true")
    other, plain = fitted(FedAvg(net=Perceptron, optimizer=sgd(**settings, fused=False)), precision="64-true")
    assert (one, other) == (True, False)
    for name, value in plain.items():
        torch.testing.assert_close(fused[name], value, rtol=1e-12, atol=1e-14)


def test_a_user_s_module_is_stepped_as_its_author_says():
    module = Classifier()
    said, _ = fitted(FedAvg(module=module))
    assert not said


class Words(Backbone):
    """An embedding whose gradient is sparse."""

    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.table, self.head = nn.Embedding(8, 5, sparse=True), nn.Linear(5, num_classes)

    def features(self, x):
        return self.table(x.clamp(0, 7).long()).mean(1)

    def stages(self):
        return Stages(nn.Flatten(), self.table, nn.Identity())


def test_sparse_gradients_take_the_plain_step():
    said, first = fitted(FedAvg(net=Words, optimizer=partial(SGD, lr=0.1)))
    assert not said
    assert equal(first, fitted(FedAvg(net=Words, optimizer=partial(SGD, lr=0.1)))[1])
