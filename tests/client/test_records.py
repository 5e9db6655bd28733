import math

import pytest
import torch
from safetensors.torch import load

from fl_lightning.client.records import copy_pytree, decode, encode, num_bytes

NEST = {
    "memory": {
        "control": {"w": torch.arange(6.0).view(2, 3), "b": torch.tensor(2.5, dtype=torch.float64)},
        "seen": [torch.tensor([1, 2]), torch.tensor(True), []],
        "half": torch.ones(3, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 4),
        "numbers": [1, 2.5, -0.0, float("inf"), 0.1 + 0.2, 2**70, True, None],
        "text": 'a "quoted" ü',
        "type": torch.float16,
        3: {"nested": {}},
    }
}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b and (not isinstance(a, float) or math.copysign(1, a) == math.copysign(1, b))


def test_what_is_written_is_read_back_exactly_and_as_the_same_bytes():
    content = encode(NEST)
    assert same(decode(content), NEST)
    assert encode(decode(content)) == content
    assert same(decode(encode({})), {})
    assert math.isnan(decode(encode({"x": float("nan")}))["x"])


def test_any_reader_of_safetensors_finds_the_tensors():
    assert torch.equal(load(encode({"a": torch.ones(2)}))["0"], torch.ones(2))


def test_views_of_one_vector_are_written_each_by_itself():
    vector = torch.arange(10.0)
    state = {"a": vector[:4].view(2, 2), "b": vector[4:], "c": vector.view(2, 5).T}
    read = decode(encode(state))
    assert all(torch.equal(read[name], value) for name, value in state.items())
    assert len(encode({"a": vector[:1]})) < len(encode({"a": vector}))


def test_a_copy_is_apart_from_what_it_was_made_of():
    value = {"x": [torch.zeros(2, requires_grad=True)]}
    copy = copy_pytree(value, "memory")
    with torch.no_grad():
        value["x"][0].add_(1)
    assert copy["x"][0].tolist() == [0, 0]
    assert not copy["x"][0].requires_grad
    assert copy_pytree((1, 2), "memory", torch.device("cpu")) == [1, 2]


def test_bytes():
    assert num_bytes(NEST) == 24 + 8 + 16 + 1 + 6


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"x": {"y": {1, 2}}}, r"memory\['x'\]\['y'\] must consist of tensors, .* got set; convert it"),
        ({("a", 1): 2}, r"keys in memory must be strings or whole numbers, got \('a', 1\) of tuple"),
    ],
)
def test_what_cannot_be_kept_is_refused(value, sentence):
    with pytest.raises(TypeError, match=sentence):
        copy_pytree(value, "memory")
