"""Properties over drawn inputs (hypothesis): partitions, aggregation, and the moments at which a run is cut."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, example, given, settings
from hypothesis import strategies as st

from fl_lightning import FederatedLoop
from fl_lightning.aggregation.robust import coordinate_median, geometric_median, krum_scores, trimmed_mean
from fl_lightning.data import (
    ClientDirichletPartition,
    DirichletPartition,
    IIDPartition,
    QuantityPartition,
    ShardPartition,
)
from fl_lightning.data.partitions import PartitionInput
from fl_lightning.functional.state import StateSum, mean_of, weighted_mean
from fl_lightning.methods import FedAvg, FedNTD
from tests.test_resume import HOOKS, SaveIn, assert_same
from tests.toys import BatchNormNet, folded, sgd, toy_data, trainer

QUICK = settings(max_examples=100, deadline=None, derandomize=True)
"""The same examples in every run: a failure is one of the code, not of the day."""

# --- partitions ------------------------------------------------------------------------------------------------------

ALPHAS = st.one_of(st.floats(1e-3, 1e3), st.sampled_from([1e-300, 1e300, float("inf")]))
PARTITIONS = st.one_of(
    st.builds(IIDPartition),
    st.builds(DirichletPartition, ALPHAS, st.integers(0, 3)),
    st.builds(ShardPartition, st.integers(1, 4)),
    st.builds(ClientDirichletPartition, ALPHAS, st.one_of(st.none(), st.integers(1, 9)), st.booleans()),
    st.builds(QuantityPartition, st.integers(1, 3), st.sampled_from(["mean", "class"]), st.booleans()),
)
LABELS = st.integers(1, 5).flatmap(
    lambda c: st.tuples(st.just(c), st.lists(st.integers(0, c - 1), min_size=1, max_size=80))
)


@QUICK
@given(LABELS, PARTITIONS, st.integers(1, 12), st.integers(0, 2**32))
def test_a_partition_deals_every_sample_once_or_refuses(drawn, partition, num_clients, seed):
    num_classes, labels = drawn
    samples = PartitionInput(len(labels), np.array(labels), num_classes)
    error = ""
    try:
        parts = partition(samples, num_clients, np.random.default_rng(seed))
    except ValueError as refusal:
        error = str(refusal)
    if error:
        assert "got " in error or "lower " in error
        assert "\n" not in error
        return
    assert len(parts) == num_clients
    assert all(part.dtype == np.int64 and part.ndim == 1 for part in parts)
    dealt = np.concatenate(parts)
    assert ((dealt >= 0) & (dealt < len(labels))).all()
    assert all(len(set(part.tolist())) == len(part) for part in parts)
    if not getattr(partition, "overlap", False):
        assert len(set(dealt.tolist())) == len(dealt)
    if isinstance(partition, IIDPartition | DirichletPartition | QuantityPartition):
        assert len(dealt) == len(labels)
    if isinstance(partition, IIDPartition):
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    if isinstance(partition, DirichletPartition):
        assert min(map(len, parts)) >= partition.min_samples
    most = getattr(partition, "shards_per_client", getattr(partition, "classes_per_client", num_classes))
    assert all(len(set(samples.labels[part].tolist())) <= most for part in parts)
    again = partition(samples, num_clients, np.random.default_rng(seed))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


# --- aggregation -----------------------------------------------------------------------------------------------------

EXACT = st.integers(-(2**20), 2**20).map(lambda i: i / 2**10)
"""Numbers whose float64 sums with whole weights below 2^16 are exact."""
WEIGHTS = st.integers(0, 2**16 - 1)


def states(rows):
    """A state of two entries for each row."""
    return [{"a": torch.tensor(row[:1]), "b": torch.tensor(row[1:])} for row in rows]


def alike(size=3, min_size=1, max_size=8):
    return st.lists(st.lists(EXACT, min_size=size, max_size=size), min_size=min_size, max_size=max_size)


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@QUICK
@given(alike(), st.data())
def test_a_mean_depends_neither_on_the_order_nor_on_who_adds(rows, data):
    weights = data.draw(st.lists(WEIGHTS, min_size=len(rows), max_size=len(rows)))
    assume(sum(weights))
    order = data.draw(st.permutations(range(len(rows))))
    cut = data.draw(st.integers(0, len(rows)))
    mean = weighted_mean(states(rows), weights)
    assert equal(weighted_mean([states(rows)[i] for i in order], [weights[i] for i in order]), mean)
    sums = [StateSum(), StateSum()]
    for i, state in enumerate(states(rows)):
        sums[i >= cut].add(state, weights[i])
    total = StateSum.zeros(layout_of(states(rows)[0]), torch.device("cpu"))
    for part in sums:
        for dtype, vector in part.flat.items():
            total.flat[dtype].add_(vector)
    exact_weight = sum(part.exact_weight for part in sums)
    total.take_form(total.form._replace(weight=sum(weights), exact_weight=exact_weight))
    assert equal(mean_of(total), mean)


def layout_of(state):
    return {name: (value.shape, value.dtype) for name, value in state.items()}


@QUICK
@given(alike(), st.data())
def test_a_mean_lies_between_and_equal_states_are_their_mean(rows, data):
    weights = data.draw(st.lists(WEIGHTS, min_size=len(rows), max_size=len(rows)))
    assume(sum(weights))
    mean = weighted_mean(states(rows), weights)
    counted = torch.tensor([row for row, weight in zip(rows, weights, strict=True) if weight])
    flat = torch.cat([mean["a"], mean["b"]])
    assert (counted.min(0).values <= flat).all()
    assert (flat <= counted.max(0).values).all()
    assert equal(weighted_mean(states(rows[:1]) * len(rows), weights), states(rows)[0])


@QUICK
@given(alike(min_size=5, max_size=9), st.data())
def test_robust_rules_do_not_depend_on_the_order_and_resist_a_minority(rows, data):
    clean = torch.tensor(rows, dtype=torch.float64)
    m = len(rows)
    f = (len(rows) - 3) // 2
    order = data.draw(st.permutations(range(m)))
    worst = data.draw(st.sampled_from([1e30, -1e30, 0.0]))
    attacked = clean.clone()
    attacked[:f] = worst
    low = clean[f:].min(0).values
    high = clean[f:].max(0).values
    for rule in (coordinate_median, partial(trimmed_mean, trim=f)):
        assert torch.allclose(rule(clean[list(order)]), rule(clean), rtol=1e-12, atol=0)
        center = rule(attacked)
        assert (center >= low - 1e-9).all()
        assert (center <= high + 1e-9).all()
    scores = krum_scores(clean, f)
    assert torch.allclose(krum_scores(clean[list(order)], f), scores[list(order)], rtol=1e-9, atol=1e-6)
    center = geometric_median(clean, torch.ones(m).double(), 20, 1e-6)
    inside = (center >= clean.min(0).values - 1e-9) & (center <= clean.max(0).values + 1e-9)
    assert inside.all()


# --- resume points ---------------------------------------------------------------------------------------------------


def make_loop(drawn):
    method = {"FedAvg": FedAvg, "FedNTD": FedNTD}[drawn["method"]](net=BatchNormNet, optimizer=sgd())
    optimizer = partial(torch.optim.SGD, lr=0.7, momentum=0.9) if drawn["momentum"] else None
    personal = "*head*" if drawn["personal"] else None
    given = {"local_epochs": drawn["local_epochs"], "seed": drawn["seed"], "threads": 1}
    return FederatedLoop(method, server_optimizer=optimizer, personal=personal, **folded(given))


def run(drawn, **more):
    loop = make_loop(drawn)
    found = trainer(drawn["rounds"], callbacks=more.get("callbacks"))
    data = toy_data(participation=drawn["participation"])
    found.fit(loop, datamodule=data, ckpt_path=more.get("ckpt_path"))
    return loop


DRAWN = st.fixed_dictionaries(
    {
        "method": st.sampled_from(["FedAvg", "FedNTD"]),
        "momentum": st.booleans(),
        "personal": st.booleans(),
        "local_epochs": st.sampled_from([1, 2, [1, 0, 2, 1, 3]]),
        "participation": st.sampled_from([0.2, 0.6, 1.0]),
        "rounds": st.integers(2, 4),
        "seed": st.integers(0, 99),
    }
)


def resumes(drawn, hook, at, folder):
    """A run that is continued from a checkpoint of any hook in any round is the run that was not cut."""
    cut = 0 if hook in ("on_fit_start", "on_train_start") else at % drawn["rounds"]
    path = folder / "cut.ckpt"
    path.unlink(missing_ok=True)
    saver = SaveIn(hook, cut, path)
    whole = run(drawn, callbacks=[saver])
    assert saver.done
    resumed = run(drawn, ckpt_path=path)
    if not drawn["momentum"]:
        assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
        assert whole.store.clients == resumed.store.clients
    else:
        assert_same(resumed, whole)
    assert resumed.round_metrics == whole.round_metrics


CUT: dict[str, Any] = {
    "phases": [Phase.explicit, Phase.generate],  # to shrink an example would be to train hundreds of runs
    "suppress_health_check": [HealthCheck.function_scoped_fixture],
    "deadline": None,
    "derandomize": True,
}


@settings(max_examples=8, **CUT)
@given(DRAWN, st.sampled_from(HOOKS), st.integers(0, 3))
def test_a_run_can_be_cut_anywhere(tmp_path, drawn, hook, at):
    resumes(drawn, hook, at, tmp_path)


@pytest.mark.slow
@settings(max_examples=150, **CUT)
@given(DRAWN, st.sampled_from(HOOKS), st.integers(0, 3))
@example({**dict.fromkeys(("momentum", "personal"), True), "method": "FedNTD", "local_epochs": 2, "participation": 0.2,
          "rounds": 4, "seed": 0}, "on_client_end", 3)  # fmt: skip
def test_a_run_can_be_cut_anywhere_often(tmp_path, drawn, hook, at):
    resumes(drawn, hook, at, tmp_path)
