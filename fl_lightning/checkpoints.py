"""What a federation's checkpoint holds, and how the weights come back from processes that were started for a fit."""

from __future__ import annotations

from collections.abc import Mapping
from multiprocessing import parent_process
from typing import TYPE_CHECKING, Any

import torch

from fl_lightning.local.forwarding import Forwarding
from fl_lightning.rounds import to_device
from fl_lightning.server import check_entries
from fl_lightning.strategy import Ranks
from fl_lightning.types import State

if TYPE_CHECKING:
    from pathlib import Path

    from fl_lightning.client import ClientModule
    from fl_lightning.evaluation import Evaluation
    from fl_lightning.server import GlobalWeights
    from fl_lightning.store import ClientStore

DATA_SHAPE = "data_shape"
"""What a checkpoint, and a state dict that crosses processes, carry besides weights: classes and shape of the input."""


class Checkpoints(Forwarding):
    """The part of the loop that saves and restores; checkpoints hold whole rounds only.

    Attributes:
        round_start: state-dict entries to be saved in place of the live ones while a round or an evaluation is under
            way.
        handed_over: after a fit in a process that was started for it (spawn, fork), of which only the state dict
            comes back.
        aggregator_later: entries of the aggregator's state that were loaded before it had them.
    """

    client: ClientModule
    weights: GlobalWeights | None
    store: ClientStore
    evaluation: Evaluation
    row: dict[str, float]
    row_round: int | None
    initial_personal: State
    initial_weights: str | Path | None

    def __init__(self) -> None:
        super().__init__()
        self.round_start: dict[str, Any] = {}
        self.handed_over = False
        self.aggregator_later: dict[str, Any] = {}

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Whole rounds only: inside a round or an evaluation, the weights before it."""
        shape = self._data_shape() if self.handed_over else None
        told = {} if shape is None else {DATA_SHAPE: torch.tensor(shape)}
        return super().state_dict(*args, **kwargs) | self.round_start | told

    def _data_shape(self) -> list[int] | None:
        """What the net was built for, (C, *input_shape); None for a module of one's own."""
        client = self.client
        if client.module is not None or client.num_classes is None or client.input_shape is None:
            return None
        return [client.num_classes, *client.input_shape]

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Outside of a fit, build the net first; what the aggregator allocates later is kept for it."""
        strict = strict and all(module.strict_loading for module in self.client_modules())
        state = dict(state_dict)
        shape = state.pop(DATA_SHAPE, None)
        if self.weights is None:
            self.initial_weights = None  # they are overwritten here, and must not come back
            self._build(None if shape is None else shape.tolist())
            self.aggregator_later = {name: state.pop(name) for name in state.keys() - self._own(state).keys()}
        return super().load_state_dict(state, strict, assign)

    def _build(self, shape: list[int] | None) -> None:
        if shape is None:
            self.client.configure_model()
        else:
            self.client.build(shape[0], tuple(shape[1:]))

    def _own(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """`state` without entries of the aggregator that are not there."""
        own = self.state_dict()
        return {name: value for name, value in state.items() if name in own or not name.startswith("aggregator.")}

    def teardown(self, stage: str) -> None:
        super().teardown(stage)
        self.handed_over = parent_process() is not None

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        inner: dict[str, Any] = {}
        self.forward_hook("on_save_checkpoint", inner)
        progress = checkpoint.get("loops", {}).get("fit_loop", {})
        epochs = progress.get("epoch_progress", {}).get("current", {"ready": 0, "started": 0})
        if epochs["started"] < epochs["ready"]:
            # saved in on_train_epoch_start: Lightning still counts the batch of the round before, and on resume
            # would take it for this round's
            batches = progress["epoch_loop.batch_progress"]
            batches["current"] = dict.fromkeys(batches["current"], 0)
            batches["is_last_batch"] = False
        checkpoint["federated"] = {
            "store": self._whole_store(),
            "initial_personal": self.initial_personal,
            "row": dict(self.row),
            "row_round": self.row_round,
            "peak": self.evaluation.peak,
            "client": inner,
            DATA_SHAPE: self._data_shape(),
        }

    def _whole_store(self) -> dict[int, dict[str, Any]]:
        """The records of all processes, on rank 0.

        Raises:
            RuntimeError: inside a round of several processes, which are not at the same client.
        """
        ranks = Ranks(self.device)
        if ranks.world == 1 or not self.store.owners:
            return self.store.state_dict()
        if self.round_start and self.trainer.training:
            raise RuntimeError(
                f"a checkpoint cannot be saved inside a round of {ranks.world} processes, which are at different "
                f"clients; save it in on_train_batch_end or later"
            )
        records: dict[int, dict[str, Any]] = {}
        for part in ranks.to_zero(to_device(self.store.state_dict(), torch.device("cpu"))):
            records |= part
        return dict(sorted(records.items()))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        saved = checkpoint.get("federated")
        if saved is None:
            raise ValueError(
                "a FederatedLoop continues its own checkpoints only, and this one is of another LightningModule; to "
                "start from its weights set model.initial_weights"
            )
        entries = checkpoint["state_dict"]
        if self.weights is None:  # by load_from_checkpoint, before any data are known
            self._build(saved.get(DATA_SHAPE))
            entries = self._own(entries)
        check_entries(self.state_dict(), entries)
        ranks = Ranks()
        self.store.load_state_dict(saved["store"], ranks.rank, ranks.world)
        self.initial_personal = {name: value.to(self.device) for name, value in saved["initial_personal"].items()}
        self.row, self.row_round = saved["row"], saved["row_round"]
        self.evaluation.peak = saved["peak"]
        self.forward_hook("on_load_checkpoint", saved["client"])


def read_checkpoint(path: str | Path, mmap: bool = False) -> dict[str, Any]:
    """What `torch.save` wrote: a checkpoint or a state dict, its tensors on the CPU.

    Args:
        path: of the file.
        mmap: whether tensors stay in the file until they are used.

    Raises:
        ValueError: if the file is damaged, or holds something else.
    """
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # whatever pickle and zip say of a damaged file
        found = type(error).__name__
    if not isinstance(found, Mapping):
        raise ValueError(
            f"{path} cannot be read as a checkpoint ({found if isinstance(found, str) else type(found).__name__}): it "
            f"is damaged, or holds more than tensors and plain values; give another one, or a state dict"
        )
    return dict(found)
