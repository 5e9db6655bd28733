"""Data of a federation of several owners: the folder of one party, and at the server samples that are elsewhere."""

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
"""Files of a set of samples."""

KINDS: dict[str, Any] = {
    kind.__name__: kind for kind in (Scale, AsLong, Normalize, CropFlip, ResizedCropFlip, Cutout, AutoAugment)
}
"""Transforms that a folder may name."""

Sizes = Mapping[int, Mapping[str, int]]
"""Samples by client and split."""


class Folder(Source):
    """The samples of one party, as `fl-lightning split` writes them.

    A set is a folder with `x.npy` (n, ...), `y.npy` (n,) or float targets (n, ...), and `meta.json`, an object with
    `num_classes` and `class_names`, each or null, and `transforms`, a list of `fl_lightning.data.transforms` with their
    fields, such as `{"name": "Scale", "divisor": 255.0}`, that make a net's input of stored samples.

    Args:
        root: folder of the training set; `test` and `val` below it, where they are, hold the other sets.

    Raises:
        FileNotFoundError: naming the file.
        ValueError: a label that is no class, or not one target for each sample.
    """

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
        """Let the training set decide the classes of all sets, or without one the first other set."""
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
        """Load a set below the root, or None where there is none."""
        folder = self.root / name
        return self._read(folder) if folder.is_dir() else None

    def _read(self, folder: Path) -> TensorSplit:
        """Read a set, with the numbers that its classes have in the training set.

        Raises:
            ValueError: The set has a class that the training set does not have, or another scale.
        """
        meta = self._meta(folder)
        x, y = (torch.from_numpy(np.load(folder / name, allow_pickle=False)) for name in (SAMPLES, TARGETS))
        transform = transform_of(meta.get("transforms") or [])
        split = labelled_split(x, y, meta["num_classes"], transform=transform, name=folder.name)
        training = Schema(self.class_names, self.num_classes, scale=self._scale)
        own = Schema(names_of(meta), meta["num_classes"], scale=scaling(transform))
        if "scale" in differing(training.digests(), own.digests()):
            raise ValueError(
                f"{folder} must have the scale of the training set ({training.scale}), got {own.scale}; write both "
                f"sets with the same transforms"
            )
        read = read_by(training, own, split, str(folder))
        return read if isinstance(read, TensorSplit) else split

    def _meta(self, folder: Path) -> dict[str, Any]:
        """Read what a set tells of the classes."""
        if not (folder / META).is_file():
            raise FileNotFoundError(
                f"a set of samples must have a {META}, and {folder} has none; write it, or mend root"
            )
        meta: dict[str, Any] = json.loads((folder / META).read_text(encoding="utf-8"))
        return meta


def names_of(meta: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the names of the classes that the description of a set tells. None: it tells none."""
    return tuple(meta["class_names"]) if meta.get("class_names") else None


def write_set(folder: Path, split: Split, indices: Tensor, classes: int | None, names: Iterable[str] | None) -> None:
    """Write samples as a set that `Folder` reads, with their transforms where these are of `KINDS`.

    Args:
        folder: of the set, which is made.
        split: that the samples are of.
        indices: of the samples, (n,) int64.
        classes: C; None: there are none.
        names: of the classes; None: numbers.

    Raises:
        ValueError: samples that somebody else's code reads or transforms.
    """
    transforms = described_transform(split.transform) if isinstance(split, TensorSplit) else None
    if transforms is None or not isinstance(split, TensorSplit):
        raise ValueError(
            f"the samples of a {type(split).__name__} are read or transformed by code of their own, which a folder "
            f"does not hold; let every party read its own by a data module as data.source, with OwnerPartition"
        )
    folder.mkdir(parents=True)
    for name, values in ((SAMPLES, split.x), (TARGETS, split.y)):
        write_atomically(folder / name, partial(save_array, values[indices.to(values.device)].cpu().numpy()))
    meta = {"num_classes": classes, "class_names": None if names is None else list(names), "transforms": transforms}
    write_file(folder / META, json.dumps(meta) + "\n")


def described_transform(transform: Transform | None) -> list[dict[str, Any]] | None:
    """Describe a transform by names and fields, or give None where it is not made of `KINDS`.

    >>> described_transform(Scale(16))
    [{'name': 'Scale', 'divisor': 16}]
    """
    parts = [] if transform is None else getattr(transform, "transforms", [transform])
    if any(type(part) is not KINDS.get(type(part).__name__) for part in parts):
        return None
    return [{"name": type(part).__name__, **asdict(part)} for part in parts]


def transform_of(parts: Iterable[Mapping[str, Any]]) -> Transform | None:
    """Make the transform that `described_transform` described.

    >>> transform_of([{"name": "Scale", "divisor": 16}])
    Scale(divisor=16)
    """
    made: list[Any] = [KINDS[part["name"]](**{n: v for n, v in part.items() if n != "name"}) for part in parts]
    return Compose(*made) if len(made) > 1 else next(iter(made), None)


def save_array(content: Array, path: Path) -> None:
    """Write an array, whatever the file's name."""
    with path.open("wb") as file:
        np.save(file, content, allow_pickle=False)


class OwnerPartition(Partition):
    """All samples belong to one client: those of the other clients are with their owners.

    Args:
        client_id: 0 ... N-1.
    """

    needs_labels = False

    def __init__(self, client_id: int) -> None:
        check_count(0, client_id=client_id)
        self.client_id = client_id

    def __call__(self, samples: PartitionInput, num_clients: int, generator: np.random.Generator) -> list[Array]:
        if self.client_id >= num_clients:
            raise ValueError(f"client_id must lie in [0, {num_clients}), got {self.client_id}; mend data.partition")
        return [np.arange(samples.size if client_id == self.client_id else 0) for client_id in range(num_clients)]

    def partition_test(self, dealt: Dealt, test: PartitionInput, size: int | None = None) -> list[Array]:
        return at_most(self(test, len(dealt.parts), dealt.generator), size, dealt.generator)


# --- at the server of a federation


class Elsewhere(Folder):
    """The server's data where the clients' samples are with their owners, who tell how many there are.

    Args:
        root: folder with the server's own sets `test` and `val`, where it has any; without one
            `data.num_classes` and `data.input_shape` tell what the net is built for.

    Attributes:
        sizes: samples of the clients, as their nodes have registered them.
    """

    classes_by = "the owners of the samples"
    sizes: Sizes

    def __init__(self, root: str | Path) -> None:
        super().__init__(root)
        self.sizes = {}

    def _train(self) -> Split:
        test = self._set("test") or self.validation
        return SplitElsewhere(self, test.input_shape if test is not None else None)


class SplitElsewhere(Split):
    """Training samples that are with their owners.

    Args:
        source: knows how many each client has.
        input_shape: of a sample; or None.
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
    """The clients' training samples where they are with their owners, with the attributes of `ClientSamples`.

    Args:
        split: knows how many each client has.
        data: the data module.

    Attributes:
        dealt: of each client, no index.
    """

    def __init__(self, split: SplitElsewhere, data: FederatedData) -> None:
        self._split = split
        self._data = data
        self.dealt = ClientIndices([np.arange(0)] * data.num_clients)

    def view(self, client_id: int, round_idx: int) -> "ViewElsewhere":
        """Make the view of one client's data in one round."""
        return ViewElsewhere(self._data, self._split, {}, client_id, round_idx)

    def indices(self, client_id: int) -> Tensor:
        """Get no index."""
        return self.dealt[client_id]

    def size(self, client_id: int) -> int:
        """Count the samples of a client, 0 where its node is not known yet."""
        return self._split.source.sizes.get(client_id, {}).get("train", 0)

    def set_count(self, client_id: int, class_idx: int, count: int | None) -> None:
        """Refuse to hold samples back."""
        raise ValueError(elsewhere("samples"))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore nothing."""


class ViewElsewhere(ClientView):
    """One client's data where they are with their owner: their number is known (the `ClientData` protocol)."""

    @property
    def label_counts(self) -> Tensor:
        raise ValueError(elsewhere(f"samples of client {self.client_id}"))

    def size(self, split: str = "train") -> int:
        sizes = self._train.source.sizes  # type: ignore[attr-defined]
        return int(sizes.get(self.client_id, {}).get(split, 0)) if split in ("train", "test") else super().size(split)

    def _look_up(self, split: str) -> Tensor:
        if split in ("train", "test"):
            raise ValueError(elsewhere(f"{split} samples of client {self.client_id}"))
        return super()._look_up(split)


def elsewhere(what: str) -> str:
    """Sentence for what the server asks of the clients' samples."""
    return f"the {what} are with their owners, and the server knows their number only; leave out what reads them"
