import itertools
from fractions import Fraction

import pytest
import torch

from fl_lightning.functional import state as S


def state(seed, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return {"w": torch.randn(3, 4, generator=g).to(dtype), "n": torch.randint(0, 99, (), generator=g)}


def test_the_mean_is_exact_and_does_not_depend_on_the_order():
    states = [state(seed) for seed in range(5)]
    weights = [7, 1, 12, 5, 900]
    first = S.weighted_mean(states, weights)
    for order in itertools.permutations(range(5)):
        again = S.weighted_mean([states[i] for i in order], [weights[i] for i in order])
        assert all(torch.equal(first[name], again[name]) for name in first)
    for index in itertools.product(range(3), range(4)):
        exact = sum(n * Fraction(s["w"][index].item()) for s, n in zip(states, weights, strict=True)) / sum(weights)
        assert first["w"][index] == torch.tensor(float(exact), dtype=torch.float64).float()


def test_equal_counters_stay_equal_for_any_number_of_clients():
    """In float32 with truncation 37 of these means would be 99."""
    for clients in range(2, 101):
        mean = S.weighted_mean([{"n": torch.tensor(100)}] * clients, [3] * clients)
        assert mean["n"].dtype == torch.int64
        assert mean["n"] == 100


@pytest.mark.parametrize(("counters", "mean"), [((0, 1), 0), ((1, 2), 2), ((2, 3), 2), ((3, 4), 4), ((-1, 0), 0)])
def test_integers_are_rounded_half_to_even(counters, mean):
    assert S.weighted_mean([{"n": torch.tensor(n)} for n in counters], [5, 5])["n"] == mean


def test_types_are_kept():
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert S.weighted_mean([state(0, dtype), state(1, dtype)], [1, 2])["w"].dtype == dtype


def test_booleans_must_be_equal():
    yes = {"mask": torch.tensor([True, False])}
    no = {"mask": torch.tensor([True, True])}
    assert S.weighted_mean([yes, yes, yes], [1, 2, 3])["mask"].tolist() == [True, False]
    for weights in ([1, 1], [1, 1000]):
        with pytest.raises(ValueError, match="boolean entry 'mask' differs between clients"):
            S.weighted_mean([yes, no], weights)


@pytest.mark.parametrize(
    "other",
    [
        {"w": torch.ones(2)},
        {"v": torch.ones(3)},
        {"w": torch.ones(3).double()},
        {"w": torch.ones(3), "v": torch.ones(1)},
    ],
)
def test_states_of_another_layout_are_refused(other):
    total = S.StateSum()
    total.add({"w": torch.ones(3)})
    with pytest.raises(ValueError, match="states of one sum must have equal names, shapes and types"):
        total.add(other)


def test_what_was_added_is_not_kept_nor_changed():
    total = S.StateSum()
    entry = {"w": torch.ones(3)}
    total.add(entry, 2)
    entry["w"].zero_()
    total.add({"w": torch.ones(3)}, torch.tensor(3))
    assert total.state()["w"].tolist() == [5.0, 5.0, 5.0]
    assert not entry["w"].any()


def test_the_order_of_names_does_not_matter():
    a = torch.zeros(2)
    b = torch.ones(2)
    mean = S.weighted_mean([{"a": a, "b": b}, {"b": b, "a": a}], [1, 1])
    assert torch.equal(mean["a"], a)
    assert torch.equal(mean["b"], b)


def test_a_state_whose_entries_are_replaced_is_laid_end_to_end_anew():
    """Of a mean, of live weights and of a sum: what is added is what the entries say."""
    start = {"a": torch.tensor([1.0, 2.0]), "n": torch.tensor(4)}
    for state in (S.weighted_mean([start], [1]), S.FlatState(start)):
        S.flatten(state)
        state["a"] = torch.tensor([5.0, 6.0])
        assert S.flatten(state)[torch.float32].tolist() == [5.0, 6.0]
        del state["a"]
        assert S.flatten(state).keys() == {torch.int64}
    total = S.StateSum()
    again = S.StateSum()
    total.add(start, 2)
    again.add(total.state())
    assert {name: value.tolist() for name, value in again.state().items()} == {"a": [2.0, 4.0], "n": 8.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("weight", [3, torch.tensor(3)])
def test_a_long_vector_is_summed_and_averaged_as_a_whole_bit_for_bit(dtype, weight):
    g = torch.Generator().manual_seed(0)
    values = [(torch.randn(2 * S.PIECE + 5, generator=g) * 100).to(dtype) for _ in range(2)]
    total = S.StateSum()
    for value in values:
        total.add({"w": value}, weight)
    summed = torch.zeros(len(values[0]), dtype=torch.float64)
    for value in values:
        summed.add_(value.double() * 3)
    mean = summed / 6
    assert torch.equal(total.state()["w"], summed)
    assert torch.equal(S.mean_of(total)["w"], (mean if dtype.is_floating_point else mean.round()).to(dtype))


@pytest.mark.parametrize("weight", [2, torch.tensor(2)])
def test_a_sum_takes_over_the_memory_of_one_that_is_done_with_and_starts_at_zero(weight):
    old = S.StateSum()
    new = {"w": torch.tensor([1.0, -0.0]), "n": torch.tensor(3)}
    old.add({"w": torch.tensor([torch.nan, torch.inf]), "n": torch.tensor(1)})
    total = S.StateSum(after=old)
    total.add(new, weight)
    assert total.flat[torch.float32].data_ptr() == old.flat[torch.float32].data_ptr()
    assert total.state()["w"].tolist() == [2.0, 0.0]
    assert str(total.state()["w"][1].item()) == "0.0"  # as of a sum that began with zeros
    assert total.state()["n"] == 6


def test_a_sum_that_was_looked_at_keeps_its_memory():
    old = S.StateSum()
    old.add({"w": torch.ones(2)})
    seen = old.state()
    total = S.StateSum(after=old)
    total.add({"w": torch.zeros(2)})
    assert seen["w"].tolist() == [1.0, 1.0]


def test_memory_of_another_size_is_not_taken():
    old = S.StateSum()
    old.add({"w": torch.ones(2)})
    total = S.StateSum(after=old)
    total.add({"w": torch.ones(3)})
    assert total.state()["w"].tolist() == [1.0] * 3
    assert S.mean_of(old)["w"].tolist() == [1.0] * 2


def test_a_sum_that_was_compared_may_be_divided_without_what_was_sent():
    total = S.StateSum()
    total.add({"w": torch.tensor([1.0, 0.0])}, 2, sent={"w": torch.tensor([0.0, 0.0])})
    assert S.mean_of(total)["w"].tolist() == [1.0, 0.0]
