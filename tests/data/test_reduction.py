"""A client's samples of a class are held back and given back between rounds, also across a resume."""

import pytest
import torch

from fl_lightning import FederatedLoop
from fl_lightning.methods import FedAvg
from tests.toys import BatchNormNet, equal, sgd, toy_data, trainer, weights_of


def counts(data, client_id=0):
    return data.view(client_id, 0).label_counts.tolist()


def ready(**settings):
    data = toy_data((20, 15), **settings)
    data.setup("fit")
    return data


def test_only_the_class_of_the_client_is_reduced():
    data = ready()
    before = counts(data)
    other = counts(data, 1)
    test = data.client_indices("test", 0)
    assert before[1] > 2
    views = data.views()
    data.set_class_count(0, 1, 2)
    assert counts(data) == [before[0], 2, before[2]]
    assert counts(data, 1) == other
    assert data.label_counts[0].tolist() == counts(data)
    assert views(0, 3).size() == sum(counts(data)) == len(data.client_indices("train", 0))  # a view of before sees it
    assert torch.equal(data.client_indices("test", 0), test)
    data.set_class_count(0, 1, None)
    assert counts(data) == before


def test_fewer_samples_are_a_part_of_more_whatever_came_before():
    data = ready()
    again = ready()
    found = []
    for count in (4, 2, 3, 0):
        data.set_class_count(0, 0, count)
        found.append(set(data.client_indices("train", 0).tolist()))
    assert found[3] < found[1] < found[2] < found[0]
    again.set_class_count(0, 0, 2)
    assert set(again.client_indices("train", 0).tolist()) == found[1]


def test_the_test_samples_do_not_depend_on_when_they_are_dealt():
    early = ready(partition=None)
    late = ready(partition=None)
    expected = early.client_indices("test", 0)
    late.set_class_count(0, 1, 0)
    assert torch.equal(late.client_indices("test", 0), expected)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((2, 0, 1), r"client_id must lie in \[0, 2\), got 2"),
        ((0, 3, 1), r"class_idx must lie in \[0, 3\), got 3"),
        ((0, 0, 99), r"count must lie in \[0, \d+\], got 99; None gives it all of them back"),
        ((0, 0, -1), r"got -1"),
    ],
)
def test_what_does_not_exist_is_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        ready().set_class_count(*arguments)


def test_samples_without_classes_are_refused():
    from tests.callbacks import toy

    data = toy.data(classes=False)
    data.setup("fit")
    with pytest.raises(ValueError, match="set_class_count needs samples with integer labels"):
        data.set_class_count(0, 0, 0)


def test_it_is_part_of_the_checkpoint(tmp_path):
    def loop():
        return FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), seed=3)

    data = toy_data()
    whole = loop()
    first = trainer(1)
    first.fit(whole, datamodule=data)
    data.set_class_count(0, 1, 0)
    first.fit_loop.max_epochs = 2
    first.fit(whole, datamodule=data)
    first.save_checkpoint(tmp_path / "at.ckpt")
    first.fit_loop.max_epochs = 4
    first.fit(whole, datamodule=data)
    again = toy_data()
    fresh = loop()
    trainer(3).fit(fresh, datamodule=again, ckpt_path=tmp_path / "at.ckpt")
    assert counts(again) == counts(data)
    third = loop()
    run = trainer(4)
    run.fit(third, datamodule=toy_data(), ckpt_path=tmp_path / "at.ckpt")
    assert equal(weights_of(third), weights_of(whole))
    # a checkpoint of the continued run fits again: the settings compare what was dealt
    run.save_checkpoint(tmp_path / "later.ckpt")
    trainer(5).fit(loop(), datamodule=toy_data(), ckpt_path=tmp_path / "later.ckpt")
