"""Feature shift by client, and quantity skew."""

import math

import numpy as np
import pytest
import torch

from fl_lightning import FederatedDataModule
from fl_lightning.data import Digits, FeatureShift, PartitionInput, QuantityDirichletPartition, TensorSource
from fl_lightning.data.feature_shift import rotated
from fl_lightning.methods import FedAvg
from fl_lightning.nets import Perceptron
from tests.data.test_vision import first_batch
from tests.toys import equal, fit, sgd, weights_of


def federation(**shift):
    data = FederatedDataModule(Digits(limit=120), num_clients=4, feature_shift=FeatureShift(**shift), batch_size=8)
    data.setup()
    return data


def seen_by(data, client_id, split="test", **how):
    return torch.cat([x for x, _ in data.view(client_id, 0).batches(split, **how)])


def stored(data, client_id, split="test"):
    x, _ = data.split(split).all()
    return x[data.client_indices(split, client_id)]


def test_noise_grows_with_the_client_as_in_niid_bench():
    data = federation(noise=0.3)
    for client_id in range(4):
        deviation = (seen_by(data, client_id) - stored(data, client_id)).std()
        torch.testing.assert_close(float(deviation), 0.3 * client_id / 3, atol=0.02, rtol=0)
    epochs = [seen_by(data, 3, "train", epoch=epoch, shuffle=False) for epoch in (0, 0, 1)]
    assert torch.equal(epochs[0], epochs[1])
    assert not torch.equal(epochs[0], epochs[2])
    assert torch.equal(seen_by(data, 3), seen_by(data, 3))


def test_a_rotated_image_is_numpys_at_right_angles():
    x = torch.randn(2, 3, 5, 5)
    for turns in range(1, 4):
        expected = torch.from_numpy(np.rot90(x.numpy(), turns, (2, 3)).copy())
        torch.testing.assert_close(rotated(x, turns * math.pi / 2), expected, atol=1e-5, rtol=0)
    wide = torch.randn(1, 1, 4, 7)
    torch.testing.assert_close(rotated(wide, math.pi), wide.flip(2, 3), atol=1e-5, rtol=0)


def test_each_client_has_one_angle_and_one_colour():
    data = federation(rotation=40.0, colour=0.5)
    angles = [math.degrees(data.shift_of(client_id).angle) for client_id in range(4)]
    assert len(set(angles)) == 4
    assert max(map(abs, angles)) <= 40
    for client_id in range(4):
        turned = rotated(stored(data, client_id), math.radians(angles[client_id]))
        factor, offset = np.polyfit(turned.flatten().numpy(), seen_by(data, client_id).flatten().numpy(), 1)
        assert 0.5 <= factor <= 1.5
        assert abs(offset) <= 0.5
        torch.testing.assert_close(seen_by(data, client_id), (turned * factor + offset).float(), atol=1e-4, rtol=0)
    assert torch.equal(seen_by(data, 1), data.view(1, 5).all("test")[0])


def test_the_server_sees_the_samples_as_they_are():
    data = federation(noise=1.0, colour=1.0)
    plain = FederatedDataModule(Digits(limit=120))
    plain.setup()
    assert torch.equal(first_batch(data.split("test"), 9)[0], first_batch(plain.split("test"), 9)[0])


def test_clients_trained_at_once_see_what_they_see_one_by_one():
    trained = []
    for chunk in (1, 4):
        client = FedAvg(net=Perceptron, optimizer=sgd(0.05))
        trained.append(weights_of(fit(client, 2, federation(noise=0.2, rotation=20.0), chunk=chunk)))
    assert not equal(trained[0], weights_of(fit(FedAvg(net=Perceptron, optimizer=sgd(0.05)), 2, federation())))
    for name, value in trained[0].items():
        torch.testing.assert_close(trained[1][name], value, atol=1e-5, rtol=1e-4)


def test_a_phase_of_some_samples_is_shifted_once():
    data = federation(colour=0.5)
    view = data.view(2, 0)
    some = view.restricted("test", torch.tensor([1, 0]))
    assert torch.equal(some.all("test")[0], view.all("test")[0][[1, 0]])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"noise": -1.0}, "noise must be at least 0, got -1.0"),
        ({"rotation": 200.0}, "rotation must be at most 180, got 200.0"),
        ({"colour": 2.0}, "colour must be at most 1, got 2.0"),
    ],
)
def test_a_shift_out_of_its_range_is_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        FeatureShift(**settings)


def test_rows_of_a_table_are_not_turned():
    rows = torch.randn(8, 3), torch.arange(8) % 2
    data = FederatedDataModule(TensorSource(rows, rows), num_clients=2, feature_shift=FeatureShift(rotation=5.0))
    with pytest.raises(ValueError, match=r"rotation and colour images \(B, C, H, W\), got samples \(3,\)"):
        data.setup()


def test_quantity_skew_deals_every_sample_once():
    samples = PartitionInput(1000)
    rng = np.random.default_rng(0)
    skewed = QuantityDirichletPartition(0.3)(samples, 8, rng)
    even = QuantityDirichletPartition(float("inf"))(samples, 8, rng)
    for parts in (skewed, even):
        assert sorted(np.concatenate(parts).tolist()) == list(range(1000))
        assert min(map(len, parts)) >= 10
    assert max(map(len, skewed)) > 2 * 125
    assert {len(part) for part in even} == {125}
    with pytest.raises(ValueError, match=r"gave every client min_samples=10 .*, the smallest share reached was"):
        QuantityDirichletPartition(0.01)(PartitionInput(100), 10, rng)
