"""The synthetic data of the FedProx paper: sizes, models and inputs of its clients, as section 5.1 describes them."""

import numpy as np
import pytest
import torch

from fl_lightning import FederatedDataModule
from fl_lightning.data import Synthetic
from fl_lightning.methods import FedAvg
from fl_lightning.nets import Perceptron
from tests.toys import fit, sgd

SEEDS = range(40)


def laws(alpha=0.0, beta=0.0, iid=False, seeds=SEEDS):
    """The laws of many clients, of which a source has 30 for each seed."""
    sources = [Synthetic(alpha, beta, iid, seed=seed) for seed in seeds]
    return [source.law_of(client_id) for source in sources for client_id in range(30)]


def test_sizes_are_log_normal_above_fifty():
    sizes = np.array([law.size for law in laws()])
    assert sizes.min() >= 50
    logs = np.log(sizes - 50 + 0.5)  # half of what the floor took
    middle = np.quantile(logs, [0.159, 0.5, 0.841])
    np.testing.assert_allclose(middle, [2, 4, 6], atol=0.3)
    assert max(sizes) > 50 * np.median(sizes)


def test_all_four_sets_have_the_same_sizes():
    sets = [Synthetic(0, 0, iid=True), Synthetic(0, 0), Synthetic(0.5, 0.5), Synthetic(1, 1)]
    sizes = [[source.law_of(client_id).size for client_id in range(30)] for source in sets]
    assert sizes[0] == sizes[1] == sizes[2] == sizes[3]
    assert len(set(sizes[0])) > 20


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0, 3.0])
def test_models_differ_by_alpha(alpha):
    """Within a client, entries have variance 1 around u. Between clients, u has variance alpha²."""
    drawn = laws(alpha)
    weights = np.stack([law.weight for law in drawn])
    biases = np.stack([law.bias for law in drawn])
    means = weights.mean((1, 2))
    np.testing.assert_allclose(weights.var((1, 2)).mean(), 1.0, rtol=0.01)
    np.testing.assert_allclose(means.std(), np.sqrt(alpha**2 + 1 / 600), rtol=0.1)
    # The bias has the u of the weights.
    np.testing.assert_allclose((biases.mean(1) - means).std(), np.sqrt(1 / 10 + 1 / 600), rtol=0.1)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0, 3.0])
def test_inputs_differ_by_beta(beta):
    means = np.stack([law.mean for law in laws(0.0, beta)])
    np.testing.assert_allclose(means.var(1, ddof=1).mean(), 1.0, rtol=0.02)
    np.testing.assert_allclose(means.mean(1).std(), np.sqrt(beta**2 + 1 / 60), rtol=0.1)


def test_features_have_the_variances_of_the_paper():
    source = Synthetic(1, 1)
    centred = []
    for client_id in range(30):
        x, _ = source.samples_of(client_id)
        centred.append(x - source.law_of(client_id).mean)
    noise = np.concatenate(centred)
    covariance = noise.T @ noise / len(noise)
    expected = np.arange(1, 61) ** -1.2
    scale = np.sqrt(np.outer(expected, expected))
    np.testing.assert_allclose(covariance / scale, np.eye(60), atol=5 * np.sqrt(2 / len(noise)))


def test_classes_are_those_of_the_softmax():
    source = Synthetic(1, 1)
    for client_id in (0, 29):
        x, y = source.samples_of(client_id)
        law = source.law_of(client_id)
        logits = torch.from_numpy(x) @ torch.from_numpy(law.weight) + torch.from_numpy(law.bias)
        assert torch.equal(logits.softmax(1).argmax(1), torch.from_numpy(y))


def test_iid_clients_have_one_model_and_one_law_of_inputs():
    iid = laws(iid=True, seeds=[0])
    for law in iid:
        np.testing.assert_array_equal(law.weight, iid[0].weight)
        np.testing.assert_array_equal(law.bias, iid[0].bias)
        assert not law.mean.any()
    differ = laws(seeds=[0])
    assert len({law.weight[0, 0] for law in differ}) == 30
    assert not np.array_equal(iid[0].weight, laws(iid=True, seeds=[1])[0].weight)
    x, _ = Synthetic(iid=True).samples_of(0)
    other, _ = Synthetic(iid=True).samples_of(1)
    assert not np.array_equal(x[:50], other[:50])


def test_draws_depend_on_the_seed_only():
    def tensors(source, data_seed=0):
        source.data_seed = data_seed
        train, test = source.read()
        return torch.cat([train.x, test.x])

    first = tensors(Synthetic(0.5, 0.5))
    assert torch.equal(first, tensors(Synthetic(0.5, 0.5), data_seed=7))
    other = tensors(Synthetic(0.5, 0.5, seed=1))
    assert first.shape != other.shape


def test_each_client_has_nine_tenths_of_its_own_samples_to_train():
    source = Synthetic(0.5, 0.5)
    data = FederatedDataModule(source, num_clients=None, by="client")
    data.setup()
    assert data.num_clients == 30
    assert (data.num_classes, data.input_shape) == (10, (60,))
    for client_id in range(30):
        x, y = source.samples_of(client_id)
        end = len(x) * 9 // 10
        train = data.client_indices("train", client_id)
        test = data.client_indices("test", client_id)
        assert torch.equal(data.split("train").x[train], torch.from_numpy(x[:end]).float())
        assert torch.equal(data.split("test").x[test], torch.from_numpy(x[end:]).float())
        assert data.split("train").labels[train].tolist() == y[:end].tolist()


def test_a_limit_leaves_some_of_each_split():
    train, test = Synthetic(limit=100).read()
    assert (len(train), len(test)) == (100, 100)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"alpha": -1.0}, "alpha must be at least 0, got -1.0"),
        ({"beta": -0.5}, "beta must be at least 0, got -0.5"),
        ({"iid": True, "alpha": 1.0}, r"iid gives all clients one law, .*got alpha=1.0 and beta=0.0; leave alpha"),
        ({"iid": True, "beta": 0.5}, r"iid gives all clients one law, .*got alpha=0.0 and beta=0.5"),
    ],
)
def test_settings_are_checked(settings, says):
    with pytest.raises(ValueError, match=says):
        Synthetic(**settings)


def test_softmax_regression_learns_the_iid_set():
    data = FederatedDataModule(Synthetic(iid=True, limit=1000), num_clients=None, by="client", batch_size=10)
    loop = fit(FedAvg(net=lambda *shape: Perceptron(*shape, hidden=()), optimizer=sgd(0.05)), 8, data)
    assert loop.round_metrics["global/acc"] > 0.45
