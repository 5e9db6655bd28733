"""The golden cases of what the papers measure, through the metric classes."""

import math
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from fl_lightning import metrics as M
from tests.golden import golden
from tests.golden.adapters_fn import float64

CASES = [case for file in (Path(golden.__file__).parent).glob("*.json") for case in golden.load(file)]


def answers(accuracy):
    """Predicted classes and targets with exactly these class-wise accuracies; a class that is NaN has no samples."""
    preds = []
    target = []
    for c, value in enumerate(accuracy.tolist()):
        if not math.isnan(value):
            share = Fraction(value).limit_denominator(10_000)
            preds += [c] * share.numerator + [(c + 1) % len(accuracy)] * (share.denominator - share.numerator)
            target += [c] * share.denominator
    return torch.tensor(preds), torch.tensor(target)


def updated(metric, *batches):
    for batch in batches:
        metric.update(*batch)
    return metric.compute()


def of_model(metric, accuracy):
    return updated(metric, answers(accuracy))


def over_rounds(metric, inputs):
    return {"value": updated(metric, *((*answers(row), t) for t, row in enumerate(float64(inputs["A"]))))}


def degree(inputs):
    """The accuracies have four digits: 10,000 samples of each class serve both models."""
    hits = [(10_000 * float64(inputs[name])).round().long() for name in ("acc_global", "acc_local")]
    classes = len(hits[0])
    at = torch.arange(10_000)
    target = torch.arange(classes)[:, None].expand(-1, 10_000)
    preds = [torch.where(at < count[:, None], target, (target + 1) % classes) for count in hits]
    return {"value": updated(M.ForgettingDegree(classes, xi=inputs["xi"], keep_invalid=True), (*preds, target))}


def in_out_local(inputs):
    accuracy = float64(inputs["class_accuracy"])
    counts = torch.tensor(inputs["counts"])
    return {
        "in_acc": of_model(M.InLocalAccuracy(counts), accuracy),
        "out_acc": of_model(M.OutLocalAccuracy(counts), accuracy),
    }


def to_target(inputs):
    points = [(value, t) for t, value in enumerate(inputs["curve"])]
    return {
        "rounds": updated(M.RoundsToTarget(inputs["target"]), *points),
        "speedup": updated(M.SpeedUp(inputs["target"], inputs["baseline_rounds"]), *points),
    }


def classwise(inputs):
    batch = torch.tensor(inputs["preds"]), torch.tensor(inputs["targets"])
    return {"value": updated(M.ClasswiseAccuracy(inputs["num_classes"]), batch)}


def diversity(inputs):
    gradients = float64(inputs["gradients"])
    value = updated(M.GradientDiversity(gradients.shape[1]), *gradients.split(1))
    return {"value": None if value.isinf() else value}


def alignment(inputs):
    first = float64(inputs["act1"])
    second = float64(inputs["act2"])
    metric = M.WeightAlignment(inputs["num_classes"], first.shape[1])
    return {"value": updated(metric, (first, second, torch.tensor(inputs["targets"])))}


def divergence(inputs):
    states = [{"w": float64(inputs[name])} for name in ("w", "w_k")]
    return {f"l{order}": updated(M.WeightDivergence(order), states) for order in (1, 2)}


def distance(inputs):
    accuracy = float64(inputs["acc"])
    p = float64(inputs["p"])
    return {"value": of_model(M.DistributionDistance((p * 1_000_000).round().long()), accuracy)}


CLASSES = {
    "bwt_forgetting": lambda i: over_rounds(M.Forgetting(len(i["A"][0]), i["exclude_final"]), i),
    "prediction_consistency": lambda i: over_rounds(M.PredictionConsistency(len(i["A"][0]), "none"), i),
    "normalised_class_accuracy": lambda i: {
        "value": of_model(M.NormalisedClassAccuracy(len(i["acc"])), float64(i["acc"]))
    },
    "forgetting_degree": degree,
    "in_out_local": in_out_local,
    "rounds_to_target": to_target,
    "classwise_accuracy": classwise,
    "gradient_diversity": diversity,
    "weight_alignment": alignment,
    "weight_divergence": divergence,
    "distribution_distance": distance,
}


@pytest.mark.parametrize("case", [case for case in CASES if case.name in CLASSES], ids=lambda case: case.id)
def test_case(case):
    found = CLASSES[case.name](case.inputs)
    expected = {name: case.expected[name] for name in case.expected if name in found}
    assert expected
    assert golden.differences(found, expected, rtol=case.rtol, atol=case.atol, where=case.id) == []
