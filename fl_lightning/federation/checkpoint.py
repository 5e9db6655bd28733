"""The federation's part of a checkpoint, which holds whole rounds only, and the reading of initial weights."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.utilities import rank_zero_info, rank_zero_warn

from fl_lightning.client.checkpoint_io import say_if_unchecked
from fl_lightning.client.hooks import own_hook
from fl_lightning.client.module import ClientModule
from fl_lightning.data.schema import Schema
from fl_lightning.data.stored_schema import DATA_SHAPE, OWNERS, SCHEMA, stored_schema
from fl_lightning.federation.effects import belongs_to_any
from fl_lightning.federation.parts import FederationParts
from fl_lightning.federation.recorder import Recorder
from fl_lightning.members.user_entries import UserEntries
from fl_lightning.members.weights import GlobalWeights
from fl_lightning.types import Members, Undo, does
from fl_lightning.utils.files import read_saved
from fl_lightning.utils.settings import check_kind

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
"""The keys that a federation adds to a checkpoint, each with the type of its value or the form of its content."""

OUTER_FORM = {"state_dict": Mapping, "global_step": int}
"""The form of Lightning's keys that every use of a checkpoint needs."""

LIGHTNING_KEYS = ("loops", "optimizer_states", "lr_schedulers", "callbacks")
"""Further keys of Lightning that a fit needs."""

CLIENT = "client."
"""Prefix of the entries of the client in the state dict of the loop."""

SERVER_PARTS = ("aggregator.", "server_module.")
"""Prefixes of the entries of aggregator and server module in the state dict of the loop."""

SERVER_STEP = ("model.server_optimizer", "model.server_lr_scheduler")
"""Settings whose states Lightning keeps in a checkpoint."""


class SavedFederation:
    """Saves and loads the federation's part of a checkpoint, and keeps loaded values until they are needed.

    Args:
        parts: The parts of the federation.
        initial_weights: Path of the file with the initial weights. None means that they are drawn.

    Raises:
        TypeError: `initial_weights` is not a path.
    """

    def __init__(self, parts: FederationParts, initial_weights: str | Path | None = None) -> None:
        remedy = "save its state_dict by torch.save, and give the path"
        check_kind((str, Path), "a file", remedy, initial_weights=initial_weights)
        self.parts = parts
        self.initial_weights = initial_weights
        self._deferred: dict[str, Any] = {}
        """Loaded entries of aggregator and server module that are not allocated yet."""
        self._states: Mapping[str, Any] = {}
        """Loaded states of the members, by name, until the members exist."""
        self._checkpoint: Mapping[str, Any] = {}
        """The loaded checkpoint, if a hook of the client's modules reads it, until the members exist."""

    # --- a run ---

    def load_initial_weights(self, global_weights: GlobalWeights) -> None:
        """Replace the drawn weights by the initial weights, if there is a file of them."""
        if self.initial_weights is not None:
            global_weights.client.load_state_dict(client_state(Path(self.initial_weights), global_weights.client))

    def give(self, members: Members, global_weights: GlobalWeights) -> None:
        """Load the states of a checkpoint into the members, once these exist.

        Args:
            members: The members.
            global_weights: The global weights.

        Raises:
            ValueError: The checkpoint has another number of transforms, or a hook has replaced a module of the client.
        """
        states = self._states
        self._states = {}
        checkpoint = self._checkpoint
        self._checkpoint = {}
        with seen_by_hooks(members, checkpoint):
            for member in members.all:
                if does(member, "load_state_dict") and member.name in states:
                    member.load_state_dict(states[member.name])
        if checkpoint:
            global_weights.check_owners()

    def take_deferred(self) -> dict[str, Any]:
        """Return the entries that `loadable` has kept, and forget them."""
        entries = self._deferred
        self._deferred = {}
        return entries

    def begin_fit(self, trainer: Trainer, global_weights: GlobalWeights) -> None:
        """Restore the rows of a run that continues. In a new run no client has received the frozen entries.

        Args:
            trainer: The Trainer of the run.
            global_weights: The global weights.
        """
        if trainer.ckpt_path is None:
            global_weights.frozen.load_state_dict({})
            return
        recorder = self.parts.recorder
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        recorder.restore(saved_rows(recorder, trainer.loggers, callbacks))

    # --- saving ---

    def shape_entry(self) -> dict[str, Any]:
        """Return the number of classes and the input shape as an entry of a state dict that crosses processes."""
        shape = data_shape(self.parts.client)
        if shape is None:
            return {}
        return {DATA_SHAPE: torch.tensor(shape)}

    def save(
        self,
        checkpoint: dict[str, Any],
        *,
        members: Members,
        undo: Undo | None,
        schema: Schema | None = None,
        owners: Sequence[str] = (),
    ) -> None:
        """Add the federation's part to the checkpoint of Lightning.

        Args:
            checkpoint: The checkpoint.
            members: The members whose states are saved.
            undo: The marks of the current round, whose states are saved. None outside of rounds.
            schema: The schema of the training samples, by which new samples are read. None: it is not known.
            owners: The names of the owners of the samples by client id. Empty: there are none.

        Raises:
            RuntimeError: The run has several processes and is inside a round.
        """
        correct_started_round(checkpoint)
        with seen_by_hooks(members, checkpoint):
            federation = members.state_dict(undo)
        federation["settings"] = self.parts.identity.state_dict()
        federation[DATA_SHAPE] = data_shape(self.parts.client)
        federation[SCHEMA] = None if schema is None else stored_schema(schema)
        federation[OWNERS] = list(owners)
        checkpoint["federated"] = federation

    # --- loading ---

    def loadable(self, state_dict: Mapping[str, Any], find: Callable[[], Mapping[str, Any]] | None) -> dict[str, Any]:
        """Return the entries of a state dict that can be loaded now, and keep the others for later.

        Args:
            state_dict: The state dict of the loop.
            find: A function that returns the present entries of the loop, once the net is built. None if the server
                exists, so that all entries can be loaded.
        """
        state = dict(state_dict)
        shape = state.pop(DATA_SHAPE, None)
        if find is None:
            return state
        # The loaded entries replace the initial weights, which must not come back when the run starts.
        self.initial_weights = None
        build(self.parts.client, None if shape is None else shape.tolist())
        entries = find()
        self._deferred = unallocated(entries, state)
        ready = {name: value for name, value in state.items() if name not in self._deferred}
        # Torch asks for every present entry, so an entry that is deferred keeps its present value for now.
        present = {name: entries[name] for name in self._deferred if name in entries}
        return ready | present

    def load(self, checkpoint: dict[str, Any], find: Callable[[], Mapping[str, Any]], trainer: Trainer | None) -> None:
        """Check a checkpoint, and keep the states of its members until `give`.

        Args:
            checkpoint: The checkpoint. The states of another server optimizer are removed.
            find: A function that returns the present entries of the loop.
            trainer: The Trainer of the run. None for `load_from_checkpoint`, which has no run and no net yet.

        Raises:
            ValueError: The file is no checkpoint of a federation, has entries of another net, or its run has other
                settings.
        """
        fits = trainer is not None and trainer.state.fn == "fit"
        states = federated(checkpoint, "the checkpoint", continues=fits)
        entries = checkpoint["state_dict"]
        if trainer is None:
            build(self.parts.client, states.get(DATA_SHAPE))
            present = find()
            check_entries({**present, **unallocated(present, entries)}, entries)
        else:
            self._compare_run(checkpoint, trainer, fits)
            check_entries(find(), entries)
        self._states = states
        if any(own_hook(module, "on_load_checkpoint") for module in self.parts.client.lightning_modules()):
            self._checkpoint = checkpoint

    def _compare_run(self, checkpoint: dict[str, Any], trainer: Trainer, fits: bool) -> None:
        """Refuse a checkpoint of a run with other settings, and adapt the states that Lightning restores."""
        identity = self.parts.identity
        self.parts.describe(trainer)
        identity.compare(checkpoint["federated"]["settings"], evaluates=not fits)
        if any(belongs_to_any(difference.name, SERVER_STEP) for difference in identity.changed):
            checkpoint["optimizer_states"] = []
            checkpoint["lr_schedulers"] = []
        if fits:
            self._tell_earlier_clock(checkpoint["federated"]["settings"])
        if fits and trainer.max_steps != -1:
            skip_complete_round(checkpoint)

    def _tell_earlier_clock(self, saved: Mapping[str, Any]) -> None:
        """Tell that the schedules of a user's module began anew in every round before there was `model.clock`.

        Args:
            saved: The settings of the run that is continued.
        """
        knows_clock = any(CLOCK in saved.get(part, {}) for part in ("config", "objects"))
        if knows_clock or self.parts.client.module is None or self.parts.settings.clock != "run":
            return
        rank_zero_warn(
            "this run was begun by an earlier version, in which schedulers and trainer.current_epoch of your module "
            "began anew in every round; to continue it so, add --model.clock round --allow_changes model.clock"
        )


CLOCK = "model.clock"
"""Name of the setting of what schedules cover."""


@contextmanager
def seen_by_hooks(members: Members, checkpoint: Mapping[str, Any]) -> Iterator[None]:
    """Let the checkpoint hooks of the client's modules see a checkpoint of Lightning within the block.

    Args:
        members: The members.
        checkpoint: The checkpoint.
    """
    entries = [member for member in members.all if isinstance(member, UserEntries)]
    for member in entries:
        member.checkpoint = checkpoint
    try:
        yield
    finally:
        for member in entries:
            member.checkpoint = {}


def modules_by_prefix(client: ClientModule) -> dict[str, LightningModule]:
    """Return the client's modules by the prefix of their names in the state dict of a loop."""
    modules: dict[str, LightningModule] = {CLIENT: client}
    if client.module is not None:
        modules[f"{CLIENT}module."] = client.module
    return modules


def data_shape(client: ClientModule) -> list[int] | None:
    """Return the number of classes and the input shape of the net, (C, *input_shape).

    None if the client trains a module of the user.
    """
    if client.module is not None or client.num_classes is None or client.input_shape is None:
        return None
    return [client.num_classes, *client.input_shape]


def build(client: ClientModule, shape: list[int] | None) -> None:
    """Build the net of a client.

    Args:
        client: The client module.
        shape: The number of classes and the input shape, as `data_shape` returns them.
    """
    if shape is None:
        client.configure_model()
    else:
        client.build(shape[0], tuple(shape[1:]))


def unallocated(present: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return the saved entries of aggregator and server module that the loop has not allocated in their shape.

    Args:
        present: The present entries of the loop.
        saved: The saved entries of the loop.
    """
    entries: dict[str, Any] = {}
    for name, value in saved.items():
        is_allocated = name in present and shape_of(present[name]) == shape_of(value)
        if name.startswith(SERVER_PARTS) and not is_allocated:
            entries[name] = value
    return entries


def correct_started_round(checkpoint: Mapping[str, Any]) -> None:
    """Correct a checkpoint that is saved in `on_train_epoch_start`.

    Lightning still counts the batch of the round before. On resume it would take it for the batch of this round.
    """
    fit_loop = checkpoint.get("loops", {}).get("fit_loop", {})
    epoch = fit_loop.get("epoch_progress", {}).get("current")
    if epoch is not None and epoch["started"] < epoch["ready"]:
        reset_batch(fit_loop)


def skip_complete_round(checkpoint: Mapping[str, Any]) -> None:
    """Let a run with `max_steps` continue after a complete round.

    Lightning would count the epoch of the round twice, or take its batch for the batch of the next round.
    """
    fit_loop = checkpoint.get("loops", {}).get("fit_loop", {})
    epochs = fit_loop.get("epoch_progress", {})
    epoch = epochs.get("current")
    if epoch is None:
        return
    is_complete = epoch["ready"] == epoch["started"] <= epoch["processed"]
    if not is_complete:
        return
    for counts in epochs.values():
        counts.update(dict.fromkeys(counts, counts["ready"]))
    reset_batch(fit_loop)


def reset_batch(fit_loop: Mapping[str, Any]) -> None:
    """Reset the count of batches in the epoch, in Lightning's state of a fit."""
    batches = fit_loop["epoch_loop.batch_progress"]
    batches["current"] = dict.fromkeys(batches["current"], 0)
    batches["is_last_batch"] = False


def federated(checkpoint: Mapping[str, Any], name: str, continues: bool = False) -> Any:
    """Return the federation's part of a checkpoint.

    Args:
        checkpoint: The checkpoint.
        name: Name of the file in error sentences.
        continues: Whether a fit continues from the checkpoint. It needs the states of the optimizers too.

    Raises:
        ValueError: The checkpoint is of another LightningModule or another version, or it lacks a key.
    """
    content = checkpoint.get("federated")
    if not isinstance(content, Mapping):
        raise ValueError(
            f"a FederatedLoop continues its own checkpoints only, and {name} is of another LightningModule; to start "
            f"from its weights set model.initial_weights"
        )
    missing = [key for key in FORM if key not in content]
    if missing:
        raise ValueError(
            f"{name} was written by another version (it has no {missing[0]!r}), whose runs cannot be continued; to "
            f"start from its weights set model.initial_weights"
        )
    wrong = misshapen(content, FORM) or misshapen(checkpoint, OUTER_FORM)
    if wrong:
        raise ValueError(
            f"{name} is no checkpoint as a federation writes it (its {wrong!r} is missing, or of another kind); take "
            f"another checkpoint"
        )
    missing = [key for key in LIGHTNING_KEYS if key not in checkpoint]
    if continues and missing:
        raise ValueError(
            f"a fit is continued from a checkpoint with everything in it, and {name} has no {missing[0]!r} "
            f"(save_weights_only); to start from its weights set model.initial_weights"
        )
    return content


def misshapen(content: Mapping[str, Any], form: Mapping[str, Any]) -> str:
    """Return the first key whose value does not have the type of a form, or an empty string.

    Args:
        content: The values, by key.
        form: The type of each value, or the form of its content.
    """
    for key, kind in form.items():
        value = content.get(key)
        if not isinstance(kind, Mapping):
            if not isinstance(value, kind):
                return key
            continue
        if not isinstance(value, Mapping):
            return key
        inner = misshapen(value, kind)
        if inner:
            return f"{key}.{inner}"
    return ""


def saved_rows(recorder: Recorder, loggers: Iterable[Any], callbacks: Iterable[Any]) -> dict[int, dict[str, float]]:
    """Return the rows of the rounds before, by round.

    They are those of a logger with `rows_on_disk`, or else those of the callbacks.

    Args:
        recorder: The recorder, which knows the rows that this run has written.
        loggers: The loggers of the Trainer.
        callbacks: The callbacks of the Trainer.
    """
    for logger in loggers:
        # The class is asked, because an instance of Lightning's DummyLogger has every attribute.
        if hasattr(type(logger), "rows_on_disk"):
            logged: dict[int, dict[str, float]] = logger.rows_on_disk()
            if recorder.wrote(logged):
                return logged
            rank_zero_info("metrics.csv has not the rows that this run has written: its values are not used any more")
    rows: dict[int, dict[str, float]] = {}
    for callback in callbacks:
        if hasattr(type(callback), "rows_on_disk"):
            for round_idx, row in callback.rows_on_disk().items():
                rows.setdefault(round_idx, {}).update(row)
    if not rows:
        rank_zero_info("no csv file has the rows of the rounds before: pictures and tables of rounds begin anew")
    return rows


def check_weights_file(path: Path) -> None:
    """Refuse initial weights that are not there.

    Raises:
        FileNotFoundError: `path` is no file.
    """
    if not path.is_file():
        raise FileNotFoundError(f"initial_weights must be a file, got {path}; give a checkpoint or a state dict")


def client_state(path: Path, client: ClientModule) -> dict[str, Any]:
    """Read the entries of the client from a file.

    Args:
        path: A checkpoint of a federation, of the client or of its module, or a state dict.
        client: The client module.

    Raises:
        FileNotFoundError: `path` is no file.
        ValueError: The file cannot be read, or its entries are not those of the client.
    """
    check_weights_file(path)
    content = read_saved(path)
    say_if_unchecked(path, content)
    saved = content.get("state_dict", content)
    state: dict[str, Any] = {}
    for name, value in saved.items():
        if not name.startswith(SERVER_PARTS):
            state[name.removeprefix(CLIENT)] = value
    entries = client.state_dict()
    is_of_module = client.module is not None and not entries.keys() & state.keys()
    if is_of_module:
        state = {f"module.{name}": value for name, value in state.items()}
    check_entries(entries, state)
    return state


def shape_of(value: Any) -> Any:
    """Return the shape of a tensor, or None for any other value."""
    return getattr(value, "shape", None)


def check_entries(present: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another net with one sentence, where torch would write a list.

    Args:
        present: The present entries, by name.
        saved: The entries of the checkpoint, by name.

    Raises:
        ValueError: An entry is not in both, or it has another shape.
    """
    for name in sorted(set(present) | set(saved)):
        present_shape = shape_of(present.get(name))
        saved_shape = shape_of(saved.get(name))
        if present_shape != saved_shape:
            raise ValueError(
                f"the checkpoint must be of the same client and aggregator, but entry {name!r} has shape "
                f"{saved_shape and tuple(saved_shape)} in it and {present_shape and tuple(present_shape)} here; give "
                f"the configuration it was made with"
            )
