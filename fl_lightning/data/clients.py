"""The clients' side of the data: cohorts, the samples of each client, and a client's view of its own."""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.reduction import reduce_classes
from fl_lightning.data.splits import Array, Split, Transform
from fl_lightning.functional.classes import label_counts
from fl_lightning.types import Batch
from fl_lightning.utils.keyed import keyed_generator, keyed_noise, keyed_numpy
from fl_lightning.utils.settings import check_choice, check_count, check_kind, check_numbers, check_whole

SamplesPerClass = dict[int, dict[int, int]]
"""Samples that are left, by client and class; a class that is not named has all."""


class CohortBounds(NamedTuple):
    """The least and the largest number of clients in a round of the run."""

    least: int
    most: int

    def __str__(self) -> str:
        return f"{self.least}" if self.least == self.most else f"{self.least} to {self.most}"


class Cohorts:
    """The client ids of every round: drawn anew, or taken from a schedule.

    Args:
        num_clients: N.
        participation: share of the clients in a drawn cohort, in (0, 1].
        schedule: the cohorts of all rounds, in place of drawn ones; or None.
        seed: of the draws, which depend on it and the round only.
        sampling: `uniform`: cohorts of one size; `poisson`: each client takes part by itself with probability
            `participation`, so that a cohort may have any size, 0 too.
        cohort_size: clients in a drawn cohort, in place of `participation`; or None.

    Attributes:
        size: clients in a drawn cohort, `cohort_size` or max(1, floor(participation · N)); under `poisson` about so
            many.
        share: of the clients in a cohort: size / N, under `poisson` the probability.

    Raises:
        ValueError: a share outside (0, 1], a scheduled cohort that is none, or a schedule that is to be drawn.
    """

    def __init__(
        self,
        num_clients: int,
        participation: float,
        schedule: Sequence[Sequence[int]] | None,
        seed: int,
        sampling: Literal["uniform", "poisson"] = "uniform",
        cohort_size: int | None = None,
    ) -> None:
        check_numbers("it is the share of the clients in a round", participation=participation)
        if participation is None or not 0 < participation <= 1:
            raise ValueError(f"participation must lie in (0, 1], got {participation}; 1 means all clients every round")
        check_choice(("uniform", "poisson"), sampling=sampling)
        if schedule is not None and sampling == "poisson":
            raise ValueError("data.schedule names the cohorts, and sampling=poisson draws them; leave one of them out")
        check_cohort_size(
            cohort_size,
            num_clients=num_clients,
            participation=participation,
            is_drawn=schedule is None and sampling == "uniform",
        )
        for cohort in schedule or []:
            check_kind((list, tuple), "a list for each round", "give such as [[0, 1], [2, 3]]", schedule=cohort)
            for client_id in cohort:
                check_whole("a cohort of data.schedule lists client ids", client_id=client_id)
            outside = [client_id for client_id in cohort if not 0 <= client_id < num_clients]
            if not cohort or outside or len(set(cohort)) < len(cohort):
                raise ValueError(
                    f"a scheduled cohort must name different clients in [0, {num_clients}), got {list(cohort)}; mend "
                    f"data.schedule"
                )
        self.num_clients = num_clients
        self.schedule = schedule
        self.seed = seed
        self.size = int(cohort_size) if cohort_size else max(1, int(participation * num_clients + 1e-9))
        self.draws_each = sampling == "poisson"
        self.share = participation if self.draws_each else self.size / num_clients

    @property
    def sampling_rate(self) -> float | None:
        """Probability with which every client takes part by itself, or None where cohorts are drawn otherwise.

        Clients that are not available make it no smaller: who they are may be known.
        """
        return self.share if self.schedule is None and (self.draws_each or self.share == 1) else None

    @cached_property
    def bounds(self) -> CohortBounds:
        """The least and the largest number of clients in a round: the one answer to this question."""
        if self.schedule is not None:
            sizes = [len(cohort) for cohort in self.schedule]
            return CohortBounds(min(sizes, default=0), max(sizes, default=0))
        if self.draws_each and self.share < 1:
            return CohortBounds(0, self.num_clients)
        return CohortBounds(self.size, self.size)

    def rekey(self, seed: int) -> None:
        """Draw the cohorts by another seed."""
        self.seed = seed

    def __call__(self, round_idx: int) -> list[int]:
        """List the client ids of a round, ascending where they are drawn.

        Raises:
            ValueError: if the schedule has no such round.
        """
        if self.schedule is not None:
            return scheduled(self.schedule, round_idx)
        if self.share == 1:
            return list(range(self.num_clients))
        if self.draws_each:  # who takes part is hidden
            drawn = keyed_noise(self.seed, "cohort", round_idx).random(self.num_clients) < self.share
            clients: list[int] = np.flatnonzero(drawn).tolist()
            return clients
        generator = keyed_numpy(self.seed, "cohort", round_idx)
        return sorted(generator.choice(self.num_clients, self.size, replace=False).tolist())


def check_cohort_size(cohort_size: int | None, *, num_clients: int, participation: float, is_drawn: bool) -> None:
    """Refuse a number of clients in a round that cannot be drawn, or that another setting contradicts.

    Args:
        cohort_size: the number; None: it is not given.
        num_clients: N.
        participation: share of the clients in a round, 1 where it is not given.
        is_drawn: whether cohorts of one size are drawn.

    Raises:
        ValueError: naming the settings.
    """
    check_count(1, cohort_size=cohort_size)
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
            f"data.cohort_size must be at most data.num_clients, got {cohort_size} of {num_clients} clients; set it to "
            f"{num_clients}"
        )


def scheduled(schedule: Sequence[Sequence[int]], round_idx: int) -> list[int]:
    """Look up the cohort of a round.

    Raises:
        ValueError: if the schedule has no such round.
    """
    if round_idx >= len(schedule):
        raise ValueError(
            f"schedule names the cohorts of {len(schedule)} rounds, but round {round_idx} was asked for; lower "
            f"max_epochs or extend data.schedule"
        )
    return list(schedule[round_idx])


class ClientIndices(Sequence[Tensor]):
    """Index tensors, one for each client, as views of one tensor, since each apart would take 1.2 kB.

    Args:
        arrays: for each client int64 indices (n,).
        total: samples that there are; None: the indices are not checked.
        pool: (total,) int64, whose entries are the samples that the indices number; None: the indices are the samples.

    Attributes:
        indices: of all clients, end to end.
        ends: where each client's indices end, (N,).

    Raises:
        ValueError: an index that is not in [0, total).

    >>> parts = ClientIndices([np.array([2, 0]), np.array([], dtype=np.int64), np.array([1])])
    >>> parts[0], len(parts[1]), [len(part) for part in parts]
    (tensor([2, 0]), 0, [2, 0, 1])
    """

    def __init__(self, arrays: Sequence[Array], total: int | None = None, pool: Array | None = None) -> None:
        everything = np.concatenate(arrays).astype(np.int64, copy=False) if len(arrays) else np.arange(0)
        if total is not None and len(everything) and not 0 <= everything.min() <= everything.max() < total:
            wrong = everything.min() if everything.min() < 0 else everything.max()
            raise ValueError(
                f"the indices that a partition gives must lie in [0, {total}), got {wrong}; mend data.partition"
            )
        self.indices = torch.from_numpy(everything if pool is None else pool[everything])
        self._ends = np.cumsum([0, *map(len, arrays)], dtype=np.int64)  # read one by one, which tensors do slowly
        self.ends = torch.from_numpy(self._ends[1:])
        self._size = len(arrays)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, client_id: int) -> Tensor:  # type: ignore[override]
        if not 0 <= client_id < self._size:
            raise IndexError(f"client_id must lie in [0, {self._size}), got {client_id}")
        return self.indices[int(self._ends[client_id]) : int(self._ends[client_id + 1])]


class FederatedData(Protocol):
    """The part of the data module that a client's view reads."""

    num_clients: int
    num_owners: int
    feature_shift: Any
    works_partly: bool
    batch_size: int | Literal["full"]
    shuffle: bool
    batch_seed: int
    drop_last: bool

    @property
    def noise_seed(self) -> int:
        """Seed of the noise of differential privacy."""

    @property
    def num_classes(self) -> int | None:
        """C, or None where the samples have no classes."""

    def work_of(self, client_id: int, round_idx: int) -> float:
        """Tell the share of its local steps that a client makes in a round, in (0, 1]."""

    def shift_of(self, client_id: int) -> Transform | None:
        """Tell how a client sees its samples, None: as they are."""

    def split(self, name: str) -> Split:
        """Get the samples of a split."""

    def client_indices(self, split: str, client_id: int) -> Tensor:
        """Get a client's samples, as int64 indices (n,) into the split."""

    def count_labels(self, parts: Sequence[Tensor]) -> Tensor:
        """Count the training samples of each class, (len(parts), C) int64, for indices into the training split."""


class ClientView:
    """One client's data in one round: its own samples, in its own keyed order (the `ClientData` protocol).

    Args:
        data: the data module, for its settings and the splits besides `train`.
        train: the training split of all clients.
        indices: the client's samples, int64 (n,), of `train` and of splits where they are not those of `data`.
        client_id: 0 ... N-1.
        round_idx: communication round, from 0.
    """

    ended = False
    given: Tensor | None = None
    """The training samples that the client was dealt, some of which may be held back; None: it has all of them."""

    def __init__(
        self, data: FederatedData, train: Split, indices: Mapping[str, Tensor], client_id: int, round_idx: int
    ) -> None:
        self.client_id = client_id
        self.round_idx = round_idx
        self.num_clients = data.num_clients
        self.batch_size = data.batch_size
        self.drop_last = data.drop_last
        self._data = data
        self._given = train
        self._indices = dict(indices)
        self._shift = None if data.feature_shift is None else data.shift_of(client_id)
        self._train = train if self._shift is None else train.through(self._shift)

    @property
    def local_work(self) -> float:
        return self._data.work_of(self.client_id, self.round_idx) if self._data.works_partly else 1.0

    @property
    def label_counts(self) -> Tensor:
        return self._data.count_labels([self._indices["train"]])[0]

    def size(self, split: str = "train") -> int:
        return self._look_up(split).shape[0]

    @property
    def num_samples(self) -> int:
        return self.size()

    def dealt(self) -> tuple[int, Tensor]:
        present = self._look_up("train")
        if self.given is None:
            return len(present), torch.arange(len(present))
        order = self.given.argsort()
        return len(self.given), order[torch.searchsorted(self.given[order], present)]

    def _look_up(self, split: str) -> Tensor:
        """Look up a split's indices at its first use."""
        if split not in self._indices:
            self._indices[split] = self._data.client_indices(split, self.client_id)
        return self._indices[split]

    def samples_per_batch(self, split: str, given: int | Literal["full"] | None = None) -> int:
        """Choose the samples per batch of a split: those given or the data module's, for `full` the whole split."""
        chosen = self.batch_size if given is None else given
        return max(1, self.size(split)) if chosen == "full" else chosen

    def augments(self, split: str = "train") -> bool:
        """Tell whether a sample differs from one local epoch to the next: only training samples do."""
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
        batches = source.batches([indices] if n <= size else torch.split(indices, size), self.draws(split, epoch))
        if not with_index:
            return batches
        positions = torch.arange(n) if order is None else order[:n]
        return zip(batches, torch.split(source.placed(positions), size), strict=True)

    def source(self, split: str) -> Split:
        """Get the split whose samples are indexed."""
        if split == "train":
            return self._train
        source = self._data.split(split)
        return source if self._shift is None or split != "test" else source.through(self._shift)

    def order(self, split: str, epoch: int | None, shuffle: bool | None = None) -> tuple[Tensor, Tensor | None]:
        """Order the client's samples for an epoch, and give their positions within the client's split.

        Both (n,) int64; positions None: 0, 1, 2, …
        """
        indices = self._look_up(split)
        if epoch is None or not indices.shape[0] or not (self._data.shuffle if shuffle is None else shuffle):
            return indices, None
        order = torch.randperm(indices.shape[0], generator=self.generator(f"batches/{split}/{epoch}"))
        return indices[order], order

    def draws(self, split: str, epoch: int | None) -> torch.Generator | None:
        """Make the generator of an epoch's augmentation, where there is one."""
        augments = split == "train" and epoch is not None and self._train.augments
        return self.generator(f"augment/{split}/{epoch}") if augments else None

    def restricted(self, split: str, positions: Tensor) -> "ClientView":
        """Restrict the client to the samples at `positions` (k,) int64 within a split.

        Raises:
            ValueError: positions of another type, or outside [0, n).
        """
        held = self._look_up(split)
        positions = positions.cpu()
        n = held.shape[0]
        whole = positions.dtype == torch.int64
        if not whole or (len(positions) and not 0 <= int(positions.min()) <= int(positions.max()) < n):
            got = positions.dtype if not whole else f"{int(positions.min())} ... {int(positions.max())}"
            raise ValueError(f"positions must be int64 in [0, {n}), the client's {split} samples, got {got}")
        indices = {**self._indices, split: held[positions]}
        view = ClientView(self._data, self._given, indices, self.client_id, self.round_idx)
        view.given = self._indices["train"] if self.given is None else self.given
        return view

    def generator(self, purpose: str, per_round: bool = True) -> torch.Generator:
        return keyed_generator(self._data.batch_seed, purpose, self.round_idx if per_round else -1, self.client_id)

    def noise_generator(self, purpose: str) -> np.random.Generator:
        return keyed_noise(self._data.noise_seed, purpose, self.round_idx, self.client_id)


class ClientSamples:
    """Training samples of every client, some of which may be held back.

    Args:
        train: the training split, whose labels are read where samples are held back.
        dealt: of each client, int64 indices into the split.
        data: the data module.
        seed: of the draws.
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
        view = ClientView(self._data, self._train, {"train": self.indices(client_id)}, client_id, round_idx)
        if client_id in self._reduced:
            view.given = self.dealt[client_id]
        return view

    def indices(self, client_id: int) -> Tensor:
        """Get the samples that a client has now, (n,) int64."""
        return self._reduced[client_id] if client_id in self._reduced else self.dealt[client_id]

    def size(self, client_id: int) -> int:
        """Count the samples that a client has now."""
        return len(self.indices(client_id))

    def set_count(self, client_id: int, class_idx: int, count: int | None) -> None:
        """Let a client have `count` samples of a class, or with None all.

        Raises:
            ValueError: no such client or class, or a count outside [0, the samples dealt].
        """
        labels = self._train.labels
        num_classes = self._data.num_classes
        if labels is None or num_classes is None:
            raise ValueError("set_class_count needs samples with integer labels, and these have none")
        for name, value, most in ("client_id", client_id, len(self.dealt)), ("class_idx", class_idx, num_classes):
            if not 0 <= value < most:
                raise ValueError(f"{name} must lie in [0, {most}), got {value}")
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
        part = self.dealt[client_id]
        counts = self._counts.get(client_id)
        if counts and (labels := self._train.labels) is not None:
            part = reduce_classes(part, labels, counts, self._seed, client_id)
        self._reduced[client_id] = part

    def state_dict(self) -> dict[str, Any]:
        return {"class_counts": {client_id: dict(counts) for client_id, counts in self._counts.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        before = self._counts
        self._counts = {client: dict(counts) for client, counts in state["class_counts"].items()}
        for client_id in before.keys() | self._counts.keys():
            self._hold_back(client_id)
