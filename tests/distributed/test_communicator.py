"""What several ranks exchange, in threads: every rank has the same, and one rank's failure is every rank's."""

import pytest
import torch

from fl_lightning.aggregation import PartialAggregate
from fl_lightning.distributed import communicator as communicators
from fl_lightning.distributed.communicator import Communicator, ProcessCommunicator, joined
from fl_lightning.distributed.watch import RemoteError
from fl_lightning.functional.state import StateSum, mean_of
from tests.distributed.worlds import World

SIZE = 3


@pytest.fixture
def together(monkeypatch):
    """Run a function of a communicator on every rank."""
    world = World(SIZE)
    monkeypatch.setattr(communicators, "dist", world)
    return lambda function: world.run(lambda rank: function(ProcessCommunicator()))


def test_a_gathered_value_is_by_rank_on_every_rank(together):
    found = together(lambda ranks: (ranks.gather(ranks.rank * 10), ranks.gather_to_root({"rank": ranks.rank})))
    at_root = [{"rank": rank} for rank in range(SIZE)]
    assert found == [([0, 10, 20], at_root), ([0, 10, 20], []), ([0, 10, 20], [])]


def test_one_rank_that_failed_fails_all(together):
    def work(ranks):
        return ranks.all_gather_or_raise(ranks.rank, ValueError("bad batch") if ranks.rank == 1 else None)

    first, second, third = together(work)
    assert isinstance(second, ValueError)
    for remote in (first, third):
        assert isinstance(remote, RemoteError)
        assert str(remote) == "rank 1 of 3 failed: ValueError: bad batch"


def test_the_root_makes_for_all(together):
    """A function that draws would give other values on every rank."""

    def work(ranks):
        changed = torch.full((2,), float(ranks.rank))

        def make():
            changed.fill_(7.0)
            return {"w": torch.tensor([1.5, ranks.rank])}

        state = ranks.from_root(make, lambda: [changed])
        return state["w"].tolist(), changed.tolist()

    assert together(work) == [([1.5, 0.0], [7.0, 7.0])] * SIZE


def test_the_root_may_make_nothing(together):
    assert together(lambda ranks: ranks.from_root(lambda: None, lambda: [])) == [None] * SIZE


def test_an_error_of_the_root_is_raised_on_all(together):
    def make():
        raise ZeroDivisionError("there")

    first, *others = together(lambda ranks: ranks.from_root(make, lambda: []))
    assert isinstance(first, ZeroDivisionError)
    for error in others:
        assert str(error) == "rank 0 of 3 failed: ZeroDivisionError: there"


def test_weights_of_the_root_are_copied_into_tensors_that_are_no_blocks(together):
    def work(ranks):
        tensor = torch.full((2, 3), float(ranks.rank + 1)).t()
        ranks.broadcast_([tensor])
        return tensor.tolist()

    assert together(work) == [torch.ones(3, 2).tolist()] * SIZE


class Sums:
    """A member with one sum, and a weight per rank. The last rank has no client."""

    gathers = False
    name = "aggregator"

    def __init__(self, rank):
        sums = {}
        if rank < SIZE - 1:
            total = StateSum()
            total.add({"w": torch.tensor([1.0, 2.0]) * (rank + 1)}, rank + 1)
            sums["mean"] = total
        self.partial = PartialAggregate(sums=sums, rows={})


def test_sums_of_all_ranks_are_added_up_also_where_one_has_none(together):
    def work(ranks):
        member = Sums(ranks.rank)
        ranks.merge([member], None)
        return {name: value.tolist() for name, value in mean_of(member.partial.sums["mean"]).items()}

    # (1·[1, 2] + 2·[2, 4]) / 3
    expected = pytest.approx([5 / 3, 10 / 3])
    assert [mean["w"] for mean in together(work)] == [expected] * SIZE


def test_sums_of_other_shapes_are_refused():
    first = StateSum()
    first.add({"w": torch.zeros(2)}, 1)
    second = StateSum()
    second.add({"w": torch.zeros(3)}, 1)
    with pytest.raises(ValueError, match="the sum 'a/mean' has other names, shapes or types on another rank"):
        joined("a/mean", first.form, second.form)


def test_clients_are_spread_by_cost_and_stay_with_their_owner(monkeypatch):
    world = World(2)
    world.join(0)
    monkeypatch.setattr(communicators, "dist", world)
    costs = {0: 5, 1: 4, 2: 3, 3: 0}
    assert ProcessCommunicator().assign_clients(list(costs), costs.get, {}) == {0: 0, 1: 1, 2: 1, 3: 0}
    assert ProcessCommunicator().assign_clients(list(costs), costs.get, {2: 0}) == {0: 1, 1: 0, 2: 0, 3: 1}


def test_one_process_exchanges_with_itself():
    alone = Communicator()
    assert alone.gather(3) == [3]
    assert alone.gather_to_root(3) == [3]
    assert alone.assign_clients([4, 2], lambda _: 1, {4: 1}) == {4: 0, 2: 0}
    assert alone.from_root(lambda: {"w": 1}, list) == {"w": 1}
    with pytest.raises(ValueError, match="bad batch"):
        alone.merge([], ValueError("bad batch"))
