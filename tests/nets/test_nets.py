import copy

import pytest
import torch
from torch import nn

from fl_lightning.nets import Backbone, FedKATCNN, FedNTDCNN, Perceptron

SMALL = [(Perceptron, (2, 3)), (FedKATCNN, (3, 16, 20)), (FedNTDCNN, (1, 4, 7))]


@pytest.mark.parametrize(
    ("net", "count"),
    [
        (FedKATCNN(10, (3, 32, 32)), 878_538),
        (FedNTDCNN(10, (3, 32, 32)), 2_156_490),
        (FedNTDCNN(100, (3, 32, 32)), 2_202_660),
        (FedNTDCNN(10, (1, 28, 28)), 1_663_370),
        (FedNTDCNN(200, (3, 64, 64)), 8_545_416),
        (Perceptron(10, (1, 28, 28), hidden=(200, 200)), 199_210),
        (Perceptron(3, (4,), hidden=()), 15),
    ],
)
def test_parameter_counts(net, count):
    assert sum(p.numel() for p in net.parameters()) == count
    assert not list(net.buffers())


@pytest.mark.parametrize(("net_class", "shape"), SMALL)
def test_logits_are_the_head_on_features(net_class, shape):
    net = net_class(4, shape)
    assert isinstance(net, Backbone)
    for batch in (1, 5):
        x = torch.randn(batch, *shape)
        features = net.features(x)
        assert features.shape == (batch, net.head.in_features)
        assert (features >= 0).all()
        assert net(x).shape == (batch, 4)
        assert torch.equal(net(x), net.head(features))


@pytest.mark.parametrize(("net_class", "shape"), SMALL)
def test_the_head_comes_last_and_a_copy_is_apart(net_class, shape):
    net = net_class(4, shape)
    assert [name for name, _ in net.named_parameters()][-2:] == ["head.weight", "head.bias"]
    twin, x = copy.deepcopy(net), torch.randn(2, *shape)
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
