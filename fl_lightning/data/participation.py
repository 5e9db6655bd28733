"""The base of the data module: the clients that take part in every round, and the seeds by which they are drawn."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pytorch_lightning import LightningDataModule

from fl_lightning.data.availability import cohorts
from fl_lightning.data.clients import Cohorts
from fl_lightning.data.local_work import PooledCohorts
from fl_lightning.data.stays import Spans, Stays, spans_of, written
from fl_lightning.data.stragglers import Stragglers, work_for
from fl_lightning.data.unseen import Unseen
from fl_lightning.utils.settings import check_count

SIMULATED = (
    "simulated: whoever has the seeds of the configuration can redraw cohorts and noise, and take the noise away again "
    "(data.secret_seed=true keeps them)"
)
SECRET = (
    "cohorts and noise are keyed by a secret seed that only the checkpoints hold: without one the run cannot be "
    "repeated bit for bit, and whoever has one can take the noise away again"
)


class Participation(LightningDataModule):
    """Keeps the clients and the cohorts of all rounds. It is the base of the data module.

    Args:
        num_clients: Number N of clients. None: as many as the samples have owners, known after `set_clients`.
        participation: Share of the clients in a drawn cohort, as `Cohorts` takes it.
        schedule: Client ids of every round, as `Cohorts` takes them.
        sampling_seed: Seed of the draws.
        sampling: Way of drawing, as `Cohorts` takes it.
        availability: Availability of the clients, as `AvailableCohorts` takes it.
        over_selection: Share of further clients that are drawn, as `AvailableCohorts` takes it.
        secret_seed: Whether the draws are keyed by a seed of the operating system.
        local_work: Local work of the clients, as `LocalWork` takes it, or the settings of stragglers.
        pooled: Whether one client has the samples of all.
        cohort_size: Number of clients in a drawn cohort, as `Cohorts` takes it.
        unseen: Tells which clients never train. None: all train.
        stays: Rounds in which clients are there, as `spans_of` takes them. None: all are always there.

    Attributes:
        num_clients: Number N of clients, with the clients that never train. 0 as long as it is not known, and 1 if
            samples are pooled.
        num_owners: Number of clients that samples are dealt to, before they are pooled.
        unseen_owners: Ids of the clients that never train, ascending, before samples are pooled. If a column names
            owners, they are known once the samples are dealt.
        cohort: Lists the clients of a round, and tells by its `bounds` how many they are. It is known with N.
        works_partly: Whether clients may make less than all of their local work.
        works_whole_epochs: Whether a share of the local work is one of epochs, rounded up to whole ones.
        secret: The secret seed in hexadecimal digits. Empty: there is none.
        batch_seed: Seed of batch order, augmentation and the clients' other draws.

    Raises:
        ValueError: Two settings contradict each other, or a setting is out of its range.
    """

    cohort: Cohorts

    def __init__(
        self,
        *,
        num_clients: int | None,
        participation: float,
        schedule: Sequence[Sequence[int]] | None,
        sampling_seed: int,
        sampling: Literal["uniform", "poisson"],
        availability: float | Sequence[float] | str | None,
        over_selection: float,
        secret_seed: bool,
        local_work: float | Sequence[float] | Stragglers,
        pooled: bool,
        cohort_size: int | None = None,
        unseen: Unseen | None = None,
        stays: Mapping[int, Sequence[int | None]] | str | None = None,
    ) -> None:
        super().__init__()
        self._spans: Spans | None = None
        self.stays: dict[int, Any] | None = None
        if stays is not None:
            self._spans = spans_of(stays)
            self.stays = written(self._spans)
        if pooled and self._spans is not None:
            raise ValueError(
                "data.pooled gives one client the samples of all, and data.stays says which clients are there; leave "
                "one of them out"
            )
        self.schedule = None if pooled else schedule
        self.sampling = sampling
        self.local_work = local_work
        self.pooled = pooled
        self._work = work_for(local_work, sampling_seed)
        self.works_partly = pooled or self._work.is_partial
        self.works_whole_epochs = self._work.whole_epochs
        self.availability = availability
        self.over_selection = over_selection
        self.secret_seed = secret_seed
        self.secret = secrets.token_hex(16) if secret_seed else ""
        self.batch_seed = 0
        self.num_clients = 0
        self.num_owners = 0
        self.unseen_owners: tuple[int, ...] = ()
        self._unseen = unseen or Unseen(None, seed=0)
        self._drawing = {
            "participation": participation,
            "schedule": schedule,
            "seed": sampling_seed,
            "sampling": sampling,
            "cohort_size": cohort_size,
        }
        if num_clients is not None:
            self.set_clients(num_clients)

    def set_clients(self, num_clients: int) -> None:
        """Take the number of clients, and make the cohorts.

        Args:
            num_clients: Number N of clients, ≥ 1.

        Raises:
            ValueError: A setting of the cohorts is out of its range.
        """
        check_count(1, num_clients=num_clients)
        self.num_owners = num_clients
        unseen: tuple[int, ...] = ()
        if not self._unseen.waits_for_owners:
            unseen = self._unseen.of(num_clients)
        self.set_unseen(unseen)

    def set_unseen(self, unseen: tuple[int, ...]) -> None:
        """Take the clients that never train, and make the cohorts of the others.

        Args:
            unseen: Ids of the clients that never train, ascending.

        Raises:
            ValueError: A setting of the cohorts is out of its range.
        """
        self.unseen_owners = unseen
        stays: Stays | None = None
        if self._spans is not None:
            stays = Stays(self._spans, num_clients=self.num_owners, unseen=unseen)
        chosen = cohorts(
            self.availability,
            self.over_selection,
            num_clients=self.num_owners,
            unseen=unseen,
            stays=stays,
            **self._drawing,
        )
        training = self._work.taking_part(chosen)
        self.cohort = PooledCohorts(training) if self.pooled else training
        self.num_clients = self.cohort.num_clients
        self._key_cohorts()

    @property
    def unseen_clients(self) -> tuple[int, ...]:
        """The ids of the clients that never train, ascending. Where samples are pooled there are none."""
        return () if self.pooled else self.unseen_owners

    @property
    def training_clients(self) -> Sequence[int]:
        """The ids of the clients that train, ascending, known with N."""
        return self.cohort.clients

    def present_clients(self, round_idx: int) -> Sequence[int]:
        """List the clients that are there in a round, ascending, known with N. Clients that never train always are.

        Args:
            round_idx: Communication round, from 0.
        """
        everyone = range(self.num_clients)
        stays = self.cohort.stays
        return everyone if stays is None else stays.of(everyone, round_idx)

    @property
    def cohort_size(self) -> int:
        """The largest number of clients in a round, known with N, as the `bounds` of `cohort` tell it."""
        return self.cohort.bounds.most

    def take_secret(self, secret: str) -> None:
        """Key cohorts and noise by a secret seed.

        Args:
            secret: The secret seed in hexadecimal digits.
        """
        self.secret = secret
        self._key_cohorts()

    def _key_cohorts(self) -> None:
        """Key cohorts and local work by the secret seed, if there is one."""
        if self.secret and self.num_clients:
            self._work.seed = int(self.secret, 16)
            self.cohort.rekey(self._work.seed)

    def work_of(self, client_id: int, round_idx: int) -> float:
        """Return the share of its local steps that a client makes in a round, in (0, 1].

        Args:
            client_id: Id of the client, from 0.
            round_idx: Communication round, from 0.
        """
        if isinstance(self.cohort, PooledCohorts):
            return self.cohort.work(self._work, round_idx)
        return self._work(client_id, round_idx)

    def key_batches(self, seed: int) -> None:
        """Key batch order, augmentation and the clients' other draws by the run's seed."""
        self.batch_seed = seed

    @property
    def seed_notice(self) -> str:
        """The sentence about who could redraw cohorts and noise."""
        return SECRET if self.secret else SIMULATED

    @property
    def noise_seed(self) -> int:
        """The seed of the noise of differential privacy: the secret seed if there is one, else the run's."""
        return int(self.secret, 16) if self.secret else self.batch_seed
