"""The registry of log keys: one answer to direction, unit and writer of a value, which all readers ask."""

import ast
import math
import re
import warnings
from pathlib import Path

import pytest
import torchmetrics
from torchmetrics import Metric

import fl_lightning
from fl_lightning import metrics
from fl_lightning.metrics.history import UNPROTECTED
from fl_lightning.metrics.keys import (
    best_of,
    describe,
    direction_of,
    is_accuracy,
    is_loss,
    metric_directions,
    parse_directions,
    unit_of,
)
from fl_lightning.metrics.user_metrics import as_collection

PACKAGE = Path(fl_lightning.__file__).parent


def words(text: str) -> list[str]:
    return text.split()


LOWER = words(
    "Loss/val val_loss_epoch mse/val val/huber val_ce val/ppl val/CrossEntropy valloss val.nll RMSE val_loss_step "
    "val/MeanAbsoluteError val/negative_log_likelihood epoch/val-loss val_wer val/dice_loss f1_loss/val val/kl Error "
    "val/loss/head val_loss/dataloader_idx_1 hospital_3/val_brier_score wer cer val_nll perplexity mape kl error_rate "
    "brier ece hinge fid latency acc_loss f1_loss top1_error per_class_error error_per_class"
)
HIGHER = words(
    "acc/val val_acc_epoch Accuracy/val val/top5_acc valacc val/F1Score val_auroc val/mAP mIoU val/dice R2/val "
    "val/log_likelihood accuracy_val/dataloader_idx_0 val/BLEUScore val_recall val/psnr val/MulticlassAccuracy "
    "valid_auroc val.iou dice ssim bleu r2 mcc kappa val/F1 val_accuracy/dataloader_idx_0 auprc recall@10 ndcg acc@5 "
    "dice_coef MatthewsCorrCoef acc_per_class/cat worst_acc"
)
UNKNOWN = words(
    "val/score val/foo loss_weight val/loss_acc num_errors val/neg_loss loss_scale acc_drop val/std metric x "
    "val/inaccuracy acc_decrease val/accuracy_degradation val/1-acc cost_savings "
    "val_loss_std lr entropy val/inacc unaccuracy backdoor_acc mia_auc acc/loss loss/acc loss_weighted_acc "
    "acc_norm grad_norm loss_norm rounds_to_acc time_to_accuracy target_acc loss_lambda kl_beta attention_map map_size "
    "error_bar dice_complement acc_ci std_acc val_top5 elbo neg_elbo negdice val/acc_mae unprotected_x feature_map_norm"
)


@pytest.mark.parametrize(("keys", "direction"), [(LOWER, "min"), (HIGHER, "max"), (UNKNOWN, None)])
def test_all_parts_of_a_name_tell_the_direction_or_nothing_is_told(keys, direction):
    found = {key: direction_of(key) for key in keys}
    assert found == dict.fromkeys(keys, direction)
    assert all(direction_of(f"{UNPROTECTED}{key}") == direction for key in keys)


def classes_of(module) -> list[type[Metric]]:
    """Metric classes that a module offers, and those of its submodules that it lists."""
    found = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for part in [
            module,
            *(p for p in vars(module).values() if getattr(p, "__name__", "").startswith("torchmetrics.")),
        ]:
            for name in getattr(part, "__all__", dir(part)):
                kind = getattr(part, name, None)
                if isinstance(kind, type) and issubclass(kind, Metric):
                    found[name] = kind
    return list(found.values())


@pytest.mark.parametrize("module", [torchmetrics, metrics])
def test_no_name_of_a_metric_class_contradicts_what_the_class_tells(module):
    """Discovered in torchmetrics and this package; in CamelCase and snake_case, at the end and start of a key."""
    told = [kind for kind in classes_of(module) if isinstance(kind.higher_is_better, bool)]
    assert len(told) > 10
    wrong = []
    for kind in told:
        wanted = "max" if kind.higher_is_better else "min"
        snake = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()
        for key in (f"val/{kind.__name__}", f"{kind.__name__}/val", f"val_{snake}"):
            if direction_of(key) not in (None, wanted):
                wrong.append(key)
    assert wrong == []


def test_a_metric_object_tells_more_than_its_name():
    class Mine(torchmetrics.SumMetric):
        higher_is_better = False

    given = metric_directions({"accuracy": Mine(), "sum": torchmetrics.SumMetric()}, "val")
    assert given == {"val/accuracy": "min"}
    assert direction_of("val/accuracy", given) == "min"
    assert direction_of("val/accuracy/cat", given) == "min"  # a part of a vector
    assert direction_of(f"{UNPROTECTED}val/accuracy", given) == "min"
    assert direction_of("val/accuracy/std", given) is None


def logged_keys() -> set[str]:
    """Keys that the package itself logs, as they stand in calls of `log` and in dicts of values."""
    keys = set()
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name in ("data", "cli", "reports", "papers", "experiments", "flower"):
            continue  # readers, files of data sets
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            texts = []
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("log", "add_to_row", "log_means"):
                texts = node.args[:1]
            if isinstance(node, ast.Dict):
                texts = node.keys
            for text in texts:
                if isinstance(text, ast.Constant) and re.fullmatch(r"[a-z]+/[a-z_/0-9]+", str(text.value)):
                    keys.add(text.value)
    return keys


def test_every_key_that_the_package_logs_is_in_the_registry():
    keys = logged_keys()
    assert {"train/ce", "train/ntd", "cost/steps", "local/alma"} - keys <= {"train/ntd", "cost/steps"}
    assert len(keys) > 15
    assert [key for key in sorted(keys) if not describe(key).is_own] == []


ANSWERS = re.compile(r"endswith\([^)]*[\"'](loss|acc|accuracy|error|mse)|[\"']min[\"'] if |\(min if |reverse=not ")


def test_no_other_file_answers_by_the_name_of_a_key():
    found = []
    for path in PACKAGE.rglob("*.py"):
        if path.name != "keys.py":
            text = path.read_text(encoding="utf-8")
            found += [f"{path.name}: {match[0]}" for match in ANSWERS.finditer(text)]
    assert [answer for answer in found if not answer.startswith("best.py: endswith")] == []


def test_what_is_not_finite_is_never_the_best():
    for direction in ("min", "max"):
        assert best_of([math.nan, 1.0, math.inf, -math.inf], direction) == 1.0
        assert math.isnan(best_of([math.nan, math.inf], direction))


def test_a_metric_of_the_user_cannot_write_a_key_of_the_package():
    for name in ("alma", "acc", "loss", "acc_class", "forgetting", "initial", "personalised", "drift", "hessian"):
        with pytest.raises(ValueError, match=rf"model\.metrics must not be named .*got '{name}'; give it another name"):
            as_collection({name: torchmetrics.SumMetric()})
    assert as_collection({"f1": torchmetrics.SumMetric()}) is not None


def test_directions_that_cannot_be_read_are_refused():
    for text in ("val/a", "val/a=lower", "=min", "val/a=min,val/a=max"):
        with pytest.raises(ValueError, match="--direction must "):
            parse_directions([text])


def test_units_are_those_of_the_values():
    assert unit_of("global/acc", [0.5, 1.0]) == "share"
    assert unit_of("val_acc", [85.3, 2.0]) == unit_of("Accuracy/val", [85.3]) == "percent"
    assert unit_of("val_acc", [0.853]) == unit_of("val_acc", [0.9, math.nan]) == "share"
    assert unit_of("val_loss", [85.3]) == ""
    assert unit_of("comm/bytes_sets") == "bytes"


def test_accuracies_and_losses_are_known_by_every_part():
    keys = ("acc/val", "val_acc_epoch", "global/acc_class/cat", "acc_loss")
    assert list(map(is_accuracy, keys)) == [True, True, False, False]
    assert list(map(is_loss, ("Loss/val", "val_loss_epoch", "global/acc_class/loss"))) == [True, True, False]
