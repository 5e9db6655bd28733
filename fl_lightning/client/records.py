"""Codec of the client store: a pytree of plain values is copied, measured, written to bytes and read back."""

import json
import os
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from safetensors.torch import load, save
from torch import Tensor

from fl_lightning.utils.devices import to_device

TREE = "tree"
"""Name of the tensor that holds the pytree itself, as the bytes of its JSON text."""


class FileRecord(NamedTuple):
    """A client's record in a file, which never changes: its name says client, round and content.

    Args:
        client_id: 0 ... N-1.
        round_idx: of the record.
        hash: of the content, 32 hex digits.
        bytes: of the content.
    """

    client_id: int
    round_idx: int
    hash: str
    bytes: int

    @property
    def name(self) -> str:
        """Name of the file."""
        return f"client_{self.client_id}_round_{self.round_idx}_{self.hash[:12]}.safetensors"

    @staticmethod
    def is_name(name: str) -> bool:
        """Return True for the name of such a file."""
        return re.fullmatch(r"client_\d+_round_\d+_[0-9a-f]{12}\.safetensors", name) is not None


def table_of(files: Iterable[FileRecord]) -> Tensor:
    """Lay files out as a checkpoint holds them: a row (client, round, bytes, both halves of the hash), (n, 5) int64."""
    rows = [[f.client_id, f.round_idx, f.bytes, *struct.unpack("<2q", bytes.fromhex(f.hash))] for f in files]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 5)


def files_of(store: Mapping[str, Any]) -> dict[int, FileRecord]:
    """Files by client id that a client store's state names.

    Raises:
        ValueError: if a checkpoint holds something else there.
    """
    table = store.get("files", torch.empty(0, 5, dtype=torch.int64))
    form = (torch.strided, torch.int64, "cpu", 2)
    if (
        not isinstance(table, Tensor)
        or (table.layout, table.dtype, table.device.type, table.ndim) != form
        or table.shape[1] != 5
        or not table.is_contiguous()  # a few bytes may claim to be any number of rows
    ):
        raise ValueError("the checkpoint's table of client files is none; take another checkpoint")
    if bool((table[:, :3] < 0).any()):
        raise ValueError("the checkpoint's table of client files has numbers below 0; take another checkpoint")
    rows = table.tolist()
    return {c: FileRecord(c, t, struct.pack("<2q", *halves).hex(), size) for c, t, size, *halves in rows}


def file_names(folder: Path) -> frozenset[str]:
    """Names in a folder that the client store could have written."""
    names = os.listdir(folder) if folder.is_dir() else []
    return frozenset(name for name in names if FileRecord.is_name(name))


def delete(folder: Path, names: Iterable[str]) -> None:
    """Delete files of a folder, as far as they are there and may be deleted."""
    for name in names:
        with suppress(OSError):
            (folder / name).unlink()


def kept(value: Any, where: str, device: torch.device | None = None) -> Any:
    """Copy a pytree.

    Only what `torch.load(weights_only=True)` reads is allowed.

    Args:
        value: tensors, numbers, strings, None, dtypes, and (nested) lists, tuples and dicts of them; keys are strings
            or whole numbers. Tuples become lists.
        where: name of the value, for the error.
        device: of the copied tensors; None: that of each tensor.

    Raises:
        TypeError: naming what cannot be kept.
    """
    if isinstance(value, Tensor):
        there = value.detach() if device is None else to_device(value.detach(), device)
        return there.clone() if there.device == value.device else there
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
    """Count the bytes of all tensors in a pytree."""
    sizes: list[int] = []
    apply_to_collection(value, Tensor, lambda tensor: sizes.append(tensor.nbytes))
    return sum(sizes)


def encode(value: Any) -> bytes:
    """Write a pytree that `kept` allows as the content of a safetensors file: equal pytrees give equal bytes.

    The file holds the pytree's tensors, numbered, and one more of bytes (`TREE`): the pytree as JSON text, in which
    every dict, tensor and dtype is an object with its kind as the only key.
    """
    tensors: dict[str, Tensor] = {}

    def pairs(items: Mapping[Any, Any]) -> dict[str, Any]:
        """A dict as a list of pairs, which keeps keys that are numbers."""
        return {"dict": [[key, apply_to_collection(item, dict, pairs)] for key, item in items.items()]}

    def leaf(value: Any) -> dict[str, str]:
        """A tensor or dtype as JSON.

        Tensors are set aside, each contiguous and apart from the others.
        """
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}

    tree = json.dumps(apply_to_collection(value, dict, pairs), default=leaf)  # floats are written exactly
    return save({**tensors, TREE: torch.frombuffer(bytearray(tree.encode()), dtype=torch.uint8)})


def decode(content: bytes) -> Any:
    """Read back the pytree that `encode` was given."""
    tensors = load(content)
    read: dict[str, Callable[[Any], Any]] = {
        "dict": dict,
        "tensor": tensors.__getitem__,
        "dtype": lambda name: getattr(torch, name),
    }

    def nested(tagged: dict[str, Any]) -> Any:
        ((kind, inner),) = tagged.items()
        return read[kind](inner)

    return json.loads(tensors[TREE].numpy().tobytes(), object_hook=nested)
