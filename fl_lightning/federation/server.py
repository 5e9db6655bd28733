"""The server: the view that its parts have, and the server optimizer."""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fl_lightning.data import FederatedDataModule
from fl_lightning.data.clients import CohortBounds
from fl_lightning.federation.horizon import Horizon
from fl_lightning.members.weights import GlobalWeights
from fl_lightning.types import State
from fl_lightning.utils.keyed import keyed_generator, keyed_noise


class Server:
    """Shows the server to its parts: server module, rule and transforms (the `ServerView` protocol).

    Args:
        global_weights: The global model's entries in the client module.
        data: The data module. Its `batch_seed`, the seed of the run, keys every draw.
        store: Where clients keep their memory between rounds.
        horizon: The planned rounds.
        bounds: Returns the least and the largest number of clients of a server step. None takes those of the cohorts.
    """

    def __init__(
        self,
        global_weights: GlobalWeights,
        data: FederatedDataModule,
        store: Any,
        horizon: Horizon,
        *,
        bounds: Callable[[FederatedDataModule], CohortBounds] | None = None,
    ) -> None:
        self.module: nn.Module = global_weights.client
        self.round_idx = 0
        self.global_weights = global_weights
        self.store = store
        self._data = data
        self._horizon = horizon
        self._bounds = bounds or bounds_of_cohorts
        self._snapshot: State | None = None
        """The shared entries as the current exchange sends them. None between rounds."""
        self._coarser: State | None = None
        """The shared entries with which the round began, if a codec has made them coarser. Else None."""

    def attach(self, data: FederatedDataModule) -> None:
        """Replace the data by those of another fit."""
        self._data = data

    def begin_round(self, round_idx: int) -> None:
        """Begin a round from a snapshot of the shared entries."""
        self.round_idx = round_idx
        self._snapshot = self.global_weights.start
        self._coarser = None

    def send(self, coarser: State) -> None:
        """Begin the round from coarser shared entries than the global ones. All updates are measured from them."""
        self._coarser = coarser
        self._snapshot = coarser

    def refined(self, new: State | None) -> State | None:
        """Return new shared entries with what the coarser entries of the round's start lacked.

        Args:
            new: The new shared entries, or None.

        Returns:
            new + (global − coarser) for every entry that was sent coarser. `new` itself if none was.
        """
        coarser = self._coarser
        exact = self.global_weights.start
        if new is None or coarser is None:
            return new
        refined = dict(new)
        for name, value in new.items():
            if coarser[name] is not exact[name]:
                change = value.double() - coarser[name].double()
                moved = (exact[name].double() + change).to(value.dtype)
                refined[name] = torch.where(change == 0, exact[name], moved)
        return refined

    def advance(self, new: State) -> State:
        """Send the new weights of an exchange in the next exchange, and return all shared entries."""
        before = self.weights
        self._snapshot = new if len(new) == len(before) else {**before, **new}
        return self._snapshot

    def end_round(self) -> None:
        """End the round. The global weights are those in the module again."""
        self._snapshot = None
        self._coarser = None

    @property
    def trainable(self) -> tuple[str, ...]:
        return self.global_weights.trainable

    @property
    def transmitted_entries(self) -> State:
        """The shared entries that are transmitted in this round."""
        shared = self.weights
        names = self.global_weights.transmitted_entries
        if len(names) == len(shared):
            return shared
        return {name: shared[name] for name in names}

    @property
    def num_clients(self) -> int:
        return len(self._data.training_clients)

    @property
    def clients(self) -> Sequence[int]:
        return self._data.training_clients

    @property
    def cohort_size(self) -> int:
        return self._bounds(self._data).least

    @property
    def largest_cohort(self) -> int:
        return self._bounds(self._data).most

    @property
    def sampling_rate(self) -> float | None:
        return self._data.cohort.sampling_rate

    @property
    def planned_rounds(self) -> int | None:
        return self._horizon.rounds()

    @property
    def weights(self) -> State:
        if self._snapshot is not None:
            return self._snapshot
        return self.global_weights.live(self.global_weights.shared)

    @property
    def exact_weights(self) -> State:
        if self._snapshot is not None:
            return self.global_weights.start
        return self.global_weights.live(self.global_weights.shared)

    def size(self, client_id: int) -> int:
        return self._data.size(client_id, self.round_idx)

    def data(self, split: str) -> Any:
        return self._data.split(split)

    def generator(self, purpose: str) -> torch.Generator:
        return keyed_generator(self._data.batch_seed, purpose, self.round_idx)

    def noise_generator(self, purpose: str) -> np.random.Generator:
        return keyed_noise(self._data.noise_seed, purpose, self.round_idx)


def bounds_of_cohorts(data: FederatedDataModule) -> CohortBounds:
    """Return the least and the largest number of clients in a cohort."""
    return data.cohort.bounds


class ServerOptimizer:
    """Steps on global − aggregate as a gradient, in float64. Without an optimizer it copies the aggregate.

    Reddi et al., ICLR 2021, arXiv:2003.00295 (FedOpt). Even the copy steps an SGD once a round, because Lightning
    counts the steps of the fitted module's optimizer.

    Args:
        factory: A function of parameters that makes the optimizer. None copies the aggregate.
        trainable: The shared trainable weights, by name. The optimizer moves only these. All others are copied.
        undoes: Whether a step is undone if its result is not finite, so that the run can go on.
    """

    def __init__(
        self, factory: Callable[[Iterable[Any]], Optimizer] | None, trainable: State, *, undoes: bool = False
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
        """Take one step, or only count it if nothing moves.

        Args:
            start: The shared weights with which the round began.
            new: The weights of the last exchange. With None nothing moves, but the step counts.
            run: Steps the optimizer through Lightning.
            scaler: The Trainer's gradient scaler, which divides the gradients that it scales here. None without one.

        Returns:
            The next shared weights, or None if they would not be finite.
        """
        if self.copies:
            self._count(run, scaler)
            return start if new is None else new
        restores = self.undoes or (scaler is not None and new is None)
        before = copy.deepcopy(self.optimizer.state_dict()) if restores else None
        self._set_gradients(start, new, scaler)
        run()
        moved: State | None = None
        if new is not None:
            moved = self._moved(new)
        if moved is None and before is not None:
            self.optimizer.load_state_dict(before)
        return start if new is None else moved

    def _count(self, run: Callable[[], Any], scaler: Any | None) -> None:
        """Take a step that moves nothing."""
        for parameter in self.params.values():
            # A scaler refuses to step without a gradient.
            parameter.grad = None if scaler is None else scaler.scale(torch.zeros_like(parameter))
        run()

    def _set_gradients(self, start: State, new: State | None, scaler: Any | None) -> None:
        """Set the parameters to the start of the round, and their gradients to start − new.

        Without new weights the parameters stay, and have no gradients, or zeros for a scaler.
        """
        for name, parameter in self.params.items():
            gradient: Tensor | None = None
            if new is not None:
                parameter.copy_(start[name])
                gradient = parameter - new[name].double()
            elif scaler is not None:
                gradient = torch.zeros_like(parameter)
            parameter.grad = gradient if scaler is None else scaler.scale(gradient)

    def _moved(self, new: State) -> State | None:
        """Return the weights with the parameters after the step, or None if a parameter is not finite."""
        moved = {name: parameter.to(new[name].dtype) for name, parameter in self.params.items()}
        are_finite = torch.stack([value.isfinite().all() for value in moved.values()])
        if not bool(are_finite.all()):
            return None
        return {**new, **moved}
