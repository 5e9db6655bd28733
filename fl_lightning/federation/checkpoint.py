"""Checkpoints of a federation: whole rounds only, whatever happens; and how weights are read from files."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning.utilities import rank_zero_info

from fl_lightning.client.checkpoint_io import say_if_unchecked
from fl_lightning.client.module import ClientModule
from fl_lightning.client.store import ClientStore
from fl_lightning.distributed import Communicator, to_device
from fl_lightning.federation.recorder import Recorder
from fl_lightning.utils.files import read_saved

DATA_SHAPE = "data_shape"
"""Key of the classes and the input's shape, in a checkpoint and in a state dict that crosses processes."""

FORM: dict[str, Any] = {
    "store": {"records": Mapping},
    "initial_personal": Mapping,
    "recorder": {
        "round_metrics": Mapping,
        "pending_round": int | None,
        "peak": torch.Tensor | None,
        "evaluated_rounds": int,
        "rows": list,
    },
    "transforms": list,
    "client": Mapping,
    "settings": {"config": Mapping, "objects": Mapping},
}
"""Keys that a federation adds to a checkpoint, with the kind of each value, or of what is in it."""

OUTER_FORM = {"state_dict": Mapping, "global_step": int}
"""The same of Lightning's keys that every use of a checkpoint needs."""

LIGHTNING_KEYS = ("loops", "optimizer_states", "lr_schedulers", "callbacks")
"""Keys of Lightning's that a fit needs besides."""

SERVER_PARTS = ("aggregator.", "server_module.")
"""Beginnings of the names of rule and server module's entries, in the loop's state dict."""


def data_shape(client: ClientModule) -> list[int] | None:
    """Give classes and shape that the net was built for, (C, *input_shape); None for a module of the user's own."""
    if client.module is not None or client.num_classes is None or client.input_shape is None:
        return None
    return [client.num_classes, *client.input_shape]


def build(client: ClientModule, shape: list[int] | None) -> None:
    """Build the net for the classes and input shape that `data_shape` gave."""
    if shape is None:
        client.configure_model()
    else:
        client.build(shape[0], tuple(shape[1:]))


def unallocated(own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Choose the saved entries of rule and server module that the loop has not allocated yet."""
    return {name: value for name, value in saved.items() if name not in own and name.startswith(SERVER_PARTS)}


def begin_round_anew(checkpoint: Mapping[str, Any]) -> None:
    """Correct a checkpoint that is saved in `on_train_epoch_start`.

    There Lightning still counts the batch of the round before, and on resume would take it for this round's.
    """
    progress = checkpoint.get("loops", {}).get("fit_loop", {})
    epochs = progress.get("epoch_progress", {}).get("current", {"ready": 0, "started": 0})
    if epochs["started"] < epochs["ready"]:
        batches = progress["epoch_loop.batch_progress"]
        batches["current"] = dict.fromkeys(batches["current"], 0)
        batches["is_last_batch"] = False


def whole_store(store: ClientStore, communicator: Communicator, inside_round: bool) -> dict[str, Any]:
    """Gather the records of all processes on the root process.

    Raises:
        RuntimeError: inside a round of several processes, which are not at the same client.
    """
    if communicator.world == 1 or not store.owners:
        return store.state_dict()
    if inside_round:
        raise RuntimeError(
            f"a checkpoint cannot be saved inside a round of {communicator.world} processes, which are at different "
            f"clients; save it in on_train_batch_end or later"
        )
    parts = communicator.gather_to_root(to_device(store.state_dict(), torch.device("cpu")))
    records = {client_id: content for part in parts for client_id, content in part["records"].items()}
    files = torch.cat([part["files"] for part in parts]) if parts else torch.empty(0, 5, dtype=torch.int64)
    return {"records": dict(sorted(records.items())), "files": files[files[:, 0].argsort()]}


def federated(checkpoint: Mapping[str, Any], name: str, continues: bool = False) -> Any:
    """Give what a federation adds to Lightning's checkpoint.

    Args:
        checkpoint: as it was read.
        name: of the file, for the error.
        continues: whether a fit goes on from it, which needs the optimizers' states too.

    Raises:
        ValueError: if it is the checkpoint of another LightningModule or another version, or lacks something.
    """
    found = checkpoint.get("federated")
    if not isinstance(found, Mapping):
        raise ValueError(
            f"a FederatedLoop continues its own checkpoints only, and {name} is of another LightningModule; to start "
            f"from its weights set model.initial_weights"
        )
    if missing := [key for key in FORM if key not in found]:
        raise ValueError(
            f"{name} was written by another version (it has no {missing[0]!r}), whose runs cannot be continued; to "
            f"start from its weights set model.initial_weights"
        )
    if wrong := misshapen(found, FORM) or misshapen(checkpoint, OUTER_FORM):
        raise ValueError(
            f"{name} is no checkpoint as a federation writes it (its {wrong!r} is missing, or of another kind); take "
            f"another checkpoint"
        )
    if continues and (missing := [key for key in LIGHTNING_KEYS if key not in checkpoint]):
        raise ValueError(
            f"a fit is continued from a checkpoint with everything in it, and {name} has no {missing[0]!r} "
            f"(save_weights_only); to start from its weights set model.initial_weights"
        )
    return found


def misshapen(found: Mapping[str, Any], form: Mapping[str, Any]) -> str:
    """Find the first key whose value is not of the kind that a form names; empty where all are."""
    for key, kind in form.items():
        value = found.get(key)
        if isinstance(kind, Mapping):
            inner = misshapen(value, kind) if isinstance(value, Mapping) else ""
            if inner or not isinstance(value, Mapping):
                return f"{key}.{inner}".rstrip(".")
        elif not isinstance(value, kind):
            return key
    return ""


def rows_kept(recorder: Recorder, loggers: Iterable[Any], callbacks: Iterable[Any]) -> dict[int, dict[str, float]]:
    """Rows of the rounds before that a logger with `rows_on_disk` has kept, else callbacks; says if there are none."""
    for logger in loggers:
        if hasattr(type(logger), "rows_on_disk"):  # of the class: Lightning's DummyLogger has every attribute
            rows: dict[int, dict[str, float]] = logger.rows_on_disk()
            if recorder.wrote(rows):
                return rows
            rank_zero_info("metrics.csv has not the rows that this run has written: its values are not used any more")
    rows = {}
    for callback in callbacks:
        if hasattr(type(callback), "rows_on_disk"):
            for round_idx, row in callback.rows_on_disk().items():
                rows.setdefault(round_idx, {}).update(row)
    if not rows:
        rank_zero_info("no csv file has the rows of the rounds before: pictures and tables of rounds begin anew")
    return rows


def client_state(path: Path, client: ClientModule) -> dict[str, Any]:
    """Read the client's entries from a checkpoint (of a federation, the client or its module) or a state dict.

    Raises:
        FileNotFoundError: without such a file.
        ValueError: as `read_saved` and `check_entries`.
    """
    if not path.is_file():
        raise FileNotFoundError(f"initial_weights must be a file, got {path}; give a checkpoint or a state dict")
    found = read_saved(path)
    say_if_unchecked(path, found)
    state = {
        name.removeprefix("client."): value
        for name, value in found.get("state_dict", found).items()
        if not name.startswith(SERVER_PARTS)
    }
    own = client.state_dict()
    if client.module is not None and not own.keys() & state.keys():  # of the module by itself
        state = {f"module.{name}": value for name, value in state.items()}
    check_entries(own, state)
    return state


def check_entries(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse the checkpoint of another net with one sentence in place of torch's list.

    Raises:
        ValueError: naming an entry that is not in both, or has another shape.
    """
    for name in sorted(set(own) | set(saved)):
        here, there = getattr(own.get(name), "shape", None), getattr(saved.get(name), "shape", None)
        if here != there:
            raise ValueError(
                f"the checkpoint must be of the same client and aggregator, but entry {name!r} has shape "
                f"{there and tuple(there)} in it and {here and tuple(here)} here; give the configuration it was "
                f"made with"
            )
