"""An entry that no client of positive weight has changed keeps its bits. Other integers are averaged exactly."""

import math
from fractions import Fraction
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
from torch import nn

from fl_lightning import Aggregator, FaultPolicy, FederatedLoop
from fl_lightning.aggregation import FP16, QSGD, NormClip, PrivateAggregator
from fl_lightning.distributed.communicator import joined
from fl_lightning.functional import state as S
from fl_lightning.methods import FedAvg
from fl_lightning.nets import Backbone
from tests.federation.test_evaluated_model import all_classes
from tests.processes.forked import run_script
from tests.test_contract import NAMES, cohorts_of, data_of, settings_of, some
from tests.toys import sgd, toy_data, trainer

pytestmark = pytest.mark.filterwarnings("ignore")
LARGE = [2**61 - 1, -(2**61) + 3, 2**53 + 1, 2**63 - 1, -(2**63), 7, 0]
CONSTANTS = [0.1, 1 / 3, -0.0, 1e300, 5e-324, -1.7]


INTEGERS = [getattr(torch, name) for name in ("int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")]


def name_of(dtype):
    return str(dtype).removeprefix("torch.")


class Constant(Backbone):
    """A net with entries that nobody changes, and an integer that every client changes."""

    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.body = nn.Linear(4, 5)
        self.head = nn.Linear(5, num_classes)
        self.untouched = nn.Parameter(torch.tensor([0.1, 1 / 3, -0.0, -1.7], dtype=torch.float64))
        self.register_buffer("large", torch.tensor(LARGE))
        self.register_buffer("narrow", torch.tensor([2**31 - 1, -(2**31), 5], dtype=torch.int32))
        self.register_buffer("wide", torch.tensor(CONSTANTS, dtype=torch.float64))
        self.register_buffer("single", torch.tensor([0.1, -0.0, 1e-45, 3e38]))
        self.register_buffer("short", torch.tensor([0.1, -0.0], dtype=torch.bfloat16))
        for dtype in INTEGERS[2:]:
            info = torch.iinfo(dtype)
            self.register_buffer(name_of(dtype), torch.tensor([info.max, info.min, 1], dtype=dtype))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("counter", torch.tensor([2**60, 0]))

    def features(self, x):
        if self.training:
            self.counter += len(x)
        return self.body(x).relu()


class OneType(Constant):
    """Trains parameters of one type only, as some methods need."""

    def __init__(self, num_classes, input_shape):
        super().__init__(num_classes, input_shape)
        self.untouched = nn.Parameter(self.untouched.detach().float())

    def reset_parameters(self):
        """Draw nothing, for methods with several models."""


KEPT = ("untouched", "large", "narrow", "wide", "single", "short", "flags", *map(name_of, INTEGERS[2:]))


class Fractional(Aggregator):
    """Weighs clients by numbers that are no integers."""

    def weight(self, update):
        return super().weight(update) ** 0.5 / 3


class OnDevice(Aggregator):
    """Weighs clients by tensors."""

    def weight(self, update):
        return torch.tensor(float(super().weight(update))) / 7


def rules():
    """Every rule of the package that makes a mean, found by its class, and some of a user's."""
    found = {"Fractional": Fractional, "OnDevice": OnDevice, "uniform": partial(Aggregator, weighting="uniform")}
    for kind in all_classes(Aggregator):
        if not issubclass(kind, PrivateAggregator):  # its noise must reach every float that is released
            found[kind.__name__] = kind
    return found


RULES = rules()
SETTINGS = {
    "chunk": {"chunk": 3},
    "skip": {"faults": FaultPolicy(nonfinite="skip")},
    "transform": {"transforms": [NormClip(0.1)]},
    "codec": {"codec": FP16()},
    "down": {"codec": QSGD(bits=8, down=True)},
    "personal": {"personal": ["net.*", "!net.body.*"]},
    "server optimizer": {"server_optimizer": partial(torch.optim.Adam, lr=0.1)},
}


def bits(value):
    return value.contiguous().view(torch.uint8).tolist() if value.ndim else value.item()


SIZES = (8, 12, 0, 5, 9, 6)


def loop_of(**settings):
    return FederatedLoop(FedAvg(net=Constant, optimizer=sgd(momentum=0.0)), seed=3, **settings)


def run(rounds=2, sizes=SIZES, processes=1, **settings):
    loop = loop_of(**settings)
    several = {"strategy": "client_parallel_fork", "devices": processes} if processes > 1 else {}
    trainer(rounds, **several).fit(loop, datamodule=toy_data(sizes))
    return loop


def check_kept(loop, names=KEPT):
    fresh = Constant(3, (4,))
    for name in names:
        assert bits(getattr(loop.client.net, name).detach()) == bits(getattr(fresh, name).detach()), name


@pytest.mark.parametrize("name", RULES)
def test_every_rule_keeps_what_nobody_has_changed(name):
    check_kept(run(aggregator=RULES[name]()))


@pytest.mark.parametrize("name", SETTINGS)
def test_so_does_every_way_to_the_server(name):
    # A codec sends what is trained, and may lose some of it.
    names = [kept for kept in KEPT if kept != "untouched"] if name == "codec" else KEPT
    check_kept(run(**SETTINGS[name]), names)


@pytest.mark.parametrize("name", some(NAMES))
def test_so_does_every_method(name):
    """The buffers, because a method's own loss may train all parameters, and noise of privacy reaches all floats."""
    if name == "FedAlign":
        pytest.skip("needs a net that says what its last block is")
    loop = FederatedLoop(**settings_of(name, net=OneType, optimizer=sgd(momentum=0.0)), seed=3)
    trainer(2).fit(loop, datamodule=data_of(**cohorts_of(name)))
    names = [kept for kept in KEPT if kept != "untouched"]
    if loop.aggregator.is_private:
        names = [kept for kept in names if not getattr(loop.client.net, kept).is_floating_point()]
    check_kept(loop, names)


def test_what_only_a_client_without_weight_has_changed_is_kept():
    sent = {"n": torch.tensor(LARGE), "x": torch.tensor(CONSTANTS, dtype=torch.float64)}
    changed = {"n": torch.zeros(7, dtype=torch.int64), "x": torch.ones(6, dtype=torch.float64)}
    for weights in ((3, 0, 4), (0.3, 0.0, 0.1), tuple(torch.tensor([3, 0, 4])), tuple(torch.tensor([0.3, 0.0, 0.7]))):
        total = S.StateSum()
        for state, weight in zip((sent, changed, sent), weights, strict=True):
            total.add(state, weight, sent)
        mean = S.mean_of(total, sent)
        assert all(bits(mean[name]) == bits(sent[name]) for name in sent)


FRACTIONS = [0.1, 1 / 3, 0.25, 2.0, 1e-12, 1e9 + 0.5, 0.7, 5e-324, 3.0, 2.5**40]


def exact(values, weights):
    total = sum(Fraction(weight) for weight in weights)
    return round(sum(Fraction(n) * value for value, n in zip(values, weights, strict=True)) / total)


def some_rows(dtype, count):
    """Return rows of numbers of a type, with its ends and with small ones, whose means are often halves."""
    info = torch.iinfo(dtype)
    random = Random(count)
    rows = []
    for index in range(count):
        row = [info.max, info.min, index % 2, 3 + index % 2, random.randint(0, 3), info.max - index]
        row += [random.randint(info.min, info.max) for _ in range(20)]
        rows.append(row)
    return rows


def weights_of_kind(kind, count):
    if kind == "fractions":
        return [FRACTIONS[index % len(FRACTIONS)] for index in range(count)]
    if kind == "halves":
        return [0.5] * count
    if kind == "ones":
        return [1] * count
    if kind == "some integers":
        return [3, 0.5, 0, 2.5][:count] + [7] * (count - 4)
    return [Random(index).randint(1, 10**7) for index in range(count)]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("kind", ["integers", "ones", "fractions", "halves", "some integers"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_integers_are_averaged_exactly_and_rounded_half_to_even(dtype, kind, as_tensor):
    for count in (2, 3, 7):
        rows = some_rows(dtype, count)
        weights = weights_of_kind(kind, count)
        expected = [exact(column, weights) for column in zip(*rows, strict=True)]
        total = S.StateSum()
        parts = [S.StateSum(), S.StateSum()]
        for index, (row, weight) in enumerate(zip(rows, weights, strict=True)):
            state = {"n": torch.tensor(row, dtype=dtype)}
            total.add(state, torch.tensor(weight, dtype=torch.float64) if as_tensor else weight)
            parts[index % 2].add(state, weight)
        assert S.mean_of(total)["n"].tolist() == expected
        assert S.mean_of(total)["n"].dtype == dtype
        assert S.mean_of(added_over_processes(parts))["n"].tolist() == expected


def added_over_processes(parts):
    """Add sums up as processes do, of which one has no client."""
    form = parts[0].form
    for part in parts[1:]:
        form = joined("sum", form, part.form)
    total = S.StateSum.zeros(form.layout, torch.device("cpu"))
    for part in (total, *parts):
        part.take_form(form)
    for part in parts:
        for mine, theirs in zip(total.vectors(), part.vectors(), strict=True):
            mine.add_(theirs)
        for mine, theirs in zip(total.flags(), part.flags(), strict=True):
            mine.copy_(torch.maximum(mine, theirs))
    return total


def test_integer_weights_on_a_device_go_with_fractions():
    total = S.StateSum()
    for value, weight in ((2**62, torch.tensor(3)), (1, 0.1), (-7, torch.tensor(0)), (2**40, torch.tensor(0.3))):
        total.add({"n": torch.tensor([value])}, weight)
    weights = (3, 0.1, 0, float(torch.tensor(0.3)))
    assert S.mean_of(total)["n"].item() == exact((2**62, 1, -7, 2**40), weights)


def test_sums_of_many_clients_are_exact():
    total = S.StateSum()
    count = S.MOST_ADDED + 3
    weight = 2.0**32 - 2.0**-20
    for index in range(count):
        total.add(
            {"n": torch.tensor([2**63 - 1, -(2**63), index]), "b": torch.tensor([255], dtype=torch.uint8)}, weight
        )
    found = S.mean_of(total)
    assert found["n"].tolist() == [2**63 - 1, -(2**63), exact([*range(count)], [weight] * count)]
    assert found["b"].item() == 255


@pytest.mark.parametrize("weights", [(0.1, 0.2, 0.3), (1e-30, 1.0, 1.0), (3, 0, 4), (0.1, 0.0, 0.7)])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_equal_flags_stay_and_one_that_differs_is_named(weights, as_tensor):
    given = [torch.tensor(weight, dtype=torch.float64) for weight in weights] if as_tensor else weights
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        parts = [S.StateSum() for _ in order]
        for part, index in zip(parts, order, strict=True):
            part.add({"b": torch.tensor([True, False])}, given[index])
        assert S.mean_of(added_over_processes(parts))["b"].tolist() == [True, False]
    for other in range(3):
        total = S.StateSum()
        for index, weight in enumerate(given):
            total.add({"b": torch.tensor([index == other])}, weight)
        if weights[other]:
            with pytest.raises(ValueError, match="boolean entry 'b' differs"):
                S.mean_of(total)
        else:
            assert not S.mean_of(total)["b"].item()


def test_a_weight_that_is_not_finite_is_left_to_the_guard():
    """tests/members/test_faults.py: the guard names the client and the round."""
    total = S.StateSum()
    total.add({"n": torch.tensor([1])}, float("nan"))
    assert math.isnan(total.weight)


def test_a_counter_beyond_2_to_53_is_the_exact_mean_of_a_round():
    class Watch(Aggregator):
        def add(self, update):
            super().add(update)
            self.seen.append((update.num_samples, update.weights["net.counter"][0].item()))

    rule = Watch()
    rule.seen = []
    loop = run(rounds=1, aggregator=rule)
    sizes, values = zip(*rule.seen, strict=True)
    assert len(set(values)) > 1
    assert loop.client.net.counter[0].item() == exact(values, sizes)


@pytest.mark.slow
def test_two_processes_keep_the_same_and_are_as_exact(tmp_path):
    done = run_script(Path(__file__).parents[1] / "processes" / "kept.py", cwd=tmp_path, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("kept") == 5


@pytest.mark.parametrize("rule", [Aggregator, Fractional, OnDevice])
def test_nodes_send_the_same_bits(rule, tmp_path):
    pytest.importorskip("flwr", reason="pip install 'fl_lightning[flower]'")
    from tests.flower.grid import federate

    sizes = (7, 12, 5)
    server, _, _ = federate(lambda: loop_of(aggregator=rule()), lambda: toy_data(sizes), tmp_path, rounds=2)
    check_kept(server)
    assert torch.equal(server.client.net.counter, run(sizes=sizes, aggregator=rule()).client.net.counter)
