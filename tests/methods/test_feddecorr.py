"""FedDecorr: both scales against torch's correlations, its corner cases, and what it refuses."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from fl_lightning import FederatedLoop
from fl_lightning.methods import FedAvg, FedDecorr
from fl_lightning.methods.feddecorr import decorrelation
from fl_lightning.nets import Perceptron
from tests.methods.stacked import stacked_and_alone
from tests.methods.test_fedavg import Regression
from tests.toys import BatchNormNet, equal, fit, samples, sgd, weights_of

Small = partial(Perceptron, hidden=(6,))


def features(rows=20, width=5):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_paper_is_the_mean_square_of_torchs_correlations():
    expected = torch.corrcoef(features().T).square().mean()
    torch.testing.assert_close(decorrelation(features(), "paper"), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("rows", [2, 10, 64])
def test_code_is_the_mean_square_off_the_diagonal_times_the_square_of_n_minus_1_over_n(rows):
    correlations = torch.corrcoef(features(rows).T)
    pairs = ~torch.eye(5, dtype=torch.bool)
    expected = correlations[pairs].square().mean() * (rows - 1) ** 2 / rows
    torch.testing.assert_close(decorrelation(features(rows)), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(("rows", "ratio"), [(10, 8), (32, 30), (64, 62)])
def test_the_gradient_of_code_is_longer(rows, ratio):
    """Times (N−1)²/N · d/(d−1), which the page names."""
    lengths = []
    for form in ("paper", "code"):
        x = features(rows, 40).requires_grad_()
        (gradient,) = torch.autograd.grad(decorrelation(x, form), x)
        lengths.append(gradient.norm())
    assert lengths[1] / lengths[0] == pytest.approx((rows - 1) ** 2 / rows * 40 / 39, rel=1e-3)
    assert lengths[1] / lengths[0] > ratio


@pytest.mark.parametrize("form", ["code", "paper"])
@pytest.mark.parametrize("given", [torch.ones(1, 3), torch.ones(4, 3), torch.tensor([[1.0, 2.0, 3.0]])])
def test_one_sample_and_constant_features_give_0_and_finite_gradients(form, given):
    x = given.clone().requires_grad_()
    value = decorrelation(x, form)
    value.backward()
    assert value == 0
    assert not x.grad.any()


def test_one_feature_is_correlated_with_no_other():
    assert decorrelation(features(width=1)) == 0
    assert decorrelation(features(width=1), "paper") == pytest.approx(1)


def test_half_types_are_summed_in_float32():
    assert decorrelation(features().bfloat16()).dtype == torch.float32


def test_beta_0_is_fedavg():
    plain = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 2)
    ours = fit(FedDecorr(beta=0.0, net=BatchNormNet, optimizer=sgd()), 2)
    assert equal(weights_of(ours), weights_of(plain))


def test_the_published_coefficient_is_the_released_code_s():
    assert FedDecorr().form == "code"
    assert FedDecorr().beta == 0.1


@pytest.mark.parametrize("beta", [0.1, 0.7])
def test_the_loss_adds_the_penalty_of_what_the_head_reads_with_the_statistics_of_the_batch(beta):
    client = FedDecorr(beta=beta, net=partial(BatchNormNet, dropout=0.0), num_classes=3, input_shape=(4,)).double()
    logged = {}
    client.log_dict = logged.update
    x, y = samples(6, dtype=torch.float64)
    loss = client.train().training_step((x, y), 0)
    body, head = client.net.body, client.net.head
    hidden = body[0](x)
    normal = (hidden - hidden.mean(0)) / (hidden.var(0, unbiased=False) + 1e-5).sqrt()
    expected = decorrelation(normal.relu())
    torch.testing.assert_close(logged["train/decorr"], expected)
    torch.testing.assert_close(loss, F.cross_entropy(head(normal.relu()), y) + beta * expected)


@pytest.mark.parametrize("form", ["code", "paper"])
def test_it_stacks(form):
    client = FedDecorr(form=form, net=Small, num_classes=3, input_shape=(4,)).double()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 4, generator=g).double()
    y = torch.randint(3, (3, 5), generator=g)
    torch.testing.assert_close(*stacked_and_alone(client, {}, x, y))


def test_what_it_refuses():
    with pytest.raises(ValueError, match="beta must be at least 0"):
        FedDecorr(beta=-1.0)
    with pytest.raises(ValueError, match="form must be one of code, paper"):
        FedDecorr(form="both")
    with pytest.raises(ValueError, match="FedDecorr needs the logits"):
        FederatedLoop(FedDecorr(module=Regression()))
