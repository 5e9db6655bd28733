"""The clients' side of the data: cohorts, the samples of each client, and a client's view of its own."""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.loaders import without_none
from fl_lightning.data.reduction import kept_of_classes
from fl_lightning.data.splits import Array, Split, Transform
from fl_lightning.functional.classes import label_counts
from fl_lightning.types import Batch
from fl_lightning.utils.keyed import keyed_generator, keyed_noise, keyed_numpy
from fl_lightning.utils.settings import check_choice, check_count, check_kind, check_numbers, check_whole

if TYPE_CHECKING:
    from fl_lightning.data.changing import ClientChanges
    from fl_lightning.data.stays import Stays

SamplesPerClass = dict[int, dict[int, int]]
"""The number of samples that are left, by client and class. A class that is not named has all its samples."""


class CohortBounds(NamedTuple):
    """Holds the least and the largest number of clients in a round of the run.

    Args:
        least: The least number of clients.
        most: The largest number of clients.
    """

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least}" if self.least == self.most else f"{self.least} to {self.most}"


class Cohorts:
    """Gives the client ids of every round: drawn anew, or taken from a schedule.

    Args:
        num_clients: Number N of clients.
        participation: Share of the clients in a drawn cohort, in (0, 1].
        schedule: Client ids of every round. None: cohorts are drawn.
        seed: Seed of the draws, which depend only on the seed and the round.
        sampling: Way of drawing. `uniform`: cohorts have one size. `poisson`: each client takes part by itself with
            probability `participation`, so that a cohort may have any size, even 0.
        cohort_size: Number of clients in a drawn cohort, in place of `participation`. None: it is not given.
        unseen: Ids of clients that never train, and are in no cohort.
        stays: Tells which clients are there in a round, among whom its cohort is drawn. None: all are.

    Attributes:
        clients: Ids of the clients that may be in a cohort, ascending. Below, N is their number.
        size: Number of clients in a drawn cohort, `cohort_size` or max(1, floor(participation · N)). Under `poisson`,
            cohorts have about this size.
        draws_each: Whether each client takes part by itself (`poisson`).
        share: Share of the clients in a cohort, size / N. Under `poisson`, the probability.

    Raises:
        ValueError: `participation` is outside (0, 1], a scheduled cohort names no clients of the run or a client twice,
            or two settings contradict each other.
    """

    def __init__(
        self,
        num_clients: int,
        participation: float,
        schedule: Sequence[Sequence[int]] | None,
        seed: int,
        *,
        sampling: Literal["uniform", "poisson"] = "uniform",
        cohort_size: int | None = None,
        unseen: Sequence[int] = (),
        stays: "Stays | None" = None,
    ) -> None:
        check_numbers("it is the share of the clients in a round", participation=participation)
        if participation is None or not 0 < participation <= 1:
            raise ValueError(f"participation must lie in (0, 1], got {participation}; 1 means all clients every round")
        check_choice(("uniform", "poisson"), sampling=sampling)
        if schedule is not None and sampling == "poisson":
            raise ValueError("data.schedule names the cohorts, and sampling=poisson draws them; leave one of them out")
        self.clients = [client_id for client_id in range(num_clients) if client_id not in unseen]
        num_training = len(self.clients)
        check_cohort_size(
            cohort_size,
            num_clients=num_training,
            participation=participation,
            is_drawn=schedule is None and sampling == "uniform",
            has_unseen=bool(unseen),
        )
        for cohort in schedule or []:
            check_scheduled(cohort, num_clients, unseen)
        if stays is not None and schedule is not None:
            raise ValueError(
                "data.schedule names the clients of every round, and data.stays says who is there to be drawn; leave "
                "one of them out"
            )
        self.num_clients = num_clients
        self.schedule = schedule
        self.stays = stays
        self.seed = seed
        self.size = int(cohort_size) if cohort_size else max(1, int(participation * num_training + 1e-9))
        self.draws_each = sampling == "poisson"
        self.share = participation if self.draws_each else self.size / num_training

    @property
    def sampling_rate(self) -> float | None:
        """The probability with which every client takes part by itself. None: cohorts are not drawn in this way.

        Clients that are not available do not make the probability smaller, because their ids may be known.
        """
        if self.schedule is not None:
            return None
        return self.share if self.draws_each or self.share == 1 else None

    @cached_property
    def bounds(self) -> CohortBounds:
        """The least and the largest number of clients in a round: the one answer to this question."""
        if self.schedule is not None:
            sizes = [len(cohort) for cohort in self.schedule]
            return CohortBounds(least=min(sizes, default=0), most=max(sizes, default=0))
        there = [len(self.there(round_idx)) for round_idx in self.begins]
        fewest = min(there)
        most = max(there)
        if self.draws_each and self.share < 1:
            return CohortBounds(least=0, most=most)
        return CohortBounds(least=min(self.size, fewest), most=min(self.size, most))

    @property
    def begins(self) -> Sequence[int]:
        """The rounds in which other clients are there than in the round before, and round 0, ascending."""
        return [0] if self.stays is None else self.stays.begins

    def there(self, round_idx: int) -> Sequence[int]:
        """List the clients among whom the cohort of a round is drawn, ascending.

        Args:
            round_idx: Communication round, from 0.
        """
        return self.clients if self.stays is None else self.stays.of(self.clients, round_idx)

    def rekey(self, seed: int) -> None:
        """Draw the cohorts by another seed."""
        self.seed = seed

    def __call__(self, round_idx: int) -> list[int]:
        """List the client ids of a round, ascending if they are drawn.

        Args:
            round_idx: Communication round, from 0.

        Raises:
            ValueError: The schedule has no such round.
        """
        if self.schedule is not None:
            return scheduled(self.schedule, round_idx)
        there = self.there(round_idx)
        if self.share == 1:
            return list(there)
        # The guarantees of differential privacy hold only if nobody can tell who takes part.
        if self.draws_each:
            # A client's chance does not depend on who else is there.
            chances = keyed_noise(self.seed, "cohort", round_idx).random(len(self.clients))
            chosen = [self.clients[place] for place in np.flatnonzero(chances < self.share).tolist()]
            return chosen if self.stays is None else self.stays.of(chosen, round_idx)
        generator = keyed_numpy(self.seed, "cohort", round_idx)
        return sorted(self.drawn(generator, self.size, among=there))

    @property
    def not_of_one_size(self) -> str:
        """The setting because of which cohorts are not drawn with one size, or an empty text."""
        if self.schedule is not None:
            return "data.schedule"
        if self.stays is not None:
            return "data.stays"
        return "data.sampling=poisson" if self.draws_each else ""

    def asked(self, round_idx: int, over_selection: float) -> list[int]:
        """List the clients of a round that are asked if some more are asked than may count, ascending.

        Args:
            round_idx: Communication round, from 0.
            over_selection: Share of further clients, ≥ 0.
        """
        count = min(len(self.clients), math.ceil((1 + over_selection) * self.size - 1e-9))
        if count == len(self.clients):
            return list(self.clients)
        return sorted(self.drawn(keyed_numpy(self.seed, "cohort", round_idx), count, among=self.clients))

    def drawn(self, generator: np.random.Generator, count: int, *, among: Sequence[int]) -> list[int]:
        """Draw different clients, in drawn order.

        Args:
            generator: The generator of the draw.
            count: Number of clients. All are drawn if there are fewer.
            among: Ids of the clients that may be drawn, ascending.
        """
        places: list[int] = generator.choice(len(among), min(count, len(among)), replace=False).tolist()
        return [among[place] for place in places]


def check_cohort_size(
    cohort_size: int | None, *, num_clients: int, participation: float, is_drawn: bool, has_unseen: bool = False
) -> None:
    """Refuse a number of clients in a round that cannot be drawn, or that another setting contradicts.

    Args:
        cohort_size: Number of clients in a round. None: it is not given.
        num_clients: Number N of clients that train.
        participation: Share of the clients in a round, 1 if it is not given.
        is_drawn: Whether cohorts of one size are drawn.
        has_unseen: Whether there are clients that never train.

    Raises:
        ValueError: `cohort_size` is below 1 or above N, `participation` is given too, or cohorts are not drawn.
    """
    check_count(1, "it is the number of clients in a round", cohort_size=cohort_size)
    if cohort_size is None:
        return
    if participation != 1:
        raise ValueError(
            f"data.cohort_size and data.participation both say how many clients a round has, got {cohort_size} and "
            f"{participation}; set data.participation to 1.0, or leave out data.cohort_size"
        )
    if not is_drawn:
        raise ValueError(
            f"data.cohort_size needs cohorts of one size that are drawn, got {cohort_size} beside data.schedule or "
            f"data.sampling=poisson; leave out data.cohort_size"
        )
    if cohort_size > num_clients:
        raise ValueError(
            f"data.cohort_size must be at most data.num_clients{', without data.unseen' if has_unseen else ''}, got "
            f"{cohort_size} of {num_clients} clients; set it to {num_clients}"
        )


def check_scheduled(cohort: Sequence[int], num_clients: int, unseen: Sequence[int] = ()) -> None:
    """Refuse a cohort of a schedule that is not a list of different client ids.

    Args:
        cohort: The cohort of a round.
        num_clients: Number N of clients.
        unseen: Ids of clients that never train.

    Raises:
        TypeError: The cohort is no list, or an id is no whole number.
        ValueError: The cohort is empty, or an id is outside [0, N), named twice, or that of a client that never trains.
    """
    check_kind((list, tuple), "a list for each round", "give such as [[0, 1], [2, 3]]", schedule=cohort)
    for client_id in cohort:
        check_whole("a cohort of data.schedule lists client ids", client_id=client_id)
    outside = [client_id for client_id in cohort if not 0 <= client_id < num_clients]
    has_twice = len(set(cohort)) < len(cohort)
    if not cohort or outside or has_twice:
        raise ValueError(
            f"a scheduled cohort must name different clients in [0, {num_clients}), got {list(cohort)}; mend "
            f"data.schedule"
        )
    never = sorted(set(cohort).intersection(unseen))
    if never:
        raise ValueError(
            f"a scheduled cohort must leave out the clients of data.unseen, got {list(cohort)} with client {never[0]}; "
            f"leave it out of data.schedule, or of data.unseen"
        )


def scheduled(schedule: Sequence[Sequence[int]], round_idx: int) -> list[int]:
    """Look up the cohort of a round.

    Args:
        schedule: Client ids of every round.
        round_idx: Communication round, from 0.

    Raises:
        ValueError: The schedule has no such round.
    """
    if round_idx >= len(schedule):
        raise ValueError(
            f"schedule names the cohorts of {len(schedule)} rounds, but round {round_idx} was asked for; lower "
            f"max_epochs or extend data.schedule"
        )
    return list(schedule[round_idx])


class ClientIndices(Sequence[Tensor]):
    """Holds an index tensor for each client, as views of one tensor, because a tensor of its own would take 1.2 kB.

    Args:
        arrays: Indices of each client, N int64 arrays (n,).
        total: Number of samples that the indices may number. None: the indices are not checked.
        pool: Samples that the indices number, (total,) int64. None: the indices are the samples.

    Attributes:
        indices: Indices of all clients, end to end.
        ends: End of each client's indices in `indices`, (N,).

    Raises:
        ValueError: An index is not in [0, total).

    >>> parts = ClientIndices([np.array([2, 0]), np.array([], dtype=np.int64), np.array([1])])
    >>> parts[0], len(parts[1]), [len(part) for part in parts]
    (tensor([2, 0]), 0, [2, 0, 1])
    """

    def __init__(self, arrays: Sequence[Array], total: int | None = None, pool: Array | None = None) -> None:
        everything = np.arange(0)
        if len(arrays):
            everything = np.concatenate(arrays).astype(np.int64, copy=False)
        if total is not None and len(everything):
            least = everything.min()
            most = everything.max()
            if least < 0 or most >= total:
                wrong = least if least < 0 else most
                raise ValueError(
                    f"the indices that a partition gives must lie in [0, {total}), got {wrong}; mend data.partition"
                )
        self.indices = torch.from_numpy(everything if pool is None else pool[everything])
        # Ends are read one by one, which is slow in a tensor.
        self._ends = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
        self.ends = torch.from_numpy(self._ends[1:])
        self._size = len(arrays)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, client_id: int) -> Tensor:  # type: ignore[override]
        if not 0 <= client_id < self._size:
            raise IndexError(f"client_id must lie in [0, {self._size}), got {client_id}")
        start = int(self._ends[client_id])
        end = int(self._ends[client_id + 1])
        return self.indices[start:end]


class FederatedData(Protocol):
    """Describes the part of the data module that a client's view reads."""

    num_clients: int
    num_owners: int
    feature_shift: Any
    works_partly: bool
    works_whole_epochs: bool
    batch_size: int | Literal["full"]
    shuffle: bool
    batch_seed: int
    drop_last: bool

    @property
    def training_clients(self) -> Sequence[int]:
        """The ids of the clients that train, ascending."""

    @property
    def noise_seed(self) -> int:
        """The seed of the noise of differential privacy."""

    @property
    def num_classes(self) -> int | None:
        """The number C of classes. None: the samples have no classes."""

    def work_of(self, client_id: int, round_idx: int) -> float:
        """Return the share of its local steps that a client makes in a round, in (0, 1]."""

    def shift_of(self, client_id: int) -> Transform | None:
        """Return the transform through which a client sees its samples. None: it sees them as they are."""

    def split(self, name: str) -> Split:
        """Get the samples of a split."""

    def client_indices(self, split: str, client_id: int) -> Tensor:
        """Get a client's samples, as int64 indices (n,) into the split."""

    def count_labels(self, parts: Sequence[Tensor]) -> Tensor:
        """Count the training samples of each class, (len(parts), C) int64, for indices into the training split."""


class ClientView:
    """Gives one client's data in one round: its own samples, in its own keyed order (the `ClientData` protocol).

    Args:
        data: The data module, for its settings and the splits besides `train`.
        train: The training split of all clients.
        indices: Indices (n,) int64 of the client's samples by split. `train` must be there. `data` tells the indices of
            a split that is not there.
        client_id: Id of the client, 0 ... N-1.
        round_idx: Communication round, from 0.
    """

    ended = False
    """Whether the last batch that was given is the last batch of its stream. Without a stream it is not."""

    share = 1.0
    """The share of its batches that the client has time for, in (0, 1]."""

    given: Tensor | None = None
    """The training samples that the client was dealt, some of which may be held back. None: it has all of them."""

    changes: "ClientChanges | None" = None
    """How the client's data differ from those of its other rounds. None: they are the same in all rounds."""

    def __init__(
        self,
        data: FederatedData,
        train: Split,
        indices: Mapping[str, Tensor],
        *,
        client_id: int,
        round_idx: int,
    ) -> None:
        self.client_id = client_id
        self.round_idx = round_idx
        self.num_clients = data.num_clients
        self.batch_size = data.batch_size
        self.drop_last = data.drop_last
        self._data = data
        self._given = train
        self._indices = dict(indices)
        self._tested: Split | None = None
        """The split of the client's own test samples, once it is known, where data change."""
        self._shift = None if data.feature_shift is None else data.shift_of(client_id)
        self._train = train if self._shift is None else train.through(self._shift)

    @property
    def clients(self) -> Sequence[int]:
        return self._data.training_clients

    @property
    def local_work(self) -> float:
        if not self._data.works_partly:
            return self.share
        return self.share * self._data.work_of(self.client_id, self.round_idx)

    @property
    def works_whole_epochs(self) -> bool:
        return self._data.works_whole_epochs

    @property
    def label_counts(self) -> Tensor:
        return self._data.count_labels([self._indices["train"]])[0]

    def size(self, split: str = "train") -> int:
        return self._look_up(split).shape[0]

    @property
    def num_samples(self) -> int:
        return self.size()

    @property
    def stage(self) -> int:
        return 0 if self.changes is None else self.changes.stage

    def arrived(self, since: int | None) -> Tensor:
        present = self._look_up("train")
        if since is None:
            return torch.arange(len(present))
        if self.changes is None:
            return torch.arange(0)
        _, positions = self.dealt()
        return self.changes.arrived(since)[positions].nonzero().flatten()

    def dealt(self) -> tuple[int, Tensor]:
        present = self._look_up("train")
        if self.given is None:
            return len(present), torch.arange(len(present))
        order = self.given.argsort()
        positions = order[torch.searchsorted(self.given[order], present)]
        return len(self.given), positions

    def _look_up(self, split: str) -> Tensor:
        """Look up a split's indices at its first use."""
        if split not in self._indices:
            indices = self._data.client_indices(split, self.client_id)
            if split == "test" and self.changes is not None:
                self._tested, indices = self.changes.tested(self._data.split("test"), indices)
            self._indices[split] = indices
        return self._indices[split]

    def samples_per_batch(self, split: str, given: int | Literal["full"] | None = None) -> int:
        """Return the number of samples per batch of a split.

        Args:
            split: Name of the split.
            given: Number of samples per batch, or `full` for the whole split. None: the data module's.
        """
        chosen = self.batch_size if given is None else given
        return max(1, self.size(split)) if chosen == "full" else chosen

    def augments(self, split: str = "train") -> bool:
        """Tell whether a sample differs from one local epoch to the next, as only training samples do."""
        return split == "train" and self._train.augments

    def all(self, split: str = "train") -> Batch:
        indices = self._look_up(split)
        return next(iter(self.source(split).batches([indices], None)))

    def labels(self, split: str = "train") -> Tensor:
        labels = self.source(split).labels
        if labels is None:
            raise ValueError(f"the {split} samples must have integer labels, and these have none")
        return labels[self._look_up(split)]

    def batches(
        self,
        split: str = "train",
        epoch: int | None = None,
        batch_size: int | None = None,
        *,
        shuffle: bool | None = None,
        with_index: bool = False,
    ) -> Iterator[Batch]:
        indices, order = self.order(split, epoch, shuffle)
        n = indices.shape[0]
        size = self.samples_per_batch(split, batch_size)
        if epoch is not None and self.drop_last:
            n -= n % size
            indices = indices[:n]
        if not n:
            return iter(())
        source = self.source(split)
        indices = source.placed(indices)
        chosen = [indices] if n <= size else torch.split(indices, size)
        batches = source.batches(chosen, self.draws(split, epoch))
        if not with_index:
            # A pass that trains counts the batches that it skips, as Lightning does.
            return without_none(batches) if epoch is None else batches
        positions = torch.arange(n) if order is None else order[:n]
        return zip(batches, torch.split(source.placed(positions), size), strict=True)

    def source(self, split: str) -> Split:
        """Get the split whose samples are indexed."""
        if split == "train":
            return self._train
        if split == "test" and self.changes is not None:
            self._look_up(split)
            return cast(Split, self._tested)
        source = self._data.split(split)
        if split == "test" and self._shift is not None:
            return source.through(self._shift)
        return source

    def order(self, split: str, epoch: int | None, shuffle: bool | None = None) -> tuple[Tensor, Tensor | None]:
        """Order the client's samples for an epoch.

        Args:
            split: Name of the split.
            epoch: Local epoch. None: samples are in their stored order.
            shuffle: Whether samples are shuffled. None: as the data module says.

        Returns:
            The samples' indices in the split of all clients, (n,) int64, and their positions within the client's split,
            (n,) int64. Positions None: 0, 1, 2, …
        """
        indices = self._look_up(split)
        shuffles = self._data.shuffle if shuffle is None else shuffle
        if epoch is None or not indices.shape[0] or not shuffles:
            return indices, None
        order = torch.randperm(indices.shape[0], generator=self.generator(f"batches/{split}/{epoch}"))
        return indices[order], order

    def draws(self, split: str, epoch: int | None) -> torch.Generator | None:
        """Make the generator of an epoch's augmentation. None: samples are not augmented."""
        augments = split == "train" and epoch is not None and self._train.augments
        return self.generator(f"augment/{split}/{epoch}") if augments else None

    def restricted(self, split: str, positions: Tensor) -> "ClientView":
        """Make a view of some of the client's samples.

        Args:
            split: Name of the split that is restricted.
            positions: Positions of the samples within the client's split, (k,) int64.

        Raises:
            ValueError: The positions are of another type, or outside [0, n).
        """
        held = self._look_up(split)
        positions = positions.cpu()
        check_positions(positions, len(held), split)
        view = ClientView(
            data=self._data,
            train=self._given,
            indices={**self._indices, split: held[positions]},
            client_id=self.client_id,
            round_idx=self.round_idx,
        )
        view.given = self._indices["train"] if self.given is None else self.given
        view.share = self.share
        view.changes = self.changes
        view._tested = self._tested
        return view

    def by_loader(self, split: str) -> list["ClientView"]:
        held = self._look_up(split).cpu()
        parts = self.source(split).by_loader(held) if split != "train" else [held]
        if len(parts) == 1:
            return [self]
        return [self.restricted(split, torch.isin(held, part).nonzero().flatten()) for part in parts]

    def of_task(self, task: int) -> "ClientView":
        """Make a view whose test samples are all of the client's own of one task of the scenario.

        Args:
            task: Number of the task, from 0.
        """
        view = self.restricted("train", torch.arange(self.size()))
        if self.changes is not None:
            own = self._data.client_indices("test", self.client_id)
            view._tested, view._indices["test"] = self.changes.tested(self._data.split("test"), own, task)
        return view

    def for_fine_tuning(self) -> "ClientView":
        view = FineTuningView(
            data=self._data,
            train=self._given,
            indices=self._indices,
            client_id=self.client_id,
            round_idx=0,
        )
        view.given = self.given
        view.changes = self.changes
        view._tested = self._tested
        return view

    def generator(self, purpose: str, per_round: bool = True) -> torch.Generator:
        round_idx = self.round_idx if per_round else -1
        return keyed_generator(self._data.batch_seed, purpose, round_idx=round_idx, client_id=self.client_id)

    def noise_generator(self, purpose: str) -> np.random.Generator:
        return keyed_noise(self._data.noise_seed, purpose, round_idx=self.round_idx, client_id=self.client_id)


class FineTuningView(ClientView):
    """Gives one client's data for fine-tuning: what is measured is the model, so that no draw depends on the round."""

    @property
    def local_work(self) -> float:
        return 1.0

    def restricted(self, split: str, positions: Tensor) -> ClientView:
        return super().restricted(split, positions).for_fine_tuning()

    def generator(self, purpose: str, per_round: bool = True) -> torch.Generator:
        return super().generator(f"fine_tuning/{purpose}", per_round)

    def noise_generator(self, purpose: str) -> np.random.Generator:
        return super().noise_generator(f"fine_tuning/{purpose}")


def check_positions(positions: Tensor, size: int, split: str) -> None:
    """Refuse positions that do not number the samples of a client's split.

    Args:
        positions: Positions of samples, (k,), on the CPU.
        size: Number of samples in the client's split.
        split: Name of the split, for the error.

    Raises:
        ValueError: The positions are of another type than int64, or outside [0, size).
    """
    got: object = positions.dtype
    is_right = positions.dtype == torch.int64
    if is_right and len(positions):
        least = int(positions.min())
        most = int(positions.max())
        got = f"{least} ... {most}"
        is_right = least >= 0 and most < size
    if not is_right:
        raise ValueError(f"positions must be int64 in [0, {size}), the client's {split} samples, got {got}")


class ClientSamples:
    """Holds the training samples of every client, some of which may be held back.

    Args:
        train: The training split, whose labels are read only if samples are held back.
        dealt: Indices of each client's samples in the split, int64.
        data: The data module.
        seed: Seed of the draws.
    """

    def __init__(self, train: Split, dealt: ClientIndices, data: FederatedData, seed: int) -> None:
        self.dealt = dealt
        self._train = train
        self._data = data
        self._seed = seed
        self._counts: SamplesPerClass = {}
        self._reduced: dict[int, Tensor] = {}

    def view(self, client_id: int, round_idx: int) -> ClientView:
        """Make the view of one client's data in one round."""
        view = ClientView(
            data=self._data,
            train=self._train,
            indices={"train": self.all_indices(client_id)},
            client_id=client_id,
            round_idx=round_idx,
        )
        if client_id in self._reduced:
            view.given = self.dealt[client_id]
        return view

    def indices(self, client_id: int, round_idx: int) -> Tensor:
        """Get the samples that a client has in a round, (n,) int64."""
        return self.all_indices(client_id)

    def all_indices(self, client_id: int) -> Tensor:
        """Get the samples that a client has in any round, (n,) int64, without those that are held back now."""
        return self._reduced[client_id] if client_id in self._reduced else self.dealt[client_id]

    def size(self, client_id: int, round_idx: int) -> int:
        """Count the samples that a client has in a round."""
        return len(self.indices(client_id, round_idx))

    def set_count(self, client_id: int, class_idx: int, count: int | None) -> None:
        """Let a client have only some of its samples of a class.

        Args:
            client_id: Id of the client, 0 ... N-1.
            class_idx: The class, 0 ... C-1.
            count: Number of samples. None: all.

        Raises:
            ValueError: There is no such client or class, the samples have no classes, or `count` is outside [0, the
                number of samples dealt].
        """
        labels = self._train.labels
        num_classes = self._data.num_classes
        if labels is None or num_classes is None:
            raise ValueError("set_class_count needs samples with integer labels, and these have none")
        if not 0 <= client_id < len(self.dealt):
            raise ValueError(f"client_id must lie in [0, {len(self.dealt)}), got {client_id}")
        if not 0 <= class_idx < num_classes:
            raise ValueError(f"class_idx must lie in [0, {num_classes}), got {class_idx}")
        dealt = int(label_counts(labels, [self.dealt[client_id]], num_classes)[0, class_idx])
        if count is not None and not 0 <= count <= dealt:
            raise ValueError(
                f"client {client_id} was dealt {dealt} samples of class {class_idx}: count must lie in [0, {dealt}], "
                f"got {count}; None gives it all of them back"
            )
        counts = self._counts.setdefault(client_id, {})
        counts.pop(class_idx, None)
        if count is not None:
            counts[class_idx] = count
        self._hold_back(client_id)

    def _hold_back(self, client_id: int) -> None:
        """Draw the samples that a client has now, by the counts of its classes."""
        part = self.dealt[client_id]
        counts = self._counts.get(client_id)
        if counts:
            labels = self._train.labels
            if labels is not None:
                kept = kept_of_classes(labels[part], counts=counts, seed=self._seed, client_id=client_id)
                part = part[kept]
        self._reduced[client_id] = part

    def state_dict(self) -> dict[str, Any]:
        class_counts = {client_id: dict(counts) for client_id, counts in self._counts.items()}
        return {"class_counts": class_counts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        before = self._counts
        self._counts = {client_id: dict(counts) for client_id, counts in state["class_counts"].items()}
        for client_id in before.keys() | self._counts.keys():
            self._hold_back(client_id)
