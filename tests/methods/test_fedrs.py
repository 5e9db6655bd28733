"""FedRS: its scaling, its loss against a loop, and evaluation on plain logits."""

from functools import partial

import pytest
import torch

from fl_lightning import FederatedLoop
from fl_lightning.functional.losses import cross_entropy
from fl_lightning.methods import FedRS
from fl_lightning.methods.fedrs import restricted_cross_entropy, scaling
from fl_lightning.nets import Perceptron
from tests.methods.stacked import stacked_and_alone
from tests.methods.test_fedavg import Regression
from tests.toys import fit, sgd

COUNTS = torch.tensor([30, 0, 5, 0, 65])
Small = partial(Perceptron, hidden=(6,))


def problem():
    g = torch.Generator().manual_seed(0)
    return torch.randn(7, 5, generator=g).double().requires_grad_(), torch.tensor([0, 2, 4, 4, 0, 2, 4])


@pytest.mark.parametrize(
    ("form", "expected"), [("hard", [1, 0.4, 1, 0.4, 1]), ("soft", [0.4 + 0.6 * n / 65 for n in (30, 0, 5, 0, 65)])]
)
def test_the_scale_and_the_loss_are_those_of_a_loop(form, expected):
    scale = scaling(COUNTS, 0.4, form)
    torch.testing.assert_close(scale, torch.tensor(expected).double(), rtol=1e-6, atol=0)
    logits, y = problem()
    rows = [z.clone() for z in logits]
    terms = [(z * scale).exp().sum().log() - z[c] * scale[c] for z, c in zip(rows, y.tolist(), strict=True)]
    torch.testing.assert_close(restricted_cross_entropy(logits, y, scale), sum(terms) / len(terms))


def test_alpha_0_leaves_e_to_the_0_and_no_gradient_and_alpha_1_is_cross_entropy():
    logits, y = problem()
    (gradient,) = torch.autograd.grad(restricted_cross_entropy(logits, y, scaling(COUNTS, 0.0)), logits)
    assert not gradient[:, COUNTS == 0].any()
    present = logits[:, COUNTS > 0]
    expected = (present.exp().sum(1) + 2).log() - logits.gather(1, y[:, None]).squeeze(1)
    torch.testing.assert_close(restricted_cross_entropy(logits, y, scaling(COUNTS, 0.0)), expected.mean())
    for form in ("hard", "soft"):
        assert restricted_cross_entropy(logits, y, scaling(COUNTS, 1.0, form)) == cross_entropy(logits, y)


def test_a_client_without_data_has_a_finite_scale():
    assert scaling(torch.zeros(3), 0.5, "soft").tolist() == scaling(torch.zeros(3), 0.5).tolist() == [0.5] * 3


def test_it_stacks():
    client = FedRS(net=Small, num_classes=3, input_shape=(4,)).double()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 4, generator=g).double()
    y = torch.randint(3, (3, 5), generator=g)
    scale = torch.stack([scaling(counts, 0.5) for counts in torch.tensor([[5, 3, 0], [0, 0, 9], [1, 2, 4]])])
    torch.testing.assert_close(*stacked_and_alone(client, {"scale": scale}, x, y))


def test_evaluation_uses_the_plain_logits():
    loop = fit(FedRS(net=Small, optimizer=sgd()), 2)
    x = torch.randn(4, 4)
    assert torch.equal(loop.client(x), loop.client.net(x))


def test_what_it_refuses():
    for alpha in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"alpha must lie in \[0, 1\]"):
            FedRS(alpha=alpha)
    with pytest.raises(ValueError, match="form must be one of hard, soft"):
        FedRS(form="linear")
    with pytest.raises(ValueError, match="FedRS needs the logits"):
        FederatedLoop(FedRS(module=Regression()))
