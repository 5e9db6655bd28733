import math

import pytest
import torch

from fl_lightning.functional.accuracy import (
    answer_counts,
    class_weighted_accuracy,
    distribution_distance,
    normalised_class_accuracy,
    prediction_consistency,
)
from fl_lightning.functional.classes import complement, in_local, out_local
from fl_lightning.functional.drift import (
    activation_sums,
    dead_neurons,
    drift_diversity,
    preferred_by_sums,
    weight_alignment,
    weight_divergence,
)
from fl_lightning.functional.forgetting import forgetting_degree
from fl_lightning.functional.losses import kl_divergence
from fl_lightning.functional.summary import mean_std, rounds_to_target
from fl_lightning.methods.fedntd import kl_parts, kl_parts_by_class


def draw(*shape, seed=0):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_nan(accuracy):
    return torch.cat([accuracy, torch.full_like(accuracy[..., :1], torch.nan)], -1)


def test_a_class_without_test_samples_is_as_if_it_were_not_there():
    table = draw(5, 4)
    counts = torch.tensor([7, 0, 2, 1])
    more = torch.cat([counts, torch.tensor([5])])
    nan_table = with_nan(table)
    p = in_local(counts)
    p_more = in_local(more)
    assert prediction_consistency(nan_table).allclose(prediction_consistency(table))
    assert normalised_class_accuracy(nan_table)[:, :-1].allclose(normalised_class_accuracy(table))
    assert class_weighted_accuracy(nan_table, p_more).allclose(class_weighted_accuracy(table, p))
    assert distribution_distance(nan_table, p_more).allclose(distribution_distance(table, p))


def test_measures_of_class_accuracies_do_not_depend_on_the_names_of_the_classes():
    table = draw(5, 4)
    p = in_local(torch.tensor([7, 0, 2, 1]))
    order = torch.tensor([2, 0, 3, 1])
    for measure in (class_weighted_accuracy, distribution_distance):
        assert measure(table[:, order], p[order]).allclose(measure(table, p))
    assert prediction_consistency(table[:, order]).allclose(prediction_consistency(table))
    assert normalised_class_accuracy(table[:, order]).allclose(normalised_class_accuracy(table)[:, order])


def test_undefined_measures_are_nan_not_a_number_that_looks_like_one():
    zeros = torch.zeros(3)
    p = torch.full((3,), 1 / 3)
    nothing = torch.full((3,), torch.nan)
    empty_client = in_local(torch.tensor([0, 0, 0]))
    assert prediction_consistency(torch.stack([zeros, p])).isnan().all()
    assert distribution_distance(zeros, p).isnan()
    assert class_weighted_accuracy(nothing, p).isnan()
    assert class_weighted_accuracy(p, empty_client).isnan()
    assert distribution_distance(p, empty_client).isnan()
    assert mean_std(torch.tensor([0.5])).mean == 0.5
    assert mean_std(torch.tensor([0.5])).std.isnan()
    assert prediction_consistency(p.expand(1, 3)).shape == (0,)
    assert rounds_to_target([], 0.5) is None
    assert rounds_to_target([math.nan, math.inf, 0.6], 0.5) == 3
    assert rounds_to_target({4: 0.4, 7: 0.6}, 0.5) == 8


def test_a_distribution_lies_at_distance_0_from_itself_and_2_from_a_disjoint_one():
    p = draw(4)
    assert distribution_distance(p, p / p.sum()) == pytest.approx(0)
    assert distribution_distance(torch.tensor([0.7, 0.0]), torch.tensor([0.0, 1.0])) == 2


def test_forgetting_degree_by_hand():
    both = torch.tensor([0.5, 0.2], dtype=torch.float64)
    assert forgetting_degree(both, both).tolist() == [0, 0]
    assert forgetting_degree(both, both.flip(0)).tolist() == pytest.approx([0.6, -1.5])
    assert forgetting_degree(torch.zeros(1), torch.ones(1)) == pytest.approx(-1e8)


def diversity(gradients):
    return len(gradients) * drift_diversity(gradients.square().sum(), gradients.sum(0))


def test_diversity_is_at_least_1_and_free_of_scale():
    gradients = draw(5, 30) - 0.5
    assert diversity(gradients) > 1
    assert diversity(3 * gradients).item() == pytest.approx(diversity(gradients).item())
    assert diversity(gradients[:1].expand(4, -1)).item() == pytest.approx(1)
    assert diversity(torch.zeros(2, 3)) == torch.inf


def test_diversity_falls_with_the_out_local_share():
    """Lee et al. 2022, Proposition 1, for clients whose classes pull in orthogonal directions."""
    p = torch.stack([torch.tensor([0.7, 0.2, 0.1, 0.0, 0.0, 0.0], dtype=torch.float64).roll(k) for k in range(6)])
    values = [diversity(p + beta * complement(p)).item() for beta in (0.0, 0.5, 1.0, 2.0)]
    assert values == sorted(values, reverse=True)


def test_weight_divergence_over_several_tensors_is_that_of_all_laid_end_to_end():
    a, b = ({"x": draw(3, 4, seed=s), "n": torch.tensor(s), "y": draw(5, seed=s + 9)} for s in (1, 2))
    flat = torch.cat([(a[name] - b[name]).flatten() for name in a])
    for order in (1, 2):
        assert weight_divergence(a, b, order).item() == pytest.approx(torch.linalg.vector_norm(flat, order).item())
    assert weight_divergence(a, a) == 0
    with pytest.raises(KeyError):
        weight_divergence(a, {"x": b["x"]})


def test_preferred_classes_equal_a_naive_loop_and_skip_classes_without_samples():
    activations, target = (draw(40, 12) - 0.6).relu(), torch.arange(40) % 5 + 1  # class 0 has no samples
    activations[:, 3] = 0
    means = torch.stack([activations[target == c].mean(0) for c in range(1, 6)])
    preferred = preferred_by_sums(*activation_sums(activations, target, num_classes=7))
    assert preferred.tolist() == (means.argmax(0) + 1).tolist()
    assert preferred[3] == 1
    assert dead_neurons(activations).nonzero().flatten().tolist() == [3]
    assert weight_alignment(preferred, preferred) == 1
    assert weight_alignment(preferred, preferred + 1) == 0


def test_the_parts_of_the_kl_divergence_sum_to_it_and_act_on_in_and_out_local():
    local = draw(30, 5, seed=1)
    teacher = draw(30, 5, seed=2)
    target = torch.arange(30) % 3
    true, not_true = kl_parts(local, teacher, target)
    inside, outside = kl_parts_by_class(local, teacher, target)
    counts = torch.bincount(target, minlength=5)
    assert (true + not_true).item() == pytest.approx(kl_divergence(local, teacher).item())
    assert (in_local(counts) * inside).nansum().item() == pytest.approx(true.item())
    assert 4 * (out_local(counts) * outside).nansum().item() == pytest.approx(not_true.item())


def test_answers_of_another_number_than_targets_are_refused():
    """One answer must not be counted for each of several targets."""
    with pytest.raises(ValueError, match=r"of the targets' shape \(3,\), got \(1,\)"):
        answer_counts(torch.tensor([1]), torch.tensor([1, 1, 0]))
