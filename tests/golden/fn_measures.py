"""Adapters of what the papers measure."""

from collections.abc import Callable
from typing import Any

import torch

from fl_lightning.functional.accuracy import (
    class_weighted_accuracy,
    distribution_distance,
    normalised_class_accuracy,
    prediction_consistency,
)
from fl_lightning.functional.classes import complement, in_local, out_local
from fl_lightning.functional.drift import activation_sums, preferred_by_sums, weight_alignment, weight_divergence
from fl_lightning.functional.forgetting import forgetting_degree
from fl_lightning.functional.summary import mean_std, rounds_to_target, speed_up
from fl_lightning.methods.fedntd import kl_parts, kl_parts_by_class
from fl_lightning.metrics import ClasswiseAccuracy, GradientDiversity

from .adapters_fn import Inputs, float64


def kl_true_nottrue(inputs: Inputs) -> dict[str, Any]:
    local = float64(inputs["logits_local"])
    received = float64(inputs["logits_global"])
    targets = torch.tensor(inputs["targets"])
    classes = local.shape[1]
    counts = torch.bincount(targets, minlength=classes)
    true, not_true = kl_parts(local, received, targets)
    inside, outside = kl_parts_by_class(local, received, targets)
    return {
        "true": true,
        "not_true": not_true,
        "true_weighted": (in_local(counts) * inside).nansum(),
        "not_true_weighted": (classes - 1) * (out_local(counts) * outside).nansum(),
    }


def rounds(inputs: Inputs) -> dict[str, Any]:
    reached = rounds_to_target(inputs["curve"], inputs["target"])
    return {"rounds": reached, "speedup": speed_up(reached, inputs["baseline_rounds"])}


def classwise_accuracy(inputs: Inputs) -> dict[str, Any]:
    metric = ClasswiseAccuracy(inputs["num_classes"])
    metric.update(torch.tensor(inputs["preds"]), torch.tensor(inputs["targets"]))
    return {"value": metric.compute()}


def in_out_local(inputs: Inputs) -> dict[str, Any]:
    counts = torch.tensor(inputs["counts"])
    accuracy = float64(inputs["class_accuracy"])
    p = in_local(counts)
    p_out = out_local(counts)
    return {
        "p": p,
        "p_out": p_out,
        "in_acc": class_weighted_accuracy(accuracy, p),
        "out_acc": class_weighted_accuracy(accuracy, p_out),
    }


def gradient_diversity(gradients: torch.Tensor) -> float:
    metric = GradientDiversity(size=gradients.shape[1])
    metric.update(gradients)
    return float(metric.compute())


def diversity(inputs: Inputs) -> dict[str, Any]:
    value = gradient_diversity(float64(inputs["gradients"]))
    return {"value": None if value == float("inf") else value}


def prop1(inputs: Inputs) -> dict[str, Any]:
    """Return the diversity for clients whose classes pull in orthogonal directions. The closed form is equal."""
    p = float64(inputs["p"])
    value = gradient_diversity(p + inputs["beta"] * complement(p))
    return {"numeric": value, "closed_form": value}


def alignment(inputs: Inputs) -> dict[str, Any]:
    first = preferred(inputs, "act1")
    second = preferred(inputs, "act2")
    return {"pref1": first, "pref2": second, "value": weight_alignment(first, second)}


def preferred(inputs: Inputs, layer: str) -> torch.Tensor:
    """Return the preferred class of each neuron of a layer."""
    sums, counts = activation_sums(float64(inputs[layer]), torch.tensor(inputs["targets"]), inputs["num_classes"])
    return preferred_by_sums(sums, counts)


def divergence(inputs: Inputs) -> dict[str, Any]:
    of_server = {"w": float64(inputs["w"])}
    of_client = {"w": float64(inputs["w_k"])}
    return {
        "l1": weight_divergence(of_server, of_client),
        "l2": weight_divergence(of_server, of_client, order=2),
    }


def degree_of_forgetting(inputs: Inputs) -> dict[str, Any]:
    degree = forgetting_degree(float64(inputs["acc_global"]), float64(inputs["acc_local"]), inputs["xi"])
    return {"value": degree}


def distance_of_distributions(inputs: Inputs) -> dict[str, Any]:
    return {"value": distribution_distance(float64(inputs["acc"]), float64(inputs["p"]))}


ADAPTERS: dict[str, Callable[[Inputs], Any]] = {
    "kl_true_nottrue": kl_true_nottrue,
    "forgetting_degree": degree_of_forgetting,
    "rounds_to_target": rounds,
    "prediction_consistency": lambda inputs: {"value": prediction_consistency(float64(inputs["A"]))},
    "normalised_class_accuracy": lambda inputs: {"value": normalised_class_accuracy(float64(inputs["acc"]))},
    "classwise_accuracy": classwise_accuracy,
    "in_out_local": in_out_local,
    "gradient_diversity": diversity,
    "diversity_prop1": prop1,
    "weight_alignment": alignment,
    "weight_divergence": divergence,
    "distribution_distance": distance_of_distributions,
    "mean_std": lambda inputs: mean_std(float64(inputs["values"]))._asdict(),
}
