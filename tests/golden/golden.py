"""Reading golden files, and comparing a result with what a case expects.

A file is `{"cases": [...], "problems": {...}}`; a case is `{id, fn | method, inputs, expected, rtol, atol}`.
An array is `{"nd": dtype, "shape": [...], "data": [flat, row-major]}`, a non-finite float in it its `repr`;
an input `"@name"` means `problems[name]`; an expected null means undefined: NaN or None.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class Case:
    """One golden case, its inputs decoded."""

    file: str
    id: str
    table: str
    """`fn` or `method`: which of the two tables of adapters it belongs to; names repeat between them."""
    name: str
    """Name in that table; a method's end-to-end cases are those of `e2e:NAME`."""
    inputs: dict[str, Any] = field(repr=False)
    expected: Any = field(repr=False)
    rtol: float
    atol: float


def load(path: Path) -> list[Case]:
    """All cases of a file."""
    content = json.loads(path.read_text())
    if path.stem.startswith("async"):
        return [timed_case(path, case) for case in content]
    if path.stem.startswith("scenarios"):
        return changing_cases(path, content)
    problems = content.get("problems", {})
    return [_case(path, case, problems) for case in content["cases"]]


def timed_case(path: Path, case: dict[str, Any]) -> Case:
    """A case of simulated time, which has neither an id nor tolerances of its own."""
    inputs = {name: value for name, value in case.items() if name != "expected"}
    return Case(path.name, case["name"], "method", "async", inputs, case["expected"], rtol=1e-12, atol=1e-12)


def changing_cases(path: Path, content: dict[str, Any]) -> list[Case]:
    """The cases of data that change, which have no tolerances of their own."""
    problem = content["problem"]
    cases = []
    for name, expected in content["cases"].items():
        inputs = {"case": name, "problem": problem}
        cases.append(Case(path.name, name, "method", "scenarios", inputs, expected, rtol=1e-12, atol=1e-12))
    given = {
        "windows": ("parts", "lines"),
        "hand": ("table", "initial", "reference"),
    }
    for name, names in given.items():
        whole = content[name]
        inputs = {"problem": problem} | {key: whole[key] for key in names}
        expected = {key: value for key, value in whole.items() if key not in names}
        cases.append(Case(path.name, name, "method", f"scenarios/{name}", inputs, expected, rtol=1e-12, atol=1e-12))
    return cases


def _case(path: Path, case: dict[str, Any], problems: dict[str, Any]) -> Case:
    table = "fn" if "fn" in case else "method"
    name = case[table]
    if {"problem", "cfg"} <= case["inputs"].keys():
        name = f"e2e:{name}"
    inputs = decode(case["inputs"], problems)
    return Case(path.name, case["id"], table, name, inputs, case["expected"], case["rtol"], case["atol"])


def decode(value: Any, problems: dict[str, Any]) -> Any:
    """Arrays as numpy arrays and `"@name"` as the problem of that name, at any depth."""
    if isinstance(value, str) and value.startswith("@"):
        if value[1:] not in problems:
            raise KeyError(f"input {value!r} names no problem of its file, which has {sorted(problems)}")
        return decode(problems[value[1:]], problems)
    if is_array(value):
        return array(value)
    if isinstance(value, dict):
        return {key: decode(item, problems) for key, item in value.items()}
    if isinstance(value, list):
        return [decode(item, problems) for item in value]
    return value


def is_array(value: Any) -> bool:
    return isinstance(value, dict) and "nd" in value


def array(value: dict[str, Any]) -> np.ndarray:
    """The numpy array of an encoded one."""
    dtype = np.dtype(value["nd"])
    data = [float(x) if isinstance(x, str) else x for x in value["data"]]
    return np.array(data, dtype=dtype).reshape(value["shape"])


def differences(actual: Any, expected: Any, rtol: float, atol: float, where: str = "") -> list[str]:
    """What differs, one line each with its place; numbers are compared in float64.

    Further keys of an actual dict are ignored; a missing one is a difference.
    """
    if is_array(expected):
        return _array_differences(actual, array(expected), rtol, atol, where, typed=True)
    if expected is None:
        return [] if _undefined(actual) else [f"{where}: expected null (NaN or None), got {actual!r}"]
    if isinstance(expected, dict):
        if not isinstance(actual, dict):
            return [f"{where}: expected a dict with {list(expected)}, got {type(actual).__name__}"]
        missing = [
            f"{where}.{key}: missing from the result, which has {list(actual)}" for key in expected.keys() - actual
        ]
        return missing + [
            line
            for key, item in expected.items()
            if key in actual
            for line in differences(actual[key], item, rtol, atol, f"{where}.{key}")
        ]
    if isinstance(expected, list) and not _numeric(expected):
        if not isinstance(actual, list | tuple | np.ndarray | torch.Tensor) or len(actual) != len(expected):
            return [f"{where}: expected a list of {len(expected)}, got {actual!r}"]
        return [
            line
            for i, (one, other) in enumerate(zip(actual, expected, strict=True))
            for line in differences(one, other, rtol, atol, f"{where}[{i}]")
        ]
    if isinstance(expected, str | bool):
        same = _plain(actual) == expected
        return [] if same else [f"{where}: expected {expected!r}, got {actual!r}"]
    return _array_differences(actual, np.asarray(expected), rtol, atol, where, typed=False)


def _numeric(values: list[Any]) -> bool:
    """True for a flat list of numbers only."""
    return all(isinstance(x, int | float) and not isinstance(x, bool) for x in values)


def _plain(value: Any) -> Any:
    """A 0-d tensor or array as a Python value; all else unchanged."""
    return value.item() if isinstance(value, torch.Tensor | np.ndarray | np.generic) and value.ndim == 0 else value


def _undefined(value: Any) -> bool:
    value = _plain(value)
    return value is None or (isinstance(value, float) and math.isnan(value))


def _array_differences(
    actual: Any, expected: np.ndarray, rtol: float, atol: float, where: str, typed: bool
) -> list[str]:
    if isinstance(actual, torch.Tensor):
        actual = actual.detach().cpu().numpy()
    try:
        actual = np.asarray(actual)
        numbers = actual.astype(np.float64)
    except (TypeError, ValueError):
        return [f"{where}: expected numbers of shape {expected.shape}, got {actual!r}"]
    if actual.shape != expected.shape:
        return [f"{where}: expected shape {expected.shape}, got {actual.shape}"]
    if typed and actual.dtype != expected.dtype:
        return [f"{where}: expected {expected.dtype}, got {actual.dtype}"]
    if typed and expected.dtype.kind in "bi":
        rtol = atol = 0.0  # counts, indices and masks are equal or wrong
    target = expected.astype(np.float64)
    wrong = ~np.isclose(numbers, target, rtol=rtol, atol=atol, equal_nan=True)
    if not wrong.any():
        return []
    first = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    worst = np.abs(np.where(wrong, numbers - target, 0.0)).max()
    return [
        f"{where}: {int(wrong.sum())} of {wrong.size} differ, by up to {worst:.3g} "
        f"(rtol {rtol:g}, atol {atol:g}); "
        f"first at {[int(i) for i in first]}: expected {target[first]}, got {numbers[first]}"
    ]
