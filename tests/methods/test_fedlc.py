"""FedLC: its three forms against a loop, classes without samples, and evaluation on plain logits."""

import math
from functools import partial

import pytest
import torch

from fl_lightning import FederatedLoop
from fl_lightning.methods import FedLC
from fl_lightning.methods.fedlc import calibrated_margin_loss, margins
from fl_lightning.nets import Perceptron
from tests.methods.stacked import stacked_and_alone
from tests.methods.test_fedavg import Regression
from tests.toys import fit, sgd, toy_data

COUNTS = [[30, 0, 5, 0, 65], [10, 20, 30, 25, 15], [0, 9, 0, 1, 0], [0, 0, 7, 0, 0]]
FORMS = ["softmax", "paper", "prior"]


def client_of(form, tau=0.7, **settings):
    return FedLC(tau=tau, form=form, net=partial(Perceptron, hidden=(6,)), optimizer=sgd(), **settings)


def problem(counts, batch=9):
    g = torch.Generator().manual_seed(sum(counts))
    present = torch.tensor([c for c, n in enumerate(counts) if n])
    y = present[torch.randint(len(present), (batch,), generator=g)]
    return (2 * torch.randn(batch, len(counts), generator=g)).double().requires_grad_(), y


def naive(logits, y, counts, form, tau):
    """Sample by sample, class by class."""
    total = 0.0
    for z, label in zip(logits, y.tolist(), strict=True):
        shifted = {
            c: z[c] + (math.log(n / sum(counts)) if form == "prior" else -tau * n**-0.25)
            for c, n in enumerate(counts) if n
        }  # fmt: skip
        others = [value for c, value in shifted.items() if c != label or form != "paper"]
        if others:
            total = total + sum(value.exp() for value in others).log() - shifted[label]
    return total / len(y)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("counts", COUNTS)
def test_the_loss_and_its_gradient_are_those_of_a_loop(form, counts):
    logits, y = problem(counts)
    client = client_of(form, num_classes=5, input_shape=(4,))
    client.forward = lambda x: logits
    client.log = lambda *args: None
    client.round_buffer("margins", margins(torch.tensor(counts), 0.7, form))
    client.round["margins"] = margins(torch.tensor(counts), 0.7, form)  # the buffer is float32, as the net
    ours = client.training_step((None, y), 0)
    expected = naive(logits, y, counts, form, 0.7)
    torch.testing.assert_close(ours, torch.as_tensor(expected, dtype=torch.float64))
    (gradient,) = torch.autograd.grad(ours, logits)
    if sum(n > 0 for n in counts) > 1:
        torch.testing.assert_close(gradient, torch.autograd.grad(expected, logits)[0])
    assert not gradient[:, torch.tensor(counts) == 0].any()


def test_the_paper_s_form_pulls_the_true_logit_for_ever():
    logits, y = problem(COUNTS[1])
    (gradient,) = torch.autograd.grad(
        calibrated_margin_loss(logits + 1e3, y, margins(torch.tensor(COUNTS[1]), 0.1)), logits
    )
    torch.testing.assert_close(gradient.gather(1, y[:, None]), torch.full((9, 1), -1 / 9).double())


@pytest.mark.parametrize("form", FORMS)
def test_it_stacks(form):
    client = client_of(form, num_classes=3, input_shape=(4,)).double()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 4, generator=g).double()
    y = torch.tensor([[0, 1, 0, 1, 1], [2] * 5, [0, 1, 2, 2, 0]])
    shift = margins(torch.tensor([[5, 3, 0], [0, 0, 9], [1, 2, 4]]), 0.5, form)
    torch.testing.assert_close(*stacked_and_alone(client, {"margins": shift}, x, y))


def test_evaluation_uses_the_plain_logits():
    loop = fit(client_of("softmax"), 2)
    x = torch.randn(4, 4)
    assert torch.equal(loop.client(x), loop.client.net(x))


def test_what_it_refuses():
    with pytest.raises(ValueError, match="tau must be above 0"):
        FedLC(tau=0.0)
    with pytest.raises(ValueError, match="form must be one of softmax, paper, prior"):
        FedLC(form="global")
    with pytest.raises(ValueError, match="FedLC needs the logits"):
        FederatedLoop(FedLC(module=Regression()))


def test_a_run_of_the_paper_s_form_that_diverges_says_why():
    with pytest.raises(RuntimeError, match=r"no lower bound: set form to softmax"):
        fit(
            FedLC(form="paper", optimizer=sgd(1e18), net=partial(Perceptron, hidden=(6,))),
            5,
            toy_data(),
            local_epochs=9,
        )
