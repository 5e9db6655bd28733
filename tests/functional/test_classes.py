import numpy as np
import pytest
import torch

from fl_lightning.functional.classes import class_split, in_local, label_counts, out_local


def test_label_counts_equals_a_naive_count():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 6, 200)
    parts = [rng.choice(200, n) for n in (0, 1, 37, 200)]
    counts = label_counts(torch.from_numpy(labels), parts, 7)
    assert counts.dtype == torch.int64
    assert counts.tolist() == [[sum(labels[i] == c for i in p) for c in range(7)] for p in parts]


def test_label_counts_takes_tensors_and_no_clients():
    labels = torch.tensor([0, 1, 1])
    assert label_counts(labels, [torch.tensor([1, 2])], 2).tolist() == [[0, 2]]
    assert label_counts(labels, [], 2).shape == (0, 2)
    assert label_counts(labels[:0], [torch.tensor([])], 2).tolist() == [[0, 0]]


@pytest.mark.parametrize("label", [-1, 3])
def test_label_counts_refuses_labels_out_of_range(label):
    with pytest.raises(ValueError, match=r"labels must lie in 0 ... 2, got"):
        label_counts(torch.tensor([1, label]), [np.array([0, 1])], 3)


def test_class_split_parts_the_classes_of_every_client():
    counts = torch.randint(0, 30, (50, 4, 8), generator=torch.Generator().manual_seed(0)) // 4
    split = class_split(counts, gamma=0.1)
    assert torch.stack(split).sum(0).eq(1).all()
    for row, missing, minor, major in zip(counts.view(-1, 8), *(m.view(-1, 8) for m in split), strict=True):
        n = int(row.sum())
        for c, k in enumerate(row.tolist()):
            assert bool(missing[c]) == (k == 0)
            assert bool(minor[c]) == (k > 0 and 10 * k < n)
            assert bool(major[c]) == (k > 0 and 10 * k >= n)


@pytest.mark.parametrize("percent", range(1, 100))
def test_a_share_of_exactly_gamma_is_dominant(percent):
    for scale in (1, 3, 7, 1000):
        counts = torch.tensor([percent * scale, (100 - percent) * scale])
        assert class_split(counts, percent / 100).dominant[0]
        assert not class_split(counts - torch.tensor([1, 0]), percent / 100).dominant[0]


def test_class_split_edges():
    assert class_split(torch.zeros(4, dtype=torch.int64), 0.1).missing.all()
    assert not class_split(torch.tensor([5, 5]), gamma=0.6).dominant.any()
    assert class_split(torch.tensor([1, 999]), gamma=0.0).dominant.all()
    with pytest.raises(ValueError, match=r"gamma must be at least 0, got -0.1"):
        class_split(torch.tensor([1]), -0.1)


def test_in_and_out_local_are_distributions():
    counts = torch.randint(0, 9, (20, 6), generator=torch.Generator().manual_seed(1)) + torch.eye(20, 6).long()
    p = in_local(counts)
    out = out_local(counts)
    torch.testing.assert_close(p.sum(-1), torch.ones(20, dtype=torch.float64))
    torch.testing.assert_close(out.sum(-1), torch.ones(20, dtype=torch.float64))
    assert p[3].tolist() == [k / sum(counts[3].tolist()) for k in counts[3].tolist()]
    uniform = torch.full((6,), 4)
    torch.testing.assert_close(out_local(uniform), in_local(uniform))


def test_distributions_of_a_client_without_samples_are_undefined():
    assert in_local(torch.zeros(3)).isnan().all()
    assert out_local(torch.zeros(3)).isnan().all()
    assert out_local(torch.tensor([5])).isnan().all()
