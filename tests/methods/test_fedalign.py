"""FedAlign: norms against SVD, the narrow block against a smaller net, where its gradient goes, and what it refuses."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from fl_lightning import FederatedLoop
from fl_lightning.methods import FedAlign, FedAvg
from fl_lightning.methods.fedalign import aligned, check_block, kept_channels, narrowed, spectral_norm, transmission
from fl_lightning.nets import CIFARResNet, FedAlignResNet, Perceptron, ResNet
from tests.methods.stacked import stacked_and_alone
from tests.methods.test_fedavg import Regression
from tests.toys import BatchNormNet, fit, sgd, toy_data

NETS = [partial(CIFARResNet, depth=8), partial(CIFARResNet, depth=20), partial(ResNet, depth=10, stem="cifar")]
NETS += [partial(ResNet, depth=50, stem="cifar"), partial(FedAlignResNet, depth=20)]


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
    before = torch.randn(2, 3, 4, 4, generator=g)
    after = torch.randn(2, 5, 2, 2, generator=g)
    pooled = before.unflatten(2, (2, 2)).unflatten(4, (2, 2)).mean((3, 5))
    expected = torch.einsum("bchw,bdhw->bcd", pooled, after) / 4
    torch.testing.assert_close(transmission(before, after), expected)


def test_the_term_has_the_value_mu_ce_and_vanishes_where_both_agree():
    ce = torch.tensor(1.3)
    full = torch.tensor([1.0, 2.0])
    assert float(aligned(ce, full + 0.5, full, 0.45)) == pytest.approx(0.45 * 1.3)
    narrow = full.clone().requires_grad_()
    value = aligned(ce, narrow, full, 0.45)
    assert value == 0
    assert not torch.autograd.grad(value, narrow)[0].any()


@pytest.mark.parametrize("narrow_input", [True, False])
@pytest.mark.parametrize("net", NETS, ids=lambda net: f"{net.func.__name__}{net.keywords['depth']}")
def test_the_stages_are_the_net_and_the_narrow_block_is_its_first_channels(net, narrow_input):
    """At width 1 it is the block; at 1/4 its output has a quarter of the channels, and statistics stay."""
    built = net(3, (3, 16, 16)).eval()
    x = torch.randn(2, 3, 16, 16)
    before, last, after = built.stages()
    inner = before(x)
    outer = last(inner)
    torch.testing.assert_close(built.head(after(outer)), built(x))
    check_block(last)
    inputs = None if narrow_input else inner.shape[1]
    torch.testing.assert_close(functional_call(last, narrowed(last, 1.0, inputs), (inner,)), outer)
    statistics = {name: value.clone() for name, value in built.named_buffers()}
    built.train()
    fewer = inner[:, : inner.shape[1] // 4] if narrow_input else inner
    narrow = functional_call(last, narrowed(last, 0.25, inputs), (fewer,))
    assert narrow.shape == (2, outer.shape[1] // 4, *outer.shape[2:])
    assert all(torch.equal(value, statistics[name]) for name, value in built.named_buffers())


@pytest.mark.parametrize("inputs", [None, 4])
def test_the_narrow_block_is_a_smaller_net_s(inputs):
    block = nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 1), nn.BatchNorm2d(12))
    first = nn.Conv2d(inputs or 2, 4, 3)
    small = nn.Sequential(first, nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 6, 1), nn.BatchNorm2d(6))
    with torch.no_grad():
        for name, value in block.state_dict().items():
            own = small.state_dict()[name]
            own.copy_(value[tuple(slice(size) for size in own.shape)])
    x = torch.randn(3, first.in_channels, 5, 5)
    torch.testing.assert_close(functional_call(block, narrowed(block, 0.5, inputs), (x,)), small(x))


def test_widths_are_multiples_of_8():
    """The nearest, half a step up; at least 8, at most all; nets of fewer than 16 channels to whole channels."""
    for share in (0.1, 0.25, 0.5, 0.75, 1.0):
        for channels in range(16, 600):
            left = kept_channels(channels, share)
            assert left == channels or left % 8 == 0
            assert min(8, channels) <= left <= channels
            assert left in (8, channels) or abs(left - share * channels) <= 4
        assert [kept_channels(channels, share) for channels in (1, 4, 12)] == [
            max(1, round(share * c)) for c in (1, 4, 12)
        ]
    assert [kept_channels(channels, 0.25) for channels in (16, 48, 80, 112, 2048)] == [8, 16, 24, 32, 512]


def by_hand(client, x, y, narrow_input):
    """ℓ, and the gradient of CE + μ (CE/ℓ) ℓ at the first layer of the last block, layer by layer."""
    p = dict(client.net.named_parameters())
    net = client.net
    blocks = [f"body.5.{k}" for k in range(len(net.body[5]))]

    def norm(z, name, width):
        mean = z.mean((0, 2, 3), keepdim=True)
        var = z.var((0, 2, 3), correction=0, keepdim=True)
        scale, shift = (p[f"{name}.{entry}"][:width, None, None] for entry in ("weight", "bias"))
        return (z - mean) / (var + 1e-5).sqrt() * scale + shift

    def conv(z, name, width, **how):
        return F.conv2d(z, p[f"{name}.weight"][:width, : z.shape[1]], **how)

    def last(z, inner, outer):
        for k, name in enumerate(blocks):
            stride = 1 if k else 2
            out = norm(conv(z, f"{name}.conv1", inner), f"{name}.bn1", inner).relu()
            out = norm(conv(out, f"{name}.conv2", inner, stride=stride, padding=1), f"{name}.bn2", inner).relu()
            out = norm(conv(out, f"{name}.conv3", outer), f"{name}.bn3", outer)
            if k == 0:
                z = norm(conv(z, f"{name}.downsample.0", outer, stride=2), f"{name}.downsample.1", outer)
            z = (out + z).relu()
        return z

    def bound(f1, f2):
        pooled = f1.unflatten(2, (f2.shape[2], 2)).unflatten(4, (f2.shape[3], 2)).mean((3, 5))
        T = torch.einsum("bchw,bdhw->bcd", pooled, f2) / f2.shape[2] / f2.shape[3]
        v = torch.ones(len(T), T.shape[1], 1, dtype=T.dtype)
        for _ in range(10):
            v = T @ T.transpose(1, 2) @ v
            size = v.norm(dim=1, keepdim=True)
            v = v / size
        return size.sqrt(), T.shape

    before = net.body[:5](x).detach()
    full = last(before, 64, 256)
    ce = F.cross_entropy(net.head(full.mean((2, 3))), y)
    fewer = before[:, :32] if narrow_input else before
    (narrow, shape), (whole, _) = bound(fewer, last(fewer, 16, 64)), bound(before, full.detach())
    assert shape == (len(x), 32 if narrow_input else 128, 64)
    gap = (narrow - whole.detach()).square().mean()
    (gradient,) = torch.autograd.grad(ce + 0.45 * (ce / gap).detach() * gap, p["body.5.0.conv1.weight"])
    return gap.item(), gradient


@pytest.mark.parametrize("narrow_input", [True, False])
@pytest.mark.parametrize("depth", [11, 20])
def test_a_step_is_that_of_the_net_narrowed_by_hand(depth, narrow_input):
    """128 and 256 channels around the last block, 64 within: 32, 64 and 16 are kept; the input's 32 by default."""
    settings = {"net": partial(FedAlignResNet, depth=depth), "num_classes": 3, "input_shape": (1, 8, 8)}
    client = FedAlign(**settings) if narrow_input else FedAlign(narrow_input=False, **settings)
    client.double().train()
    x = torch.randn(4, 1, 8, 8).double()
    y = torch.tensor([0, 1, 2, 0])
    gap, gradient = by_hand(client, x, y, narrow_input)
    found = {}
    client.log_dict = found.update
    client.training_step((x, y), 0).backward()
    assert float(found["train/aligned"]) == pytest.approx(gap)
    torch.testing.assert_close(client.net.body[5][0].conv1.weight.grad, gradient, rtol=1e-6, atol=1e-9)


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


@pytest.mark.parametrize("net", [partial(CIFARResNet, depth=8), partial(FedAlignResNet, depth=11)])
def test_it_stacks(net):
    client = FedAlign(net=net, num_classes=3, input_shape=(1, 8, 8)).double()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 1, 8, 8, generator=g).double()
    y = torch.randint(3, (3, 5), generator=g)
    torch.testing.assert_close(*stacked_and_alone(client, {}, x, y), rtol=1e-6, atol=1e-9)


def test_two_rounds_and_a_single_sample():
    loop = fit(FedAlign(net=BatchNormNet, optimizer=sgd(0.01)), 2, toy_data((7, 1, 9)), clip_norm=10.0)
    assert loop.round_metrics["train/aligned"] >= 0


def test_a_net_without_stages_is_refused_but_not_where_nothing_is_aligned():
    Small = partial(Perceptron, hidden=(6,))
    with pytest.raises(ValueError, match=r"Perceptron does not say what its last block.* or FedAlignResNet"):
        fit(FedAlign(net=Small), 1)
    fit(FedAlign(mu=0.0, net=Small), 1)


@pytest.mark.parametrize("layer", [nn.Conv2d(8, 8, 3, groups=8), nn.GroupNorm(2, 8), nn.LayerNorm(8)])
def test_a_block_that_cannot_be_narrowed_is_refused(layer):
    with pytest.raises(ValueError, match=f"FedAlign makes the last block narrower.*1 is {type(layer).__name__}"):
        check_block(nn.Sequential(nn.ReLU(), layer))


def test_a_block_with_inner_layers_as_wide_as_its_input_is_refused_by_the_layer_where_that_stays_whole():
    wide = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 12, 1))
    with pytest.raises(
        ValueError, match="read the last block's input by its 8 channels, but an earlier layer than 3 has"
    ):
        narrowed(wide, 0.25, 8)
    assert narrowed(wide, 0.25)["3.weight"].shape == (3, 2, 1, 1)
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
        FederatedLoop(FedAlign(**settings))
