import pytest
import torch

from fl_lightning import ClientModule, FederatedDataModule, FederatedLoop
from fl_lightning.data import DirichletPartition, TensorSource
from tests.toys import samples, toy_data, trainer

TRAIN = samples(200)
TEST = samples(60, seed=1)


def make(**settings):
    """Every training sample carries its own index as its last feature, so that sets can be compared."""
    (x, y), (x_test, y_test) = TRAIN, TEST
    train = torch.cat([x, torch.arange(200.0).unsqueeze(1)], 1), y
    test = torch.cat([x_test, torch.zeros(60, 1)], 1), y_test
    settings = {"num_clients": 4, "partition": DirichletPartition(0.5), **settings}
    data = FederatedDataModule(TensorSource(train, test, num_classes=3), **settings)
    data.setup()
    return data


def ids(split) -> set[int]:
    return set(split.all()[0][:, -1].long().tolist())


def owned(data) -> set[int]:
    return {i for client_id in range(data.num_clients) for i in data.client_indices("train", client_id).tolist()}


def test_sets_are_disjoint_and_the_rest_goes_to_the_clients():
    data = make(val_fraction=0.1, proxy_size=0.05, transfer_size=30)
    sets = {name: ids(data.split(name)) for name in ("val", "proxy", "transfer")}
    assert {name: len(found) for name, found in sets.items()} == {"val": 20, "proxy": 10, "transfer": 30}
    everything = [owned(data), *sets.values()]
    assert sum(map(len, everything)) == 200
    assert set().union(*everything) == set(range(200))


def test_an_overlapping_proxy_stays_with_the_clients():
    apart, overlapping = (make(proxy_size=10, proxy_overlap=overlap) for overlap in (False, True))
    assert ids(apart.split("proxy")) == ids(overlapping.split("proxy"))
    assert len(owned(apart)) == 190
    assert owned(overlapping) == set(range(200))


def test_the_sets_depend_on_the_data_seed_alone():
    one, same, other = (make(seed=seed, sampling_seed=k, proxy_size=10) for k, seed in enumerate((0, 0, 1)))
    for name in ("proxy", "shared"):
        assert ids(one.split(name)) == ids(same.split(name)) != ids(other.split(name))
    assert ids(make(proxy_size=20, transfer_size=9).split("transfer")) == ids(make(transfer_size=9).split("transfer"))


def test_the_shared_set_has_one_sample_of_each_class_which_its_owner_keeps():
    data = make()
    shared = data.split("shared")
    assert shared.all()[1].tolist() == [0, 1, 2]
    assert ids(shared) <= owned(data) == set(range(200))
    assert make(shared_per_class=2).split("shared").all()[1].tolist() == [0, 0, 1, 1, 2, 2]
    held = make(transfer_size=150, partition=DirichletPartition(0.5, min_samples=0))
    assert not ids(held.split("shared")) & ids(held.split("transfer"))


def test_a_class_that_nobody_has_is_not_shared():
    x, y = TRAIN
    data = FederatedDataModule(TensorSource((x, y * 2), (x, y * 2), num_classes=6), num_clients=2)
    data.setup()
    assert data.split("shared").all()[1].tolist() == [0, 2, 4]


def test_clients_see_what_everyone_holds_and_not_what_the_server_holds():
    data = make(transfer_size=12, proxy_size=3, val_fraction=0.1)
    for client_id in range(4):
        local = data.view(client_id, 0)
        assert local.size("transfer") == 12
        assert torch.equal(local.all("transfer")[0], data.split("transfer").all()[0])
        assert [len(y) for _, y in local.batches("transfer", batch_size=5)] == [5, 5, 2]
        assert local.size("shared") == 3
        for name in ("proxy", "val"):
            with pytest.raises(ValueError, match=f"no client sees the server's split '{name}'"):
                local.size(name)


def test_sets_are_never_augmented():
    def noisy(x, generator):
        return x if generator is None else x + 1

    source = TensorSource(TRAIN, TEST, transform=noisy)
    data = FederatedDataModule(source, num_clients=2, transfer_size=8, extra_splits={"public": source})
    data.setup()
    local = data.view(0, 0)
    for name in ("transfer", "shared", "public"):
        (batch,) = local.batches(name, epoch=0, batch_size=500, shuffle=False)
        assert torch.equal(batch[0], local.all(name)[0])
    (batch,) = local.batches("train", epoch=0, batch_size=500, shuffle=False)
    assert torch.equal(batch[0], local.all()[0] + 1)


def test_sets_may_come_from_other_sources():
    other = TensorSource(samples(9, seed=5), samples(1))
    data = toy_data(extra_splits={"transfer": other, "public": other})
    data.setup()
    for name in ("transfer", "public"):
        assert torch.equal(data.split(name).all()[0], other.train[0])
        assert data.view(1, 0).size(name) == 9
    with pytest.raises(
        ValueError, match=r"data.extra_splits.transfer must have the shape of data.source's \(\(4,\)\), got"
    ):
        toy_data(extra_splits={"transfer": TensorSource(samples(9, dim=3), samples(1, dim=3))}).setup()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"proxy_size": -1}, "proxy_size must be a whole number of samples, .* got -1"),
        ({"transfer_size": 1.5}, "transfer_size must be a whole number of samples, .* got 1.5"),
        (
            {"transfer_size": 200},
            "must leave training samples to the clients, got 200 of the 200 .* data.transfer_size",
        ),
        ({"proxy_size": 180, "transfer_size": 30}, "got 180 of the 170 that were left; lower data.proxy_size"),
        ({"shared_per_class": -1}, "shared_per_class must be at least 0, got -1"),
        ({"client_test_size": 0}, "client_test_size must be at least 1, got 0"),
        ({"extra_splits": {"test": TensorSource(TRAIN, TEST)}}, "data.extra_splits cannot replace the test split"),
        ({"extra_splits": {"proxy": TensorSource(TRAIN, TEST)}, "proxy_size": 3}, "both give the proxy set"),
    ],
)
def test_impossible_settings_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        make(**settings)


@pytest.mark.parametrize(
    ("split", "settings", "setting"),
    [
        ("proxy", {}, "set data.proxy_size"),
        ("transfer", {}, "set data.transfer_size"),
        ("val", {}, "set data.val_fraction"),
        ("shared", {"shared_per_class": 0}, "set data.shared_per_class"),
        ("public", {}, "set data.extra_splits.public"),
    ],
)
def test_a_split_that_a_method_needs_and_the_data_lack_is_refused_at_start(split, settings, setting):
    class Needy(ClientModule):
        needs = frozenset({split})

    with pytest.raises(ValueError, match=f"Needy needs the split '{split}': .*{setting}"):
        trainer(1).fit(FederatedLoop(Needy()), datamodule=toy_data(**settings))


def test_shared_needs_classes():
    x = torch.randn(20, 4)
    data = FederatedDataModule(TensorSource((x, x), (x, x)), num_clients=2)
    data.setup()
    with pytest.raises(ValueError, match=r"needs samples with classes, .* data.extra_splits.shared"):
        data.split("shared")
