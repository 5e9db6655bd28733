"""The server: the view that its parts have, and the server optimizer."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import SGD, Optimizer

from fl_lightning.data import FederatedDataModule
from fl_lightning.members.weights import GlobalWeights
from fl_lightning.types import State
from fl_lightning.utils.keyed import keyed_generator, keyed_noise


class Server:
    """The server as its parts see it (the `ServerView` protocol).

    Args:
        global_weights: in the client module.
        data: of the federation; its `batch_seed`, the run's seed, keys every draw.
        store: of the clients' memory.
    """

    def __init__(self, global_weights: GlobalWeights, data: FederatedDataModule, store: Any) -> None:
        self.module: nn.Module = global_weights.client
        self.round_idx = 0
        self.global_weights = global_weights
        self.store = store
        self._data = data
        self._snapshot: State | None = None
        self._coarser: State | None = None

    def attach(self, data: FederatedDataModule) -> None:
        """Take the data of another fit."""
        self._data = data

    def begin_round(self, round_idx: int) -> None:
        """Begin a round from a snapshot of the shared entries."""
        self.round_idx = round_idx
        self._snapshot = self.global_weights.start
        self._coarser = None

    def send(self, coarser: State) -> None:
        """Begin the round from coarser shared entries than the global ones, which everybody measures from."""
        self._snapshot = self._coarser = coarser

    def refined(self, new: State | None) -> State | None:
        """Add what the global entries were besides the coarser ones, if such were sent."""
        coarser = self._coarser
        whole = self.global_weights.start
        if new is None or coarser is None:
            return new
        moved = {n: v.double() - coarser[n].double() for n, v in new.items() if coarser[n] is not whole[n]}
        return {**new, **{n: (whole[n].double() + change).to(new[n].dtype) for n, change in moved.items()}}

    def advance(self, new: State) -> State:
        """Make the weights of an exchange the global ones.

        Returns all shared entries.
        """
        before = self.weights
        self._snapshot = new if len(new) == len(before) else {**before, **new}
        return self._snapshot

    def end_round(self) -> None:
        """End the round: the global weights are those in the module again."""
        self._snapshot = self._coarser = None

    @property
    def trainable(self) -> tuple[str, ...]:
        return self.global_weights.trainable

    @property
    def transmitted_entries(self) -> State:
        """The shared entries that are transmitted in this round."""
        whole = self.weights
        names = self.global_weights.transmitted_entries
        return whole if len(names) == len(whole) else {name: whole[name] for name in names}

    @property
    def num_clients(self) -> int:
        return self._data.num_clients

    @property
    def cohort_size(self) -> int:
        return min(map(len, self._data.schedule or []), default=self._data.cohort_size)

    @property
    def sampling_rate(self) -> float | None:
        return self._data.cohort.sampling_rate

    @property
    def planned_rounds(self) -> int | None:
        trainer = self._data.trainer
        limits = [] if trainer is None else [trainer.max_epochs, trainer.max_steps]
        return min((limit for limit in limits if limit is not None and limit >= 0), default=None)

    @property
    def weights(self) -> State:
        return self.global_weights.live(self.global_weights.shared) if self._snapshot is None else self._snapshot

    def size(self, client_id: int) -> int:
        return self._data.size(client_id)

    def data(self, split: str) -> Any:
        return self._data.split(split)

    def generator(self, purpose: str) -> torch.Generator:
        return keyed_generator(self._data.batch_seed, purpose, self.round_idx)

    def noise_generator(self, purpose: str) -> np.random.Generator:
        return keyed_noise(self._data.noise_seed, purpose, self.round_idx)


class ServerOptimizer:
    """Steps on global − aggregate as a gradient, in float64.

    Without an optimizer it copies the aggregate.

    Reddi et al., ICLR 2021, arXiv:2003.00295 (FedOpt). Even without one an SGD is stepped once a round, because
    Lightning counts the steps of the fitted module's optimizer.

    Args:
        factory: the optimizer, as a function of its parameters, or None.
        trainable: the shared trainable weights, which alone it moves; the rest is copied.
        undoes: whether a step whose result is not finite is undone, so that the run can go on.
    """

    def __init__(
        self, factory: Callable[[Iterable[Any]], Optimizer] | None, trainable: State, undoes: bool = False
    ) -> None:
        self.copies = factory is None
        self.undoes = undoes
        if factory is None:
            self.params = {"rounds": nn.Parameter(torch.zeros((), dtype=torch.float32))}
            self.optimizer: Optimizer = SGD(self.params.values(), lr=1.0)
        else:
            self.params = {name: nn.Parameter(value.detach().double()) for name, value in trainable.items()}
            self.optimizer = factory(self.params.values())

    @torch.no_grad()
    def step(self, start: State, new: State | None, run: Callable[[], Any], scaler: Any | None) -> State | None:
        """Take one step, or only count it where nothing moves.

        Returns the next shared weights, or None where they would not be finite.

        Args:
            start: the round's first shared weights.
            new: weights of the last exchange, or None: nothing moves, but the step counts.
            run: steps the optimizer through Lightning.
            scaler: the Trainer's gradient scaler, which divides what is multiplied here.
        """
        if not self.copies:
            return self._move(start, new, run, scaler)
        for parameter in self.params.values():  # a scaler refuses to step without a gradient
            parameter.grad = None if scaler is None else scaler.scale(torch.zeros_like(parameter))
        run()
        return start if new is None else new

    def _move(self, start: State, new: State | None, run: Callable[[], Any], scaler: Any | None) -> State | None:
        """Move the weights on from `start`, and take a step back that makes none, where the run goes on."""
        restores = self.undoes or (scaler is not None and new is None)
        before = copy.deepcopy(self.optimizer.state_dict()) if restores else None
        for name, parameter in self.params.items():
            gradient = None if scaler is None else torch.zeros_like(parameter)
            if new is not None:
                parameter.copy_(start[name])
                gradient = parameter - new[name].double()
            parameter.grad = gradient if scaler is None else scaler.scale(gradient)
        run()
        if new is not None:
            moved = {name: parameter.to(new[name].dtype) for name, parameter in self.params.items()}
            if bool(torch.stack([value.isfinite().all() for value in moved.values()]).all()):
                return {**new, **moved}
        if before is not None:
            self.optimizer.load_state_dict(before)
        return start if new is None else None
