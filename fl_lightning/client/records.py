"""The codec of the client store, and the names of the store's files.

A pytree of plain values is copied, measured, written as bytes and read back.
"""

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

from fl_lightning.utils.devices import copy_to_device
from fl_lightning.utils.plain import plain_scalar, plain_tensor

TREE = "tree"
"""Name of the tensor that holds the pytree itself, as the bytes of its JSON text."""

COLUMNS = 5
"""Columns of a table of files: client, round, bytes, and both halves of the hash."""


class FileRecord(NamedTuple):
    """Describes a client's record in a file, which never changes: its name says client, round and content.

    Args:
        client_id: The client's id, 0 ... N-1.
        round_idx: The round that wrote the record.
        hash: Hash of the file's content, 32 hex digits.
        bytes: Size of the file.
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
        """Return True if a file of this name may hold a client's record."""
        return re.fullmatch(r"client_\d+_round_\d+_[0-9a-f]{12}\.safetensors", name) is not None


def table_of(files: Iterable[FileRecord]) -> Tensor:
    """Return the table of files that a checkpoint holds, (n, 5) int64.

    A row is (client, round, bytes, first half of the hash, second half of the hash).
    """
    rows = []
    for file in files:
        first_half, second_half = struct.unpack("<2q", bytes.fromhex(file.hash))
        rows.append([file.client_id, file.round_idx, file.bytes, first_half, second_half])
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, COLUMNS)


def files_of(store: Mapping[str, Any]) -> dict[int, FileRecord]:
    """Return the files that a client store's state names, by client id.

    Raises:
        ValueError: The checkpoint holds something else in the place of the table.
    """
    table = store.get("files", torch.empty(0, COLUMNS, dtype=torch.int64))
    if not is_table(table):
        raise ValueError("the checkpoint's table of client files is none; take another checkpoint")
    if bool((table[:, :3] < 0).any()):
        raise ValueError("the checkpoint's table of client files has numbers below 0; take another checkpoint")
    files = {}
    for client_id, round_idx, size, first_half, second_half in table.tolist():
        content_hash = struct.pack("<2q", first_half, second_half).hex()
        files[client_id] = FileRecord(client_id=client_id, round_idx=round_idx, hash=content_hash, bytes=size)
    return files


def is_table(value: object) -> bool:
    """Return True if a value of a checkpoint has the form of a table of files."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.dtype != torch.int64:
        return False
    if value.device.type != "cpu" or value.ndim != 2 or value.shape[1] != COLUMNS:
        return False
    # With strides of 0, a few bytes may claim to be any number of rows.
    return value.is_contiguous()


def file_names(folder: Path) -> frozenset[str]:
    """Return the names of the files in a folder that the client store may have written."""
    if not folder.is_dir():
        return frozenset()
    return frozenset(name for name in os.listdir(folder) if FileRecord.is_name(name))


def delete(folder: Path, names: Iterable[str]) -> None:
    """Delete files of a folder. A file that is missing or protected is passed over."""
    for name in names:
        with suppress(OSError):
            (folder / name).unlink()


def copy_pytree(value: Any, name: str, device: torch.device | None = None) -> Any:
    """Copy a pytree of values that `torch.load(weights_only=True)` reads.

    Args:
        value: Tensors, numbers, strings, None, dtypes, and (nested) lists, tuples and dicts of these. Keys of dicts
            are strings or whole numbers. The copy has lists in the place of tuples, and numbers and strings of exactly
            these types.
        name: Name of the value, for the error.
        device: The device of the copied tensors. None is the device of each tensor.

    Raises:
        TypeError: The pytree holds something that cannot be kept.
    """
    if isinstance(value, Tensor):
        detached = plain_tensor(value.detach())
        moved = detached if device is None else copy_to_device(detached, device)
        # A tensor that was on the device already has not been copied.
        return moved.clone() if moved.device == value.device else moved
    if isinstance(value, dict):
        for key in map(plain_scalar, value):
            if not isinstance(key, str | int):
                raise TypeError(
                    f"keys in {name} must be strings or whole numbers, got {key!r} of {type(key).__name__}; name it "
                    f"by a string"
                )
        return {plain_scalar(key): copy_pytree(item, f"{name}[{key!r}]", device) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [copy_pytree(item, name, device) for item in value]
    value = plain_scalar(value)
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return value
    raise TypeError(
        f"{name} must consist of tensors, numbers, strings, lists and dicts, got {type(value).__name__}; convert it "
        f"before it is kept (checkpoints load with weights_only=True)"
    )


def num_bytes(value: Any) -> int:
    """Return the number of bytes of all tensors in a pytree."""
    sizes: list[int] = []
    apply_to_collection(value, Tensor, lambda tensor: sizes.append(tensor.nbytes))
    return sum(sizes)


def encode(value: Any) -> bytes:
    """Return a pytree that `copy_pytree` allows as the content of a safetensors file.

    Equal pytrees give equal bytes. The file holds the tensors of the pytree under numbers, and the pytree as JSON text
    in one more tensor of bytes (`TREE`). In the text, every dict, tensor and dtype is an object with its kind as the
    only key.
    """
    tensors: dict[str, Tensor] = {}

    def pairs(items: Mapping[Any, Any]) -> dict[str, Any]:
        """Return a dict as a list of pairs, which keeps keys that are numbers."""
        return {"dict": [[key, apply_to_collection(item, dict, pairs)] for key, item in items.items()]}

    def leaf(value: Any) -> dict[str, str]:
        """Return a tensor or dtype as JSON, and set a tensor aside.

        The tensors that are set aside are contiguous and share no memory.
        """
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        name = str(len(tensors))
        tensors[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)
        return {"tensor": name}

    text = json.dumps(apply_to_collection(value, dict, pairs), default=leaf)  # JSON writes floats exactly.
    tree = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    return save({**tensors, TREE: tree})


def decode(content: bytes) -> Any:
    """Return the pytree that `encode` wrote."""
    tensors = load(content)
    readers: dict[str, Callable[[Any], Any]] = {
        "dict": dict,
        "tensor": tensors.__getitem__,
        "dtype": lambda name: getattr(torch, name),
    }

    def read(tagged: dict[str, Any]) -> Any:
        """Return the value of a JSON object, whose only key is the kind of the value."""
        ((kind, inner),) = tagged.items()
        return readers[kind](inner)

    return json.loads(tensors[TREE].numpy().tobytes(), object_hook=read)
