"""`fl-lightning split`: the folders of a simulation's parties, each with what it would have in a real federation."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]

from fl_lightning.cli.console import quiet_lightning
from fl_lightning.cli.parser_only import parts_of
from fl_lightning.data import FederatedDataModule, Split
from fl_lightning.data.holdout import SERVER_ONLY
from fl_lightning.data.owners import write_set
from fl_lightning.types import CONDITIONS
from fl_lightning.utils.files import write_file

OUTPUT = "--output"
NOT_DIVIDED = {
    "by": None,
    "val_fraction": 0.0,
    "val_by": None,
    "proxy_size": 0,
    "transfer_size": 0,
    "client_test_size": None,
}
"""Settings of the data that have no meaning where everybody has his own."""


def run(argv: list[str]) -> None:
    """Write the folders, and print what was written.

    Args:
        argv: the command line of a fit, and `--output DIR`.

    Raises:
        ValueError: no folder, one that holds something, or samples that cannot be written.
    """
    arguments, folder = taken(argv)
    if folder is None:
        raise ValueError(f"split needs the folder of the parties' folders; add {OUTPUT} DIR")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{OUTPUT} must name an empty folder or a new one, got {folder}; name another")
    with quiet_lightning():
        made = parts_of(["fit", *arguments])
        data: FederatedDataModule = made.datamodule
        data.prepare_data()
        data.setup("fit")
        names = made.model.parts.needs - CONDITIONS
        write_server(folder / "server", data, names)
        for client_id in range(data.num_clients):
            write_client(folder / f"client_{client_id}", data, names.difference(SERVER_ONLY), client_id)
    print(f"{folder}: server and {data.num_clients} clients, each with its data.yaml, whose paths are of this machine")


class NoSplitError(Exception):
    """Error for a split that the data do not have."""


def taken(argv: list[str]) -> tuple[list[str], Path | None]:
    """Take the output out of a command line.

    Raises:
        ValueError: it has no value.
    """
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith(f"{OUTPUT}=") else [word])]
    if words[-1:] == [OUTPUT]:
        raise ValueError(f"{OUTPUT} needs a value, got none; write {OUTPUT} DIR")
    if OUTPUT not in words:
        return argv, None
    place = words.index(OUTPUT)
    return words[:place] + words[place + 2 :], Path(words[place + 1])


def write_client(folder: Path, data: FederatedDataModule, names: frozenset[str], client_id: int) -> None:
    """Write what one client has: its own samples, and the sets that everyone has."""
    view = data.view(client_id, 0)
    write(folder, data, "train", data.client_indices("train", client_id))
    if view.size("test"):
        write(folder / "test", data, "test", data.client_indices("test", client_id))
    owner = {"class_path": "fl_lightning.data.OwnerPartition", "init_args": {"client_id": client_id}}
    write_data_file(folder, data, "Folder", write_sets(folder, data, names), owner)


def write_server(folder: Path, data: FederatedDataModule, names: frozenset[str]) -> None:
    """Write what the server has: the samples that it evaluates, and the sets that it or everyone has."""
    for name in ("test", "val"):
        with suppress(NoSplitError):
            write(folder / name, data, name, torch.arange(len(split_of(data, name))))
    write_data_file(folder, data, "Elsewhere", write_sets(folder, data, names - {"val"}), None)


def write_sets(folder: Path, data: FederatedDataModule, names: frozenset[str]) -> dict[str, Any]:
    """Write sets besides a party's own samples, and return them as `data.extra_splits`."""
    for name in sorted(names):
        write(folder / name, data, name, torch.arange(len(data.split(name))))
    return {name: source_of("Folder", folder / name) for name in sorted(names)}


def split_of(data: FederatedDataModule, name: str) -> Split:
    """Get a split.

    Raises:
        NoSplitError: there is none.
    """
    try:
        return data.split(name)
    except ValueError as error:
        raise NoSplitError(name) from error


def source_of(kind: str, folder: Path) -> dict[str, Any]:
    """Name a source as a configuration does."""
    return {"class_path": f"fl_lightning.data.{kind}", "init_args": {"root": str(folder.resolve())}}


def write_data_file(folder: Path, data: FederatedDataModule, kind: str, sets: dict[str, Any], partition: Any) -> None:
    """Write the file that a party adds to the federation's."""
    shape = data.input_shape and list(data.input_shape)
    known = {"num_classes": data.num_classes, "input_shape": shape, "extra_splits": sets or None}
    divided = {"num_clients": data.num_clients, "partition": partition}
    settings = {"source": source_of(kind, folder), **divided, **known, **NOT_DIVIDED}
    write_file(folder / "data.yaml", yaml.safe_dump({"data": settings}, sort_keys=False))


def write(folder: Path, data: FederatedDataModule, split: str, indices: torch.Tensor) -> None:
    """Write a set."""
    write_set(folder, data.split(split), indices, data.num_classes, data.source.class_names)
