import pytest
import torch

from fl_lightning.functional.forgetting import forgetting, forgetting_per_class


@pytest.mark.parametrize("exclude_final", [False, True])
def test_forgetting_equals_a_naive_loop(exclude_final):
    table = torch.rand(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rounds = table[: 9 - exclude_final].tolist()
    naive = [max(row[c] for row in rounds) - float(table[-1, c]) for c in range(4)]
    assert forgetting_per_class(table, exclude_final).tolist() == pytest.approx(naive)
    assert forgetting(table, exclude_final).item() == pytest.approx(sum(naive) / 4)


def test_nothing_is_forgotten_while_accuracy_rises():
    table = torch.linspace(0, 1, 12).view(4, 3)
    assert forgetting(table) == 0
    assert forgetting(table, exclude_final=True) < 0
    assert forgetting(table.flip(0)) == pytest.approx(0.8181818)


def test_classes_without_test_samples_are_left_out():
    table = torch.rand(5, 4, generator=torch.Generator().manual_seed(1))
    without = torch.cat([table, torch.full((5, 1), torch.nan)], 1)
    assert forgetting(without) == forgetting(table)
    assert forgetting_per_class(without)[-1].isnan()
    assert forgetting(torch.full((3, 2), torch.nan)).isnan()


@pytest.mark.parametrize("exclude_final", [False, True])
def test_rounds_that_did_not_evaluate_a_class_are_left_out(exclude_final):
    table = torch.rand(6, 4, generator=torch.Generator().manual_seed(1))
    gaps = torch.cat([table, torch.full((1, 4), torch.nan)])[[0, 6, 1, 2, 6, 3, 4, 5]]
    assert forgetting_per_class(gaps, exclude_final).equal(forgetting_per_class(table, exclude_final))
    assert forgetting_per_class(gaps[:2], exclude_final).isnan().all()


def test_one_round_forgets_nothing_or_is_undefined():
    table = torch.rand(1, 4)
    assert forgetting(table) == 0
    assert forgetting(table, exclude_final=True).isnan()
    assert forgetting(table[:0]).isnan()


def test_relabelling_permutes_the_classes():
    table = torch.rand(6, 5, generator=torch.Generator().manual_seed(2))
    order = torch.tensor([3, 0, 4, 1, 2])
    assert forgetting_per_class(table[:, order]).equal(forgetting_per_class(table)[order])
