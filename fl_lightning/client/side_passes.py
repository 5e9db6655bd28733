"""Further passes of a training step, beside the one that counts."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fl_lightning.client.checks import runs_foreign_code
from fl_lightning.client.metric_states import fresh_metrics, parts_that_count
from fl_lightning.client.modes import silent
from fl_lightning.functional.importance import as_function
from fl_lightning.functional.state import State, clone
from fl_lightning.types import Batch
from fl_lightning.utils.keyed import GlobalStates
from fl_lightning.utils.own_generators import generators_of, kept_states


class SidePasses:
    """Makes further passes of a client's training steps, in its modes, for a method with several passes a step.

    A side pass logs nothing, and metric objects do not count it. The next pass draws the same numbers again.

    Args:
        client: The ClientModule, which has begun an exchange.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._counting = parts_that_count(client)
        self._is_foreign = runs_foreign_code(client)
        self._generators = generators_of(*client.modules()) if self._is_foreign else []
        self._loss = as_function(client, "local_loss")

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Context of a side pass."""
        client = self._client
        outputs = client.outputs
        states = GlobalStates(on_gpu=client.device.type == "cuda", foreign=self._is_foreign)
        try:
            with silent(client), fresh_metrics(self._counting), kept_states(self._generators):
                yield
        finally:
            states.restore()
            client.outputs = outputs

    def buffers(self) -> State:
        """Return copies of all buffers of the client by name, for passes that must not move the client's own."""
        client = self._client
        client_id = client.context.client_id
        return clone({name: value for name, value in client.named_buffers() if client.has(client_id, name)})

    def loss_at(self, entries: State, batch: Batch, batch_idx: int) -> Any:
        """Return `local_loss` of a batch at other values of some entries. It is differentiable in them.

        Args:
            entries: The other values, by name. Those of buffers are moved in place.
            batch: The batch.
            batch_idx: The index of the batch in its epoch.
        """
        return self._loss(entries, batch, batch_idx)
