"""Rounds under `on_error: skip`: a client that fails is left out as if it had not been asked."""

from collections.abc import Iterable
from dataclasses import dataclass

from fl_lightning.aggregation import PartialAggregate
from fl_lightning.federation.faults import ClientError, too_few
from fl_lightning.federation.round import Round, RoundResult
from fl_lightning.types import Broadcast, ClientResult


@dataclass(frozen=True)
class TolerantRound(Round):
    """Runs rounds in which a client that fails leaves no trace."""

    def _train(
        self, exchange: str, clients: Iterable[int], partials: dict[str, PartialAggregate], result: RoundResult
    ) -> Exception | None:
        """Train the clients that have not failed; once all processes are done, give the round up if they are too few.

        Raises:
            Exception: that is no client's, of this or another process.
        """
        waiting = iter([client_id for client_id in clients if client_id not in result.failed])
        while isinstance(error := super()._train(exchange, waiting, partials, result), ClientError):
            result.leave_out({error.client_id: error.reason})
        for failed in self.communicator.all_gather_or_raise(result.failed, error):
            result.leave_out(failed)
        left = len(result.cohort) - len(result.failed)
        if left < self.min_clients:
            result.lose(too_few(left, self.min_clients, list(result.failed.values())[-1]))
        return None

    def _take(
        self, one: ClientResult, broadcast: Broadcast, partials: dict[str, PartialAggregate], result: RoundResult
    ) -> None:
        before, mark = {name: partial.copied() for name, partial in partials.items()}, self.guard.mark
        logged = self.recorder.logged.sizes
        try:
            super()._take(one, broadcast, partials, result)
        except Exception:
            for name, partial in before.items():
                partials[name].become(partial.sums, partial.rows)
            self.guard.forget_since(mark)
            self.recorder.logged.cut(logged)
            self.aggregator.take_unchecked()
            raise
