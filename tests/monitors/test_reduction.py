"""SampleReduction: FedKA's study of what a client forgets as it loses the samples of a class."""

import csv

import pytest

from fl_lightning import FederatedLoop
from fl_lightning.methods import FedAvg
from fl_lightning.monitors import ForgettingMonitor, SampleReduction
from tests.callbacks import toy
from tests.toys import BatchNormNet, equal, sgd, toy_data, trainer, weights_of

SIZES = (40, 15)


def run(study, rounds=6, ckpt_path=None, callbacks=()):
    loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), seed=3)
    trainer(rounds, callbacks=[study, *callbacks]).fit(loop, datamodule=toy_data(SIZES), ckpt_path=ckpt_path)
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
    assert loop.data.label_counts[0, 0] == max(n - 20, 2)
    assert loop.data.label_counts[1].tolist() == dealt.label_counts[1].tolist()
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


def test_settings_out_of_range_are_refused():
    with pytest.raises(ValueError, match="step must be above 0"):
        SampleReduction(class_idx=0, step=0)
    with pytest.raises(ValueError, match=r"class_idx must lie in \[0, 3\), got 7"):
        run(SampleReduction(class_idx=7))
