"""Class means and covariances that are accumulated batch by batch."""

import pytest
import torch

from fl_lightning.functional.class_means import ClassCovariances, ClassMeans


def drawn(n: int = 40, width: int = 5, offset: float = 0.0):
    """Features of four classes, of which class 1 has no sample and class 3 one."""
    g = torch.Generator().manual_seed(4)
    labels = torch.randint(2, (n,), generator=g) * 2
    labels[7] = 3
    features = torch.randn(n, width, generator=g, dtype=torch.float64) * (1 + labels[:, None]) + offset
    return features, labels


def in_batches(classes, features, labels, size):
    for x, y in zip(features.split(size), labels.split(size), strict=True):
        classes.add(x, y)
    return classes


@pytest.mark.parametrize("size", [1, 7, 40])
def test_batches_of_any_size_give_the_means_and_unbiased_covariances_of_all_samples(size):
    features, labels = drawn()
    classes = in_batches(ClassCovariances(4, 5), features, labels, size)
    assert classes.counts.tolist() == labels.bincount(minlength=4).tolist()
    for c in (0, 2, 3):
        torch.testing.assert_close(classes.means[c], features[labels == c].mean(0), rtol=1e-12, atol=1e-14)
    for c in (0, 2):
        torch.testing.assert_close(classes.covariances[c], features[labels == c].T.cov(), rtol=1e-12, atol=1e-14)
    assert not classes.means[1].any()
    assert not classes.covariances[1].any()
    assert not classes.covariances[3].any()


@pytest.mark.parametrize("size", [1, 7, 40])
def test_diagonals_are_those_of_the_covariances(size):
    features, labels = drawn(offset=3.0)
    full = in_batches(ClassCovariances(4, 5), features, labels, size).covariances
    diagonals = in_batches(ClassCovariances(4, 5, diagonal=True), features, labels, size).covariances
    torch.testing.assert_close(diagonals, full.diagonal(dim1=1, dim2=2), rtol=1e-12, atol=1e-14)


def test_features_far_from_0_keep_their_covariance():
    near = in_batches(ClassCovariances(4, 5), *drawn(), 7).covariances
    far = in_batches(ClassCovariances(4, 5), *drawn(offset=1e6), 7).covariances
    torch.testing.assert_close(far, near, rtol=1e-8, atol=1e-8)


def test_a_half_type_is_summed_in_float64():
    """In bfloat16 the sum would stay at 256."""
    classes = in_batches(ClassMeans(1, 1), torch.ones(1000, 1).bfloat16(), torch.zeros(1000, dtype=torch.int64), 10)
    assert classes.means.dtype == classes.counts.dtype == torch.float64
    assert classes.totals.item() == classes.counts.item() == 1000


def test_without_a_sample_all_is_0():
    classes = ClassCovariances(2, 3)
    classes.add(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    assert not any(value.any() for value in (classes.counts, classes.means, classes.covariances))
