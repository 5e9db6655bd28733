import pytest
import torch

from fl_lightning.data.datasets import DatasetSource
from fl_lightning.data.sources import Digits, PooledSource, TensorSource, check_labels, labelled_split
from fl_lightning.data.transforms import Scale


def batch_of(split, *index):
    return next(iter(split.batches([torch.tensor(index)], None)))


def tensors(labels, dtype=torch.float32):
    return torch.randn(len(labels), 2, dtype=dtype), torch.as_tensor(labels)


def test_digits():
    from sklearn.datasets import load_digits

    source = Digits()
    source.prepare()
    train, test = source.load()
    assert (len(train), len(test), source.num_classes, source.class_names) == (1437, 360, 10, None)
    assert (train.x.dtype, train.y.dtype) == (torch.uint8, torch.int64)
    images, labels = load_digits(return_X_y=True)
    x, y = batch_of(test, 0, 359)
    assert (x.shape, x.dtype) == ((2, 1, 8, 8), torch.float32)
    assert torch.equal(x.flatten(1).double(), torch.tensor(images[[1437, 1796]]) / 16)
    assert y.tolist() == labels[[1437, 1796]].tolist()


def test_tensors_keep_their_type_and_labels_become_int64():
    train = tensors([0, 2, 1], torch.float64)
    test = tensors([3], torch.float64)
    source = TensorSource(train, (test[0], test[1].to(torch.int32)))
    splits = source.load()
    assert source.num_classes == 4
    x, y = batch_of(splits[0], 2, 0)
    assert x.dtype == torch.float64
    assert torch.equal(x, train[0][[2, 0]])
    assert torch.equal(y, torch.tensor([1, 0]))
    assert splits[1].labels.dtype == torch.int64


def test_tensors_transform_and_given_classes():
    x = torch.full((3, 2), 4, dtype=torch.uint8)
    y = torch.tensor([0, 1, 0])
    source = TensorSource((x, y), (x, y), num_classes=7, transform=Scale(8))
    assert source.num_classes == 7
    assert torch.equal(batch_of(source.load()[1], 0)[0], torch.full((1, 2), 0.5))


def test_float_targets_and_label_maps_have_no_classes():
    x = torch.randn(3, 2)
    for y in (torch.tensor([0.5, -1.0, 2.0]), torch.randn(3, 4), torch.full((3, 5), 255)):
        source = TensorSource((x, y), (x, y))
        train, _ = source.load()
        assert source.num_classes is None
        assert train.labels is None


def test_each_load_gives_fresh_splits():
    source = TensorSource(tensors([0, 1]), tensors([1]))
    assert source.load()[0] is not source.load()[0]


@pytest.mark.parametrize(
    ("train", "test", "num_classes", "sentence"),
    [
        ([0, 1, 3], [0], 3, r"\[0, 3\), got 3 at index 2 of the train split"),
        ([0, 1], [0, 1, -1], None, r"\[0, 2\), got -1 at index 2 of the test split"),
    ],
)
def test_labels_outside_are_refused(train, test, num_classes, sentence):
    with pytest.raises(ValueError, match=sentence):
        TensorSource(tensors(train), tensors(test), num_classes).load()


def test_check_labels_takes_an_empty_split():
    check_labels(torch.empty(0, dtype=torch.int64), 3)
    assert len(labelled_split(torch.empty(0, 2), torch.empty(0, dtype=torch.int64), 3)) == 0


def test_splits_that_do_not_match_are_refused():
    x, y = tensors([0, 1])
    with pytest.raises(ValueError, match=r"same shape, got \(2,\) and \(3,\)"):
        TensorSource((x, y), (torch.randn(2, 3), y))
    with pytest.raises(ValueError, match="of one kind"):
        TensorSource((x, y), (x, y.float()))
    with pytest.raises(ValueError, match="2 samples and 1 labels"):
        TensorSource((x, y[:1]), (x, y)).load()


class Pictures(TensorSource):
    """Ten samples that are their own numbers, whose splits have transforms of their own."""

    class_names = ("even", "odd")

    def load(self):
        train, test = super().load()
        train.transform = lambda x, generator: x + 100
        test.transform = lambda x, generator: -x
        return train, test


def pictures():
    numbers = torch.arange(10)
    x = numbers.float()[:, None]
    y = numbers % 2
    return Pictures((x[:8], y[:8]), (x[8:], y[8:]))


def test_pooled_samples_are_split_anew():
    source = PooledSource(pictures(), test_share=0.3)
    source.prepare()
    train, test = source.load()
    assert (len(train), len(test), source.num_classes, source.class_names) == (7, 3, 2, ("even", "odd"))
    assert sorted([*train.x.flatten().tolist(), *test.x.flatten().tolist()]) == list(range(10))
    for split in (train, test):
        assert torch.equal(split.labels, split.x.flatten().long() % 2)
    assert torch.equal(train.all()[0], train.x + 100)
    assert torch.equal(test.all()[0], -test.x)


def test_a_new_split_depends_on_its_seed_alone():
    def test_samples(seed):
        return PooledSource(pictures(), 0.5, seed).load()[1].x.flatten().tolist()

    assert test_samples(3) == test_samples(3)
    drawn = [test_samples(seed) for seed in range(40)]
    assert len({tuple(sorted(samples)) for samples in drawn}) > 20
    assert {number for samples in drawn for number in samples} == set(range(10))


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: PooledSource("mnist"), TypeError, "source must be a source of fl_lightning.data, got 'mnist'"),
        (lambda: PooledSource(pictures(), 0), ValueError, "test_share must be above 0, got 0"),
        (lambda: PooledSource(pictures(), 1), ValueError, "test_share must be below 1, got 1"),
        (lambda: PooledSource(pictures(), seed=0.5), TypeError, "seed must be a whole number, got 0.5"),
        (
            lambda: PooledSource(DatasetSource([(torch.zeros(1), 0)], None)).load(),
            TypeError,
            "needs a training and a test split in memory, which DatasetSource does not give",
        ),
    ],
)
def test_wrong_pools_are_refused(make, error, sentence):
    with pytest.raises(error, match=sentence):
        make()
