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
    """A client with one sample of each class, as every split has them, which it draws from."""

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
    classes = len(inputs["logits_local"][0]) if rows else max(dominant) + 1
    received, local = (float64(inputs[name]).reshape(rows, classes) for name in ("logits_global", "logits_local"))
    local.requires_grad_()
    is_dominant = torch.tensor([k in dominant for k in range(classes)])
    kept = kept_columns(ClassSplit(~is_dominant, ~is_dominant, is_dominant), inputs.get("columns", "dropped"))
    value = anchor_loss(received, local, kept, torch.ones(rows, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(value, local)
    return {"value": value, "grad_local": gradient}


def anchor_pick(inputs: Inputs) -> dict[str, Any]:
    labels = torch.tensor(inputs["labels"])
    losses = float64(inputs["losses"])
    return {"index": pick(labels, inputs["klass"], inputs["how"], losses, None)}


FN: dict[str, Callable[[Inputs], Any]] = {
    "anchor_plan": plan_anchors,
    "ka_loss": ka_loss,
    "anchor_pick": anchor_pick,
}
METHOD: dict[str, Callable[[Inputs], Any]] = {}


class Given(FedKA):
    """FedKA with the anchors of the case, by round and client, that notes what it used."""

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
            missing, rest = (mask.nonzero().flatten() for mask in (split.missing, split.non_dominant))
            kept = kept_columns(split, self.columns).nonzero().flatten()
            note = {"missing": missing, "non_dominant": rest, "kept_columns": kept, "anchors_used": 0}
        if "anchors" in self.round:
            valid: Tensor = self.round["valid"]
            case = torch.from_numpy(self.given[local.round_idx][local.client_id]["X"])
            assert torch.equal(self.round["anchors"][valid], case)
            note |= {"kept_columns": self.round["kept"].nonzero().flatten(), "anchors_used": valid.sum()}
        self.used[local.round_idx][local.client_id] = note


def fedka_run(inputs: Inputs, **loop: Any) -> tuple[Run, dict[str, Any]]:
    """A run, with further settings of it or of the loop, and what is compared of it."""
    cfg = inputs["cfg"]
    schedule = cfg["schedule"]
    given = [dict(zip(cohort, row, strict=True)) for cohort, row in zip(schedule, inputs["anchors"], strict=True)]
    names = ("beta", "gamma", "use_missing", "use_non_dominant")
    settings = {"columns": cfg.get("columns", "dropped"), **{name: cfg[name] for name in names}}
    client = partial(Given, given=given, max_anchors=cfg["mu"], **settings)
    finished = run(client, {**inputs, "shared": inputs["shared_set"]}, sets=("shared",), **loop)
    result = rounds(finished)
    for r, one in enumerate(result["rounds"]):
        notes = [finished.client.used[r][client_id] for client_id in schedule[r]]
        one |= {name: [note[name] for note in notes] for name in notes[0]}
    return finished, result


E2E: dict[str, Callable[[Inputs], dict[str, Any]]] = {"fedka": lambda inputs: fedka_run(inputs)[1]}
