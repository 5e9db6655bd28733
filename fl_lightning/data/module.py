"""The federation's data: one source, divided among clients."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import numpy as np
import torch
from pytorch_lightning import LightningDataModule
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, default_collate

from fl_lightning.data.changing import ChangingSamples
from fl_lightning.data.checks import (
    as_source,
    as_sources,
    check_feature_shift,
    check_fitted,
    check_given,
    check_limited,
    check_parts,
    check_pooled,
    check_scenario,
    partition_of,
)
from fl_lightning.data.clients import ClientIndices, ClientSamples, ClientView
from fl_lightning.data.datamodules import DataModuleSource, validation_name
from fl_lightning.data.datasets import DatasetSource, users_as_clients
from fl_lightning.data.devices import Devices
from fl_lightning.data.division import Division
from fl_lightning.data.feature_shift import FeatureShift
from fl_lightning.data.holdout import SERVER_ONLY, SETTINGS, holdout_sizes, load_extra
from fl_lightning.data.loader_settings import LoaderSpec
from fl_lightning.data.loaders import BatchesInTurn, EvaluationBatches, RoundLoader, evaluation_batch_size
from fl_lightning.data.local_work import PooledCohorts
from fl_lightning.data.new_samples import NewSamples, check_new_path
from fl_lightning.data.owners import ClientsElsewhere, SplitElsewhere
from fl_lightning.data.participation import Participation
from fl_lightning.data.partitions import Partition
from fl_lightning.data.scenario import Scenario
from fl_lightning.data.schema import Schema
from fl_lightning.data.sources import Predicted, Source, Splits
from fl_lightning.data.splits import Split, Transform
from fl_lightning.data.stored_schema import Told, read_told
from fl_lightning.data.stragglers import Stragglers
from fl_lightning.data.streams import ClientStreams, StreamSplit
from fl_lightning.data.unseen import Unseen
from fl_lightning.functional.classes import label_counts
from fl_lightning.types import DataModule
from fl_lightning.utils.keyed import keyed_globals
from fl_lightning.utils.settings import agreed, check_count, client_index, find_client, listed
from fl_lightning.utils.signatures import checks_arguments
from fl_lightning.utils.trainer_view import view_of


class FederatedDataModule(Participation):
    """Divides a source of samples among `num_clients` clients.

    Args:
        source: Source of the samples: one of `fl_lightning.data`, or a user's LightningDataModule.
        num_clients: Number N of clients. None, with `by`: as many clients as the samples have owners.
        partition: Partition of the training samples among the clients. None: IID.
        by: Column of the samples that names their owners, in place of a partition. Samples of one owner stay together,
            and owners are dealt to the clients in turn.
        participation: Share of the clients in a round's cohort, in (0, 1]. The cohort has
            max(1, floor(participation · N)) clients.
        cohort_size: Number of clients in a round's cohort, in place of `participation`, which then stays 1.
        batch_size: Number of samples per local step, or `full` for all samples of a client. None: the batch size of the
            source's own loader, else 32.
        shuffle: Whether a client's samples are shuffled before every local epoch. None: as in the source's own loader,
            else they are.
        schedule: Client ids of every round, in place of a drawn cohort.
        availability: Share of the rounds in which a client can take part, in [0, 1]. A list gives each client its own
            share. A text file has a line for each round, the ids of the clients that can take part, and begins again
            after its last line. Chosen clients that cannot take part are left out. None: all clients can.
        over_selection: Share of further clients that are chosen because some cannot take part. The cohort is never
            larger than `participation` says.
        seed: Seed of the partition and the splits.
        sampling_seed: Seed of the cohorts, of `availability` and of `local_work`. None: `seed`.
        sampling: Way of drawing cohorts. `uniform`: cohorts have one size. `poisson`: each client takes part by itself
            with probability `participation`, as the guarantees of differential privacy need it. A cohort may then be
            empty.
        secret_seed: Whether cohorts and the noise of differential privacy are keyed by a seed of the operating system.
            Only checkpoints hold the seed, so a run cannot be repeated without a checkpoint.
        val_fraction: Share of the training samples that the server holds back, in [0, 1). Above 0 these samples are
            evaluated every round (`val/*`), and the test split is left to `test`. 0 evaluates the test split every
            round (`global/*`). The samples are transformed as test samples are. A warning says if a user's dataset does
            not tell how.
        proxy_size: Number of training samples, or below 1 their share, that the server holds for methods that estimate
            something on data of its own (FedCL).
        proxy_overlap: Whether the clients keep the proxy's samples, too.
        transfer_size: Number of labelled training samples, or below 1 their share, that everyone holds (KnFu, FedMD).
            No client has them among its own samples.
        shared_per_class: Number of training samples of each class that everyone holds (FedKA). They are drawn only if a
            method needs the `shared` set, and their owners keep them.
        extra_splits: Sources by the name of a split (`proxy`, `transfer`, `shared`, or any other). The training split
            of the source is the split of that name, in place of samples taken from the training split.
        client_test_size: Number of samples of a client's own test set, drawn from the test split by the client's class
            proportions. Several clients may have the same sample. None: as the partition says, else n_test // N.
        eval_batch_size: Number of samples per batch in evaluation. None: 1,000, or on a CPU 125 for samples as large as
            images.
        num_classes: Number C of classes, if the source does not know it.
        input_shape: Shape of one sample, if the source does not know it.
        local_work: Share of its local steps that a client makes in a round, in (0, 1], for stragglers. [low, high] is
            drawn anew for every client and round. Batches are rounded up. `Stragglers`: a share of each cohort makes
            fewer local epochs, or is dropped.
        val_by: Column of the samples, such as `patient`. `val_fraction` holds back all samples of a value, or none.
            None: samples are drawn one by one.
        test_on_val: Whether the validation split takes the place of the test split, which nobody then sees. Clients are
            tested on validation samples, which they get as they would get test samples. For settings that are chosen by
            what clients answer (`compare --tune_metric local/alma`).
        pooled: Whether one client has the samples of all clients: training at one place, with which a federation is
            compared. The client makes as many steps as the share of the samples has that the round's cohort would have
            had.
        feature_shift: Noise, rotation or color by which the clients' samples differ. None: they do not differ.
        devices: Devices of the clients, which say how long a client takes in simulated time, the same for all methods
            of a comparison. None: time is not simulated.
        scenario: How the clients' data change over the rounds: which of the samples that it was dealt a client has in a
            round, and how it sees them. None: the data stay as they were dealt.
        stays: First and last round, from 0, in which a client is there, by client id, for clients that join and leave.
            Both are included, and a last round of None is the end. A csv file with the columns `client`, `first` and
            `last` in their place. Cohorts are drawn among the clients that are there. None: all clients stay.
        unseen: Clients that never train and are only tested, as clients are that come after the training: their share
            in (0, 1), their number, or a list of their ids and, with `by`, of names of owners. They are in no cohort,
            no number N of a method and no set of the server. None: all clients train.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: An argument is out of its range, or two arguments contradict each other.
    """

    _division: Division
    """Divides the samples once they are loaded."""

    _takes_scenario = False
    """Whether the scenario was taken from a callback, by `take_scenario`."""

    @checks_arguments
    def __init__(
        self,
        source: Source | LightningDataModule | DataModule,
        num_clients: int | None = 10,
        partition: Partition | None = None,
        participation: float = 1.0,
        *,
        batch_size: int | Literal["full"] | None = None,
        shuffle: bool | None = None,
        schedule: list[list[int]] | None = None,
        availability: float | list[float] | str | None = None,
        over_selection: float = 0.0,
        seed: int = 0,
        sampling_seed: int | None = None,
        sampling: Literal["uniform", "poisson"] = "uniform",
        secret_seed: bool = False,
        val_fraction: float = 0.0,
        proxy_size: int | float = 0,
        proxy_overlap: bool = False,
        transfer_size: int | float = 0,
        shared_per_class: int = 1,
        extra_splits: dict[str, Source] | None = None,
        client_test_size: int | None = None,
        eval_batch_size: int | None = None,
        num_classes: int | None = None,
        input_shape: tuple[int, ...] | None = None,
        by: str | None = None,
        feature_shift: FeatureShift | None = None,
        local_work: float | list[float] | Stragglers = 1.0,
        pooled: bool = False,
        val_by: str | None = None,
        cohort_size: int | None = None,
        unseen: int | float | list[int | str] | None = None,
        test_on_val: bool = False,
        devices: Devices | None = None,
        scenario: Scenario | None = None,
        stays: dict[int, list[int | None]] | str | None = None,
    ) -> None:
        # Datasets in place of a source are the commonest mistake, so the source is checked first.
        read = as_source(source)
        check_given(
            num_clients=num_clients,
            batch_size=batch_size,
            partition=partition,
            seed=seed,
            sampling_seed=sampling_seed,
        )
        dealt_by = partition_of(partition, by=by, counts_owners=num_clients is None)
        super().__init__(
            num_clients=num_clients,
            participation=participation,
            schedule=schedule,
            sampling_seed=seed if sampling_seed is None else sampling_seed,
            sampling=sampling,
            availability=availability,
            over_selection=over_selection,
            secret_seed=secret_seed,
            local_work=local_work,
            pooled=pooled,
            cohort_size=cohort_size,
            unseen=Unseen(unseen, seed, has_owners=dealt_by.column is not None),
            stays=stays,
        )
        self.source = read
        self.seed = seed
        self.partition = dealt_by
        self.unseen = unseen
        self.by = by
        check_count(1, eval_batch_size=eval_batch_size, client_test_size=client_test_size)
        check_parts(feature_shift=feature_shift, devices=devices, scenario=scenario)
        check_count(0, shared_per_class=shared_per_class)
        self._batch_size = batch_size
        self._shuffle = shuffle
        self.extra_splits = as_sources(extra_splits)
        self.holdout_sizes = holdout_sizes(
            val_fraction=val_fraction,
            transfer_size=transfer_size,
            proxy_size=proxy_size,
            extra_splits=self.extra_splits,
        )
        if val_by is not None and not val_fraction:
            raise ValueError(
                f"data.val_by needs data.val_fraction, the share that is held back, got val_by={val_by} and "
                f"val_fraction=0; set data.val_fraction"
            )
        self.val_by = val_by
        self.test_on_val = test_on_val
        self.proxy_overlap = proxy_overlap
        self.shared_per_class = shared_per_class
        self.client_test_size = client_test_size
        self._eval_batch_size = eval_batch_size
        self.feature_shift = feature_shift
        self.devices = devices
        self.scenario = scenario
        self.num_classes = num_classes
        self.input_shape = None if input_shape is None else tuple(input_shape)
        self.batch_size: int | Literal["full"] = batch_size or 32
        self.shuffle = shuffle is not False
        self.drop_last = False
        self._splits = Splits()
        self.tested_client: int | None = None
        self.new: NewSamples | None = None
        self._told: Told | None = None
        """What a checkpoint tells of the samples of its run, on which predictions rely."""
        self._knows_clients = False
        """Whether it tells the number of clients as well."""
        self._counts_owners = False
        """Whether the number of clients was not known, and must be counted once the samples are read."""
        self._predicted: dict[str, Split] = {}
        """The samples that the source gave to be predicted, by name."""
        self._kept_state: dict[str, Any] = {}
        """The state of the clients' samples in a checkpoint, until the samples are dealt."""
        self._clients: dict[str, Sequence[Tensor]] = {}
        self._held_out = False
        self._unseen_samples: Tensor | None = None
        """The training samples of the clients that never train, (n,) int64, once these are known."""
        self._samples: ClientSamples | ClientStreams | ClientsElsewhere | None = None

    @classmethod
    def from_datamodule(cls, datamodule: DataModule, **settings: Any) -> Self:
        """Federate a data module that knows nothing of federations.

        Args:
            datamodule: The data module. Its `train_dataloader` is divided among the clients. Its `val_dataloader` is
                evaluated every round, and its `test_dataloader` by `test`.
            settings: Arguments of this class except `source`.
        """
        return cls(DataModuleSource(datamodule), **settings)

    @classmethod
    def from_datasets(  # type: ignore[override]
        cls,
        train: Dataset[Any] | Mapping[int, IterableDataset[Any]],
        test: Dataset[Any] | None = None,
        val: Dataset[Any] | None = None,
        by: str | Sequence[Any] | None = None,
        *,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        num_workers: int = 0,
        **settings: Any,
    ) -> Self:
        """Federate map-style datasets.

        Args:
            train: Training samples, which are divided among the clients, or a stream for each client, by client id.
            test: Samples that `test` evaluates, and that are evaluated every round if there is no `val`. None: there
                are none.
            val: Samples that are evaluated every round. None: there are none.
            by: User of every training sample, (n,), or the name of the column of the users (an attribute of the dataset
                or a key of its items). Each user is a client, or users are dealt to `num_clients` clients if that is
                given. Clients are tested on the test samples of their own users if the test samples have that column.
                None: the samples have no users.
            collate_fn: Function that makes a batch of a list of items.
            num_workers: Number of processes that read ahead.
            settings: Arguments of this class except `source`.

        Raises:
            ValueError: `by` is given together with a `partition` or streams, or the samples do not have the column.
        """
        columns = None if by is None or isinstance(by, str) else {"by": np.asarray(by)}
        source = DatasetSource(
            train=train,
            test=test,
            val=val,
            num_classes=settings.get("num_classes"),
            loader_spec=LoaderSpec(collate_fn=collate_fn, num_workers=num_workers),
            columns=columns,
        )
        if isinstance(train, Mapping):
            settings = {"num_clients": len(train), **settings}
        if by is not None:
            settings = users_as_clients(source, by, settings)
        return cls(source, **settings)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Look up an attribute in the user's own data module (`self.trainer.datamodule.vocabulary`).

            Raises:
                AttributeError: There is no such data module, or `name` begins with an underscore.
            """
            datamodule = getattr(vars(self).get("source"), "datamodule", None)
            if datamodule is None or name.startswith("_"):
                raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
            return getattr(datamodule, name)

    def prepare_data(self) -> None:
        if self.is_unread and self.new is not None:
            return
        self._prepare()

    def _prepare(self) -> None:
        """Fetch the samples of all sources."""
        for source in self._attached_sources():
            with source.keyed("prepare"):
                source.prepare()

    def _attached_sources(self) -> list[Source]:
        """List all sources, which draw by the seed of the data and see the present Trainer from now on."""
        sources = [self.source, *self.extra_splits.values()]
        fitted = None if self.trainer is None else self.trainer.lightning_module
        # A federation knows who asks how long the run is. Any other module sees one process.
        make_view = getattr(fitted, "view_of", view_of)
        for source in sources:
            source.data_seed = self.seed
            source.attach(make_view(self.trainer))
        return sources

    def setup(self, stage: str | None = None) -> None:
        """Load the source and divide it (idempotent).

        Args:
            stage: Stage of the Trainer. The clients' samples are dealt for `fit`. None: for all stages.

        Raises:
            ValueError: The source's classes or shape are not those given here, or the partition is impossible.
        """
        self._attached_sources()
        self._predicted = {}
        if stage == "predict" and self.is_unread:
            # Whoever asks for other samples than the new ones reads them then.
            return
        self._read_once()
        for split in self._splits.values():
            split.digest = ""  # The samples may have changed since an earlier run of this process.
        if stage in ("fit", None):
            self.client_samples()

    @property
    def is_unread(self) -> bool:
        """Whether only samples that are predicted are read, because a checkpoint tells of the others (`rely_on`)."""
        return self._told is not None and self._knows_clients and not self._splits

    def _read_once(self) -> None:
        """Load the source and divide it, unless that is done."""
        if self._splits:
            return
        if self.is_unread:
            # Perhaps nothing was fetched when the Trainer asked for it.
            self._prepare()
        if self._counts_owners:
            self.num_clients = 0
        with self._keyed():
            self._set_up()

    def _keyed(self) -> AbstractContextManager[None]:
        """Key the generators of Python, NumPy and torch for code of users, and put them back afterwards.

        Hooks of a source are keyed by their names within this context. The context keys all other code of users, such
        as the items of a dataset that draws.
        """
        return keyed_globals(self.seed, "data/module")

    def _set_up(self) -> None:
        """Load the source, check it, and make what divides it."""
        self._splits = self._load()
        self._division = Division(
            splits=self._splits,
            data=self,
            partition=self.partition,
            seed=self.seed,
        )
        check_limited(self.source, self._splits["train"], self._division)
        check_pooled(self, self._splits["train"])
        check_feature_shift(self.feature_shift, self._splits["train"])
        check_scenario(self, self._splits["train"])
        if not self.num_clients:
            # Owners are counted after the holdout, because an owner may have no samples left.
            self._hold_out()
            self.set_clients(self._division.count_owners())
        if self.test_on_val:
            # Nobody may see the test split before, and nobody divides streams.
            self._hold_out()
        if self._unseen.waits_for_owners:
            # Their names are known once the samples are dealt.
            self.client_samples()

    def _load(self) -> Splits:
        """Load all sources: the splits by name, before anything is taken from the training samples.

        A validation or test split without samples is none.

        Raises:
            ValueError: The source has validation samples of its own, and `val_fraction` is above 0, or `test_on_val` is
                set, and there are no validation samples, or the clients' samples are with their owners.
        """
        source = self.source
        train, test = source.read()
        validation = validation_splits(source)
        if validation and self.holdout_sizes["val"]:
            raise ValueError(
                f"data.val_fraction must be 0 where the source has validation samples of its own, got "
                f"{self.holdout_sizes['val']}; leave it at 0, in compare with --tune by --val_fraction 0"
            )
        evaluates_test = not validation and not self.holdout_sizes["val"]
        if self.test_on_val and isinstance(train, SplitElsewhere):
            raise ValueError(
                "data.test_on_val gives clients validation samples to be tested on, and these clients are tested on "
                "samples that their owners keep; leave data.test_on_val unset"
            )
        if self.test_on_val and evaluates_test:
            raise ValueError(
                "data.test_on_val needs validation samples, got none; set data.val_fraction (0.1: a tenth of the "
                "training samples)"
            )
        if test is None and evaluates_test:
            with source.keyed("tested"):
                test = source.tested(counted=True)
        if source.classes is None:
            self.num_classes = agreed("num_classes", self.num_classes, source.num_classes)
        else:
            # The cached property counts the classes on demand.
            vars(self).pop("num_classes")
        self.input_shape = agreed("input_shape", self.input_shape, train.input_shape)
        self._follow_loader(source.loader_spec)
        splits = {"train": train, **validation}
        if test is not None and len(test):
            splits["test"] = test
        further = load_extra(self.extra_splits, train, source)
        return Splits(splits | further, None if evaluates_test else source)

    def _follow_loader(self, spec: LoaderSpec) -> None:
        """Take the settings of the source's own loader that are not given here."""
        self.batch_size = self._batch_size or spec.batch_size or self.batch_size
        self.drop_last = spec.drop_last
        if self._shuffle is None and spec.shuffle is not None:
            self.shuffle = spec.shuffle

    @cached_property
    def num_classes(self) -> int | None:
        """The number C of classes. None: the samples have no classes.

        Counting the classes may take a pass over the samples.
        """
        if self.source.classes is None:
            return None
        with self._keyed():
            return self.source.classes()

    @property
    def eval_batch_size(self) -> int:
        """The number of samples per batch in evaluation."""
        if self._eval_batch_size is not None:
            return self._eval_batch_size
        device = torch.device("cpu") if self.trainer is None else self.trainer.strategy.root_device
        return evaluation_batch_size(device, self.input_shape)

    def to(self, device: torch.device, early: bool = True) -> None:
        """Move the samples in memory to a device, and copy batches of other samples there.

        Args:
            device: The device.
            early: Whether batches of other samples are copied when they are read.
        """
        for split in self._splits.values():
            split.to(device)
            split.stage(device, early)

    def teardown(self, stage: str) -> None:
        with self._keyed():
            self.source.teardown(stage)

    @property
    def evaluated(self) -> str | None:
        """The name of the split evaluated every round: the server's `val`, else `test`. None: there is neither.

        The name is known once the data are set up, because a `val_dataloader` may give nothing.
        """
        self._check_loaded()
        if self.holdout_sizes["val"] or "val" in self._splits:
            return "val"
        return "test" if "test" in self._splits else None

    @property
    def evaluated_prefix(self) -> str:
        """The beginning of the log keys of every round's evaluation: `val` for validation samples, else `global`."""
        return "val" if self.evaluated == "val" else "global"

    def measured_split(self, asked: str | None = None) -> str:
        """Return the name of the split on which monitors measure a model.

        Args:
            asked: Name of the split that is asked for. None: `test`, or the split evaluated every round if there are no
                test samples.

        Raises:
            ValueError: There is no such split. The sentence names the setting that would give it.
        """
        evaluated = self.evaluated
        name = asked or "test"
        if not asked and evaluated and "test" not in self._splits:
            name = evaluated
        self.split(name)
        return name

    @property
    def loaded_splits(self) -> Mapping[str, Split]:
        """The splits that are loaded or held out so far, by name."""
        return {**self._splits, **self._predicted}

    # --- splits and clients --------------------------------------------------------------------------------------

    def split(self, name: str) -> Split:
        """Get a split by name.

        Args:
            name: Name of the split: `train` or `test`; `val` or `proxy`, which the server holds; `transfer` or
                `shared`, which everyone holds; or a name of `extra_splits`.

        Raises:
            ValueError: There is no such split. The sentence names the setting that would give it.
        """
        if name not in self._splits:
            # Dealing the samples takes out the holdout, whose splits are then known.
            self.client_samples()
            if name == "shared" and self.shared_per_class:
                with self._keyed():
                    self._splits["shared"] = self._division.draw_shared(
                        self.shared_per_class, excluded=self._unseen_samples
                    )
        if name not in self._splits:
            setting = SETTINGS.get(name, f"data.extra_splits.{name} (a source)")
            raise ValueError(f"the data have no split {name!r}, only {', '.join(sorted(self._splits))}; set {setting}")
        return self._splits[name]

    def client_indices(self, split: str, client_id: int) -> Tensor:
        """Get the samples that a client has in any round, as int64 indices (n,) into the split.

        A client has all samples of a split that everyone holds.

        Args:
            split: Name of the split.
            client_id: Id of the client, 0 ... N-1.

        Raises:
            ValueError: No client sees the split.
        """
        if split == "train":
            return self.client_samples().all_indices(client_id)
        if split in SERVER_ONLY:
            raise ValueError(f"no client sees the server's split {split!r}; ask for it by ServerView.data({split!r})")
        if split not in self._clients:
            with self._keyed():
                self._clients[split] = self._deal_further(split)
        return self._clients[split][client_id]

    def _deal_further(self, split: str) -> Sequence[Tensor]:
        """Deal the samples of a split besides `train`: test samples by the partition, other samples to everybody."""
        is_pooled = self.pooled and "test" in self._splits
        if split == "test" and not is_pooled:
            return self._division.deal_test(self.client_samples().dealt, self.client_test_size)
        everything = torch.arange(len(self.split(split)))
        return [everything] * self.num_clients

    def client_samples(self) -> ClientSamples | ClientStreams | ClientsElsewhere:
        """Get the clients' training samples, which are dealt at the first call, once the holdout is taken out."""
        if self._samples is None:
            self._check_loaded()
            with self._keyed():
                self._samples = self._deal()
            if self._kept_state:
                self._samples.load_state_dict(self._kept_state)
        return self._samples

    def _deal(self) -> ClientSamples | ClientStreams | ClientsElsewhere:
        """Deal the training samples to the clients, unless the clients have streams or samples of their own."""
        train = self._splits["train"]
        if isinstance(train, StreamSplit):
            return ClientStreams(train, self)
        if isinstance(train, SplitElsewhere):
            return ClientsElsewhere(train, self)
        self._hold_out()
        dealt = self._division.deal_train()
        self._take_unseen(dealt)
        if isinstance(self.cohort, PooledCohorts):
            dealt = self.cohort.pool(dealt)
        if self.scenario is not None:
            if self.scenario.has_begun:
                # Another data module was given it, too, and goes on with its own samples.
                self.scenario = copy(self.scenario)
            return ChangingSamples(train=train, dealt=dealt, data=self, seed=self.seed, scenario=self.scenario)
        return ClientSamples(train=train, dealt=dealt, data=self, seed=self.seed)

    def take_scenario(self, scenario: Scenario, setting: str) -> None:
        """Let a scenario say how the clients' data change, for a callback of a fit whose samples are loaded.

        Args:
            scenario: The scenario. It takes the place of one that was taken before.
            setting: Name of the callback, for the error.

        Raises:
            ValueError: The data have a scenario of their own, or `set_class_count` holds samples back, or the data
                cannot have a scenario.
        """
        if self.scenario is not None and not self._takes_scenario:
            raise ValueError(
                f"{setting} takes samples from a client, and data.scenario={type(self.scenario).__name__} says which "
                f"samples a client has; leave one of them out"
            )
        if self.client_samples().state_dict()["class_counts"]:
            raise ValueError(
                f"{setting} takes samples from a client, and set_class_count has held some back; leave one of them out"
            )
        self.scenario = scenario
        self._takes_scenario = True
        check_scenario(self, self._splits["train"])
        self._samples = None
        self._kept_state = {}
        self._forget_counts()
        self.client_samples()

    def _check_loaded(self) -> None:
        """Refuse a question about samples that are not loaded. Samples that wait for the first question are loaded.

        Raises:
            ValueError: The samples are not loaded.
        """
        if self.is_unread:
            self._read_once()
        if not self._splits:
            raise ValueError("the samples must be loaded first; call setup('fit') of the data, as a Trainer does")

    def _hold_out(self) -> None:
        """Take the server's samples, and the samples that everyone has, out of the training samples (idempotent)."""
        if self._held_out:
            return
        if self.unseen is not None and any(self.holdout_sizes.values()) and self._division.decides_owners():
            self._find_unseen_samples()
        self._splits |= self._division.hold_out(
            self.holdout_sizes, proxy_overlap=self.proxy_overlap, val_by=self.val_by, excluded=self._unseen_samples
        )
        if self.test_on_val:
            self._splits["test"] = self._splits["val"]
        self._held_out = True

    def _find_unseen_samples(self) -> None:
        """Find the samples of clients that never train, before the server's samples are taken out.

        A sample then belongs to its owner, whatever is taken out.
        """
        if not self.num_clients:
            self.set_clients(self._division.count_owners())
        self._take_unseen(self._division.deal_train())

    def _take_unseen(self, dealt: ClientIndices) -> None:
        """Take the clients that never train, and their samples.

        Args:
            dealt: The samples of each client.

        Raises:
            ValueError: Another client has become one of them since their samples were found.
        """
        if self.unseen is None:
            return
        names = self._division.owner_names
        unseen = self._unseen.of(self.num_owners, names)
        samples = torch.cat([dealt[client_id] for client_id in unseen]).sort().values
        before = self._unseen_samples
        if before is not None and not torch.equal(before, samples):
            raise ValueError(
                "data.unseen must name owners (data.by) where data.val_fraction, data.transfer_size or data.proxy_size "
                f"takes all samples of an owner, got {self.unseen}, because other clients then have these ids; give "
                "the owners' names, or lower the sizes"
            )
        self._unseen_samples = samples
        if unseen != self.unseen_owners:
            self.set_unseen(unseen)

    @cached_property
    def label_counts(self) -> Tensor:
        """The number of training samples of each client and class in all rounds together, (N, C) int64.

        `ClientView.label_counts` tells those of one round.

        Raises:
            ValueError: The samples have no classes.
        """
        samples = self.client_samples()
        with self._keyed():
            parts = [samples.all_indices(client_id) for client_id in range(len(samples.dealt))]
            return self.count_labels(parts)

    @property
    def owner_names(self) -> list[str]:
        """The names of the owners by client id. Empty if a client has the samples of several owners, or of none."""
        if self._told is not None and self.is_unread:
            return list(self._told.owners)
        # The owners are known once the samples are dealt.
        self.client_samples()
        return self._division.owner_names

    @property
    def client_names(self) -> list[str]:
        """The names of the clients: the owners' if each client has one owner (`by`), else 0 ... N-1."""
        names = self.owner_names
        if len(names) == self.num_clients:
            return names
        return [str(client_id) for client_id in range(self.num_clients)]

    def client_id(self, client: int | str, setting: str = "client_id") -> int:
        """Return the id of a client that is given by its id or by its name.

        Args:
            client: A whole number is the id. A text is the name of the client (`client_names`), or the digits of its
                id if no client has this name.
            setting: Name of the setting, for errors.

        Raises:
            TypeError: `client` is neither a whole number nor a text.
            ValueError: There is no such client.
        """
        if not isinstance(client, str):
            return client_index(client, self.num_clients, name=setting)
        names = self.client_names
        found = find_client(client, names, self.num_clients)
        if found is not None:
            return found
        rule = f"must be the id of a client in [0, {self.num_clients})"
        if names[0] != "0":
            rule += f" or the name of one ({listed(names)})"
        raise ValueError(f"{setting} {rule}, got {client}; give one of these")

    def count_labels(self, parts: Sequence[Tensor]) -> Tensor:
        """Count the training samples of each part and class, (len(parts), C) int64.

        Args:
            parts: Indices into the training split, int64 (n,) for each part.

        Raises:
            ValueError: The samples have no classes.
        """
        num_classes = self.num_classes
        labels = self._splits["train"].labels
        if labels is None or num_classes is None:
            raise ValueError("label_counts needs samples with integer labels, and these have none")
        return label_counts(labels, parts, num_classes)

    def view(self, client_id: int, round_idx: int) -> ClientView:
        """Make the view of one client's data in one round.

        Args:
            client_id: Id of the client, 0 ... N-1.
            round_idx: Communication round, from 0.
        """
        if self.is_unread:
            return cast(ClientView, UnreadView(self, client_id=client_id, round_idx=round_idx))
        return self.views()(client_id, round_idx)

    def views(self) -> Callable[[int, int], ClientView]:
        """Return the function `(client_id, round_idx) -> ClientView` for every client's data."""
        return self.client_samples().view

    def shift_of(self, client_id: int) -> Transform | None:
        """Draw the transform through which a client sees its samples. None: it sees them as they are."""
        shift = self.feature_shift
        if shift is None:
            return None
        return shift.of(client_id, num_clients=self.num_clients, seed=self.seed)

    def size(self, client_id: int, round_idx: int) -> int:
        """Count the training samples of a client in a round. The samples of a stream are those of its longest pass.

        Args:
            client_id: Id of the client, 0 ... N-1.
            round_idx: Communication round, from 0.
        """
        return self.client_samples().size(client_id, round_idx)

    @property
    def last_round(self) -> int:
        """The last round that the fitted loop has trained, as of which clients are tested outside of a fit, or 0."""
        loop = None if self.trainer is None else self.trainer.lightning_module
        return int(getattr(loop, "last_round", 0))

    def has_test_samples(self, client_id: int) -> bool:
        """Return True if a client has test samples of its own, in whatever round.

        Args:
            client_id: Id of the client, 0 ... N-1.
        """
        if self.scenario is not None:
            return len(self.client_indices("test", client_id)) > 0
        return self.view(client_id, 0).size("test") > 0

    def first_rounds(self, client_id: int, num_rounds: int) -> list[int]:
        """List the rounds in which a client's data change, ascending. Round 0 is the first.

        Args:
            client_id: Id of the client, 0 ... N-1.
            num_rounds: Number of rounds of the run.
        """
        if self.scenario is None:
            return [0]
        stages = [self.scenario.stage(client_id, round_idx) for round_idx in range(num_rounds)]
        return [index for index in range(num_rounds) if index == 0 or stages[index] != stages[index - 1]]

    @property
    def has_streams(self) -> bool:
        """Tell whether the training samples are a stream for each client."""
        return isinstance(self._splits.get("train"), StreamSplit)

    def limit_streams(self, batches: int) -> None:
        """Let a pass over a client's stream end after so many batches. Without streams nothing changes."""
        if not self.has_streams:
            return
        samples = self.client_samples()
        if isinstance(samples, ClientStreams):
            samples.limit(batches)

    def set_class_count(self, client_id: int, class_idx: int, count: int | None) -> None:
        """Let a client have only some of its training samples of a class from now on.

        Call this method between rounds, on every process. The samples that stay depend only on the seed, client, class
        and count. The client's test samples do not change. The counts are part of every checkpoint.

        Args:
            client_id: Id of the client, 0 ... N-1.
            class_idx: The class, 0 ... C-1.
            count: Number of samples. None: all.

        Raises:
            ValueError: There is no such client or class, `count` is not in [0, the number of samples dealt], or there
                are devices.
        """
        if self.devices is not None:
            raise ValueError(
                "set_class_count changes how long clients train, also in the rounds before, which data.devices do not "
                "allow; leave out data.devices"
            )
        self.client_samples().set_count(client_id, class_idx=class_idx, count=count)
        self._forget_counts()

    def _forget_counts(self) -> None:
        """Forget the counts of classes, which are counted again at the next access."""
        vars(self).pop("label_counts", None)

    # --- Lightning -----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        state = {"class_counts": {}} if self._samples is None else self._samples.state_dict()
        if self.secret:
            state = {**state, "secret": self.secret}
        with self.source.keyed("state_dict"):
            kept = self.source.state_dict()
        if kept:
            state = {**state, "source": kept}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        secret = state_dict.get("secret", "")
        if secret:
            self.take_secret(secret)
        if "source" in state_dict:
            with self.source.keyed("load_state_dict"):
                self.source.load_state_dict(state_dict["source"])
        if self.is_unread:
            self._kept_state = state_dict
            return
        self.client_samples().load_state_dict(state_dict)
        self._forget_counts()

    def train_dataloader(self) -> Any:
        fitted = None if self.trainer is None else self.trainer.lightning_module
        check_fitted(fitted)
        return RoundLoader(self.cohort.bounds.most)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Put a batch of an evaluation on the device, by the transfer hooks of the user.

        Hooks on batches get what the step gets, as in Lightning. The batch of a fit is the index of a round.

        Args:
            batch: The batch.
            device: Its device.
            dataloader_idx: Index of its loader.
        """
        if self.trainer is None or self.trainer.training:
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        transferred = getattr(self.trainer.lightning_module, "transferred", None)
        if transferred is None:  # A plain Trainer fits another module.
            return super().transfer_batch_to_device(batch, device, dataloader_idx)
        return transferred(batch, dataloader_idx)

    def val_dataloader(self) -> Any:
        if self.evaluated is None:
            return []
        loaders = [*self._loaders_of(self.evaluated)]
        for name in self.further_validation:
            loaders += self._loaders_of(name)
        return loaders if len(loaders) > 1 else loaders[0]

    @property
    def further_validation(self) -> list[str]:
        """The names of the splits of the source's validation loaders, from the second loader on."""
        names = [validation_name(index) for index, _ in enumerate(self.source.further_validation, start=1)]
        return [name for name in names if name in self._splits]

    def num_loaders(self, split: str) -> int:
        """Count the loaders that give the samples of a split, which may be missing.

        Args:
            split: Name of the split.
        """
        return max(1, len(self.split(split).loader_sizes)) if split in self._splits else 1

    @property
    def num_validation_loaders(self) -> int:
        """The number of loaders that are evaluated every round."""
        names = [self.evaluated, *self.further_validation]
        return sum(self.num_loaders(name) for name in names if name is not None)

    def test_dataloader(self) -> Any:
        loaders = self._loaders_of("test")
        return loaders if len(loaders) > 1 else loaders[0]

    def predict_new(self, path: str | Path | None, schema: Schema | None = None) -> None:
        """Let the next predictions be those of new samples, which need no targets, in place of the test samples.

        After `rely_on` no other samples are read.

        Args:
            path: File or folder of the new samples. None: the test samples again.
            schema: Schema of the training samples that reads them, as a checkpoint holds it. None: that of the
                checkpoint of `rely_on`, else that of the samples that are loaded.

        Raises:
            FileNotFoundError: There is no such file or folder.
            ValueError: The source reads no new samples, these do not fit the schema, or no schema is known.
        """
        self.new = None
        if path is None:
            return
        place = Path(path).expanduser()
        check_new_path(place)
        if schema is None:
            schema = self.source.schema if self._told is None else self._told.schema
        if schema is None:
            raise ValueError("predict_new needs the schema of the training samples, got none; give it, or fit first")
        self.source.data_seed = self.seed
        with self.source.keyed("read_new"):
            self.new = self.source.read_new(place, schema)

    def rely_on(self, checkpoint: str | Path) -> None:
        """Let predictions read nothing of the training samples, because a checkpoint of the run tells enough of them.

        They are read only if something asks for them, such as fine-tuning. If they are loaded already, nothing changes.

        Args:
            checkpoint: The checkpoint, from which the model is predicted.

        Raises:
            ValueError: The checkpoint cannot be read, or an older version wrote it, without a schema.
        """
        if self._splits:
            return
        told = read_told(checkpoint)
        self._told = told
        self._knows_clients = self._take_owners(told)
        if told.num_classes is not None:
            self.num_classes = agreed("num_classes", self.num_classes, told.num_classes)
        self.input_shape = agreed("input_shape", self.input_shape, told.input_shape)

    def _take_owners(self, told: Told) -> bool:
        """Take the number of clients that a checkpoint tells, and return whether it is known."""
        owners = told.owners
        if not told.has_clients and not self.num_clients:
            # The model alone is of nobody, and all predict by it.
            self.set_clients(1)
            self._counts_owners = True
        elif owners and not self.num_clients:
            self.set_clients(len(owners))
        if owners and self._unseen.waits_for_owners:
            self.set_unseen(self._unseen.of(len(owners), owners))
        knows_unseen = bool(owners) or not (told.has_clients and self._unseen.waits_for_owners)
        return self.num_clients > 0 and knows_unseen

    @property
    def predicts_others(self) -> bool:
        """Whether other samples than the test samples are predicted: new ones, or those that the source gives."""
        return self.new is not None or self.source.gives_predicted

    def know_shape(self) -> None:
        """Read the samples if a checkpoint does not tell of which classes and shape they are, which a net needs."""
        if self._told is None or not self.is_unread:
            return
        knows_classes = self._told.schema.targets == "numbers" or self.num_classes is not None
        if self.input_shape is None or not knows_classes:
            self._read_once()

    def predict_dataloader(self) -> Any:
        if self.new is not None:
            return self._evaluation_batches(self.new.split)
        with self.source.keyed("predicted"):
            given = self.source.predicted()
        if given is None:
            self._check_predicted()
            return self._batches_of("test")
        if isinstance(given, Split):
            given = [Predicted(given)]
        self._predicted = {}
        for index, predicted in enumerate(given):
            if isinstance(predicted.samples, Split):
                self._predicted[f"predict/dataloader_idx_{index}" if index else "predict"] = predicted.samples
        loaders = [self._prediction_batches(predicted) for predicted in given]
        return loaders if len(loaders) > 1 else loaders[0]

    def _prediction_batches(self, predicted: Predicted) -> EvaluationBatches | BatchesInTurn:
        """Make this process's batches of samples that the source gives to be predicted."""
        if isinstance(predicted.samples, Split):
            return self._evaluation_batches(predicted.samples, batch_size=predicted.batch_size)
        rank, world = self._place()
        return BatchesInTurn(predicted.samples, rank=rank, world=world)

    def _check_predicted(self) -> None:
        """Refuse to predict where there are neither samples to predict nor test samples."""
        self.client_samples()  # loads the splits
        if "test" not in self._splits:
            raise ValueError(
                f"predict needs samples to answer, got data with only {', '.join(sorted(self._splits))}; define "
                f"predict_dataloader or test_dataloader in a data module of your own, or name new samples of another "
                f"source by --new"
            )

    def _batches_of(self, split: str) -> EvaluationBatches:
        """Make this process's evaluation batches of a split, or of the test samples of the client that is tested."""
        samples, positions = self._evaluated_samples(split)
        return self._evaluation_batches(samples, positions)

    def _loaders_of(self, split: str) -> list[EvaluationBatches]:
        """Make what `_batches_of` makes for each loader that gives samples of the split."""
        samples, positions = self._evaluated_samples(split)
        if not samples.loader_sizes:
            return [self._evaluation_batches(samples, positions)]
        chosen = torch.arange(len(samples)) if positions is None else positions
        return [self._evaluation_batches(samples, part) for part in samples.by_loader(chosen)]

    def _evaluated_samples(self, split: str) -> tuple[Split, Tensor | None]:
        """Return a split and the positions of the samples that are evaluated, (n,) int64. None means all samples."""
        if self.tested_client is None:
            return self.split(split), None
        view = self.view(self.tested_client, self.last_round)
        positions, _ = view.order("test", None)
        return view.source("test"), positions

    def _evaluation_batches(
        self, samples: Split, positions: Tensor | None = None, *, batch_size: int | None = None
    ) -> EvaluationBatches:
        """Make this process's evaluation batches of some samples, or of all.

        Args:
            samples: The samples.
            positions: Positions of the samples in the split, (n,) int64. None: all.
            batch_size: Number of samples per batch. None: that of evaluations.
        """
        rank, world = self._place()
        size = self.eval_batch_size if batch_size is None else batch_size
        with self._keyed():
            return EvaluationBatches(samples, batch_size=size, rank=rank, world=world, positions=positions)

    def _place(self) -> tuple[int, int]:
        """Return the number of this process, and how many there are."""
        if self.trainer is None:
            return 0, 1
        return self.trainer.global_rank, self.trainer.world_size


class UnreadView:
    """Stands for the view of a client whose samples are read at the first question about them.

    Args:
        data: The data module.
        client_id: Id of the client, 0 ... N-1.
        round_idx: Communication round, from 0.
    """

    def __init__(self, data: FederatedDataModule, *, client_id: int, round_idx: int) -> None:
        self.client_id = client_id
        self.round_idx = round_idx
        self._data = data

    def __getattr__(self, name: str) -> Any:
        """Ask the client's samples, which are read now."""
        return getattr(self._data.views()(self.client_id, self.round_idx), name)


def validation_splits(source: Source) -> dict[str, Split]:
    """Return the validation splits that a source has read, by name. If all are empty, there are none."""
    splits = {}
    for index, split in enumerate([source.validation, *source.further_validation]):
        if split is not None:
            splits[validation_name(index)] = split
    has_samples = any(len(split) for split in splits.values())
    return splits if has_samples else {}
