"""The pace of a fit: who comes back in which round, from which version, and when."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pytorch_lightning.utilities import rank_zero_info

from fl_lightning.aggregation import Codec, ServerModule
from fl_lightning.aggregation.pacing import Pacing, Rounds
from fl_lightning.aggregation.timeline import Job, TimedRound, Timeline
from fl_lightning.client.module import ClientModule
from fl_lightning.data import FederatedDataModule
from fl_lightning.data.devices import Devices, JobTimes, PlannedWork
from fl_lightning.data.stragglers import Stragglers
from fl_lightning.engines.training import LocalTrainer
from fl_lightning.functional.state import to_float32
from fl_lightning.functional.traffic import traffic
from fl_lightning.members.codec import encoded
from fl_lightning.members.weights import GlobalWeights

TOLERANCE = 0.01
"""Share by which messages may differ from what the clock counts without a line about it."""


class Pace:
    """Answers who comes back in which round of a fit, from which version, and when.

    Args:
        timeline: The timeline of the run.
        times: The times of jobs.
        is_asynchronous: Whether clients may come back in a later round than the one they started in.
        loses_clients: Whether clients may be lost.
        freezes: Whether entries are frozen, which a client is sent only once.
    """

    def __init__(
        self,
        timeline: Timeline,
        times: JobTimes,
        *,
        is_asynchronous: bool,
        loses_clients: bool,
        freezes: bool,
    ) -> None:
        self.timeline = timeline
        self.is_asynchronous = is_asynchronous
        self._times = times
        self._loses_clients = loses_clients
        self._freezes = freezes
        self._told: set[str] = set()
        """Keys of bytes about which a line was logged."""
        self._round_idx = -1
        self._jobs: dict[int, Job] = {}
        """The jobs of the last round that was asked for, by client id."""

    @property
    def is_chosen(self) -> bool:
        """Whether time decides which of the clients that are asked come back in a round."""
        return self.is_asynchronous or self._loses_clients

    def cohort(self, round_idx: int) -> list[int]:
        """Return the clients that come back in a round: in the order of the cohort, or by version and id."""
        arrivals = self.timeline.round(round_idx).arrivals
        if self.is_asynchronous:
            ordered = sorted(arrivals, key=lambda job: (job.version, job.client_id))
        else:
            ordered = sorted(arrivals, key=lambda job: job.number)
        return [job.client_id for job in ordered]

    def job(self, client_id: int, round_idx: int) -> Job:
        """Return the job with which a client comes back in a round."""
        if round_idx != self._round_idx:
            self._jobs = {job.client_id: job for job in self.timeline.round(round_idx).arrivals}
            self._round_idx = round_idx
        return self._jobs[client_id]

    def sent_ahead(self, round_idx: int) -> list[tuple[Job, bool]]:
        """Return the jobs that start in a round and do not come back in it, and whether each comes back later."""
        timed = self.timeline.round(round_idx)
        back = {job.number for job in timed.arrivals}
        later = {job.number for job in self.timeline.leaving(round_idx)}
        return [(job, job.number in later) for job in timed.started if job.number not in back]

    def row(self, round_idx: int) -> dict[str, float]:
        """Return the values of a round, by log key."""
        timed = self.timeline.round(round_idx)
        values = {"time/seconds": timed.end}
        if self._loses_clients:
            values["time/lost"] = float(len(timed.lost))
        if self.is_asynchronous:
            staleness = [round_idx - job.version for job in timed.arrivals]
            values["time/staleness"] = sum(staleness) / len(staleness)
            values["time/staleness_max"] = float(max(staleness))
        return values

    def ends(self, round_idx: int) -> float:
        """Return when a round ends, in seconds since the start of the run. 0 before the first round."""
        return self.timeline.round(round_idx).end if round_idx >= 0 else 0.0

    def tell_bytes(self, round_idx: int, values: Mapping[str, float]) -> None:
        """Log a line if the messages of a round have other bytes than the clock counts.

        Args:
            round_idx: Index of the round.
            values: The values of the round, by log key.
        """
        timed = self.timeline.round(round_idx)
        if values.get("train/skipped") or not timed.arrivals:
            return
        if not self._freezes:
            self._tell("comm/bytes_down", values, number=len(timed.started), nominal=self._times.bytes_down)
        self._tell("comm/bytes_up", values, number=len(timed.arrivals), nominal=self._times.bytes_up)

    def _tell(self, key: str, values: Mapping[str, float], *, number: int, nominal: int) -> None:
        """Log a line, once a fit, if the messages of a direction have other bytes than the clock counts.

        Args:
            key: The log key of the bytes.
            values: The values of the round, by log key.
            number: The number of messages.
            nominal: The bytes of a message that the clock counts.
        """
        if key not in values or key in self._told or not number:
            return
        sent = values[key] / number
        if math.isclose(sent, nominal, rel_tol=TOLERANCE):
            return
        self._told.add(key)
        rank_zero_info(
            f"data.devices count {nominal:,} bytes for a message, and those of {key} had {sent:,.0f} on average: "
            f"time/seconds does not count the difference"
        )


def pace_of(
    *,
    pacing: Pacing | None,
    data: FederatedDataModule,
    local: LocalTrainer,
    global_weights: GlobalWeights,
    codec: Codec | None,
) -> Pace | None:
    """Return the pace of a fit, or None if the data have no devices.

    Args:
        pacing: The pacing. None means rounds that wait for all clients.
        data: The data module.
        local: What trains clients, and knows how much they train.
        global_weights: The global weights.
        codec: The codec, or None.

    Raises:
        ValueError: No job ever arrives, or the devices are those of another number of clients.
    """
    devices: Devices | None = data.devices
    if devices is None or data.pooled:
        return None
    pacing = pacing or Rounds()
    cohorts = data.cohort
    client = global_weights.client
    num_exchanges = len(client.exchanges)
    down, up = nominal_bytes(global_weights, client, codec)
    times = JobTimes(
        devices.draw(data.num_clients, seed=cohorts.seed),
        seed=cohorts.seed,
        planned=planned_by(local, data, client.exchanges),
        bytes_down=num_exchanges * down,
        bytes_up=num_exchanges * up,
    )
    timeline = pacing.timeline(cohorts, times)
    timeline.check_arrivals(limit=None if cohorts.schedule is None else len(cohorts.schedule))
    return Pace(
        timeline,
        times,
        is_asynchronous=pacing.is_asynchronous,
        loses_clients=pacing.loses_clients or devices.loses_clients,
        freezes=any(not value.requires_grad for value in global_weights.frozen.parameters.values()),
    )


def planned_by(
    local: LocalTrainer, data: FederatedDataModule, exchanges: tuple[str, ...]
) -> Callable[[int, int], PlannedWork]:
    """Return the function of client id and version that returns what the client trains in all exchanges of a round.

    Args:
        local: What trains clients.
        data: The data module.
        exchanges: The names of the exchanges.
    """
    view = data.views()
    known: dict[int, PlannedWork] = {}

    def planned(client_id: int, version: int) -> PlannedWork:
        if client_id in known:
            return known[client_id]
        parts = [local.planned(view(client_id, version), exchange) for exchange in exchanges]
        work = PlannedWork(batches=sum(part.batches for part in parts), samples=sum(part.samples for part in parts))
        if not data.works_partly and data.scenario is None:
            known[client_id] = work
        return work

    return planned


def nominal_bytes(global_weights: GlobalWeights, client: ClientModule, codec: Codec | None) -> tuple[int, int]:
    """Return the bytes that a message to a client and one to the server are counted with.

    A message holds the entries that are not frozen, and a state of the trained entries for each of `client.changes`.

    Args:
        global_weights: The global weights.
        client: The client module.
        codec: The codec, or None.
    """
    shared = global_weights.live(global_weights.shared)
    frozen = {name for name, value in global_weights.frozen.parameters.items() if not value.requires_grad}
    entries = {name: value for name, value in shared.items() if name not in frozen}
    trained = {name: value for name, value in entries.items() if name in global_weights.trainable}
    weights = traffic(entries, {})
    change = traffic(trained, {})
    coded = change
    if codec is not None and trained:
        vector = torch.cat([to_float32(value).reshape(-1) for value in trained.values()])
        coded = traffic(encoded(codec, vector, torch.Generator().manual_seed(0)), {})
    num_changes = len(client.changes)
    has_coded_changes = codec is not None and codec.feedback
    down = weights - change + (coded if codec is not None and codec.down else change) + num_changes * change
    up = weights - change + coded + num_changes * (coded if has_coded_changes else change)
    return down, up


# --- checks ---


def check_pace(
    *,
    pacing: Pacing | None,
    data: FederatedDataModule,
    client: ClientModule,
    server_module: ServerModule,
    exchanges: tuple[str, ...],
    codec: Codec | None,
    is_private: bool,
) -> None:
    """Refuse devices and a pacing that other parts of a federation exclude.

    Args:
        pacing: The pacing, or None.
        data: The data module.
        client: The client module.
        server_module: The server module.
        exchanges: The names of all exchanges that a round may have.
        codec: The codec, or None.
        is_private: Whether the rule or the client makes a guarantee.

    Raises:
        ValueError: Two settings exclude each other.
    """
    devices: Devices | None = data.devices
    if devices is None:
        if pacing is not None:
            raise ValueError(
                f"model.pacing={type(pacing).__name__} needs data.devices, which say how long clients take, got None; "
                f"set data.devices, such as data.devices.step_seconds to 0.1"
            )
        return
    if data.has_streams:
        raise ValueError(
            "data.devices count the samples that a client trains on, and those of a stream are not known before; "
            "leave out data.devices"
        )
    if data.pooled:
        if pacing is not None:
            raise ValueError(
                f"data.pooled leaves one client with all samples, and model.pacing={type(pacing).__name__} says which "
                f"clients a server step takes; leave one of them out"
            )
        rank_zero_info("data.devices time clients, and data.pooled leaves none: there is no time/seconds")
        return
    if is_private and (devices.loses_clients or (pacing is not None and pacing.loses_clients)):
        name = "data.devices.dropout" if pacing is None else f"model.pacing={type(pacing).__name__}"
        raise ValueError(
            f"a guarantee of privacy counts on who is drawn for a round, and {name} lets clients come to nothing by "
            f"how fast they are; leave it out"
        )
    if pacing is None:
        return
    if isinstance(data.local_work, Stragglers) and (pacing.is_asynchronous or pacing.loses_clients):
        raise ValueError(
            f"data.local_work.share and model.pacing={type(pacing).__name__} both say which clients of a round are "
            f"late; leave one of them out"
        )
    pacing.check_cohorts(data.cohort, len(data.training_clients))
    owner = type(client).__name__ if exchanges == client.exchanges else type(server_module).__name__
    if len(exchanges) > 1 and (pacing.is_asynchronous or pacing.loses_clients):
        raise ValueError(
            f"model.pacing={type(pacing).__name__} needs a method with one exchange a round, and {owner} has "
            f"{len(exchanges)} ({', '.join(exchanges)}); leave model.pacing unset, or take another method"
        )
    if pacing.is_asynchronous:
        check_asynchronous(pacing, client, codec)


def check_asynchronous(pacing: Pacing, client: ClientModule, codec: Codec | None) -> None:
    """Refuse parts that exclude clients that started from earlier weights.

    Args:
        pacing: The pacing.
        client: The client module.
        codec: The codec, or None.

    Raises:
        ValueError: There is such a part.
    """
    setting = f"model.pacing={type(pacing).__name__}"
    if client.own_start:
        raise ValueError(
            f"{setting} measures how far clients moved from the weights that they were sent, and those of "
            f"{type(client).__name__} start from models of their own; leave model.pacing unset, or take another method"
        )
    if codec is not None and codec.down:
        raise ValueError(
            f"{setting} keeps the weights that each client was sent, which {type(codec).__name__}(down=True) codes "
            f"anew in every round; leave out model.codec.down"
        )


def check_takes_stale(pacing: Pacing, server_module: ServerModule) -> None:
    """Refuse a server module that may not be given updates of clients that started from earlier weights.

    Args:
        pacing: The pacing.
        server_module: The server module, which is set up.

    Raises:
        ValueError: It is such a module.
    """
    if not pacing.is_asynchronous:
        return
    takes = True if type(server_module) is ServerModule else server_module.takes_stale
    is_taken = takes == "unscaled" and not pacing.is_scaled
    if takes is True or is_taken:
        return
    reason = server_module.stale_reason or "does not say that it may have them (takes_stale)"
    remedy = "take another method, or leave model.pacing unset"
    if takes == "unscaled":
        remedy = "set model.pacing.form to constant (and alpha to 1), or leave model.pacing unset"
    raise ValueError(
        f"model.pacing={type(pacing).__name__} gives the server updates of clients that started earlier, and "
        f"{type(server_module).__name__} {reason}; {remedy}"
    )


def check_seconds(data: FederatedDataModule, **settings: Any) -> None:
    """Refuse settings in simulated seconds if no time is simulated.

    Args:
        data: The data module.
        settings: The settings of the loop by name.

    Raises:
        ValueError: A setting is given, and there are no devices, or all samples are in one place.
    """
    for name, value in settings.items():
        if value is not None and data.pooled:
            raise ValueError(
                f"model.{name} counts simulated seconds, and data.pooled leaves no clients that take any, got {value}; "
                f"leave model.{name} out, or data.pooled"
            )
        if value is not None and data.devices is None:
            raise ValueError(
                f"model.{name} counts simulated seconds, which data.devices say, got {value} and no devices; set "
                f"data.devices, such as data.devices.step_seconds to 0.1"
            )


def is_evaluated(timed: TimedRound, every: float) -> bool:
    """Return True if a round ends the first one after a multiple of some seconds.

    >>> is_evaluated(TimedRound(1.0, 2.5, (), (), ()), every=2.0)
    True
    """
    return math.floor(timed.end / every) > math.floor(timed.start / every)
