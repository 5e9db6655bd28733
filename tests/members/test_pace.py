"""Clients are spread over processes by the seconds they took, where that pays."""

from types import SimpleNamespace

import pytest
import torch

from fl_lightning.distributed.communicator import ProcessCommunicator
from fl_lightning.members import pace
from fl_lightning.members.pace import Pace

SIZES = {0: 10, 1: 10, 2: 10, 3: 10, 4: 30}


class Rank(ProcessCommunicator):
    """One of two, without a process group."""

    def __init__(self, rank):
        self.rank, self.world, self.device = rank, 2, torch.device("cpu")


def deal(seconds=None, owners=None):
    cohort = list(SIZES)
    ranks, other = (Rank(rank).assign_clients(cohort, SIZES.get, owners or {}, seconds) for rank in (0, 1))
    assert ranks == other
    return [[client_id for client_id in cohort if ranks[client_id] == rank] for rank in (0, 1)]


def measured(monkeypatch, took, exchanges=1):
    """A round in which each client takes so many seconds in every exchange, and processes wait in between."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(pace, "perf_counter", lambda: clock.now)
    member = Pace(SIZES.get)
    member.begin(0, list(took))
    for _ in range(exchanges):
        for client_id, seconds in took.items():
            clock.now += seconds
            result = SimpleNamespace(update=SimpleNamespace(client_id=client_id))
            assert member.incoming(result) is result
        clock.now += 1000.0
        member.end_exchange()
    return member


def test_seconds_of_all_exchanges_count_and_waiting_does_not(monkeypatch):
    member = measured(monkeypatch, {0: 2.0, 4: 3.0}, exchanges=2)
    assert member.share() == {0: 4.0, 4: 6.0}
    assert member.estimate() is None
    member.end(None, [member.share(), {1: 10.0}])
    expected = member.estimate()
    assert [expected(client_id) for client_id in (0, 1, 4)] == [4.0, 10.0, 6.0]
    assert expected(2) == pytest.approx(20.0 * 10 / 50)  # by the sample as long as the others


def test_later_rounds_count_by_half():
    member = Pace(SIZES.get)
    for seconds in (4.0, 8.0, 2.0):
        member.end(None, [{0: seconds}, {}])
    expected = member.estimate()
    assert expected(0) == 4.0
    assert expected(4) == 12.0


def test_clients_that_are_slow_by_the_sample_are_spread_over_the_ranks():
    assert deal() == [[3, 4], [0, 1, 2]]
    slow = {0: 9.0, 1: 1.0, 2: 9.0, 3: 1.0, 4: 1.0}
    loads = sorted(sum(slow[c] for c in part) for part in deal(slow.get))
    assert loads == [10.0, 11.0]


def test_noise_leaves_clients_where_their_samples_put_them():
    noisy = {0: 1.04, 1: 0.97, 2: 1.05, 3: 0.96, 4: 3.02}
    assert deal(noisy.get) == deal()


def test_who_has_a_memory_stays_with_its_rank_but_where_its_seconds_say_otherwise():
    owners = {0: 1, 2: 1}
    assert deal(owners=owners) == [[3, 4], [0, 1, 2]]
    balanced = {0: 9.0, 1: 9.0, 2: 9.0, 3: 1.0, 4: 1.0}
    assert deal(balanced.get, {0: 1, 2: 1, 1: 0, 3: 0, 4: 0}) == [[1, 3, 4], [0, 2]]  # no tenth would be gained
    slow = {0: 9.0, 1: 1.0, 2: 9.0, 3: 1.0, 4: 1.0}
    assert deal(slow.get, owners) == deal(slow.get)
