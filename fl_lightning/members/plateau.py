"""ReduceLROnPlateau of the clients: stepped by the server, once a round, with a value that no client can know."""

from collections.abc import Mapping
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.utilities import rank_zero_info
from pytorch_lightning.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

from fl_lightning.client.checks import check_optimized
from fl_lightning.client.hooks import overridden
from fl_lightning.client.module import ClientModule
from fl_lightning.client.optimizers import parse_optimizers
from fl_lightning.types import Member

Factors = list[list[float]]
"""Factors of the local learning rates, by optimizer and parameter group."""


class Plateau(Member):
    """Steps the `ReduceLROnPlateau` of the client's `configure_optimizers` once a round, for all clients.

    The server has optimizers of its own, which are never stepped: their learning rates, relative to those they began
    with, are the factors of the clients' learning rates in the next round.

    Attributes:
        factors: of the round to come; empty where no learning rate is changed.
    """

    name = "plateau"

    def __init__(self) -> None:
        self.factors = Factors()
        self._entries: list[LRSchedulerConfig] = []
        self._optimizers: list[Optimizer] = []
        self._base: Factors = []
        self._saved: dict[str, Any] | None = None
        self._owner: Any = None
        """The module with the schedulers, once there are some."""

    def start(self, client: ClientModule, trainer: Trainer) -> None:
        """Begin a fit.

        Raises:
            ValueError: the client's optimizers would not train it.
        """
        owner: Any = client.lightning_modules()[-1]
        self._entries = []
        self._optimizers = []
        self.factors = []
        if not overridden(owner, "configure_optimizers", ClientModule):
            return
        name = type(owner).__name__
        optimizers, schedulers = parse_optimizers(client.configure_optimizers(), name)
        if schedulers:
            rank_zero_info(
                f"the schedulers of {name} start anew for every client and round; give them the number of a client's "
                f"local steps, because the Trainer's numbers (max_epochs, estimated_stepping_batches) count rounds "
                f"(docs/your-module.md, 'Optimizers and schedulers')"
            )
        check_optimized(owner, optimizers, client.parameters())
        if not client.automatic_optimization:
            return  # the module steps its schedulers itself
        entries = [entry for entry in schedulers if entry.reduce_on_plateau]
        if not entries:
            return
        keys = ", ".join(str(entry.monitor) for entry in entries)
        rank_zero_info(
            f"ReduceLROnPlateau of {name} is stepped once a round with the federation's {keys}; its learning rate "
            f"holds for every client of the next round"
        )
        self._entries = entries
        self._optimizers = optimizers
        self._owner = owner
        self._base = self._rates()
        if self._saved is not None:
            self._restore(self._saved)
            self._saved = None
        self.factors = self._relative()

    def step(self, round_idx: int, values: Mapping[str, float], is_complete: bool) -> None:
        """Step at the end of a round, with its logged values. A scheduler whose value is not among them waits.

        Args:
            round_idx: of the round.
            values: that it has logged.
            is_complete: whether all that is ever logged is among them (the round was evaluated).

        Raises:
            ValueError: naming a monitor that nobody logs.
        """
        for entry in self._entries:
            value = values.get(str(entry.monitor))
            if value is None and entry.strict and is_complete:
                raise ValueError(
                    f"ReduceLROnPlateau must watch a logged value, got monitor={entry.monitor!r}; watch one of "
                    f"{sorted(values)}, or set strict=False to wait for it"
                )
            if value is not None and (round_idx + 1) % entry.frequency == 0:
                self._owner.lr_scheduler_step(entry.scheduler, value)
        now = self._relative()
        if now != self.factors:
            rates = ", ".join(f"{factor:.3g}" for row in now for factor in row)
            rank_zero_info(f"ReduceLROnPlateau: after round {round_idx} local learning rates are multiplied by {rates}")
            self.factors = now

    def _rates(self) -> Factors:
        return [[float(group["lr"]) for group in optimizer.param_groups] for optimizer in self._optimizers]

    def _relative(self) -> Factors:
        pairs = zip(self._rates(), self._base, strict=True)
        factors = [[a / b if b else 1.0 for a, b in zip(now, base, strict=True)] for now, base in pairs]
        return factors if any(factor != 1.0 for row in factors for factor in row) else []

    # --- checkpoints -------------------------------------------------------------------------------------------

    def state_dict(self, mark: Any = None) -> dict[str, Any]:
        """Learning rates and schedulers.

        Empty where nothing is watched.
        """
        if self._saved is not None:
            return self._saved
        if not self._entries:
            return {}
        schedulers = [entry.scheduler.state_dict() for entry in self._entries]
        return {"rates": self._rates(), "schedulers": schedulers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the state of a checkpoint, when the next fit begins."""
        self._saved = dict(state) or None

    def _restore(self, state: Mapping[str, Any]) -> None:
        rates = state["rates"]
        schedulers = state["schedulers"]
        if len(schedulers) != len(self._entries) or [*map(len, rates)] != [*map(len, self._base)]:
            raise ValueError(
                f"the checkpoint must be of the same ReduceLROnPlateau, but has {len(schedulers)} of them and there "
                f"are {len(self._entries)} here; give the module it was made with"
            )
        for entry, saved in zip(self._entries, schedulers, strict=True):
            entry.scheduler.load_state_dict(saved)
        for optimizer, row in zip(self._optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, row, strict=True):
                group["lr"] = rate
