"""Data of a federation of several owners: the folder of one party, and at the server the samples that are elsewhere."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fl_lightning.data.autoaugment import AutoAugment
from fl_lightning.data.clients import ClientIndices, ClientView, FederatedData
from fl_lightning.data.partitioning import at_most
from fl_lightning.data.partitions import Dealt, Partition, PartitionInput
from fl_lightning.data.schema import Schema, differing, read_by, scaling
from fl_lightning.data.sources import Source, labelled_split
from fl_lightning.data.splits import Array, Split, TensorSplit, Transform
from fl_lightning.data.transforms import AsLong, Compose, CropFlip, Cutout, Normalize, ResizedCropFlip, Scale
from fl_lightning.types import Batch
from fl_lightning.utils.files import write_atomically, write_file
from fl_lightning.utils.settings import check_count

SAMPLES = "x.npy"
TARGETS = "y.npy"
META = "meta.json"
"""The files of a set of samples."""

KINDS: dict[str, Any] = {
    kind.__name__: kind for kind in (Scale, AsLong, Normalize, CropFlip, ResizedCropFlip, Cutout, AutoAugment)
}
"""Transforms that a folder may name, by name."""

Sizes = Mapping[int, Mapping[str, int]]
"""The number of samples by client and split."""


class Folder(Source):
    """Reads the samples of one party, as `fl-lightning split` writes them.

    A set is a folder with three files:

    - `x.npy`: the samples (n, ...).
    - `y.npy`: the classes (n,), or float targets (n, ...).
    - `meta.json`: an object with `num_classes`, `class_names` and `transforms`. The first two may be null. `transforms`
      lists the `fl_lightning.data.transforms` that make a net's input of stored samples, with their fields, such as
      `{"name": "Scale", "divisor": 255.0}`.

    Args:
        root: Folder of the training set. Its folders `test` and `val`, if there are any, hold the other sets.

    Raises:
        FileNotFoundError: A set lacks a file.
        ValueError: A label is no class, or a set does not have one target for each sample.
    """

    places = ("root",)

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def load(self) -> tuple[Split, Split | None]:
        self._decide_classes()
        self.validation = self._set("val")
        train = self._train()
        return train, self._set("test")

    def described(self, train: Split) -> Schema:
        return super().described(train)._replace(scale=self._scale)

    def _decide_classes(self) -> None:
        """Let the training set decide the classes of all sets. Without a training set, the first other set decides."""
        self._scale: tuple[Transform, ...] | None = None
        for folder in (self.root, self.root / "test", self.root / "val"):
            if (folder / META).is_file():
                meta = self._meta(folder)
                self.num_classes = meta["num_classes"]
                self.class_names = names_of(meta)
                self._scale = scaling(transform_of(meta.get("transforms") or []))
                return

    def _train(self) -> Split:
        """Load the training samples."""
        return self._read(self.root)

    def _set(self, name: str) -> TensorSplit | None:
        """Load a set below the root. None: there is none."""
        folder = self.root / name
        return self._read(folder) if folder.is_dir() else None

    def _read(self, folder: Path) -> TensorSplit:
        """Read a set, with the numbers that its classes have in the training set.

        Args:
            folder: Folder of the set.

        Raises:
            FileNotFoundError: The set lacks a file.
            ValueError: The set has a class that the training set does not have, or another scale.
        """
        meta = self._meta(folder)
        x = torch.from_numpy(np.load(folder / SAMPLES, allow_pickle=False))
        y = torch.from_numpy(np.load(folder / TARGETS, allow_pickle=False))
        transform = transform_of(meta.get("transforms") or [])
        split = labelled_split(x=x, y=y, num_classes=meta["num_classes"], transform=transform, name=folder.name)
        training = Schema(self.class_names, self.num_classes, scale=self._scale)
        own = Schema(names_of(meta), meta["num_classes"], scale=scaling(transform))
        if "scale" in differing(training.digests(), own.digests()):
            raise ValueError(
                f"{folder} must have the scale of the training set ({training.scale}), got {own.scale}; write both "
                f"sets with the same transforms"
            )
        read = read_by(training, own=own, split=split, name=str(folder))
        return read if isinstance(read, TensorSplit) else split

    def _meta(self, folder: Path) -> dict[str, Any]:
        """Read the description of a set.

        Args:
            folder: Folder of the set.

        Raises:
            FileNotFoundError: The set has no description.
        """
        if not (folder / META).is_file():
            raise FileNotFoundError(
                f"a set of samples must have a {META}, and {folder} has none; write it, or mend root"
            )
        meta: dict[str, Any] = json.loads((folder / META).read_text(encoding="utf-8"))
        return meta


def names_of(meta: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the class names in the description of a set. None: it has none."""
    names = meta.get("class_names")
    return tuple(names) if names else None


def write_set(folder: Path, split: Split, indices: Tensor, classes: int | None, names: Iterable[str] | None) -> None:
    """Write samples as a set that `Folder` reads, with their transforms.

    Args:
        folder: Folder of the set, which this function makes.
        split: Split of the samples.
        indices: Indices of the samples in the split, (n,) int64.
        classes: Number C of classes. None: there are none.
        names: Names of the classes. None: classes are numbers.

    Raises:
        ValueError: A transform is not of `KINDS`, or a user's code reads the samples.
    """
    transforms = described_transform(split.transform) if isinstance(split, TensorSplit) else None
    if transforms is None or not isinstance(split, TensorSplit):
        raise ValueError(
            f"the samples of a {type(split).__name__} are read or transformed by code of their own, which a folder "
            f"does not hold; let every party read its own by a data module as data.source, with OwnerPartition"
        )
    folder.mkdir(parents=True)
    for name, values in ((SAMPLES, split.x), (TARGETS, split.y)):
        chosen = values[indices.to(values.device)].cpu().numpy()
        write_atomically(folder / name, partial(save_array, chosen))
    meta = {
        "num_classes": classes,
        "class_names": None if names is None else list(names),
        "transforms": transforms,
    }
    write_file(folder / META, json.dumps(meta) + "\n")


def described_transform(transform: Transform | None) -> list[dict[str, Any]] | None:
    """Describe a transform by names and fields.

    Args:
        transform: The transform. None: there is none.

    Returns:
        The name and the fields of each part. None: a part is not of `KINDS`.

    >>> described_transform(Scale(16))
    [{'name': 'Scale', 'divisor': 16}]
    """
    parts = [] if transform is None else getattr(transform, "transforms", [transform])
    if any(type(part) is not KINDS.get(type(part).__name__) for part in parts):
        return None
    return [{"name": type(part).__name__, **asdict(part)} for part in parts]


def transform_of(parts: Iterable[Mapping[str, Any]]) -> Transform | None:
    """Make the transform that `described_transform` described.

    Args:
        parts: The name and the fields of each part.

    Returns:
        The transform. None: it has no parts.

    >>> transform_of([{"name": "Scale", "divisor": 16}])
    Scale(divisor=16)
    """
    made: list[Any] = []
    for part in parts:
        fields = {field: value for field, value in part.items() if field != "name"}
        made.append(KINDS[part["name"]](**fields))
    if len(made) > 1:
        return Compose(*made)
    return made[0] if made else None


def save_array(content: Array, path: Path) -> None:
    """Write an array to a file of any name."""
    with path.open("wb") as file:
        np.save(file, content, allow_pickle=False)


class OwnerPartition(Partition):
    """Gives all samples to one client. The samples of the other clients are with their owners.

    Args:
        client_id: Id of the client, 0 ... N-1.

    Raises:
        ValueError: `client_id` is below 0.
    """

    needs_labels = False

    def __init__(self, client_id: int) -> None:
        check_count(0, client_id=client_id)
        self.client_id = client_id

    def __call__(self, samples: PartitionInput, num_clients: int, generator: np.random.Generator) -> list[Array]:
        if self.client_id >= num_clients:
            raise ValueError(f"client_id must lie in [0, {num_clients}), got {self.client_id}; mend data.partition")
        parts: list[Array] = [np.arange(0) for _ in range(num_clients)]
        parts[self.client_id] = np.arange(samples.size)
        return parts

    def partition_test(self, dealt: Dealt, test: PartitionInput, size: int | None = None) -> list[Array]:
        parts = self(test, num_clients=len(dealt.parts), generator=dealt.generator)
        return at_most(parts, size=size, generator=dealt.generator)


# --- at the server of a federation


class Elsewhere(Folder):
    """Reads the server's data of a federation whose owners keep their samples and tell how many they have.

    Args:
        root: Folder with the server's own sets `test` and `val`, if it has any. None has no set. Without a set,
            `data.num_classes` and `data.input_shape` tell the classes and the input shape of the net.

    Attributes:
        sizes: Number of samples of each client and split, as the clients' nodes have registered them.
    """

    classes_by = "the owners of the samples"
    sizes: Sizes

    def __init__(self, root: str | Path | None = None) -> None:
        super().__init__(root or "")
        self.has_root = root is not None
        self.sizes = {}

    @classmethod
    def fingerprint(cls, arguments: Mapping[str, Any]) -> str | None:
        return None if arguments["root"] is None else super().fingerprint(arguments)

    def _decide_classes(self) -> None:
        self._scale = None
        if self.has_root:
            super()._decide_classes()

    def _set(self, name: str) -> TensorSplit | None:
        return super()._set(name) if self.has_root else None

    def _train(self) -> Split:
        test = self._set("test") or self.validation
        return SplitElsewhere(self, test.input_shape if test is not None else None)


class SplitElsewhere(Split):
    """Stands for training samples that are with their owners.

    Args:
        source: Source that knows how many samples each client has.
        input_shape: Shape of a sample. None: it is not known.
    """

    labels = None

    def __init__(self, source: Elsewhere, input_shape: tuple[int, ...] | None) -> None:
        self.source = source
        self._input_shape = input_shape

    def __len__(self) -> int:
        return 0

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        return self._input_shape

    def batches(self, indices: Iterable[Tensor], generator: torch.Generator | None) -> Iterator[Batch]:
        raise ValueError(elsewhere("training samples"))

    def subset(self, indices: Tensor) -> Split:
        raise ValueError(elsewhere("training samples"))


class ClientsElsewhere:
    """Stands for the clients' training samples that are with their owners, with the attributes of `ClientSamples`.

    Args:
        split: Split that knows how many samples each client has.
        data: The data module.

    Attributes:
        dealt: Indices of each client, which are none.
    """

    def __init__(self, split: SplitElsewhere, data: FederatedData) -> None:
        self._split = split
        self._data = data
        self.dealt = ClientIndices([np.arange(0)] * data.num_clients)

    def view(self, client_id: int, round_idx: int) -> "ViewElsewhere":
        """Make the view of one client's data in one round."""
        return ViewElsewhere(
            data=self._data,
            train=self._split,
            indices={},
            client_id=client_id,
            round_idx=round_idx,
        )

    def indices(self, client_id: int, round_idx: int) -> Tensor:
        """Get the indices of a client's samples, which are none."""
        return self.all_indices(client_id)

    def all_indices(self, client_id: int) -> Tensor:
        """Get the indices of a client's samples, which are none."""
        return self.dealt[client_id]

    def size(self, client_id: int, round_idx: int) -> int:
        """Count the samples of a client, 0 as long as its node is not known."""
        return self._split.source.sizes.get(client_id, {}).get("train", 0)

    def set_count(self, client_id: int, class_idx: int, count: int | None) -> None:
        """Refuse to hold samples back.

        Raises:
            ValueError: In any case, because the samples are with their owners.
        """
        raise ValueError(elsewhere("samples"))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore nothing."""


class ViewElsewhere(ClientView):
    """Gives the number of a client's samples that are with their owner (the `ClientData` protocol)."""

    @property
    def label_counts(self) -> Tensor:
        raise ValueError(elsewhere(f"samples of client {self.client_id}"))

    def size(self, split: str = "train") -> int:
        if split not in ("train", "test"):
            return super().size(split)
        sizes = self._train.source.sizes  # type: ignore[attr-defined]
        of_client = sizes.get(self.client_id, {})
        return int(of_client.get(split, 0))

    def _look_up(self, split: str) -> Tensor:
        if split in ("train", "test"):
            raise ValueError(elsewhere(f"{split} samples of client {self.client_id}"))
        return super()._look_up(split)


def elsewhere(what: str) -> str:
    """Return the error sentence for a question about the clients' samples at the server.

    Args:
        what: What was asked for, a noun phrase in the plural.
    """
    return f"the {what} are with their owners, and the server knows their number only; leave out what reads them"
