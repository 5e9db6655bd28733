"""ReduceLROnPlateau of the clients. The server steps it once a round, since no client knows the value."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from pytorch_lightning.utilities import rank_zero_info
from pytorch_lightning.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer

from fl_lightning.client.module import ClientModule
from fl_lightning.types import Member, RoundOutcome

GroupValues = list[list[float]]
"""Rates or their factors, by optimizer and parameter group."""


class Plateau(Member):
    """Steps the `ReduceLROnPlateau` of the client's `configure_optimizers` once a round, for all clients.

    The server has optimizers of its own, which are never stepped. The schedulers change their
    learning rates. The ratios of these rates to the initial rates are the factors of the clients'
    learning rates in the next round.

    Attributes:
        factors: Factors of the next round. Empty means 1 for all.
    """

    name = "plateau"

    def __init__(self) -> None:
        self.factors = GroupValues()
        self._entries: list[LRSchedulerConfig] = []
        self._optimizers: list[Optimizer] = []
        self._initial_rates: GroupValues = []
        self._saved: dict[str, Any] | None = None
        """The state of a checkpoint, until the next fit begins."""
        self._owner: Any = None
        """The module with the schedulers. None without schedulers."""
        self._has_clients = False
        """Whether a client took part in the last round. If none did, no client has logged anything."""
        self._is_checked = False
        """Whether a complete row had all watched values. The first complete row of a run must have them."""

    def begin_fit(
        self, client: ClientModule, optimizers: list[Optimizer], schedulers: Sequence[LRSchedulerConfig]
    ) -> None:
        """Take the server's optimizers and schedulers when a fit begins.

        Args:
            client: The client module.
            optimizers: Optimizers that the client has made and nobody steps.
            schedulers: The schedulers of these optimizers.

        Raises:
            ValueError: The checkpoint is one of other schedulers.
        """
        owner: Any = client.lightning_modules()[-1]
        self._entries = []
        self._optimizers = []
        self.factors = []
        self._is_checked = False
        self._has_clients = False
        if not client.automatic_optimization:
            # The module steps its schedulers itself.
            return
        entries = [entry for entry in schedulers if entry.reduce_on_plateau]
        if not entries:
            return
        keys = ", ".join(str(entry.monitor) for entry in entries)
        rank_zero_info(
            f"ReduceLROnPlateau of {type(owner).__name__} is stepped once a round with the federation's {keys}; its "
            f"learning rate holds for every client of the next round"
        )
        self._entries = entries
        self._optimizers = optimizers
        self._owner = owner
        self._initial_rates = self._rates()
        if self._saved is not None:
            self._restore(self._saved)
            self._saved = None
        self.factors = self._relative()

    @property
    def is_used(self) -> bool:
        """True if the module has a scheduler that watches a value."""
        return bool(self._entries)

    def end(self, outcome: RoundOutcome, shared: Sequence[Any]) -> Mapping[str, float]:
        self._has_clients = bool(outcome.asked) and not outcome.aborted
        return {}

    def step(self, round_idx: int, values: Mapping[str, float], is_evaluated: bool) -> None:
        """Step the schedulers at the end of a round. A scheduler waits if its value was not logged.

        Args:
            round_idx: The index of the round.
            values: The logged values of the round, by key.
            is_evaluated: Whether the round was evaluated, or no round is.

        Raises:
            ValueError: Nobody logs the value that a scheduler watches.
        """
        if is_evaluated and self._has_clients and not self._is_checked:
            self._check_monitors(values)
            self._is_checked = True
        for entry in self._entries:
            value = values.get(str(entry.monitor))
            if value is not None and (round_idx + 1) % entry.frequency == 0:
                self._owner.lr_scheduler_step(entry.scheduler, value)
        factors = self._relative()
        if factors != self.factors:
            text = ", ".join(f"{factor:.3g}" for factor in chain.from_iterable(factors))
            rank_zero_info(f"ReduceLROnPlateau: after round {round_idx} local learning rates are multiplied by {text}")
            self.factors = factors

    def _check_monitors(self, values: Mapping[str, float]) -> None:
        """Refuse schedulers whose value is not among those of a row that has all values."""
        for entry in self._entries:
            if entry.strict and str(entry.monitor) not in values:
                raise ValueError(
                    f"ReduceLROnPlateau must watch a logged value, got monitor={entry.monitor!r}; watch one of "
                    f"{sorted(values)}, or set strict=False to wait for it"
                )

    def _rates(self) -> GroupValues:
        """Return the learning rates of the server's optimizers."""
        return [learning_rates(optimizer) for optimizer in self._optimizers]

    def _relative(self) -> GroupValues:
        """Return the ratios of the learning rates to the initial rates, or an empty list if all are 1."""
        factors: GroupValues = []
        for rates, initial_rates in zip(self._rates(), self._initial_rates, strict=True):
            pairs = zip(rates, initial_rates, strict=True)
            factors.append([rate / initial if initial else 1.0 for rate, initial in pairs])
        if all(factor == 1.0 for factor in chain.from_iterable(factors)):
            return []
        return factors

    # --- checkpoints ---

    def state_dict(self, mark: Any = None) -> dict[str, Any]:
        """Return learning rates and schedulers, or an empty dict without schedulers."""
        if self._saved is not None:
            return self._saved
        if not self._entries:
            return {}
        schedulers = [entry.scheduler.state_dict() for entry in self._entries]
        return {"rates": self._rates(), "schedulers": schedulers, "is_checked": self._is_checked}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep the state of a checkpoint until the next fit begins."""
        self._saved = dict(state) or None

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Restore learning rates and schedulers from the state of a checkpoint.

        Raises:
            ValueError: The state is one of other schedulers or optimizers.
        """
        rates = state["rates"]
        schedulers = state["schedulers"]
        saved_sizes = [len(row) for row in rates]
        sizes = [len(row) for row in self._initial_rates]
        if len(schedulers) != len(self._entries) or saved_sizes != sizes:
            raise ValueError(
                f"the checkpoint must be of the same ReduceLROnPlateau, but has {len(schedulers)} of them and there "
                f"are {len(self._entries)} here; give the module it was made with"
            )
        # Checkpoints of 0.2.0 have no such entry. Their runs were checked in the first round.
        self._is_checked = state.get("is_checked", True)
        for entry, saved in zip(self._entries, schedulers, strict=True):
            entry.scheduler.load_state_dict(saved)
        for optimizer, row in zip(self._optimizers, rates, strict=True):
            for group, rate in zip(optimizer.param_groups, row, strict=True):
                group["lr"] = rate


def learning_rates(optimizer: Optimizer) -> list[float]:
    """Return the learning rates of an optimizer, by parameter group."""
    return [float(group["lr"]) for group in optimizer.param_groups]
