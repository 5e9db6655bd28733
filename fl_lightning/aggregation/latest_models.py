"""The base of server modules that keep the latest model of every client."""

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from fl_lightning.aggregation.server_parts import ServerModule, StateBuffers
from fl_lightning.functional.state import clone, zeros_like
from fl_lightning.types import ClientUpdate


class LatestModels(ServerModule):
    """Keeps every client's latest model.

    Its state grows with the number of clients, whatever the cohort: N models of the net's size on the Trainer's
    device and in every checkpoint, since any of them may be needed in the next round (1,000 clients of a 10 MB net:
    10 GB). The client store, which has files, is no place for them: a client's record may lie with another process.

    Attributes:
        models: Each client's latest model, for the clients that train, in the order of their ids.
        trained: Whether a client has a model, (N,) bool, in the same order.
    """

    trained: Tensor
    models: nn.ModuleList
    stale_reason = "keeps the clients' models, which would be no longer theirs"

    def snapshot(self) -> dict[str, Any]:
        # The models are replaced and never edited, so that none of the N need be copied.
        return dict(self.state_dict())

    def setup(self) -> None:
        weights = self.server.weights
        clients = self.server.clients
        self._place = {client_id: place for place, client_id in enumerate(clients)}
        like = next(iter(weights.values()))
        self.trained = nn.Buffer(torch.zeros(len(clients), dtype=torch.bool, device=like.device))
        self.models = nn.ModuleList(StateBuffers(zeros_like(weights)) for _ in clients)

    def place_of(self, client_id: int) -> int:
        """Return the place of a client among those that train."""
        return self._place[client_id]

    def has_model(self, client_id: int) -> bool:
        """Return True if a client has trained a model. A client that never trains has none."""
        return client_id in self._place and bool(self.trained[self.place_of(client_id)])

    def clients_with_model(self) -> list[int]:
        """Return the ids of the clients that have trained a model, ascending."""
        trained = self.trained.tolist()
        return [client_id for client_id, place in self._place.items() if trained[place]]

    def latest(self, client_id: int) -> StateBuffers:
        """Return the latest model of a client that has trained one."""
        return cast(StateBuffers, self.models[self.place_of(client_id)])

    def keep(self, updates: Iterable[ClientUpdate]) -> None:
        """Keep the models of updates as the latest ones of their clients. An update without weights has none."""
        trained = self.trained.clone()
        for update in updates:
            if update.weights is not None:
                place = self.place_of(update.client_id)
                trained[place] = True
                self.models[place] = StateBuffers(clone({**self.server.weights, **update.weights}))
        self.trained = nn.Buffer(trained)
