"""FedLwF: the model of the change is the teacher on the classes met before."""

import copy

import pytest
import torch
from torch.nn import functional as F

from fl_lightning.data import ClassIncremental
from fl_lightning.methods import FedLwF
from tests.methods.changing import Small, run
from tests.toys import fit, sgd, toy_data, weights_of


def test_the_old_model_is_the_one_received_at_the_change():
    held = weights_of(run(FedLwF, 2))
    loop = run(FedLwF, 4)
    for client in range(3):
        memory = loop.store.record(client)[0]
        for name, value in memory["old"].items():
            assert value.equal(held[f"client.{name}"]), name
        assert memory["met"].tolist() == [True, True, False]


@pytest.mark.parametrize(("classes", "met"), [("all", [0, 1]), ("new", [0, 1]), ("new", [0])])
def test_two_steps_are_those_of_the_loss_written_out(classes, met):
    """The steps begin at the old model, so that the second one is the first that is distilled."""
    new = [class_idx for class_idx in range(3) if class_idx not in met]

    def begun(rounds):
        data = toy_data((14,), scenario=ClassIncremental([met, new], rounds_per_task=1), batch_size="full")
        client = FedLwF(alpha=0.7, temperature=3.0, classes=classes, net=Small, optimizer=sgd(0.1, 0.0))
        return fit(client, rounds, data, local_epochs=2)

    loop = begun(1)
    x, y = loop.data.view(0, 1).all()
    net = copy.deepcopy(loop.client.net)
    old = copy.deepcopy(net)
    for _ in range(2):
        logits = net(x)
        if classes == "all":
            ce = F.cross_entropy(logits, y)
        else:
            ce = F.cross_entropy(logits[:, new], y - new[0])
        teacher = F.log_softmax(old(x)[:, met] / 3.0, dim=1)
        student = F.log_softmax(logits[:, met] / 3.0, dim=1)
        kd = 9.0 * F.kl_div(student, teacher, reduction="batchmean", log_target=True)
        gradients = torch.autograd.grad(ce + 0.7 * kd, list(net.parameters()))
        with torch.no_grad():
            for value, gradient in zip(net.parameters(), gradients, strict=True):
                value.sub_(0.1 * gradient)
    for name, value in begun(2).client.net.state_dict().items():
        torch.testing.assert_close(value, net.state_dict()[name])


def test_a_class_that_comes_again_counts_as_new():
    """Otherwise its samples would have no answer among the new classes, and an infinite loss."""
    tasks = ClassIncremental([[0, 1], [2]], rounds_per_task=1, cumulative=True)
    loop = fit(FedLwF(classes="new", net=Small, optimizer=sgd()), 2, toy_data((14, 9), scenario=tasks))
    assert loop.round_metrics["train/ce"] < 10
