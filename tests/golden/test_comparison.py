"""The comparison itself: it must find what differs."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from .golden import differences, load


def compare(actual, expected):
    return differences(actual, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (torch.tensor(1.0), 1.0),
        (None, None),
        (torch.tensor(torch.nan), None),
        ({"a": [1, 2], "more": 0}, {"a": [1, 2]}),
        (np.array([[1.0, np.nan]]), {"nd": "float64", "shape": [1, 2], "data": [1.0, "nan"]}),
        (torch.tensor([np.inf]), {"nd": "float32", "shape": [1], "data": ["inf"]}),
        ([[0, "shared"], [1, "local"]], [[0, "shared"], [1, "local"]]),
        ([[1.0], []], [[1.0], []]),
        (True, True),
    ],
)
def test_equal(actual, expected):
    assert not compare(actual, expected)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (1.001, 1.0),
        (np.nan, 1.0),
        (1.0, None),
        ({}, {"a": 1}),
        ([1, 2], [1, 2, 3]),
        ([1.0, 2.0], [1.0, 2.1]),
        ([[1.0], [2.0, 3.0]], [[1.0], [2.0]]),
        (3.0000001, {"nd": "int64", "shape": [], "data": [3]}),
        (np.array([1.0]), {"nd": "float64", "shape": [1, 1], "data": [1.0]}),
        (np.array([1], dtype=np.int32), {"nd": "int64", "shape": [1], "data": [1]}),
        ("local", "shared"),
        ("text", 1.0),
        (None, 1.0),
        (False, True),
    ],
)
def test_different(actual, expected):
    assert len(compare(actual, expected)) == 1


def test_problems_are_resolved(tmp_path: Path):
    file = tmp_path / "x.json"
    problem = {"init": {"nd": "float64", "shape": [1], "data": [2.0]}}
    case = {
        "id": "a",
        "method": "m",
        "inputs": {"problem": "@p", "cfg": {}},
        "expected": {},
        "rtol": 0,
        "atol": 0,
    }
    file.write_text(json.dumps({"problems": {"p": problem}, "cases": [case]}))
    (loaded,) = load(file)
    assert loaded.name == "e2e:m"
    assert loaded.inputs["problem"]["init"].tolist() == [2.0]
    case["inputs"] = {"problem": "@q"}
    file.write_text(json.dumps({"problems": {"p": problem}, "cases": [case]}))
    with pytest.raises(KeyError, match="names no problem"):
        load(file)
