"""SampleReduction: FedKA's study of what a client forgets as it loses the samples of a class."""

import csv

import pytest

from fl_lightning import FederatedLoop
from fl_lightning.data import RemoveSamples, Window
from fl_lightning.methods import FedAvg
from fl_lightning.monitors import ClassCount, ForgettingMonitor, SampleReduction
from tests.callbacks import toy
from tests.toys import BatchNormNet, equal, sgd, toy_data, trainer, weights_of

SIZES = (40, 15)


def run(study, rounds=6, ckpt_path=None, callbacks=(), data=None):
    loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), seed=3)
    fitted = trainer(rounds, callbacks=[study, *callbacks])
    fitted.fit(loop, datamodule=data or toy_data(SIZES), ckpt_path=ckpt_path)
    return loop


def test_a_dominant_class_shrinks_by_shares_to_the_last_one(tmp_path):
    loop = run(
        SampleReduction(class_idx=0, start=1, every=2, step=0.1, until=0.05),
        rounds=10,
        callbacks=[ForgettingMonitor(dirpath=tmp_path, clients=[0])],
    )
    dealt = toy_data(SIZES)
    dealt.setup("fit")
    n = int(dealt.label_counts[0, 0])
    curve = loop.recorder.history.curve("data/class_count")
    assert list(curve.values()) == [max(n - 4 * k, 2) for k in (0, 1, 1, 2, 2, 3, 3, 4, 4, 5)]
    last = [loop.data.view(client_id, 9).label_counts.tolist() for client_id in (0, 1)]
    assert last[0][0] == max(n - 20, 2)
    assert last[1] == dealt.label_counts[1].tolist()
    with (tmp_path / "client_classwise.csv").open(newline="") as file:
        assert {row["client"] for row in csv.DictReader(file)} == {"0"}


def test_a_rare_class_is_cut_to_counts():
    curve = run(SampleReduction(class_idx=1, start=2, every=1, counts=[3, 1, 0])).recorder.history
    assert list(curve.curve("data/class_count").values())[2:] == [3, 1, 0, 0]


def test_a_run_goes_on_as_the_whole_one(tmp_path):
    def study():
        return SampleReduction(class_idx=1, start=1, every=2, counts=[4, 0])

    whole = run(study())
    run(study(), callbacks=[toy.At(2, lambda t: t.save_checkpoint(tmp_path / "at.ckpt"))])
    again = run(study(), ckpt_path=tmp_path / "at.ckpt")
    assert equal(weights_of(again), weights_of(whole))
    assert again.round_metrics == whole.round_metrics
    assert not equal(weights_of(run(SampleReduction(class_idx=1))), weights_of(whole))


def test_it_is_the_scenario_and_says_once_what_to_type():
    arguments = {"class_idx": 1, "client": 0, "start": 1, "every": 2, "counts": [4, 0]}
    with pytest.warns(FutureWarning) as warned:
        front = run(SampleReduction(**arguments))
    (said,) = [str(warning.message) for warning in warned if "RemoveSamples" in str(warning.message)]
    written = "{class_idx: 1, client: 0, start: 1, every: 2, counts: [4, 0]}"
    assert f"data.scenario to {{class_path: fl_lightning.data.RemoveSamples, init_args: {written}}}" in said
    data = toy_data(SIZES, scenario=RemoveSamples(**arguments))
    scenario = run(ClassCount(class_idx=1), data=data)
    assert equal(weights_of(front), weights_of(scenario))
    assert front.round_metrics == scenario.round_metrics
    assert front.round_metrics["data/class_count"] == 0


def test_data_are_taken_from_by_one_of_them():
    study = SampleReduction(class_idx=1)
    with pytest.raises(ValueError, match=r"SampleReduction takes .* and data\.scenario=Window says which"):
        run(study, data=toy_data(SIZES, scenario=Window(per_round=0.1)))
    held = toy_data(SIZES)
    held.setup("fit")
    held.set_class_count(1, 1, 2)
    with pytest.raises(ValueError, match="set_class_count has held some back"):
        run(study, data=held)
    again = toy_data(SIZES)
    first = run(SampleReduction(class_idx=1, start=0, counts=[2]), data=again, rounds=1)
    second = run(SampleReduction(class_idx=1, start=0, counts=[0]), data=again, rounds=1)
    found = [loop.recorder.history.curve("data/class_count")[0] for loop in (first, second)]
    assert found == [2, 0]


def test_a_client_or_class_that_does_not_exist_is_not_counted():
    with pytest.raises(ValueError, match=r"client must lie in \[0, 2\), got 2"):
        run(ClassCount(class_idx=0, client=2))
    with pytest.raises(ValueError, match=r"class_idx must lie in \[0, 3\), got 3"):
        run(ClassCount(class_idx=3))


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match="step must be above 0"):
        SampleReduction(class_idx=0, step=0)
    with pytest.raises(ValueError, match=r"class_idx must lie in \[0, 3\), got 7"):
        run(SampleReduction(class_idx=7))
