"""The part of the data module that says who takes part in every round, and by which seeds that is drawn."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Literal

from pytorch_lightning import LightningDataModule

from fl_lightning.data.availability import cohorts
from fl_lightning.data.clients import Cohorts
from fl_lightning.data.local_work import PooledCohorts
from fl_lightning.data.stays import Stays, spans_of, written
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
    """Base of the data module: its clients and the cohorts of all rounds.

    Args:
        num_clients: N; None: as many as the samples have owners, known after `set_clients`.
        participation: as `Cohorts` takes it, with the next three.
        schedule: the cohorts of all rounds.
        sampling_seed: of the draws.
        sampling: uniform or poisson.
        availability: as `AvailableCohorts` takes it, with the next one.
        over_selection: share of further clients.
        secret_seed: whether the draws are keyed by a seed of the operating system.
        local_work: as `LocalWork` takes it, or the settings of stragglers.
        pooled: whether one client has the samples of all.
        cohort_size: as `Cohorts` takes it.
        unseen: which clients never train.
        stays: as `spans_of` takes it.

    Attributes:
        num_clients: N, 0 as long as it is not known, 1 where samples are pooled. Those that never train count.
        num_owners: clients that samples are dealt to, before they are pooled.
        unseen_owners: ids of the clients that never train, ascending, before samples are pooled. If a column names
            owners, they are known once the samples are dealt.
        cohort: lists the clients of a round, known with N; its `bounds` tell how many these are at least and at most.
        works_partly: whether clients may make less than all of their local work.
        works_whole_epochs: whether a share of the local work is one of epochs, rounded up to whole ones.
        secret: the secret seed in hexadecimal digits, empty without one.
        batch_seed: of batch order, augmentation and the clients' other draws.
    """

    cohort: Cohorts

    def __init__(
        self,
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
        self._spans = None if stays is None else spans_of(stays)
        self.stays = None if self._spans is None else written(self._spans)
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
        self._unseen = unseen or Unseen(None, 0)
        self._drawn = {
            "participation": participation,
            "schedule": schedule,
            "seed": sampling_seed,
            "sampling": sampling,
            "cohort_size": cohort_size,
        }
        if num_clients is not None:
            self.set_clients(num_clients)

    def set_clients(self, num_clients: int) -> None:
        """Take the number of clients, N.

        Raises:
            ValueError: a setting of the cohorts that is out of its range.
        """
        check_count(1, num_clients=num_clients)
        self.num_owners = num_clients
        self.set_unseen(() if self._unseen.waits_for_owners else self._unseen.of(num_clients))

    def set_unseen(self, unseen: tuple[int, ...]) -> None:
        """Take the ids of the clients that never train, ascending, and make the cohorts of the others.

        Raises:
            ValueError: a setting of the cohorts that is out of its range.
        """
        self.unseen_owners = unseen
        stays = None if self._spans is None else Stays(self._spans, self.num_owners, unseen)
        asked = cohorts(
            self.availability,
            self.over_selection,
            num_clients=self.num_owners,
            unseen=unseen,
            stays=stays,
            **self._drawn,
        )
        drawn = self._work.taking_part(asked)
        self.cohort = PooledCohorts(drawn) if self.pooled else drawn
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
        """List the clients that are there in a round, ascending, known with N. Clients that never train are.

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
        """Key cohorts and noise by this secret seed, in hexadecimal digits."""
        self.secret = secret
        self._key_cohorts()

    def _key_cohorts(self) -> None:
        """Key cohorts and local work by the secret seed, where there is one."""
        if self.secret and self.num_clients:
            self._work.seed = int(self.secret, 16)
            self.cohort.rekey(self._work.seed)

    def work_of(self, client_id: int, round_idx: int) -> float:
        """Tell the share of its local steps that a client makes in a round, in (0, 1]."""
        if isinstance(self.cohort, PooledCohorts):
            return self.cohort.work(self._work, round_idx)
        return self._work(client_id, round_idx)

    def key_batches(self, seed: int) -> None:
        """Key batch order, augmentation and the clients' other draws by the run's seed."""
        self.batch_seed = seed

    @property
    def seed_notice(self) -> str:
        """Tell who could redraw cohorts and noise."""
        return SECRET if self.secret else SIMULATED

    @property
    def noise_seed(self) -> int:
        """Seed of the noise of differential privacy: the secret one where there is one, else the run's."""
        return int(self.secret, 16) if self.secret else self.batch_seed
