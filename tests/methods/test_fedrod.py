"""FedRoD: the shared net learns by the balanced softmax alone, the personal head by the rest."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from fl_lightning import FederatedLoop
from fl_lightning.methods import FedRoD
from fl_lightning.methods.fedrod import balanced_softmax, log_counts
from fl_lightning.nets import Perceptron
from tests.methods.stacked import stacked_and_alone
from tests.methods.test_local import Regression
from tests.toys import BatchNormNet, equal, fit, samples, sgd, toy_data

Small = partial(Perceptron, hidden=(6,))


def fedrod(**settings):
    return FedRoD(**{"net": Small, "optimizer": sgd(), **settings})


def test_the_balanced_softmax():
    z = torch.randn(5, 3)
    y = torch.tensor([0, 1, 1, 0, 1])
    counts = torch.tensor([2, 6, 0])
    wanted = F.cross_entropy(z[:, :2].double() + torch.tensor([2.0, 6.0]).double().log(), y)
    torch.testing.assert_close(balanced_softmax(z.double(), y, counts), wanted)
    assert log_counts(counts, 0.0).tolist() == [0, 0, 0]
    torch.testing.assert_close(balanced_softmax(z, y, counts, 0.0), F.cross_entropy(z, y))
    equal_counts = torch.tensor([4, 4, 4])  # a shift of all logits
    torch.testing.assert_close(balanced_softmax(z.double(), y, equal_counts), F.cross_entropy(z.double(), y))


def test_no_gradient_is_shared():
    client = fedrod(num_classes=3, input_shape=(4,))
    client.round_buffer("log_counts", log_counts(torch.tensor([3, 4, 1]), 1.0))
    x, y = samples(6)
    client.log = lambda *args, **kwargs: None
    client.training_step((x, y), 0).backward()
    generic, _ = client.both_heads(x)
    shared = torch.autograd.grad(balanced_softmax(generic, y, torch.tensor([3, 4, 1])), list(client.net.parameters()))
    for parameter, gradient in zip(client.net.parameters(), shared, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    features = client.net.features(x).detach()
    own = F.cross_entropy(generic.detach() + client.personal_head(features), y)
    torch.testing.assert_close(
        client.personal_head.weight.grad, torch.autograd.grad(own, client.personal_head.weight)[0]
    )


def test_the_personal_head_begins_as_the_generic_one_received_first():
    data = toy_data((7, 12, 0, 9), schedule=[[0, 2], [1, 2]])
    before = fit(fedrod(), 1, data).client.net.head.weight.clone()
    loop = fit(fedrod(), 2, toy_data((7, 12, 0, 9), schedule=[[0, 2], [1, 2]]), local_epochs=[1, 0, 1, 1])
    torch.testing.assert_close(loop.store.personal(1)["personal_head.weight"], before)
    assert loop.store.memory(1) == {"has_head": True}
    assert loop.store.memory(2) == {}  # without data it has none


def test_the_personal_head_never_travels():
    loop = fit(fedrod(), 2)
    assert loop.round_metrics["comm/bytes_down"] == 5 * 4 * (4 * 6 + 6 + 6 * 3 + 3)
    heads = [loop.store.personal(c)["personal_head.weight"] for c in range(5)]
    assert not any(torch.equal(heads[0], head) for head in heads[1:])


def test_deployed_adds_both_heads_and_evaluation_reads_the_generic():
    loop = fit(fedrod(), 1, evaluate_clients_every=1)
    client, (x, _) = loop.client, samples(4)
    client.context.memory = {"has_head": True}
    features = client.net.features(x)
    torch.testing.assert_close(client.deployed()(x), client.net.head(features) + client.personal_head(features))
    torch.testing.assert_close(client(x), client.net.head(features))
    client.context.memory = {}
    assert client.deployed() is client


def test_resume_is_exact(tmp_path):
    settings = {"schedule": [[0, 1, 2], [1, 3], [0, 4]]}
    whole, half = (fit(fedrod(net=BatchNormNet), rounds, toy_data(**settings)) for rounds in (3, 2))
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(fedrod(net=BatchNormNet), 3, toy_data(**settings), ckpt_path=tmp_path / "half.ckpt")
    assert equal(resumed.client.state_dict(), whole.client.state_dict())
    assert all(equal(resumed.store.personal(c), whole.store.personal(c)) for c in range(5))


def test_a_step_can_be_stacked():
    client = fedrod(num_classes=3, input_shape=(4,))
    x, y = (torch.stack(parts) for parts in zip(*(samples(5, seed=s) for s in range(3)), strict=True))
    shifts = {"log_counts": torch.stack([log_counts(torch.bincount(one, minlength=3), 1.0).float() for one in y])}
    torch.testing.assert_close(*stacked_and_alone(client, shifts, x, y))


def test_what_it_cannot_train_is_refused():
    with pytest.raises(ValueError, match="FedRoD needs the logits of a net, got module=Regression"):
        FederatedLoop(FedRoD(module=Regression()))
    with pytest.raises(ValueError, match=r"gamma must be at least 0, got -1.0; 0 is cross-entropy"):
        FedRoD(gamma=-1.0)
