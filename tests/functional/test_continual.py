import math

import pytest
import torch

from fl_lightning.functional.continual import (
    backward_transfer,
    forward_transfer,
    intransigence,
    learning_accuracy,
    tasks_accuracy,
    tasks_forgetting,
)


def drawn(seed, num_rows=5, num_tasks=4):
    """A table, and the rows in which each task is trained on, some of which overlap and one of which is none."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.rand(num_rows, num_tasks, generator=generator, dtype=torch.float64)
    initial = torch.rand(num_tasks, generator=generator, dtype=torch.float64)
    ends = torch.randint(num_rows, (2, num_tasks), generator=generator).sort(0).values
    ends[:, seed % num_tasks] = -1
    return table, initial, ends[0], ends[1]


def mean(values):
    return sum(values) / len(values) if values else math.nan


@pytest.mark.parametrize("seed", range(20))
def test_measures_are_those_of_plain_loops(seed):
    table, initial, first, last = drawn(seed)
    rows = table.tolist()
    end = len(rows) - 1
    tasks = [(k, int(first[k]), int(last[k])) for k in range(4) if first[k] >= 0]
    reference = torch.rand(4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    forgotten = [max(rows[i][k] for i in range(end)) - rows[end][k] for k, begins, _ in tasks if begins < end]
    gained = [rows[end][k] - rows[ends][k] for k, _, ends in tasks if ends < end]
    ahead = [rows[begins - 1][k] - float(initial[k]) for k, begins, _ in tasks if begins > 0]
    learned = [rows[begins][k] for k, begins, _ in tasks]
    missing = [float(reference[k]) - rows[begins][k] for k, begins, _ in tasks]

    def near(value):
        return pytest.approx(value, rel=1e-12, nan_ok=True)

    assert tasks_accuracy(table, first).item() == near(mean([rows[end][k] for k, _, _ in tasks]))
    assert tasks_forgetting(table, first).item() == near(mean(forgotten))
    assert backward_transfer(table, last).item() == near(mean(gained))
    assert forward_transfer(table, initial, first).item() == near(mean(ahead))
    assert intransigence(table, reference, first).item() == near(mean(missing))
    assert learning_accuracy(table, first).item() == near(mean(learned))


def test_one_row_has_an_accuracy_and_no_other_measure():
    table, initial, _, _ = drawn(1, num_rows=1)
    rows = torch.tensor([0, -1, 0, -1])
    assert tasks_accuracy(table, rows) == table[0, [0, 2]].mean()
    for value in (
        tasks_forgetting(table, rows),
        backward_transfer(table, rows),
        forward_transfer(table, initial, rows),
    ):
        assert value.isnan()


def test_tasks_without_test_samples_are_left_out():
    table, initial, first, last = drawn(2)
    first[2] = last[2] = 0
    without = table.clone()
    without[:, 2] = torch.nan
    chosen = [0, 1, 3]
    assert tasks_accuracy(without, first) == tasks_accuracy(table[:, chosen], first[chosen])
    assert learning_accuracy(without, first) == learning_accuracy(table[:, chosen], first[chosen])
    assert tasks_forgetting(without, first).nan_to_num(-9) == tasks_forgetting(
        table[:, chosen], first[chosen]
    ).nan_to_num(-9)
    assert forward_transfer(without, initial, first).nan_to_num(-9) == forward_transfer(
        table[:, chosen], initial[chosen], first[chosen]
    ).nan_to_num(-9)
