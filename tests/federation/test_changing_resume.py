"""Data that change, and a run that is cut anywhere: in a hook of a round, by a client that fails, in a stack."""

from itertools import product

import pytest
import pytorch_lightning as pl

from fl_lightning.data import ClassIncremental, DomainIncremental, LabelDrift, Scenario, Window
from fl_lightning.methods import SCAFFOLD, FedAvg, FedEWC, FedLwF, Replay
from fl_lightning.nets import Perceptron
from tests.test_resume import SaveIn
from tests.toys import equal, fit, sgd, toy_data, weights_of

SIZES = (14, 9, 12, 11)
METHODS = {
    "FedAvg": (FedAvg, {}),
    "SCAFFOLD": (SCAFFOLD, {}),
    "FedEWC": (FedEWC, {}),
    "FedLwF": (FedLwF, {"classes": "new"}),
    "DER++": (Replay, {"size": 8, "alpha": 0.5}),
}
SCENARIOS = {
    "shuffled": lambda: ClassIncremental([[0], [1], [2]], rounds_per_task=2, order="shuffled", delay=1, blur=0.2),
    "rotated": lambda: DomainIncremental(2, permutations=2),
    "drift": lambda: LabelDrift(alpha=1.0, rounds=4, samples=0.6),
    "window": lambda: Window(per_round=0.2, keep=3, first=0.2),
}


class Rows(pl.Callback):
    """The rows of a run by round."""

    def __init__(self):
        self.rows = {}

    def on_train_epoch_end(self, trainer, loop):
        self.rows[trainer.current_epoch] = str(dict(loop.round_metrics))


def run(method, scenario, rounds=5, callbacks=(), ckpt_path=None, data=None, **settings):
    kind, own = METHODS[method]
    watch = Rows()
    loop = fit(
        kind(net=Perceptron, optimizer=sgd(), **own),
        rounds,
        data or toy_data(SIZES, scenario=SCENARIOS[scenario](), cohort_size=3),
        callbacks=[watch, *callbacks],
        ckpt_path=ckpt_path,
        evaluate_clients_every=1,
        **settings,
    )
    return loop, watch.rows


def records_of(loop):
    return str([loop.store.record(client)[0] for client in loop.store.clients])


def test_a_run_that_is_cut_in_its_first_round_has_measured_the_first_model(tmp_path):
    whole, _ = run("FedEWC", "rotated", 3, callbacks=[SaveIn("on_client_end", 0, tmp_path / "first.ckpt")])
    continued, _ = run("FedEWC", "rotated", 3, ckpt_path=tmp_path / "first.ckpt")
    assert continued._run.tasks.state_dict() == whole._run.tasks.state_dict()


HOOKS = ("on_client_end", "on_train_batch_end", "on_validation_end", "on_train_epoch_end")


def combinations():
    """Each method with each scenario, one by one and in stacks; one of them is fast."""
    for method, scenario, chunk in product(METHODS, SCENARIOS, (1, 3)):
        is_fast = (method, scenario, chunk) == ("DER++", "window", 3)
        yield pytest.param(method, scenario, chunk, marks=() if is_fast else pytest.mark.slow)


@pytest.mark.parametrize(("method", "scenario", "chunk"), list(combinations()))
def test_a_run_is_continued_from_every_hook_of_a_round(method, scenario, chunk, tmp_path):
    """In round 2, in which a stage begins."""
    paths = {hook: tmp_path / f"{hook}.ckpt" for hook in HOOKS}
    saves = [SaveIn(hook, 2, path) for hook, path in paths.items()]
    whole, rows = run(method, scenario, callbacks=saves, chunk=chunk)
    for hook, path in paths.items():
        continued, rest = run(method, scenario, ckpt_path=path, chunk=chunk)
        assert equal(weights_of(continued), weights_of(whole)), hook
        assert rest == {round_idx: rows[round_idx] for round_idx in rest}, hook
        assert 4 in rest
        assert records_of(continued) == records_of(whole), hook
        if whole._run.tasks is not None:
            assert continued._run.tasks.state_dict() == whole._run.tasks.state_dict(), hook


def failing(kind):
    """A client of that kind, which fails in round 2 as client 1, after it was trained."""

    def reply(self, exchange, local):
        extras = kind.reply(self, exchange, local)
        if (local.client_id, local.round_idx) == (1, 2):
            raise ValueError("broken")
        return extras

    return type(kind.__name__, (kind,), {"reply": reply, "stackable": False})


@pytest.mark.parametrize("method", METHODS)
def test_a_client_that_fails_in_a_new_stage_is_as_one_that_was_not_drawn(method, monkeypatch):
    everyone = [0, 1, 2]

    def data(third):
        schedule = [everyone, everyone, third, everyone, everyone]
        tasks = ClassIncremental([[0], [1], [2]], rounds_per_task=2, order="shuffled")
        return toy_data(SIZES, scenario=tasks, schedule=schedule)

    absent, rows = run(method, None, data=data([0, 2]))
    kind, own = METHODS[method]
    monkeypatch.setitem(METHODS, method, (failing(kind), own))
    skipped, found = run(method, None, data=data(everyone), on_error="skip")
    assert equal(weights_of(skipped), weights_of(absent))
    assert records_of(skipped) == records_of(absent)
    assert skipped._run.tasks.state_dict() == absent._run.tasks.state_dict()
    assert found.keys() == rows.keys()


class Absent(Scenario):
    """Client 1 has no samples in rounds 2 and 3."""

    def stage(self, client_id, round_idx):
        return min(round_idx, 4) // 2

    def keeps(self, client_id, stage):
        return [False] * SIZES[1] if (client_id, stage) == (1, 1) else None


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("chunk", [1, 4])
def test_a_client_without_samples_is_as_one_that_was_not_drawn(method, chunk):
    def ends(second):
        schedule = [[0, 1, 2], [0, 1, 2], second, second, [0, 1, 2], [0, 1, 2]]
        loop, _ = run(method, None, 6, data=toy_data(SIZES, scenario=Absent(), schedule=schedule), chunk=chunk)
        return loop

    there = ends([0, 1, 2])
    absent = ends([0, 2])
    assert equal(weights_of(there), weights_of(absent))
    assert records_of(there) == records_of(absent)
