"""NeuronActivations, FeatureProbe, LossLandscape: what they measure, and that a run does not know of them."""

import copy

import numpy as np
import pytest
import torch
from torch.func import functional_call
from torch.nn import functional as F

from fl_lightning.functional.drift import activation_sums, dead_neurons, preferred_by_sums, weight_alignment
from fl_lightning.methods import FedAvg, FedNTD, KnFu
from fl_lightning.monitors import FeatureProbe, LossLandscape, NeuronActivations
from fl_lightning.monitors.probe_figures import joint_embedding, plot_embedding
from fl_lightning.nets import FedNTDHypersphere
from tests.callbacks import toy
from tests.monitors.test_monitors import Copies, run
from tests.toys import BatchNormNet, equal, sgd, toy_data, weights_of
from tests.user_data import Pairs
from tests.user_modules import Classifier


def probes(folder, layer=None):
    return [
        NeuronActivations(layer, dirpath=folder),
        FeatureProbe(layer, every=2, samples=12, dirpath=folder),
        LossLandscape(every=2, samples=12, grid=3, repeats=2, iterations=4, clients=[1], dirpath=folder),
    ]


@pytest.mark.parametrize("name", ["FedNTD", "module", pytest.param("KnFu", marks=pytest.mark.slow)])
def test_a_run_with_every_probe_has_the_weights_of_one_without(name, tmp_path):
    from pytorch_lightning import seed_everything

    from fl_lightning import FederatedDataModule

    def fitted(callbacks):
        seed_everything(1, verbose=False)
        if name == "module":
            data = FederatedDataModule.from_datamodule(Pairs(), num_clients=3)
            return run(Classifier(), callbacks, rounds=2, data=data)
        own = {"transfer_size": 9, "partition": None} if name == "KnFu" else {}
        client = {"FedNTD": FedNTD, "KnFu": KnFu}[name](net=BatchNormNet, optimizer=sgd())
        return run(client, callbacks, rounds=2, data=toy_data(**own))

    layer = {"module": "module.net.1"}.get(name)
    with_them = fitted(probes(tmp_path, layer))
    without = fitted([])
    assert equal(weights_of(with_them), weights_of(without))
    assert {key: with_them.round_metrics[key] for key in without.round_metrics} == without.round_metrics
    names = {path.name for path in tmp_path.iterdir()}
    assert {"features-00001.npz", "tsne-00001.png", "landscape-00001-client1.npz"} <= names
    assert ("landscape-00001-global.png" in names) == (name != "KnFu")


def preferred(features, y, num_classes):
    return preferred_by_sums(*activation_sums(features, y, num_classes))


def test_neurons_prefer_what_those_of_the_copies_do(tmp_path):
    copies = Copies()
    loop = run(callbacks=[copies, NeuronActivations(dirpath=tmp_path)], data=toy_data(eval_batch_size=7))
    x, y = loop.data.split("test").all()
    received = []
    trained = []
    dead = []
    with torch.no_grad():
        for i in range(5):
            received.append(preferred(copies.received[2, i].features(x), y, 3))
            trained.append(preferred(copies.trained[2, i].features(x), y, 3))
            dead.append(dead_neurons(copies.trained[2, i].features(x)).double().mean())
        after = preferred(copy.deepcopy(loop.client.net).eval().features(x), y, 3)
    row = loop.round_metrics
    alignments = [float(weight_alignment(a, b)) for a, b in zip(received, trained, strict=True)]
    assert row["local/weight_alignment"] == pytest.approx(sum(alignments) / 5)
    assert row["local/dead_neurons"] == pytest.approx(float(sum(dead) / 5))
    assert row["global/weight_alignment"] == pytest.approx(float(weight_alignment(received[0], after)))
    with np.load(tmp_path / "neurons-00002.npz") as file:
        assert file["trained"].tolist() == torch.stack(trained).tolist()
        assert file["received"].tolist() == received[0].tolist()
        assert file["aggregate"].tolist() == after.tolist()


def test_a_named_layer_is_that_of_the_features():
    rows = [run(callbacks=[NeuronActivations(layer)], rounds=1).round_metrics for layer in (None, "net.body.3")]
    assert rows[0] == rows[1]
    with pytest.raises(ValueError, match="NeuronActivations: layer must name a module of the client, such as 'net"):
        run(callbacks=[NeuronActivations("net.tail")])

    class WithOutputs(toy.Regression):
        def forward(self, x):
            return x

    with pytest.raises(ValueError, match="FeatureProbe needs the name of a layer for a client without net="):
        run(WithOutputs(), [FeatureProbe()], data=toy.data())


def test_features_are_those_of_the_copies(tmp_path):
    copies = Copies()
    loop = run(callbacks=[copies, FeatureProbe(every=1, samples=9, clients=[0, 3], plot=False, dirpath=tmp_path)])
    x, y = loop.data.split("test").all()
    with np.load(tmp_path / "features-00002.npz") as file:
        assert file["models"].tolist() == ["received", "client 0", "client 3", "aggregate"]
        chosen = loop.evaluation.inspection.subset("test", 9)
        assert file["targets"].tolist() == y[chosen].tolist()
        nets = [
            copies.received[2, 0],
            copies.trained[2, 0],
            copies.trained[2, 3],
            copy.deepcopy(loop.client.net).eval(),
        ]
        with torch.no_grad():
            expected = torch.stack([net.features(x[chosen]) for net in nets])
        np.testing.assert_allclose(file["features"], expected.numpy(), rtol=1e-5, atol=1e-6)
    assert not list(tmp_path.glob("*.png"))


def test_features_of_two_dimensions_are_drawn_on_the_circle(tmp_path):
    from functools import partial

    from fl_lightning import FederatedDataModule, FederatedLoop
    from fl_lightning.data import TensorSource
    from tests.toys import trainer

    x = torch.randn(40, 1, 12, 12, generator=torch.Generator().manual_seed(0))
    y = torch.arange(40) % 3
    data = FederatedDataModule(TensorSource((x, y), (x[:15], y[:15]), num_classes=3), num_clients=2)
    loop = FederatedLoop(FedAvg(net=partial(FedNTDHypersphere), optimizer=sgd(0.01)), seed=0)
    trainer(1, callbacks=[FeatureProbe(every=1, dirpath=tmp_path)]).fit(loop, datamodule=data)
    assert {path.name for path in tmp_path.iterdir()} == {"features-00000.npz", "circle-00000.png"}
    with np.load(tmp_path / "features-00000.npz") as file:
        np.testing.assert_allclose(np.linalg.norm(file["features"], axis=2), 1, rtol=1e-5)


def test_the_landscape_is_that_of_the_model(tmp_path):
    monitor = LossLandscape(
        every=3, samples=None, sigmas=[0.0, 0.5], grid=3, reach=0.5, iterations=200, dirpath=tmp_path
    )
    loop = run(callbacks=[monitor], data=toy_data(eval_batch_size=7))
    net = copy.deepcopy(loop.client.net).eval().double()
    params = {name: value.detach() for name, value in net.named_parameters()}
    x, y = loop.data.split("test").all()
    x = x.double()

    def loss_at(vector):
        parts = torch.split(vector, [value.numel() for value in params.values()])
        shifted = {n: v + part.view_as(v) for (n, v), part in zip(params.items(), parts, strict=True)}
        return F.cross_entropy(functional_call(net, shifted, (x,)), y)

    zero = torch.zeros(sum(value.numel() for value in params.values()), dtype=torch.float64)
    whole = torch.func.hessian(loss_at)(zero)
    largest = torch.linalg.eigvalsh(whole)
    largest = largest[largest.abs().argsort(descending=True)[:2]]
    with np.load(tmp_path / "landscape-00002-global.npz") as file:
        np.testing.assert_allclose(file["eigenvalues"], largest.numpy(), rtol=0.05)
        assert file["plane"].shape == (3, 3)
        assert file["plane"][1, 1] == pytest.approx(float(loss_at(zero)), rel=1e-5)
        np.testing.assert_allclose(file["noise_loss"][0], float(loss_at(zero)), rtol=1e-5)
        assert file["noise_loss"][1].mean() > file["noise_loss"][0].mean()
        assert file["noise_accuracy"].shape == (2, 5)
        hits = functional_call(net, params, (x,)).argmax(1) == y
        np.testing.assert_allclose(file["noise_accuracy"][0], float(hits.double().mean()))
        # along the sharpest direction: a parabola near w
        curvature = (file["plane"][0, 1] + file["plane"][2, 1] - 2 * file["plane"][1, 1]) / 0.5**2
        assert curvature == pytest.approx(float(largest[0]), rel=0.5)
    assert loop.round_metrics["global/hessian/1"] == pytest.approx(float(largest[0]), rel=0.05)


def test_a_joint_embedding_is_the_same_again_and_drawn():
    features = torch.randn(3, 20, 5, generator=torch.Generator().manual_seed(0))
    points = joint_embedding(features, 7)
    assert points.shape == (3, 20, 2)
    assert torch.equal(points, joint_embedding(features, 7))
    figure = plot_embedding(points, torch.arange(20) % 2, ["a", "b", "c"], ["x", "y"])
    texts = [[text.get_text() for text in axes.get_legend().get_texts()] for axes in figure.axes]
    assert texts == [["x", "y"], ["a", "b", "c"]]
