import copy
import math
from functools import partial

import pytest
import torch
from torch import nn

from fl_lightning.nets import (
    Backbone,
    CIFARMobileNetV2,
    CIFARResNet,
    FedAlignResNet,
    FedCLCIFARCNN,
    FedCLMNISTCNN,
    FedKATCNN,
    FedNTDCNN,
    FedNTDHypersphere,
    KnFuM1,
    KnFuM2,
    Perceptron,
    ResNet,
)

GREY = (1, 28, 28)
COLOUR = (3, 32, 32)
TINY = (3, 64, 64)
SMALL = [
    (Perceptron, (2, 3)),
    (FedKATCNN, (3, 16, 20)),
    (FedNTDCNN, (1, 4, 7)),
    (partial(FedCLMNISTCNN, dropout=0.0), (1, 8, 8)),
    (partial(FedCLCIFARCNN, dropout=0.0), (3, 8, 5)),
    (KnFuM1, (1, 8, 8)),
    (KnFuM2, (3, 8, 8)),
]
NORMED = [
    (CIFARMobileNetV2, (3, 8, 8)),
    (CIFARResNet, (1, 8, 8)),
    (partial(FedAlignResNet, depth=11), (1, 8, 8)),
    (partial(ResNet, depth=10, stem="cifar", running_stats=False), (1, 16, 16)),
    (partial(ResNet, stem="cifar"), (3, 8, 8)),
    (ResNet, (3, 32, 32)),
]


@pytest.mark.parametrize(
    ("build", "classes", "shape", "count", "buffers"),
    [
        (FedKATCNN, 10, COLOUR, 878_538, 0),
        (FedNTDCNN, 10, COLOUR, 2_156_490, 0),
        (FedNTDCNN, 100, COLOUR, 2_202_660, 0),
        (FedNTDCNN, 10, GREY, 1_663_370, 0),
        (FedNTDCNN, 200, TINY, 8_545_416, 0),
        (partial(FedNTDCNN, units=(512, 128)), 10, COLOUR, 2_218_314, 0),
        (FedCLMNISTCNN, 10, GREY, 1_663_370, 0),
        (partial(FedCLMNISTCNN, layers="code"), 10, GREY, 1_630_602, 0),
        (FedCLCIFARCNN, 10, COLOUR, 1_756_426, 0),
        (KnFuM1, 10, GREY, 221_994, 0),
        (KnFuM2, 10, COLOUR, 280_218, 0),
        (partial(Perceptron, hidden=(200, 200)), 10, GREY, 199_210, 0),
        (partial(Perceptron, hidden=()), 3, (4,), 15, 0),
        (CIFARMobileNetV2, 10, COLOUR, 2_296_922, 35_145),
        (CIFARMobileNetV2, 100, COLOUR, 2_412_212, 35_145),
        (CIFARMobileNetV2, 200, TINY, 2_540_312, 35_145),
        (ResNet, 10, COLOUR, 11_181_642, 9_620),
        (partial(ResNet, stem="cifar"), 10, COLOUR, 11_173_962, 9_620),
        (CIFARResNet, 10, COLOUR, 464_154, 2_303),
        (FedAlignResNet, 10, COLOUR, 591_322, 9_050),
        (partial(ResNet, depth=10, stem="cifar", running_stats=False), 10, COLOUR, 4_903_242, 0),
        (partial(ResNet, depth=50), 100, COLOUR, 23_712_932, 53_173),
        (partial(ResNet, depth=50), 200, TINY, 23_917_832, 53_173),
    ],
)
def test_sizes(build, classes, shape, count, buffers):
    with torch.device("meta"):
        net = build(classes, shape)
    assert sum(p.numel() for p in net.parameters()) == count
    assert sum(b.numel() for b in net.buffers()) == buffers


@pytest.mark.parametrize("depth", [8, 20])
def test_the_stages_of_a_thin_resnet_halve_the_picture_twice(depth):
    net = CIFARResNet(10, (3, 32, 32), depth=depth)
    sizes = []
    x = torch.zeros(1, 3, 32, 32)
    for layer in net.body[:-2]:
        x = layer(x)
        sizes.append(tuple(x.shape[1:]))
    assert list(dict.fromkeys(sizes)) == [(16, 32, 32), (32, 16, 16), (64, 8, 8)]


@pytest.mark.parametrize(("net_class", "shape"), SMALL + NORMED)
def test_logits_are_the_head_on_features(net_class, shape):
    net = net_class(4, shape).eval()
    assert isinstance(net, Backbone)
    for batch in (1, 5):
        x = torch.randn(batch, *shape)
        features = net.features(x)
        assert features.shape == (batch, net.head.in_features)
        assert (features >= 0).all()
        assert net(x).shape == (batch, 4)
        assert torch.equal(net(x), net.head(features))


@pytest.mark.parametrize(("net_class", "shape"), SMALL + NORMED)
def test_the_head_comes_last_and_a_copy_is_apart(net_class, shape):
    net = net_class(4, shape)
    assert [name for name, _ in net.named_parameters()][-2:] == ["head.weight", "head.bias"]
    twin = copy.deepcopy(net)
    x = torch.randn(2, *shape)
    net.eval()
    twin.eval()
    with torch.no_grad():
        twin.head.weight.zero_()
    assert not torch.equal(net(x), twin(x))


@pytest.mark.parametrize(("net_class", "shape"), SMALL)
def test_nets_stack_under_vmap(net_class, shape):
    nets = [net_class(3, shape) for _ in range(2)]
    params, buffers = torch.func.stack_module_state(nets)
    x = torch.randn(2, 4, *shape)
    stacked = torch.func.vmap(lambda p, b, z: torch.func.functional_call(nets[0], (p, b), (z,)))(params, buffers, x)
    for net, z, logits in zip(nets, x, stacked, strict=True):
        torch.testing.assert_close(logits, net(z), rtol=1e-4, atol=1e-5)


def test_layers_follow_the_papers():
    printed = ["Conv2d", "ReLU", "MaxPool2d", "Conv2d", "ReLU", "MaxPool2d", "Flatten", "Linear", "ReLU"]
    for net in (FedKATCNN(10, (3, 32, 32)), FedNTDCNN(10, (3, 32, 32))):
        assert [type(layer).__name__ for layer in net.body] == printed
    assert FedKATCNN(10, (3, 32, 32)).body[7].in_features == 1600
    assert FedNTDCNN(10, (3, 32, 32)).body[7].in_features == 4096


@pytest.mark.parametrize(("net_class", "shape"), [*NORMED[:-1], pytest.param(*NORMED[-1], marks=pytest.mark.slow)])
def test_normed_nets_stack_under_vmap(net_class, shape):
    nets = [net_class(3, shape).double() for _ in range(2)]
    params, buffers = torch.func.stack_module_state(nets)
    x = torch.randn(2, 3, *shape, dtype=torch.float64)

    def call(p, b, z):
        return torch.func.functional_call(nets[0], (p, b), (z,))

    stacked = torch.func.vmap(call)(params, buffers, x)
    for net, z, logits in zip(nets, x, stacked, strict=True):
        torch.testing.assert_close(logits, net(z), rtol=1e-6, atol=1e-6)


def test_features_on_the_circle():
    net = FedNTDHypersphere(10, (3, 8, 8))
    features = net.features(torch.randn(5, 3, 8, 8))
    assert features.shape == (5, 2)
    torch.testing.assert_close(features.norm(dim=1), torch.ones(5))
    assert net(torch.randn(2, 3, 8, 8)).shape == (2, 10)


def test_dropout_follows_the_linear_layers_and_only_trains():
    net = FedCLCIFARCNN(10, (3, 8, 8), dropout=0.5)
    assert sum(isinstance(layer, nn.Dropout) for layer in net.body) == 2
    x = torch.randn(2, 3, 8, 8)
    assert not torch.equal(net(x), net(x))
    net.eval()
    assert torch.equal(net(x), net(x))


def test_without_running_statistics_evaluation_uses_the_batch():
    net = ResNet(2, (1, 16, 16), depth=10, stem="cifar", running_stats=False)
    x = torch.randn(4, 1, 16, 16)
    torch.testing.assert_close(net.train()(x), net.eval()(x))


def test_no_layer_works_in_place():
    x = torch.ones(2, 6)
    net = Perceptron(3, (6,), (5, 4))
    assert not any(layer.inplace for layer in net.modules() if isinstance(layer, nn.ReLU))
    net(x).sum().backward()
    assert torch.equal(x, torch.ones(2, 6))


def test_shapes_may_be_lists():
    assert FedNTDCNN(2, [1, 8, 8])(torch.zeros(1, 1, 8, 8)).shape == (1, 2)


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: FedNTDCNN(10, (784,)), r"FedNTDCNN needs images: .* got \(784,\)"),
        (
            lambda: FedNTDCNN(10, (3, 3, 32)),
            r"FedNTDCNN needs images of at least 4×4, got an input_shape of \(3, 3, 32\)",
        ),
        (
            lambda: FedKATCNN(10, (3, 32, 15)),
            r"FedKATCNN needs images of at least 16×16, got .*\(3, 32, 15\)",
        ),
        (lambda: FedKATCNN(10, (3, 0, 32)), r"sizes of at least 1 without the batch, got \(3, 0, 32\)"),
        (lambda: FedKATCNN(0, (3, 32, 32)), "FedKATCNN needs num_classes of at least 1, got 0"),
        (lambda: KnFuM1(2, (3, 3, 9)), r"KnFuM1 needs images of at least 4×4, got .*\(3, 3, 9\)"),
        (lambda: FedCLMNISTCNN(2, GREY, dropout=1.0), r"FedCLMNISTCNN needs a dropout in \[0, 1\), got 1.0"),
        (lambda: FedCLMNISTCNN(2, GREY, layers="mine"), "layers must be one of paper, code, got 'mine'"),
        (lambda: FedCLCIFARCNN(2, COLOUR, start="zero"), "start must be one of torch, xavier, got 'zero'"),
        (lambda: ResNet(2, COLOUR, depth=20), "ResNet needs a depth of 10, 18, 34, 50, got 20"),
        (lambda: ResNet(2, COLOUR, stem="small"), "ResNet needs a stem of imagenet or cifar, got 'small'"),
        (lambda: ResNet(2, (784,)), r"ResNet needs images: .* got \(784,\)"),
        (lambda: CIFARResNet(2, COLOUR, depth=30), r"CIFARResNet needs a depth of 6n \+ 2 .* got 30"),
        (lambda: FedAlignResNet(2, COLOUR, depth=32), r"FedAlignResNet needs a depth of 9n \+ 2 .* got 32"),
        (lambda: CIFARMobileNetV2(2, (4,)), r"CIFARMobileNetV2 needs images: .* got \(4,\)"),
        (lambda: Perceptron(2, ()), r"Perceptron needs an input_shape .* got \(\)"),
        (lambda: Perceptron(2, (4,), (3, 0)), r"hidden layers of at least 1 unit, got hidden=\(3, 0\)"),
    ],
)
def test_refused_shapes(build, sentence):
    with pytest.raises(ValueError, match=sentence):
        build()


@pytest.mark.parametrize(("net_class", "least"), [(FedKATCNN, 16), (FedNTDCNN, 4)])
def test_the_least_image_works(net_class, least):
    assert net_class(2, (1, least, least))(torch.zeros(1, 1, least, least)).shape == (1, 2)


def test_a_backbone_needs_features():
    class Bare(Backbone):
        pass

    with pytest.raises(TypeError, match="features"):
        Bare()


def test_a_xavier_start_fills_the_range_of_xaviers_uniform_draws_with_biases_of_0():
    net = FedCLCIFARCNN(10, COLOUR, start="xavier")
    layers = [layer for layer in net.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert len(layers) == 5
    for layer in layers:
        fan_out, fan_in, *kernel = layer.weight.shape
        bound = float(torch.tensor((6 / ((fan_in + fan_out) * math.prod(kernel))) ** 0.5))  # as float32 holds it
        assert 0.9 * bound < float(layer.weight.abs().max()) <= bound
        assert not layer.bias.any()
