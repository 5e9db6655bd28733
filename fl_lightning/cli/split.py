"""`fl-lightning split`: the folders of a simulation's parties, each with what it would have in a real federation."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]

from fl_lightning.cli.console import quiet_lightning
from fl_lightning.cli.parser_only import parts_of
from fl_lightning.data import FederatedDataModule
from fl_lightning.data.holdout import SERVER_ONLY
from fl_lightning.data.owners import write_set
from fl_lightning.types import CONDITIONS
from fl_lightning.utils.files import write_file

OUTPUT = "--output"
NOT_DIVIDED = {
    "by": None,
    "val_fraction": 0.0,
    "val_by": None,
    "test_on_val": False,
    "proxy_size": 0,
    "transfer_size": 0,
    "client_test_size": None,
}
"""Settings of the data that have no meaning where each party has its own samples."""


def run(argv: list[str]) -> None:
    """Write the folders, and print what was written.

    Args:
        argv: The command line of a fit, and `--output DIR`.

    Raises:
        ValueError: There is no folder, the folder holds something, or the samples cannot be written.
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
        check_the_same_in_all_rounds(data)
        data.setup("fit")
        names = made.model.parts.needs - CONDITIONS
        write_server(folder / "server", data=data, names=names)
        for client_id in range(data.num_clients):
            write_client(
                folder / f"client_{client_id}",
                data=data,
                names=names.difference(SERVER_ONLY),
                client_id=client_id,
            )
    print(f"{folder}: server and {data.num_clients} clients, each with its data.yaml, whose paths are of this machine")


def check_the_same_in_all_rounds(data: FederatedDataModule) -> None:
    """Refuse clients whose data change or that join and leave, which folders cannot say.

    Raises:
        ValueError: There are such clients.
    """
    for name in ("scenario", "stays"):
        if getattr(data, name) is not None:
            raise ValueError(
                f"split writes what each party has in all rounds, and data.{name} says it for each round; set "
                f"data.{name} to null"
            )


def taken(argv: list[str]) -> tuple[list[str], Path | None]:
    """Take the output out of a command line.

    Args:
        argv: The command line.

    Returns:
        The other words, and the output. None: the command line names no output.

    Raises:
        ValueError: The output has no value.
    """
    words: list[str] = []
    for word in argv:
        if word.startswith(f"{OUTPUT}="):
            words += word.split("=", 1)
        else:
            words.append(word)
    if words[-1:] == [OUTPUT]:
        raise ValueError(f"{OUTPUT} needs a value, got none; write {OUTPUT} DIR")
    if OUTPUT not in words:
        return argv, None
    place = words.index(OUTPUT)
    return words[:place] + words[place + 2 :], Path(words[place + 1])


def write_client(folder: Path, *, data: FederatedDataModule, names: frozenset[str], client_id: int) -> None:
    """Write what one client has: its own samples, and the sets that everyone has.

    Args:
        folder: The client's folder.
        data: The data of the simulation.
        names: The sets that everyone has.
        client_id: 0 ... N-1.
    """
    view = data.view(client_id, 0)
    write(folder, data=data, split="train", indices=data.client_indices("train", client_id))
    if view.size("test"):
        write(folder / "test", data=data, split="test", indices=data.client_indices("test", client_id))
    partition = {"class_path": "fl_lightning.data.OwnerPartition", "init_args": {"client_id": client_id}}
    sets = write_sets(folder, data=data, names=names)
    write_data_file(folder, data=data, source="Folder", sets=sets, partition=partition)


def write_server(folder: Path, *, data: FederatedDataModule, names: frozenset[str]) -> None:
    """Write what the server has: the samples that it evaluates, and the sets that it or everyone has.

    Args:
        folder: The server's folder.
        data: The data of the simulation.
        names: The sets that the method needs.
    """
    for name in ("test", "val"):
        if has_split(data, name):
            write_whole(folder / name, data=data, split=name)
    sets = write_sets(folder, data=data, names=names - {"val"})
    write_data_file(folder, data=data, source="Elsewhere", sets=sets, partition=None)


def write_sets(folder: Path, *, data: FederatedDataModule, names: Iterable[str]) -> dict[str, Any]:
    """Write sets besides a party's own samples.

    Args:
        folder: The party's folder.
        data: The data of the simulation.
        names: The sets.

    Returns:
        The sets as `data.extra_splits`.
    """
    sets = {}
    for name in sorted(names):
        write_whole(folder / name, data=data, split=name)
        sets[name] = source_of("Folder", folder / name)
    return sets


def has_split(data: FederatedDataModule, name: str) -> bool:
    """Return True if the data have a split of this name."""
    try:
        data.split(name)
    except ValueError:
        return False
    return True


def source_of(kind: str, folder: Path) -> dict[str, Any]:
    """Return a source as a configuration names it."""
    return {"class_path": f"fl_lightning.data.{kind}", "init_args": {"root": str(folder.resolve())}}


def write_data_file(
    folder: Path, *, data: FederatedDataModule, source: str, sets: dict[str, Any], partition: dict[str, Any] | None
) -> None:
    """Write the file that a party adds to the federation's configuration.

    Args:
        folder: The party's folder.
        data: The data of the simulation.
        source: The class of the party's source.
        sets: The party's further sets, as `data.extra_splits`.
        partition: The party's partition, as a configuration names it. None: the default.
    """
    settings = {
        "source": source_of(source, folder),
        "num_clients": data.num_clients,
        "partition": partition,
        "num_classes": data.num_classes,
        "input_shape": data.input_shape and list(data.input_shape),
        "extra_splits": sets or None,
        "unseen": list(data.unseen_clients) or None,
        **NOT_DIVIDED,
    }
    write_file(folder / "data.yaml", yaml.safe_dump({"data": settings}, sort_keys=False))


def write_whole(folder: Path, *, data: FederatedDataModule, split: str) -> None:
    """Write all samples of a split."""
    write(folder, data=data, split=split, indices=torch.arange(len(data.split(split))))


def write(folder: Path, *, data: FederatedDataModule, split: str, indices: torch.Tensor) -> None:
    """Write samples of a split.

    Args:
        folder: The folder of the set.
        data: The data of the simulation.
        split: The name of the split.
        indices: The samples' positions in the split, (n,) int64.
    """
    write_set(
        folder,
        split=data.split(split),
        indices=indices,
        classes=data.num_classes,
        names=data.source.class_names,
    )
