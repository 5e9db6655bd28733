"""The Fisher information of a client's model: which batches it is of."""

from functools import partial

import pytest
import torch

from fl_lightning.client import ClientModule
from fl_lightning.client.fisher import fisher_information
from fl_lightning.functional.importance import batch_fisher, importance
from fl_lightning.functional.state import clone
from fl_lightning.nets import Perceptron
from tests.toys import toy_data


def test_batches_are_those_of_the_first_local_epoch_and_samples_are_all():
    data = toy_data((12,))
    data.setup("fit")
    local = data.view(0, 0)
    x, y = local.all()
    client = ClientModule(partial(Perceptron, hidden=(6,)), num_classes=3, input_shape=tuple(x.shape[1:]))
    params = clone(client.params())
    first, second, _ = local.batches(epoch=0)
    assert len(first[0]) == 5
    of_batches = batch_fisher(client.loss_at, params, [first, second])
    of_samples = importance(client.loss_at, params, [(x, y)], kind="square")
    for kind, expected in {"batch": of_batches, "sample": of_samples}.items():
        # The second batch passes 5 samples.
        found = fisher_information(client, params, local=local, kind=kind, max_samples=5)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


def loss_with_item(params, batch):
    return params["w"].sum() * batch[0].sum().item()


def loss_of_each_sample(params, batch):
    return batch[0] @ params["w"]


@pytest.mark.parametrize(
    ("kind", "loss", "begin", "end"),
    [
        ("abs", loss_with_item, "gradients of single samples are taken", "FedCurv and FedEWC: fisher=batch)"),
        ("tensor", loss_of_each_sample, "the gradient of a batch is taken", "change the loss"),
    ],
)
def test_a_loss_that_cannot_be_differentiated_is_refused_with_a_remedy_of_its_own(kind, loss, begin, end):
    with pytest.raises(RuntimeError) as raised:
        importance(loss, {"w": torch.ones(2)}, [(torch.ones(3, 2), torch.ones(3))], kind)
    assert str(raised.value).startswith(begin)
    assert str(raised.value).endswith(end)
