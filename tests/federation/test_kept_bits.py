"""An entry that no client of positive weight has changed keeps its bits. Other integers are averaged exactly."""

from fractions import Fraction
from functools import partial

import pytest
import torch
from torch import nn

from fl_lightning import Aggregator, FaultPolicy, FederatedLoop
from fl_lightning.aggregation import FP16, QSGD, NormClip, PrivateAggregator
from fl_lightning.functional import state as S
from fl_lightning.methods import FedAvg
from fl_lightning.nets import Backbone
from tests.federation.test_evaluated_model import all_classes
from tests.toys import sgd, toy_data, trainer

pytestmark = pytest.mark.filterwarnings("ignore")
LARGE = [2**61 - 1, -(2**61) + 3, 2**53 + 1, 2**63 - 1, -(2**63), 7, 0]
CONSTANTS = [0.1, 1 / 3, -0.0, 1e300, 5e-324, -1.7]


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
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("counter", torch.tensor([2**60, 0]))

    def features(self, x):
        if self.training:
            self.counter += len(x)
        return self.body(x).relu()


KEPT = ("untouched", "large", "narrow", "wide", "single", "short", "flags")


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
}


def bits(value):
    return value.contiguous().view(torch.uint8).tolist() if value.ndim else value.item()


def run(rounds=2, sizes=(8, 12, 0, 5, 9, 6), **settings):
    client = FedAvg(net=Constant, optimizer=sgd(momentum=0.0))
    loop = FederatedLoop(client, seed=3, **settings)
    trainer(rounds).fit(loop, datamodule=toy_data(sizes))
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


def test_what_only_a_client_without_weight_has_changed_is_kept():
    sent = {"n": torch.tensor(LARGE), "x": torch.tensor(CONSTANTS, dtype=torch.float64)}
    changed = {"n": torch.zeros(7, dtype=torch.int64), "x": torch.ones(6, dtype=torch.float64)}
    for weights in ((3, 0, 4), (0.3, 0.0, 0.1), tuple(torch.tensor([3, 0, 4])), tuple(torch.tensor([0.3, 0.0, 0.7]))):
        total = S.StateSum()
        for state, weight in zip((sent, changed, sent), weights, strict=True):
            total.add(state, weight, sent)
        mean = S.mean_of(total, sent)
        assert all(bits(mean[name]) == bits(sent[name]) for name in sent)


def exact(values, weights):
    return round(sum(n * Fraction(value) for value, n in zip(values, weights, strict=True)) / sum(weights))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_integers_are_averaged_exactly_and_rounded_half_to_even(dtype, as_tensor):
    generator = torch.Generator().manual_seed(1)
    info = torch.iinfo(dtype)
    for count in (2, 3, 7):
        rows = torch.randint(info.min, info.max, (count, 50), generator=generator, dtype=dtype)
        rows[0, :3] = torch.tensor([info.max, info.min, 1], dtype=dtype)
        rows[1, :3] = torch.tensor([info.max, info.min, 2], dtype=dtype)
        weights = torch.randint(1, 10**7, (count,), generator=generator).tolist()
        total = S.StateSum()
        parts = [S.StateSum(), S.StateSum()]
        for index, (row, weight) in enumerate(zip(rows, weights, strict=True)):
            total.add({"n": row}, torch.tensor(weight) if as_tensor else weight)
            parts[index % 2].add({"n": row}, float(weight))
        expected = [exact(column, weights) for column in rows.T.tolist()]
        assert S.mean_of(total)["n"].tolist() == expected
        assert S.mean_of(total)["n"].dtype == dtype
        joined = S.StateSum.zeros(total.layout, torch.device("cpu"))
        for part in parts:
            for mine, theirs in zip(joined.vectors(), part.vectors(), strict=True):
                mine.add_(theirs)
        joined.weigh(sum(weights))
        assert S.mean_of(joined)["n"].tolist() == expected


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
