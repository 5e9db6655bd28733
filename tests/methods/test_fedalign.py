"""FedAlign: norms against SVD, the narrow block against a smaller net, where its gradient goes, and what it refuses."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call

from fl_lightning.methods import FedAlign, FedAvg
from fl_lightning.methods.fedalign import aligned, check_block, narrowed, spectral_norm, transmission
from fl_lightning.nets import CIFARResNet, Perceptron, ResNet
from tests.methods.stacked import stacked_and_alone
from tests.methods.test_fedavg import Regression
from tests.toys import BatchNormNet, fit, sgd, toy_data

NETS = [partial(CIFARResNet, depth=8), partial(CIFARResNet, depth=20), partial(ResNet, depth=10, stem="cifar")]
NETS += [partial(ResNet, depth=50, stem="cifar")]


def test_many_iterations_give_the_largest_singular_value_and_ten_need_not():
    T = torch.randn(4, 5, 7, generator=torch.Generator().manual_seed(0)).double()
    torch.testing.assert_close(spectral_norm(T, 3000), torch.linalg.matrix_norm(T, 2))
    assert (spectral_norm(T) <= torch.linalg.matrix_norm(T, 2) * (1 + 1e-9)).all()


def test_a_block_without_output_has_norm_and_gradient_0():
    T = torch.zeros(2, 3, 4, requires_grad=True)
    value = spectral_norm(T)
    assert not value.any()
    assert not torch.autograd.grad(value.sum(), T)[0].any()


def test_transmission_pools_the_larger_map_and_divides_by_the_positions():
    g = torch.Generator().manual_seed(0)
    before, after = torch.randn(2, 3, 4, 4, generator=g), torch.randn(2, 5, 2, 2, generator=g)
    pooled = before.unflatten(2, (2, 2)).unflatten(4, (2, 2)).mean((3, 5))
    expected = torch.einsum("bchw,bdhw->bcd", pooled, after) / 4
    torch.testing.assert_close(transmission(before, after), expected)


def test_the_term_has_the_value_mu_ce_and_vanishes_where_both_agree():
    ce, full = torch.tensor(1.3), torch.tensor([1.0, 2.0])
    assert float(aligned(ce, full + 0.5, full, 0.45)) == pytest.approx(0.45 * 1.3)
    narrow = full.clone().requires_grad_()
    value = aligned(ce, narrow, full, 0.45)
    assert value == 0
    assert not torch.autograd.grad(value, narrow)[0].any()


@pytest.mark.parametrize("net", NETS, ids=lambda net: f"{net.func.__name__}{net.keywords['depth']}")
def test_the_stages_are_the_net_and_the_narrow_block_is_its_first_channels(net):
    """At width 1 it is the block; at 1/4 its output has a quarter of the channels, and statistics stay."""
    built, x = net(3, (3, 16, 16)).eval(), torch.randn(2, 3, 16, 16)
    before, last, after = built.stages()
    inner = before(x)
    outer = last(inner)
    torch.testing.assert_close(built.head(after(outer)), built(x))
    check_block(last)
    torch.testing.assert_close(functional_call(last, narrowed(last, 1.0, inner.shape[1]), (inner,)), outer)
    statistics = {name: value.clone() for name, value in built.named_buffers()}
    built.train()
    narrow = functional_call(last, narrowed(last, 0.25, inner.shape[1]), (inner,))
    assert narrow.shape == (2, outer.shape[1] // 4, *outer.shape[2:])
    assert all(torch.equal(value, statistics[name]) for name, value in built.named_buffers())


def test_the_narrow_block_is_a_smaller_net_s():
    block = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 1), nn.BatchNorm2d(12))
    small = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6))
    with torch.no_grad():
        for name, value in block.state_dict().items():
            own = small.state_dict()[name]
            own.copy_(value[tuple(slice(size) for size in own.shape)])
    x = torch.randn(3, 4, 5, 5)
    torch.testing.assert_close(functional_call(block, narrowed(block, 0.5, 4), (x,)), small(x))


def gradients(client, batch):
    client.log_dict = client.log = lambda *args, **kwargs: None
    client.zero_grad()
    client.training_step(batch, 0).backward()
    return {name: p.grad.clone() for name, p in client.named_parameters()}


def test_the_term_reaches_the_last_block_only():
    batch = torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])
    client = FedAlign(net=partial(CIFARResNet, depth=8), num_classes=3, input_shape=(1, 8, 8))
    ours = gradients(client, batch)
    plain = FedAvg(net=partial(CIFARResNet, depth=8), num_classes=3, input_shape=(1, 8, 8))
    plain.load_state_dict({name: value.clone() for name, value in client.state_dict().items()})
    last = {id(p) for p in client.stages().last.parameters()}
    reached = {name for name, p in client.named_parameters() if id(p) in last}
    for name, gradient in gradients(plain, batch).items():
        same = torch.allclose(ours[name], gradient, rtol=1e-4, atol=1e-6)
        assert same or name in reached, name
    assert any(not torch.allclose(ours[name], gradient) for name, gradient in gradients(plain, batch).items())


def test_it_stacks():
    client = FedAlign(net=partial(CIFARResNet, depth=8), num_classes=3, input_shape=(1, 8, 8)).double()
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(3, 5, 1, 8, 8, generator=g).double(), torch.randint(3, (3, 5), generator=g)
    torch.testing.assert_close(*stacked_and_alone(client, {}, x, y), rtol=1e-6, atol=1e-9)


def test_two_rounds_and_a_single_sample():
    loop = fit(FedAlign(net=BatchNormNet, optimizer=sgd(0.01)), 2, toy_data((7, 1, 9)), clip_norm=10.0)
    assert loop.round_metrics["train/aligned"] >= 0


def test_a_net_without_stages_is_refused_but_not_where_nothing_is_aligned():
    Small = partial(Perceptron, hidden=(6,))
    with pytest.raises(ValueError, match=r"Perceptron does not say what its last block is.*ResNet or CIFARResNet"):
        fit(FedAlign(net=Small), 1)
    fit(FedAlign(mu=0.0, net=Small), 1)


@pytest.mark.parametrize("layer", [nn.Conv2d(8, 8, 3, groups=8), nn.GroupNorm(2, 8), nn.LayerNorm(8)])
def test_a_block_that_cannot_be_narrowed_is_refused(layer):
    with pytest.raises(ValueError, match=f"FedAlign makes the last block narrower.*1 is {type(layer).__name__}"):
        check_block(nn.Sequential(nn.ReLU(), layer))


def test_a_block_with_inner_layers_as_wide_as_its_input_is_refused_by_the_layer():
    wide = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 1))
    with pytest.raises(
        ValueError, match="read the last block's input by its 8 channels, but an earlier layer than 3 has"
    ):
        narrowed(wide, 0.25, 8)
    last = nn.Sequential(nn.Conv2d(8, 12, 3), nn.ReLU(), nn.Conv2d(12, 8, 1))  # which nothing within it reads
    assert [len(value) for value in narrowed(last, 0.25, 8).values()] == [3, 3, 2, 2]


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"mu": -1.0}, "mu must be at least 0"),
        ({"width": 0.0}, r"width must lie in \(0, 1\]"),
        ({"width": 1.5}, r"width must lie in \(0, 1\]"),
        ({"module": Regression()}, "FedAlign needs the logits"),
    ],
)
def test_bad_settings(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        FedAlign(**settings)
