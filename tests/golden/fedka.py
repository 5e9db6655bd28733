"""Adapters of FedKA."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fl_lightning.functional.classes import ClassSplit, class_split
from fl_lightning.methods import FedKA
from fl_lightning.methods.fedka import Anchor, anchor_loss, anchor_plan, kept_columns, pick

from .adapters_fn import Inputs, float64
from .end_to_end import Run, rounds, run


class Stub:
    """Stands for a client that has one sample of each class in every split."""

    def __init__(self, classes: torch.Tensor) -> None:
        self.classes = classes

    def labels(self, split: str = "train") -> torch.Tensor:
        return self.classes

    def generator(self, purpose: str) -> torch.Generator:
        return torch.Generator().manual_seed(0)


def plan_anchors(inputs: Inputs) -> dict[str, Any]:
    split = class_split(torch.tensor(inputs["counts"]), inputs["gamma"])
    plan = anchor_plan(split)
    classes = torch.arange(len(inputs["counts"]))
    samples = {source: (classes.double(), classes) for source in ("shared", "local")}
    drawn = FedKA(max_anchors=inputs["mu"]).draw_anchors(plan, samples, Stub(classes))
    assert [anchor.index for anchor in drawn] == [anchor.label for anchor in drawn]
    return {
        "plan": [list(entry) for entry in plan.items()],
        "size_after_cut": len(drawn),
        "kept_logits": kept_columns(split, inputs.get("columns", "dropped")).nonzero().flatten(),
    }


def ka_loss(inputs: Inputs) -> dict[str, Any]:
    rows = len(inputs["logits_local"])
    dominant = inputs["dominant"]
    # A case without rows has no logits that tell the number of classes.
    classes = len(inputs["logits_local"][0]) if rows else max(dominant) + 1
    received = float64(inputs["logits_global"]).reshape(rows, classes)
    local = float64(inputs["logits_local"]).reshape(rows, classes).requires_grad_()
    is_dominant = torch.tensor([k in dominant for k in range(classes)])
    split = ClassSplit(missing=~is_dominant, non_dominant=~is_dominant, dominant=is_dominant)
    kept = kept_columns(split, inputs.get("columns", "dropped"))
    value = anchor_loss(received, local, kept, valid=torch.ones(rows, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(value, local)
    return {"value": value, "grad_local": gradient}


def anchor_pick(inputs: Inputs) -> dict[str, Any]:
    index = pick(
        labels=torch.tensor(inputs["labels"]),
        label=inputs["klass"],
        strategy=inputs["how"],
        losses=float64(inputs["losses"]),
        generator=None,
    )
    return {"index": index}


FN: dict[str, Callable[[Inputs], Any]] = {
    "anchor_plan": plan_anchors,
    "ka_loss": ka_loss,
    "anchor_pick": anchor_pick,
}
METHOD: dict[str, Callable[[Inputs], Any]] = {}


class Given(FedKA):
    """Takes the anchors of the case, and notes what it used.

    Args:
        given: The anchors by round and client.
        settings: Settings of FedKA.
    """

    def __init__(self, given: list[dict[int, Any]], **settings: Any) -> None:
        super().__init__(**settings)
        self.given = given
        self.used: list[dict[int, dict[str, Any]]] = [{} for _ in given]

    def draw_anchors(self, plan: Any, samples: Any, local: Any) -> list[Anchor]:
        own = super().draw_anchors(plan, samples, local)
        case = self.given[local.round_idx][local.client_id]
        anchors = [Anchor(*entry) for entry in zip(case["classes"], case["source"], case["index"], strict=True)]
        assert len(own) == len(anchors)
        assert all(plan[anchor.label] == anchor.source for anchor in anchors)
        return anchors

    def receive(self, broadcast: Any, local: Any) -> None:
        super().receive(broadcast, local)
        note: dict[str, Any] = {"missing": None, "non_dominant": None, "kept_columns": None, "anchors_used": 0}
        if local.size():
            split = class_split(local.label_counts, self.gamma)
            note["missing"] = split.missing.nonzero().flatten()
            note["non_dominant"] = split.non_dominant.nonzero().flatten()
            note["kept_columns"] = kept_columns(split, self.columns).nonzero().flatten()
        if "anchors" in self.round:
            valid: Tensor = self.round["valid"]
            expected = torch.from_numpy(self.given[local.round_idx][local.client_id]["X"])
            assert torch.equal(self.round["anchors"][valid], expected)
            note["kept_columns"] = self.round["kept"].nonzero().flatten()
            note["anchors_used"] = valid.sum()
        self.used[local.round_idx][local.client_id] = note


def fedka_run(inputs: Inputs, **loop: Any) -> tuple[Run, dict[str, Any]]:
    """Run a case.

    Args:
        inputs: The case.
        loop: Further settings of the run or of the loop.

    Returns:
        The run, and what is compared of it.
    """
    cfg = inputs["cfg"]
    schedule = cfg["schedule"]
    given = []
    for cohort, anchors in zip(schedule, inputs["anchors"], strict=True):
        given.append(dict(zip(cohort, anchors, strict=True)))
    client = partial(
        Given,
        given=given,
        max_anchors=cfg["mu"],
        columns=cfg.get("columns", "dropped"),
        beta=cfg["beta"],
        gamma=cfg["gamma"],
        use_missing=cfg["use_missing"],
        use_non_dominant=cfg["use_non_dominant"],
    )
    finished = run(client, {**inputs, "shared": inputs["shared_set"]}, sets=("shared",), **loop)
    result = rounds(finished)
    for r, of_round in enumerate(result["rounds"]):
        notes = [finished.client.used[r][client_id] for client_id in schedule[r]]
        for name in notes[0]:
            of_round[name] = [note[name] for note in notes]
    return finished, result


def fedka_rounds(inputs: Inputs) -> dict[str, Any]:
    _, result = fedka_run(inputs)
    return result


E2E: dict[str, Callable[[Inputs], dict[str, Any]]] = {"fedka": fedka_rounds}
