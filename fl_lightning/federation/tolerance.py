"""Rounds under `on_error: skip`: a client that fails is left out as if it had not been asked."""

from collections.abc import Iterable
from dataclasses import dataclass

from fl_lightning.aggregation import PartialAggregate
from fl_lightning.federation.result import RoundResult
from fl_lightning.federation.round import Round
from fl_lightning.members.faults import ClientError, too_few
from fl_lightning.types import ClientJob, ClientResult


@dataclass(frozen=True)
class TolerantRound(Round):
    """Runs rounds in which a client that fails leaves no trace, or which are to be repeated without it."""

    def _train(
        self, exchange: str, clients: Iterable[int], partials: dict[str, PartialAggregate], result: RoundResult
    ) -> Exception | None:
        """Train the clients that have not failed; once all processes are done, give the round up if they are too few.

        Raises:
            Exception: that is no client's, of this or another process.
        """
        waiting = iter([client_id for client_id in clients if client_id not in result.failed])
        later = exchange != self.client.exchanges[0]
        while isinstance(error := super()._train(exchange, waiting, partials, result), ClientError):
            result.leave_out({error.client_id: error.reason})
            # a metric object that the client had, too, was reset with it
            result.repeat(later or self._keeps_cohort or bool(self.recorder.logged.metrics))
            self.recorder.logged.cut(result.mark)
        for failed, repeats in self.communicator.all_gather_or_raise((result.failed, result.repeats), error):
            result.leave_out(failed)
            result.repeat(repeats)
        if (left := len(result.asked)) < self.min_clients:
            result.lose(too_few(left, self.min_clients, list(result.failed.values())[-1]))
        return None

    def _take(
        self, one: ClientResult, job: ClientJob, partials: dict[str, PartialAggregate], result: RoundResult
    ) -> None:
        try:
            super()._take(one, job, partials, result)
        except Exception:
            result.repeat()
            raise
