"""Laws of every metric class: parts of the data merge, states are saved, collections and wrappers name the values."""

import copy
import json
import pickle
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torchmetrics import ClasswiseWrapper, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassRecall

from fl_lightning import metrics as M
from tests.metrics.streams import COUNTS, STREAMS, C, N, answers, by_client, fed, of_model, plain

REST = {"FederatedMetric"}


def same(found, expected, tolerance=1e-12):
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            same(found[name], expected[name], tolerance)
    else:
        found, expected = (torch.as_tensor(value, dtype=torch.float64) for value in (found, expected))
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def test_every_metric_has_a_stream():
    assert set(M.__all__) - REST == STREAMS.keys()


@pytest.mark.parametrize("name", STREAMS)
class TestEach:
    def test_parts_merge_to_the_whole(self, name):
        first = fed(name, slice(0, None, 2))
        second = fed(name, slice(1, None, 2))
        first.merge_state(second)
        same(first.compute(), fed(name).compute())

    def test_forward_gives_the_batch_and_keeps_the_whole(self, name):
        make, stream = STREAMS[name]
        metric = make()
        batches = stream()
        for batch in batches:
            value = metric(**batch)
        same(value, fed(name, slice(-1, None)).compute())
        same(metric.compute(), fed(name).compute())

    def test_reset_forgets_everything(self, name):
        metric = fed(name)
        metric.reset()
        for batch in STREAMS[name][1]():
            metric.update(**batch)
        same(metric.compute(), fed(name).compute())

    def test_states_are_saved_pickled_and_copied(self, name):
        metric = fed(name)
        other = STREAMS[name][0]()
        for each in (metric, other):
            each.persistent(True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it was not updated itself
            other.load_state_dict(copy.deepcopy(metric.state_dict()))
            same(other.compute(), fed(name).compute())
        for twin in (pickle.loads(pickle.dumps(metric)), metric.clone()):
            same(twin.compute(), fed(name).compute())

    def test_half_types_of_a_module_do_not_reach_the_states(self, name):
        metric = torch.nn.ModuleList([fed(name)]).half()[0]
        same(metric.compute(), fed(name).compute())

    def test_it_is_drawn(self, name):
        metric = fed(name)
        for value in (None, [metric.compute(), metric.compute()]):
            figure, axes = metric.plot(value)
            assert axes is not None
            close(figure)


def close(figure):
    import matplotlib.pyplot as plt

    plt.close(figure)


@pytest.mark.slow
def test_two_processes_give_the_values_of_one(tmp_path):
    file = tmp_path / "found.json"
    script = Path(__file__).with_name("streams.py")
    done = subprocess.run([sys.executable, script, file], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    for found in json.loads(file.read_text()).values():
        for name in STREAMS:
            same(found[name], plain(fed(name).compute()))


def test_scores_and_classes_of_any_shape_are_the_same_answers():
    scores, target = answers(0)
    by_scores, by_class, by_pixel = (M.ClasswiseAccuracy(C) for _ in range(3))
    by_scores.update(scores, target)
    by_class.update(scores.argmax(1), target)
    by_pixel.update(scores.T.reshape(1, C, 3, 4), target.view(1, 3, 4))
    same(by_class.compute(), by_scores.compute())
    same(by_pixel.compute(), by_scores.compute())
    with pytest.raises(ValueError, match="preds must be scores"):
        by_scores.update(scores.round().long(), target)


def test_class_wise_accuracy_agrees_with_torchmetrics_and_scikit_learn():
    from sklearn.metrics import accuracy_score, log_loss, recall_score

    scores, target = (torch.cat(parts) for parts in zip(*(answers(seed) for seed in range(4)), strict=True))
    ours = fed("ClasswiseAccuracy").compute()
    there = [0, 1, 2]
    assert ours[3].isnan()
    for theirs in (MulticlassAccuracy(C, average=None), MulticlassRecall(C, average=None)):
        same(ours[there], theirs(scores, target)[there], 1e-6)
    same(ours[there], recall_score(target, scores.argmax(1), labels=there, average=None))
    *_, accuracy, loss = fed("ClassifierScores").compute()
    same(accuracy, accuracy_score(target, scores.argmax(1)))
    same(loss, log_loss(target, scores.softmax(1), labels=range(C)), 1e-9)


def test_alma_agrees_with_torchmetrics_per_client():
    batches = by_client()
    own = []
    for client_id in range(3):
        accuracy = MulticlassAccuracy(C, average="micro")
        for batch in batches:
            if batch["client_id"] == client_id:
                accuracy.update(batch["preds"], batch["target"])
        own.append(float(accuracy.compute()))
    same(fed("ClientAccuracy").compute(), [*own, float("nan"), float("nan")], 1e-6)
    same(fed("ALMA").compute(), sum(own) / 3, 1e-6)
    same(fed("ClientFairness").compute(), {"std": torch.tensor(own).std(), "worst": min(own)}, 1e-6)


def test_a_collection_shares_states_and_names_the_values():
    both = MetricCollection(
        {"A": M.ClasswiseAccuracy(C), "in": M.InLocalAccuracy(COUNTS[0]), "groups": M.ClassGroupAccuracy(COUNTS[0])}
    )
    over_time = MetricCollection([M.Forgetting(C), M.ClasswiseAccuracy(C), M.PredictionConsistency(C)])
    for i, batch in enumerate(of_model()):
        both.update(**batch)
        over_time.update(**batch, round_idx=i // 2)
    assert len(both.compute_groups) == 1
    found = both.compute()
    assert found.keys() == {"A", "in", "missing", "non_dominant", "dominant"}
    same(found["A"], fed("ClasswiseAccuracy").compute())
    assert len(over_time.compute_groups) == 2
    same(over_time.compute()["Forgetting"], fed("Forgetting").compute())
    assert over_time.clone(prefix="val_").compute().keys() == {
        "val_Forgetting",
        "val_ClasswiseAccuracy",
        "val_PredictionConsistency",
    }


def test_settings_that_change_a_state_are_never_merged_in_a_collection():
    targets = MetricCollection({"early": M.RoundsToTarget(0.05), "late": M.RoundsToTarget(0.65)})
    norms = MetricCollection({"l1": M.WeightDivergence(), "l2": M.WeightDivergence(order=2)})
    for i, value in enumerate([0.1, 0.6, 0.4, 0.7]):
        targets.update(value, i)
        state = {"w": F.pad(torch.tensor([2.0]), (0, i), value=1.0)}  # at first one entry: L1 and L2 are the same
        norms.update(state, {"w": torch.zeros_like(state["w"])})
    assert plain(targets.compute()) == {"early": 1, "late": 4}
    found = norms.compute()
    assert found["l1"] == 3.5
    assert found["l2"] < 3


def test_the_classwise_wrapper_names_the_classes():
    names = ["cat", "dog", "owl", "fox"]
    wrapped = ClasswiseWrapper(M.ClasswiseAccuracy(C), labels=names, prefix="acc_class/")
    for batch in of_model():
        wrapped.update(**batch)
    assert list(wrapped.compute()) == [f"acc_class/{name}" for name in names]


def test_undefined_values_are_nan():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, (make, _) in STREAMS.items():
            value = make().compute()
            for part in value.values() if isinstance(value, dict) else [value]:
                assert part.isnan().all() or name == "CommunicationCost", name


def test_tau_is_kept_or_masked_where_the_received_model_knows_nothing():
    target = torch.tensor([0, 1])
    wrong = torch.tensor([1, 1])
    for keep in (False, True):
        metric = M.ForgettingDegree(2, keep_invalid=keep)
        metric.update(wrong, target, target)
        first, second = metric.compute()
        assert second == 0
        assert first == -1e8 if keep else first.isnan()
    mean = M.ForgettingDegree(2, average="macro")
    mean.update(wrong, target, target)
    assert mean.compute() == 0


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: M.ClasswiseAccuracy(0), "num_classes must be at least 1, got 0"),
        (lambda: M.ClientFairness(N, worst_share=0), "worst_share must be above 0"),
        (lambda: M.SpeedUp(0.5, baseline_rounds=0), "baseline_rounds must be at least 1"),
        (lambda: M.WeightDivergence(order=0.5), "order must be at least 1"),
        (lambda: M.PredictionConsistency(C, reduction="sum"), "reduction must be one of last, mean, none"),
        (lambda: M.ForgettingDegree(C, average="micro"), "average must be one of none, macro"),
    ],
)
def test_settings_out_of_range_are_refused(make, said):
    with pytest.raises(ValueError, match=said):
        make()


def test_they_work_in_a_plain_lightning_module():
    import pytorch_lightning as pl

    from tests.toys import samples, trainer

    class Plain(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 3)
            self.forgetting = M.Forgetting(3)
            self.scores = MetricCollection(
                {"A": ClasswiseWrapper(M.ClasswiseAccuracy(3)), "acc": MulticlassAccuracy(3)}
            )

        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def validation_step(self, batch, batch_idx):
            logits = self.net(batch[0])
            self.scores.update(logits, batch[1])
            self.forgetting.update(logits, batch[1], self.current_epoch)

        def on_validation_epoch_end(self):
            self.log_dict(self.scores.compute())
            self.scores.reset()
            self.log("F", self.forgetting.compute())

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*samples(40)), batch_size=8)
    module = Plain()
    run = trainer(3)
    run.fit(module, data, data)
    assert isinstance(module.forgetting, Metric)
    assert len(module.forgetting.table()) == 3
    assert {"F", "acc", "classwiseaccuracy_0"} <= run.callback_metrics.keys()


def test_a_value_before_the_first_round_reaches_the_target_in_no_round():
    metric = M.SpeedUp(0.5, baseline_rounds=6)
    metric.update(0.9, round_idx=-1)
    assert metric.rounds() is None
    assert torch.isnan(metric.compute())
    metric.update(0.6, round_idx=2)
    assert metric.rounds() == 3
    assert float(metric.compute()) == 2
