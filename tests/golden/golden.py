"""Reads golden files, and compares a result with what a case expects.

- A file is `{"cases": [...], "problems": {...}}`, a case is `{id, fn | method, inputs, expected, rtol, atol}`.
- An array is `{"nd": dtype, "shape": [...], "data": [flat, row-major]}`. A non-finite float in it is its `repr`.
- An input `"@name"` means `problems[name]`.
- An expected null means undefined: NaN or None.
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
    """Holds one golden case, with its inputs decoded."""

    file: str
    id: str
    table: str
    """The table of adapters that the case belongs to, `fn` or `method`. Both tables may have the same name."""
    name: str
    """Name of the adapter in that table. A method's end-to-end cases have `e2e:NAME`."""
    inputs: dict[str, Any] = field(repr=False)
    expected: Any = field(repr=False)
    rtol: float
    atol: float


def load(path: Path) -> list[Case]:
    """Return all cases of a file."""
    content = json.loads(path.read_text())
    if path.stem.startswith("async"):
        return [timed_case(path, case) for case in content]
    if path.stem.startswith("scenarios"):
        return changing_cases(path, content)
    problems = content.get("problems", {})
    return [_case(path, case, problems) for case in content["cases"]]


def timed_case(path: Path, case: dict[str, Any]) -> Case:
    """Return a case of simulated time, which has neither an id nor tolerances of its own."""
    inputs = {name: value for name, value in case.items() if name != "expected"}
    return _tight_case(path, ident=case["name"], name="async", inputs=inputs, expected=case["expected"])


def changing_cases(path: Path, content: dict[str, Any]) -> list[Case]:
    """Return the cases of data that change, which have no tolerances of their own."""
    problem = content["problem"]
    cases = []
    for ident, expected in content["cases"].items():
        inputs = {"case": ident, "problem": problem}
        cases.append(_tight_case(path, ident=ident, name="scenarios", inputs=inputs, expected=expected))
    names_of_inputs = {
        "windows": ("parts", "lines"),
        "hand": ("table", "initial", "reference"),
    }
    for ident, names in names_of_inputs.items():
        whole = content[ident]
        inputs = {"problem": problem} | {key: whole[key] for key in names}
        expected = {key: value for key, value in whole.items() if key not in names}
        cases.append(_tight_case(path, ident=ident, name=f"scenarios/{ident}", inputs=inputs, expected=expected))
    return cases


def _tight_case(path: Path, *, ident: str, name: str, inputs: dict[str, Any], expected: Any) -> Case:
    return Case(
        file=path.name,
        id=ident,
        table="method",
        name=name,
        inputs=inputs,
        expected=expected,
        rtol=1e-12,
        atol=1e-12,
    )


def _case(path: Path, case: dict[str, Any], problems: dict[str, Any]) -> Case:
    table = "fn" if "fn" in case else "method"
    name = case[table]
    if {"problem", "cfg"} <= case["inputs"].keys():
        name = f"e2e:{name}"
    return Case(
        file=path.name,
        id=case["id"],
        table=table,
        name=name,
        inputs=decode(case["inputs"], problems),
        expected=case["expected"],
        rtol=case["rtol"],
        atol=case["atol"],
    )


def decode(value: Any, problems: dict[str, Any]) -> Any:
    """Replace encoded arrays by numpy arrays and `"@name"` by the problem of that name, at any depth."""
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
    """Decode an array."""
    dtype = np.dtype(value["nd"])
    data = [float(x) if isinstance(x, str) else x for x in value["data"]]
    return np.array(data, dtype=dtype).reshape(value["shape"])


def differences(actual: Any, expected: Any, *, rtol: float, atol: float, where: str = "") -> list[str]:
    """Return a line about each difference, with its place. Numbers are compared in float64.

    Further keys of an actual dict are ignored. A missing key is a difference.
    """
    if is_array(expected):
        return _array_differences(actual, array(expected), rtol=rtol, atol=atol, where=where, typed=True)
    if expected is None:
        return [] if _undefined(actual) else [f"{where}: expected null (NaN or None), got {actual!r}"]
    if isinstance(expected, dict):
        return _dict_differences(actual, expected, rtol=rtol, atol=atol, where=where)
    if isinstance(expected, list) and not _numeric(expected):
        return _list_differences(actual, expected, rtol=rtol, atol=atol, where=where)
    if isinstance(expected, str | bool):
        same = _plain(actual) == expected
        return [] if same else [f"{where}: expected {expected!r}, got {actual!r}"]
    return _array_differences(actual, np.asarray(expected), rtol=rtol, atol=atol, where=where, typed=False)


def _dict_differences(actual: Any, expected: dict[str, Any], *, rtol: float, atol: float, where: str) -> list[str]:
    if not isinstance(actual, dict):
        return [f"{where}: expected a dict with {list(expected)}, got {type(actual).__name__}"]
    lines = []
    for key in expected.keys() - actual:
        lines.append(f"{where}.{key}: missing from the result, which has {list(actual)}")
    for key, item in expected.items():
        if key in actual:
            lines += differences(actual[key], item, rtol=rtol, atol=atol, where=f"{where}.{key}")
    return lines


def _list_differences(actual: Any, expected: list[Any], *, rtol: float, atol: float, where: str) -> list[str]:
    if not isinstance(actual, list | tuple | np.ndarray | torch.Tensor) or len(actual) != len(expected):
        return [f"{where}: expected a list of {len(expected)}, got {actual!r}"]
    lines = []
    for place, item in enumerate(expected):
        lines += differences(actual[place], item, rtol=rtol, atol=atol, where=f"{where}[{place}]")
    return lines


def _numeric(values: list[Any]) -> bool:
    """Return True for a flat list of numbers only."""
    return all(isinstance(x, int | float) and not isinstance(x, bool) for x in values)


def _plain(value: Any) -> Any:
    """Return a 0-d tensor or array as a Python value, and anything else unchanged."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic) and value.ndim == 0:
        return value.item()
    return value


def _undefined(value: Any) -> bool:
    value = _plain(value)
    return value is None or (isinstance(value, float) and math.isnan(value))


def _array_differences(
    actual: Any, expected: np.ndarray, *, rtol: float, atol: float, where: str, typed: bool
) -> list[str]:
    """Return the line about an array that differs, or nothing.

    Args:
        actual: An array, a tensor or what numpy makes an array of.
        expected: The expected array.
        rtol: Relative tolerance.
        atol: Absolute tolerance.
        where: Place of the array in the result.
        typed: Whether the type of the entries must be the expected one.
    """
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
        # Counts, indices and masks are equal or wrong.
        rtol = 0.0
        atol = 0.0
    target = expected.astype(np.float64)
    wrong = ~np.isclose(numbers, target, rtol=rtol, atol=atol, equal_nan=True)
    if not wrong.any():
        return []
    first = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
    worst = np.abs(np.where(wrong, numbers - target, 0.0)).max()
    return [
        f"{where}: {int(wrong.sum())} of {wrong.size} differ, by up to {worst:.3g} "
        f"(rtol {rtol:g}, atol {atol:g}); "
        f"first at {[int(index) for index in first]}: expected {target[first]}, got {numbers[first]}"
    ]
