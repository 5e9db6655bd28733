"""What several ranks exchange, in threads: every rank has the same, and one rank's failure is every rank's."""

from itertools import permutations
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from fl_lightning.aggregation import PartialAggregate
from fl_lightning.distributed import communicator as communicators
from fl_lightning.distributed.communicator import (
    Communicator,
    ProcessCommunicator,
    current_communicator,
    joined,
    on_device,
    to_device,
)
from fl_lightning.distributed.watch import RemoteError
from fl_lightning.functional.state import StateSum, mean_of
from fl_lightning.types import ClientUpdate
from fl_lightning.utils.life import LIFE
from tests.distributed.test_strategy import alone  # noqa: F401
from tests.distributed.worlds import NOT_OF_GLOO, World

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


@pytest.mark.parametrize("exchange", ["all_gather_or_raise", "merge"])
def test_of_several_ranks_that_failed_each_raises_its_own_and_the_others_that_of_the_least(together, exchange):
    def work(ranks):
        value = [Sums(ranks.rank)] if exchange == "merge" else ranks.rank
        return getattr(ranks, exchange)(value, ValueError(f"of {ranks.rank}") if ranks.rank else None)

    first, second, third = together(work)
    assert str(first) == "rank 1 of 3 failed: ValueError: of 1"
    assert [str(second), str(third)] == ["of 1", "of 2"]


def test_values_are_gathered_by_rank_if_nobody_failed(together):
    """A value may be None, or an error."""

    def work(ranks):
        value = (None, "one", KeyError("of data"))[ranks.rank]
        return ranks.all_gather_or_raise(value, None)

    for found in together(work):
        assert [str(value) for value in found] == ["None", "one", "'of data'"]


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


DTYPES = [
    *NOT_OF_GLOO,
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3)], ids=str)
def test_entries_of_every_type_and_shape_are_those_of_the_root(together, dtype, shape):
    def work(ranks):
        tensors = [torch.full(shape, float(ranks.rank)).to(dtype), torch.full(shape, 1.0 - ranks.rank).to(dtype)]
        ranks.broadcast_(tensors)
        return tensors

    for zeros, ones in together(work):
        assert zeros.dtype == ones.dtype == dtype
        assert zeros.shape == ones.shape == shape
        assert not zeros.to(torch.complex64).any()
        assert torch.equal(ones.to(torch.complex64), torch.ones(shape, dtype=torch.complex64))


def test_parameters_are_copied_outside_of_their_graph(together):
    def work(ranks):
        weight = torch.nn.Parameter(torch.full((2,), float(ranks.rank + 1)))
        ranks.broadcast_([weight])
        weight.sum().backward()
        return weight.tolist()

    assert together(work) == [[1.0, 1.0]] * SIZE


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


@pytest.mark.parametrize(
    "weights",
    [(3, 2), (0.3, 2), (torch.tensor(3), torch.tensor(2))],
    ids=["integers", "fraction", "on a device"],
)
def test_sums_of_all_types_are_the_exact_sums_of_one_process(together, weights):
    """Also where a rank has no client."""
    states = [
        {
            "double": torch.tensor([0.5 + rank, -3.0], dtype=torch.float64),
            "half": torch.tensor([1.5 * rank], dtype=torch.float16),
            "flag": torch.tensor([True, False]),
            "whole": torch.tensor([2**62 - rank, -7 * rank], dtype=torch.int64),
            "small": torch.tensor([200 + rank], dtype=torch.uint8),
        }
        for rank in range(SIZE - 1)
    ]
    sent = {name: torch.zeros_like(value) for name, value in states[0].items()}
    expected = StateSum()
    for state, weight in zip(states, weights, strict=True):
        expected.add(state, weight, sent=sent)

    def work(ranks):
        member = Sums(SIZE)
        if ranks.rank < SIZE - 1:
            total = StateSum()
            total.add(states[ranks.rank], weights[ranks.rank], sent=sent)
            member.partial.sums["mean"] = total
        ranks.merge([member], None)
        return member.partial.sums["mean"]

    for found in together(work):
        assert found.weight == expected.weight
        assert found.exact_weight == expected.exact_weight
        assert found.unread == expected.unread
        assert [vector.tolist() for vector in found.flags()] == [vector.tolist() for vector in expected.flags()]
        ours = mean_of(found, sent)
        theirs = mean_of(expected, sent)
        assert {name: value.tolist() for name, value in ours.items()} == {
            name: value.tolist() for name, value in theirs.items()
        }


def test_a_boolean_that_differs_between_ranks_is_seen_on_all(together):
    def work(ranks):
        member = Sums(SIZE)
        member.partial.sums["mean"] = sum_of({"flag": torch.tensor([True, ranks.rank == 2])})
        ranks.merge([member], None)
        return mean_of(member.partial.sums["mean"])

    for error in together(work):
        assert "boolean entry 'flag' differs between clients" in str(error)


def update(client_id, **contents):
    settings = {"num_samples": client_id, "num_steps": 1, "accumulated_lr": 0.5, "weights": None}
    return ClientUpdate(client_id=client_id, **{**settings, **contents})


class Rows:
    """A member with the updates of two clients per rank, and another sum."""

    def __init__(self, rank, *, name, gathers):
        self.name = name
        self.gathers = gathers
        total = StateSum()
        total.add({"w": torch.ones(1)}, weight=len(name))
        rows = {client_id: update(client_id) for client_id in (rank + SIZE, rank)}
        self.partial = PartialAggregate(sums={"mean": total}, rows=rows)


def test_rows_are_those_of_all_clients_by_id_and_one_member_may_have_them_on_the_root_only(together):
    """Every member has its own sums and rows."""

    def work(ranks):
        members = [Rows(ranks.rank, name="rule", gathers=True), Rows(ranks.rank, name="other_rule", gathers=False)]
        ranks.merge(members, None)
        rows = [list(member.partial.rows) for member in members]
        assert all(key == row.client_id for member in members for key, row in member.partial.rows.items())
        return rows, [member.partial.sums["mean"].weight for member in members]

    everybody = list(range(2 * SIZE))
    weights = [SIZE * len("rule"), SIZE * len("other_rule")]
    first, *others = together(work)
    assert first == ([everybody, everybody], weights)
    assert others == [([[], everybody], weights)] * (SIZE - 1)


def sum_of(state, *, compared=False):
    total = StateSum()
    total.add(state, 1, sent=state if compared else None)
    return total


@pytest.mark.parametrize(
    "other",
    [
        sum_of({"w": torch.zeros(3)}),
        sum_of({"v": torch.zeros(2)}),
        sum_of({"w": torch.zeros(2, dtype=torch.float64)}),
        sum_of({"w": torch.zeros(2)}, compared=True),
    ],
)
def test_sums_that_differ_between_ranks_are_refused(other):
    form = sum_of({"w": torch.zeros(2)}).form
    with pytest.raises(ValueError, match="the sum 'a/mean' has other names, shapes or types on another rank"):
        joined("a/mean", form, other.form)


@pytest.fixture
def of_two(monkeypatch):
    """The communicator of the first of two ranks."""
    world = World(2)
    world.join(0)
    monkeypatch.setattr(communicators, "dist", world)
    return ProcessCommunicator()


@pytest.mark.parametrize(
    ("costs", "owners", "expected"),
    [
        ({0: 5, 1: 4, 2: 3, 3: 0}, {}, {0: 0, 1: 1, 2: 1, 3: 0}),
        ({0: 5, 1: 4, 2: 3, 3: 0}, {2: 0}, {0: 1, 1: 0, 2: 0, 3: 1}),
        ({0: 1, 1: 1, 2: 9}, {1: 1, 2: 1, 7: 0}, {0: 0, 1: 1, 2: 1}),
        ({0: 0, 1: 1, 2: 1}, {}, {0: 0, 1: 1, 2: 0}),  # a client without samples costs as one of one sample
        ({0: 1, 1: 2, 2: 1}, {}, {0: 1, 1: 0, 2: 1}),
        ({0: 0, 1: 0, 2: 0, 3: 0}, {}, {0: 0, 1: 1, 2: 0, 3: 1}),
    ],
)
def test_clients_are_spread_by_cost_and_stay_with_their_owner(of_two, costs, owners, expected):
    """In whatever order they come. Another division would change the last bits of sums over clients."""
    for cohort in permutations(costs):
        assert of_two.assign_clients(cohort, costs.get, owners) == expected


# --- devices ---


def test_tensors_of_updates_move_and_all_else_stays():
    meta = torch.device("meta")
    weight = torch.ones(2, requires_grad=True)
    mine = update(3, weights={"w": weight * 2}, included=torch.tensor(True), extras={"of": [torch.ones(1), "words"]})
    moved = to_device({"rows": {3: mine}, "none": None, "number": 1.5}, meta)
    theirs = moved["rows"][3]
    assert (moved["none"], moved["number"]) == (None, 1.5)
    assert (theirs.client_id, theirs.num_samples, theirs.accumulated_lr) == (3, 3, 0.5)
    assert theirs.extras["of"][1] == "words"
    for tensor in (theirs.weights["w"], theirs.included, theirs.extras["of"][0]):
        assert tensor.device == meta
    assert not theirs.weights["w"].requires_grad
    assert mine.weights["w"].device == torch.device("cpu")


def test_weights_of_a_form_move():
    total = StateSum()
    total.add({"n": torch.tensor([1])}, torch.tensor(2))
    form = on_device(total.form, torch.device("meta"))
    assert form.weight.device == form.unread.device == torch.device("meta")
    assert on_device(StateSum().form, torch.device("meta")) == StateSum().form


def test_what_the_root_makes_comes_to_the_device_of_each(together):
    def work(ranks):
        ranks.device = torch.device("meta")
        return ranks.from_root(lambda: {"w": torch.ones(2)}, list)

    for state in together(work):
        assert state["w"].device == torch.device("meta")


# --- one process ---


def test_one_process_exchanges_with_itself():
    one = Communicator()
    assert (one.rank, one.world, one.device) == (0, 1, torch.device("cpu"))
    assert one.gather(3) == [3]
    assert one.gather_to_root(3) == [3]
    assert one.all_gather_or_raise(3, None) == [3]
    assert one.assign_clients([4, 2], lambda _: 1, {4: 1}) == {4: 0, 2: 0}
    assert one.from_root(lambda: {"w": 1}, list) == {"w": 1}
    one.merge([], None)
    for exchange in (one.merge, one.all_gather_or_raise):
        with pytest.raises(ValueError, match="bad batch"):
            exchange([], ValueError("bad batch"))


def test_the_communicator_is_that_of_the_process_group(monkeypatch):
    device = torch.device("meta")
    assert type(current_communicator(device)) is Communicator
    assert current_communicator(device).device == device
    world = World(2)
    world.join(1)
    world.is_available = lambda: True
    world.is_initialized = lambda: True
    monkeypatch.setattr(communicators, "dist", world)
    several = current_communicator(device)
    assert type(several) is ProcessCommunicator
    assert (several.rank, several.world, several.device) == (1, 2, device)
    world.size = 1
    assert type(current_communicator()) is Communicator
    monkeypatch.setattr(communicators, "dist", SimpleNamespace(is_available=lambda: False))  # as some builds of torch
    assert type(current_communicator()) is Communicator


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gloo_itself_sends_entries_of_every_type(alone, dtype):  # noqa: F811
    tensor = torch.tensor([[1, 0], [1, 1]]).to(dtype).t()
    ProcessCommunicator().broadcast_([tensor])
    assert tensor.to(torch.complex64).tolist() == [[1, 1], [0, 1]]


@pytest.mark.parametrize("dtype", NOT_OF_GLOO, ids=str)
def test_gloo_refuses_the_types_that_the_tests_world_refuses(alone, dtype):  # noqa: F811
    with pytest.raises(RuntimeError, match="Invalid scalar type"):
        dist.broadcast(torch.ones(2).to(dtype), 0)


def merged(ranks):
    member = Sums(SIZE)
    member.partial.sums["mean"] = sum_of({"w": torch.ones(2), "flag": torch.tensor([True])})
    ranks.merge([member], None)
    return {name: value.tolist() for name, value in mean_of(member.partial.sums["mean"]).items()}


EXCHANGES = [
    ("all_gather_object", lambda ranks: ranks.gather({"a": 1})),
    ("all_gather_object", lambda ranks: ranks.all_gather_or_raise("value", None)),
    ("gather_object", lambda ranks: ranks.gather_to_root("value")),
    ("broadcast", lambda ranks: ranks.broadcast_([torch.ones(2)])),
    ("all_gather_object", lambda ranks: ranks.from_root(lambda: {"w": torch.ones(2)}, list)["w"].tolist()),
    ("all_reduce", merged),
]


@pytest.mark.parametrize(("collective", "exchange"), EXCHANGES)
def test_a_group_of_one_process_exchanges_as_one_process_and_waits_meanwhile(
    alone,  # noqa: F811
    monkeypatch,
    collective,
    exchange,
):
    """A process that does not say that it waits would be at fault if another one takes long."""
    waits = []

    def noting(name):
        def called(*args):
            waits.append((name, LIFE.sign().waits))
            return getattr(dist, name)(*args)

        return called

    noted = SimpleNamespace(ReduceOp=dist.ReduceOp, get_rank=dist.get_rank, get_world_size=dist.get_world_size)
    for name in ("all_gather_object", "gather_object", "broadcast", "all_reduce"):
        setattr(noted, name, noting(name))
    monkeypatch.setattr(communicators, "dist", noted)
    assert exchange(ProcessCommunicator()) == exchange(Communicator())
    assert (collective, True) in waits
    assert all(waiting for _, waiting in waits)
    assert not LIFE.sign().waits
