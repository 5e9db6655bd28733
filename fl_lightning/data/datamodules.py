"""Sources made of the user's own LightningDataModules, read as a Trainer would read them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pytorch_lightning import LightningDataModule, Trainer
from pytorch_lightning.utilities import rank_zero_info
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from fl_lightning.data.datasets import KnownSplit, check_class_names, count_known, described_by_dataset, make_split
from fl_lightning.data.loader_settings import LoaderSpec, check_loader_class
from fl_lightning.data.new_samples import NewSamples
from fl_lightning.data.schema import Schema
from fl_lightning.data.sources import Predicted, Source
from fl_lightning.data.splits import Split
from fl_lightning.data.streams import StreamSplit, are_streams, read_stream_loader
from fl_lightning.types import DataModule
from fl_lightning.utils.packages import lightning_base
from fl_lightning.utils.settings import described

ABSENT = ("MisconfigurationException", "NotImplementedError")
"""Names of the errors by which a data module says that it has no such loader. Either package of Lightning has its own.
"""


class DataModuleSource(Source):
    """Reads the datasets of a user's LightningDataModule as its loaders read them.

    `val_dataloader` gives the server's validation samples, and `test_dataloader` gives its test samples. The test
    samples are predicted if there is no `predict_dataloader`. Each hook finds the generators of Python, NumPy and torch
    keyed by the seed of the data and by the name of the hook, so that `setup` draws the same for every stage.

    Args:
        datamodule: The data module, which need not know of federations.

    Raises:
        TypeError: `datamodule` is no LightningDataModule.
    """

    def __init__(self, datamodule: DataModule) -> None:
        if isinstance(datamodule, type) or not isinstance(datamodule, DataModule):
            remedy = "derive it from pytorch_lightning.LightningDataModule"
            if isinstance(datamodule, type) and hasattr(datamodule, "train_dataloader"):
                remedy = f"give an instance, {datamodule.__name__}(...)"
            elif isinstance(datamodule, Source):
                remedy = f"a source is given as FederatedDataModule({type(datamodule).__name__}(...))"
            elif isinstance(datamodule, Dataset | DataLoader):
                remedy = "datasets are given by FederatedDataModule.from_datasets(train, test)"
            raise TypeError(
                f"a data module must be a LightningDataModule, of pytorch_lightning or lightning.pytorch, got "
                f"{described(datamodule)}; {remedy}"
            )
        self.datamodule = cast(LightningDataModule, datamodule)
        self._splits: dict[str, KnownSplit] = {}

    def attach(self, trainer: Trainer | None) -> None:
        self.datamodule.trainer = trainer

    def prepare(self) -> None:
        self._call("prepare_data")

    def _call(self, hook: str, *arguments: str) -> Any:
        """Call a hook of the data module, which may draw from the generators of Python, NumPy and torch.

        Args:
            hook: Name of the hook.
            arguments: Arguments of the hook.
        """
        with self.keyed(hook):
            return getattr(self.datamodule, hook)(*arguments)

    def load(self) -> tuple[Split, Split | None]:
        module = self.datamodule
        try:
            self._call("setup", "fit")
        except Exception as error:
            error.add_note(
                f"The federation calls {type(module).__name__}.setup('fit'); one that can be set up only "
                f"once is given by its datasets: FederatedDataModule.from_datasets (docs/recipes/datamodules.md)"
            )
            raise
        validating = self._loaders("val_dataloader")
        train, self.loader_spec = self._train()
        splits = [make_split(loader.dataset, read_loader(loader)) for loader in validating]
        self._splits = {"train": train}
        for index, split in enumerate(splits):
            self._splits[validation_name(index)] = split
        check_class_names(self._splits)
        self._count_classes()
        self.class_names = getattr(module, "class_names", None)
        self.validation = splits[0] if splits else None
        self.further_validation = tuple(splits[1:])
        return train, None

    def tested(self, counted: bool = False) -> Split | None:
        """Set up the test and read `test_dataloader`, for which a Trainer asks in `test` only."""
        if not self._has("test_dataloader"):
            return None
        self._call("setup", "test")
        try:
            loaders = self._loaders("test_dataloader")
        except Exception as error:
            if type(error).__name__ not in ABSENT:
                raise
            rank_zero_info(f"{type(self.datamodule).__name__} gives no test samples: {error}")
            return None
        if not loaders:
            return None
        split = self._joined("test_dataloader", loaders)
        check_class_names({**self._splits, "test": split})
        if counted:
            self._splits["test"] = split
            self._count_classes()
        elif self.num_classes is not None:
            count_known({"test": split}, self.num_classes)  # refuses labels that are no classes
        return split

    def _joined(self, name: str, loaders: Sequence[DataLoader[Any]]) -> KnownSplit:
        """Make one split of the samples of loaders, which knows the loader of each sample.

        Args:
            name: Name of the method that returned the loaders.
            loaders: The loaders, one or more.

        Raises:
            ValueError: They do not make batches in one way.
        """
        specs = [read_loader(loader) for loader in loaders]
        datasets: list[Any] = [loader.dataset for loader in loaders]
        if len(datasets) == 1:
            return make_split(datasets[0], specs[0])
        if any(spec.collate_fn is not specs[0].collate_fn for spec in specs):
            raise ValueError(
                f"{type(self.datamodule).__name__}.{name} must return loaders with one collate_fn, got several; the "
                f"samples of all are dealt to the clients: give them the same function"
            )
        split = make_split(ConcatDataset(datasets), specs[0])
        split.loader_sizes = tuple(len(dataset) for dataset in datasets)
        return split

    def _count_classes(self) -> None:
        """Count the classes of the splits, or keep a function that counts them on demand."""
        stated = getattr(self.datamodule, "num_classes", None)
        self.counts_classes = stated is None
        self.num_classes, self.classes = count_known(self._splits, stated)

    def described(self, train: Split) -> Schema:
        return described_by_dataset(super().described(train), train)

    def _train(self) -> tuple[KnownSplit, LoaderSpec]:
        """Get the training samples, or the clients' streams, and the settings of their loader."""
        returned = self._call("train_dataloader") if self._has("train_dataloader") else None
        if are_streams(returned):
            streams = {client_id: read_stream_loader(loader) for client_id, loader in returned.items()}
            split = StreamSplit(streams)
            return split, split.streams[0].loader_spec
        loader = self._only("train_dataloader", self._checked("train_dataloader", returned))
        if loader is None:
            raise ValueError(
                f"{type(self.datamodule).__name__} must define train_dataloader, whose samples are divided among the "
                f"clients"
            )
        spec = read_loader(loader)
        return make_split(loader.dataset, spec), spec

    @property
    def gives_predicted(self) -> bool:
        return self._has("predict_dataloader")

    @property
    def predicts_alone(self) -> bool:
        return self.gives_predicted

    def predicted(self) -> Sequence[Predicted] | None:
        """Set up the prediction and read `predict_dataloader`, whose samples no client needs.

        A loader that cannot be divided among clients is therefore taken as it is.
        """
        if not self._has("predict_dataloader"):
            return None
        self._call("setup", "predict")
        returned = self._call("predict_dataloader")
        return None if returned is None else [predicted_by(loader) for loader in loaders_in(returned)]

    def read_new(self, path: Path, schema: Schema) -> NewSamples:
        name = type(self.datamodule).__name__
        raise ValueError(
            f"--new needs a source of fl_lightning.data, and {name} gives its samples itself, got {path}; leave --new "
            f"out and let {name}.predict_dataloader give the new samples (an argument of it that names them may differ "
            f"by --allow_changes data.source)"
        )

    def state_dict(self) -> dict[str, Any]:
        return self.datamodule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.datamodule.load_state_dict(state_dict)

    def teardown(self, stage: str) -> None:
        self.datamodule.teardown(stage)

    def _has(self, name: str) -> bool:
        """Tell whether the data module defines the method of this name."""
        # LightningDataModule.from_datasets sets such methods on the object, and others set None.
        own = vars(self.datamodule)
        if name in own:
            return own[name] is not None
        kind = type(self.datamodule)
        return getattr(kind, name) is not getattr(lightning_base(kind), name)

    def _loaders(self, name: str) -> list[DataLoader[Any]]:
        """Get the DataLoaders that the method of this name returns."""
        returned = self._call(name) if self._has(name) else None
        return self._checked(name, returned)

    def _checked(self, name: str, returned: Any) -> list[DataLoader[Any]]:
        """List the DataLoaders that the method of this name returned.

        Args:
            name: Name of the method.
            returned: A DataLoader, or a list, tuple or mapping of DataLoaders. None: there are none.

        Raises:
            TypeError: The method returned anything else.
        """
        if returned is None:
            return []
        if isinstance(returned, Mapping):
            returned = list(returned.values())
        loaders = list(returned) if isinstance(returned, list | tuple) else [returned]
        for loader in loaders:
            if not isinstance(loader, DataLoader):
                raise TypeError(
                    f"{type(self.datamodule).__name__}.{name} must return torch's DataLoader, got "
                    f"{type(loader).__name__}; its dataset is what clients and server share"
                )
        return loaders

    def _loader(self, name: str) -> DataLoader[Any] | None:
        """Get the one DataLoader that the method of this name returns. None: it returns none."""
        return self._only(name, self._loaders(name))

    def _only(self, name: str, loaders: list[DataLoader[Any]]) -> DataLoader[Any] | None:
        """Return the only DataLoader that the method of this name returned. None: it returned none.

        Args:
            name: Name of the method.
            loaders: The DataLoaders that it returned.

        Raises:
            TypeError: There are several.
        """
        if len(loaders) > 1:
            raise TypeError(
                f"{type(self.datamodule).__name__}.{name} must return one torch DataLoader, got {len(loaders)}; its "
                f"dataset is what clients and server share: join several by ConcatDataset"
            )
        return loaders[0] if loaders else None


def loaders_in(returned: Any) -> list[Any]:
    """List the loaders that a hook of Lightning's returned: one, or a list, tuple, mapping or CombinedLoader."""
    returned = getattr(returned, "iterables", returned)
    if isinstance(returned, Mapping):
        return list(returned.values())
    return list(returned) if isinstance(returned, list | tuple) else [returned]


def predicted_by(loader: Any) -> Predicted:
    """Return the samples of a loader, in the order of the dataset if the loader has no order of its own.

    Args:
        loader: A DataLoader, or any other iterable over batches.
    """
    if not isinstance(loader, DataLoader):
        return Predicted(loader)
    try:
        spec = read_loader(loader)
    except ValueError:
        return Predicted(loader)
    return Predicted(make_split(loader.dataset, spec), spec.batch_size)


def validation_name(index: int) -> str:
    """Return the name of the split of a validation loader: `val` for the first, at index 0."""
    return f"val/dataloader_idx_{index}" if index else "val"


def read_loader(loader: DataLoader[Any]) -> LoaderSpec:
    """Read the settings of a DataLoader that are kept when its dataset is divided.

    Raises:
        ValueError: The DataLoader makes batches in a way that cannot be kept when its dataset is divided.
    """
    check_loader_class(loader)
    if isinstance(loader.dataset, IterableDataset):
        raise ValueError(
            f"the samples of all clients are divided by their index, which a stream does not have, got a DataLoader of "
            f"{type(loader.dataset).__name__}; give a dataset with __len__ and __getitem__, or a stream for each "
            f"client ({{client_id: DataLoader}})"
        )
    batching = batching_of(loader)
    if isinstance(batching.sampler, WeightedRandomSampler):
        raise ValueError(
            "a WeightedRandomSampler draws from the samples of all clients together, and a client has its own only; "
            "leave it out and weigh the classes in the loss, or by data.partition"
        )
    if batching.batch_size is None:
        raise ValueError(
            "a DataLoader must have a batch_size, got one with a batch_sampler of its own or without batching; clients "
            "draw their own batches: give it batch_size, or its dataset to FederatedDataModule.from_datasets "
            "(docs/recipes/datamodules.md)"
        )
    check_sampler(batching.sampler, loader.dataset)
    return LoaderSpec(
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        worker_init_fn=loader.worker_init_fn,
        batch_size=batching.batch_size,
        shuffle=isinstance(batching.sampler, RandomSampler),
        drop_last=batching.drop_last,
        reads_batches=loader.batch_size is None,
    )


def batching_of(loader: DataLoader[Any]) -> DataLoader[Any] | BatchSampler:
    """Return what says which samples make a batch.

    A DataLoader without batching hands each element of its sampler to the dataset. With torch's own `BatchSampler` as
    the sampler, the dataset makes a batch of a list of indices.
    """
    makes_batches = loader.batch_size is None and loader.batch_sampler is None
    if makes_batches and type(loader.sampler) is BatchSampler:
        return loader.sampler
    return loader


def check_sampler(sampler: Any, dataset: Any) -> None:
    """Refuse a sampler that does more than to order all samples.

    Args:
        sampler: The sampler.
        dataset: The samples that it orders.

    Raises:
        ValueError: The sampler chooses samples, repeats them, or has an order of its own.
    """
    name = type(sampler).__name__
    remedy = "clients draw from their own samples only: leave the sampler out and set data.shuffle"
    iters = (RandomSampler.__iter__, SequentialSampler.__iter__)
    if not isinstance(sampler, RandomSampler | SequentialSampler) or type(sampler).__iter__ not in iters:
        raise ValueError(f"a DataLoader's order must be sequential or shuffled, got {name}; {remedy}")
    if getattr(sampler, "replacement", False):
        raise ValueError(f"a DataLoader must read each sample once, got {name}(replacement=True); {remedy}")
    size = len(dataset)
    if len(sampler) != size:
        raise ValueError(
            f"a DataLoader must read all samples of its dataset, got a {name} that draws {len(sampler)} of {size}; "
            f"give it a Subset of the dataset, or set model.max_local_steps for less work a round"
        )
