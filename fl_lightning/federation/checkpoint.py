"""Checkpoints of a federation: whole rounds only, whatever happens.

And how weights are read from files.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Trainer
from pytorch_lightning.utilities import rank_zero_info

from fl_lightning.client.checkpoint_io import say_if_unchecked
from fl_lightning.client.module import ClientModule
from fl_lightning.federation.identity import below
from fl_lightning.federation.parts import FederationParts
from fl_lightning.federation.recorder import Recorder
from fl_lightning.members.weights import GlobalWeights
from fl_lightning.types import Members, Undo, does
from fl_lightning.utils.files import read_saved
from fl_lightning.utils.settings import check_kind

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


class SavedFederation:
    """The federation's part of a checkpoint: makes it, takes a loaded one, and keeps what cannot be taken yet.

    Args:
        parts: of the federation.
        initial_weights: file of the weights to start from; None: those that are drawn.
    """

    def __init__(self, parts: FederationParts, initial_weights: str | Path | None = None) -> None:
        remedy = "save its state_dict by torch.save, and give the path"
        check_kind((str, Path), "a file", remedy, initial_weights=initial_weights)
        self.parts = parts
        self.initial_weights = initial_weights
        self._deferred: dict[str, Any] = {}
        """Entries of rule and server module, until they are allocated."""
        self._waiting: Mapping[str, Any] = {}
        """States of the members, by name, until there are members."""

    # --- a run -------------------------------------------------------------------------------------------------

    def start(self, weights: GlobalWeights) -> None:
        """Put the values to start from in place of those with which the module was built."""
        if self.initial_weights is not None:
            weights.client.load_state_dict(client_state(Path(self.initial_weights), weights.client))

    def give(self, members: Members) -> None:
        """Give the members, now that there are some, the states that were loaded before.

        Raises:
            ValueError: there is another number of transforms.
        """
        states = self._waiting
        self._waiting = {}
        for member in members.all:
            if does(member, "load_state_dict") and member.name in states:
                member.load_state_dict(states[member.name])

    def take_deferred(self) -> dict[str, Any]:
        """Hand over the entries that `loadable` has kept."""
        entries = self._deferred
        self._deferred = {}
        return entries

    def begin_fit(self, trainer: Trainer, weights: GlobalWeights) -> None:
        """Take the rows of the rounds before.

        Where there are none the clients have nothing of the model yet.
        """
        if trainer.ckpt_path is None:
            weights.frozen.load_state_dict({})
        else:
            recorder, callbacks = self.parts.recorder, trainer.callbacks  # type: ignore[attr-defined]
            recorder.restore(rows_kept(recorder, trainer.loggers, callbacks))

    # --- saving ------------------------------------------------------------------------------------------------

    def shape_entry(self) -> dict[str, Any]:
        """The entry of a state dict that crosses processes: what the net was built for."""
        shape = data_shape(self.parts.client)
        return {} if shape is None else {DATA_SHAPE: torch.tensor(shape)}

    def save(self, checkpoint: dict[str, Any], members: Members, undo: Undo | None) -> None:
        """Add the federation's part to Lightning's checkpoint.

        Args:
            checkpoint: to be written.
            members: whose states it holds.
            undo: of the round under way, before which the states are saved; None outside of rounds.

        Raises:
            RuntimeError: inside a round of several processes.
        """
        begin_round(checkpoint)
        rest = {"settings": self.parts.identity.state_dict(), DATA_SHAPE: data_shape(self.parts.client)}
        checkpoint["federated"] = members.state_dict(undo) | rest

    # --- loading -----------------------------------------------------------------------------------------------

    def loadable(self, state_dict: Mapping[str, Any], find: Callable[[], Mapping[str, Any]] | None) -> dict[str, Any]:
        """Choose the entries of a state dict that can be loaded now.

        The others wait until the server is made.

        Args:
            state_dict: of the loop.
            find: where there is no server yet gives the entries that there are, once the net is built; else None.
        """
        state = dict(state_dict)
        shape = state.pop(DATA_SHAPE, None)
        if find is None:
            return state
        self.initial_weights = None  # they are overwritten, and must not come back
        build(self.parts.client, None if shape is None else shape.tolist())
        entries = find()
        self._deferred = unallocated(entries, state)
        ready = {name: value for name, value in state.items() if name not in self._deferred}
        return ready | {name: entries[name] for name in self._deferred if name in entries}

    def load(self, checkpoint: dict[str, Any], find: Callable[[], Mapping[str, Any]], trainer: Trainer | None) -> None:
        """Build the net for a checkpoint, or compare its run with the present one, and keep its states to be given.

        Args:
            checkpoint: as it was read; states of another server optimizer are taken out.
            find: gives the entries of the loop.
            trainer: of the present run; None: there is none, and no net yet (`load_from_checkpoint`).

        Raises:
            ValueError: as `federated` and `check_entries`, or naming each setting that differs and may not.
        """
        identity = self.parts.identity
        fits = trainer is not None and trainer.state.fn == "fit"
        states = federated(checkpoint, "the checkpoint", fits)
        saved = checkpoint["state_dict"]
        if trainer is None:
            build(self.parts.client, states.get(DATA_SHAPE))
            here = find()
            check_entries({**here, **unallocated(here, saved)}, saved)
        else:
            self.parts.describe(trainer)
            identity.compare(states["settings"], evaluates=not fits)
            steps = "model.server_optimizer", "model.server_lr_scheduler"
            if any(below(changed.name, name) for changed in identity.changed for name in steps):
                checkpoint |= {"optimizer_states": [], "lr_schedulers": []}
            if fits and trainer.max_steps != -1:
                begin_round(checkpoint, after=True)
            check_entries(find(), saved)
        self._waiting = states


def data_shape(client: ClientModule) -> list[int] | None:
    """Give classes and shape that the net was built for, (C, *input_shape).

    None for a module of the user's own.
    """
    if client.module is not None or client.num_classes is None or client.input_shape is None:
        return None
    return [client.num_classes, *client.input_shape]


def build(client: ClientModule, shape: list[int] | None) -> None:
    """Build the net for the classes and input shape that `data_shape` gave."""
    if shape is None:
        client.configure_model()
    else:
        client.build(shape[0], tuple(shape[1:]))


def unallocated(here: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Choose the saved entries of rule and server module that the loop has not allocated yet, or not in their shape."""
    parts = {name: value for name, value in saved.items() if name.startswith(SERVER_PARTS)}
    return {n: value for n, value in parts.items() if n not in here or shape_of(here[n]) != shape_of(value)}


def begin_round(checkpoint: Mapping[str, Any], after: bool = False) -> None:
    """Correct a checkpoint that is saved in `on_train_epoch_start`, or one of a complete round for `max_steps`.

    In the first Lightning still counts the batch of the round before, and on resume would take it for this round's. In
    the second it would count the round's epoch twice, or take its batch for that of the next round.

    Args:
        checkpoint: as it was saved or read.
        after: whether the next round begins after a complete one.
    """
    progress = checkpoint.get("loops", {}).get("fit_loop", {})
    epochs = progress.get("epoch_progress", {})
    now = epochs.get("current", {"ready": 0, "started": 0, "processed": -1})
    if not (now["ready"] == now["started"] <= now["processed"] if after else now["started"] < now["ready"]):
        return
    for counted in epochs.values() if after else ():
        counted.update(dict.fromkeys(counted, counted["ready"]))
    batches = progress["epoch_loop.batch_progress"]
    batches |= {"current": dict.fromkeys(batches["current"], 0), "is_last_batch": False}


def federated(checkpoint: Mapping[str, Any], name: str, continues: bool = False) -> Any:
    """Give what a federation adds to Lightning's checkpoint.

    Args:
        checkpoint: as it was read.
        name: of the file, for the error.
        continues: whether a fit goes on from it, which needs the optimizers' states too.

    Raises:
        ValueError: if it is the checkpoint of another LightningModule or another version, or lacks something.
    """
    content = checkpoint.get("federated")
    if not isinstance(content, Mapping):
        raise ValueError(
            f"a FederatedLoop continues its own checkpoints only, and {name} is of another LightningModule; to start "
            f"from its weights set model.initial_weights"
        )
    if missing := [key for key in FORM if key not in content]:
        raise ValueError(
            f"{name} was written by another version (it has no {missing[0]!r}), whose runs cannot be continued; to "
            f"start from its weights set model.initial_weights"
        )
    if wrong := misshapen(content, FORM) or misshapen(checkpoint, OUTER_FORM):
        raise ValueError(
            f"{name} is no checkpoint as a federation writes it (its {wrong!r} is missing, or of another kind); take "
            f"another checkpoint"
        )
    if continues and (missing := [key for key in LIGHTNING_KEYS if key not in checkpoint]):
        raise ValueError(
            f"a fit is continued from a checkpoint with everything in it, and {name} has no {missing[0]!r} "
            f"(save_weights_only); to start from its weights set model.initial_weights"
        )
    return content


def misshapen(content: Mapping[str, Any], form: Mapping[str, Any]) -> str:
    """Find the first key whose value is not of the kind that a form names.

    Empty where all are.
    """
    for key, kind in form.items():
        value = content.get(key)
        if isinstance(kind, Mapping):
            inner = misshapen(value, kind) if isinstance(value, Mapping) else ""
            if inner or not isinstance(value, Mapping):
                return f"{key}.{inner}".rstrip(".")
        elif not isinstance(value, kind):
            return key
    return ""


def rows_kept(recorder: Recorder, loggers: Iterable[Any], callbacks: Iterable[Any]) -> dict[int, dict[str, float]]:
    """Rows of the rounds before that a logger with `rows_on_disk` has kept, else callbacks.

    Says if there are none.
    """
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
    content = read_saved(path)
    say_if_unchecked(path, content)
    state = {
        name.removeprefix("client."): value
        for name, value in content.get("state_dict", content).items()
        if not name.startswith(SERVER_PARTS)
    }
    entries = client.state_dict()
    if client.module is not None and not entries.keys() & state.keys():  # of the module by itself
        state = {f"module.{name}": value for name, value in state.items()}
    check_entries(entries, state)
    return state


def shape_of(value: Any) -> Any:
    """The shape of a tensor.

    None of anything else.
    """
    return getattr(value, "shape", None)


def check_entries(entries: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse the checkpoint of another net with one sentence in place of torch's list.

    Raises:
        ValueError: naming an entry that is not in both, or has another shape.
    """
    for name in sorted(set(entries) | set(saved)):
        here = shape_of(entries.get(name))
        there = shape_of(saved.get(name))
        if here != there:
            raise ValueError(
                f"the checkpoint must be of the same client and aggregator, but entry {name!r} has shape "
                f"{there and tuple(there)} in it and {here and tuple(here)} here; give the configuration it was "
                f"made with"
            )
