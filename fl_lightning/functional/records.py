"""What a client keeps between rounds, as a nest of plain values: copied, measured, written to bytes and read back."""

import json
import struct
from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor


def kept(value: Any, where: str, device: torch.device | None = None) -> Any:
    """`value` with its tensors copied; only what `torch.load(weights_only=True)` reads is allowed.

    Args:
        value: tensors, numbers, strings, None, dtypes, and (nested) lists, tuples and dicts of them; keys are strings
            or whole numbers. Tuples become lists.
        where: of the value, for the error.
        device: of the copies; None: that of each tensor.

    Raises:
        TypeError: naming what cannot be kept.

    >>> kept({"seen": (1, 2)}, "memory")
    {'seen': [1, 2]}
    """
    if isinstance(value, Tensor):
        return value.detach().clone() if device is None else value.detach().to(device, copy=True)
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str | int):
                raise TypeError(
                    f"keys in {where} must be strings or whole numbers, got {key!r} of {type(key).__name__}; name it "
                    f"by a string"
                )
        return {key: kept(item, f"{where}[{key!r}]", device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [kept(item, where, device) for item in value]
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return value
    raise TypeError(
        f"{where} must consist of tensors, numbers, strings, lists and dicts, got {type(value).__name__}; convert it "
        f"before it is kept (checkpoints load with weights_only=True)"
    )


def num_bytes(value: Any) -> int:
    """Bytes of the tensors in a nest.

    >>> num_bytes({"a": torch.zeros(3), "b": [torch.zeros(2, dtype=torch.float64), 1]})
    28
    """
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(num_bytes(item) for item in value.values())
    if isinstance(value, list):
        return sum(num_bytes(item) for item in value)
    return 0


def encode(value: Any) -> bytes:
    """A nest that `kept` allows as the content of a safetensors file: equal nests give equal bytes.

    The tensors are numbered; how they hang together stands in the file's metadata as JSON, floats in it as their hex
    digits (exact, NaN and inf too).

    >>> decode(encode({"times": 2, 7: [torch.ones(2), float("inf")]}))
    {'times': 2, 7: [tensor([1., 1.]), inf]}
    """
    tensors: dict[str, Tensor] = {}
    tree = json.dumps(_plain(value, tensors))
    return save_tensors(tensors, {"record": tree})


def _plain(value: Any, tensors: dict[str, Tensor]) -> Any:
    """The nest for JSON; its tensors go to `tensors`."""
    if isinstance(value, Tensor):
        name = str(len(tensors))
        own = value.detach().cpu().contiguous()
        shares = own.untyped_storage().nbytes() != own.numel() * own.element_size()
        tensors[name] = own.clone() if shares else own
        return {"tensor": name}
    if isinstance(value, dict):
        return {"dict": [[key, _plain(item, tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return [_plain(item, tensors) for item in value]
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    return value


def decode(content: bytes) -> Any:
    """What `encode` was given."""
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    return _nested(json.loads(header["__metadata__"]["record"]), load_tensors(content))


def _nested(tree: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, list):
        return [_nested(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    read: dict[str, Callable[[Any], Any]] = {
        "tensor": lambda name: tensors[name],
        "dict": lambda items: {key: _nested(item, tensors) for key, item in items},
        "float": float.fromhex,
        "dtype": lambda name: getattr(torch, name),
    }
    return read[kind](content)
