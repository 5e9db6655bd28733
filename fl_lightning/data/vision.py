"""Data sets that torchvision reads (MNIST and its kin, CIFAR, SVHN), which stay in memory as uint8."""

from abc import abstractmethod
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor

from fl_lightning.data.images import Augmentation, Images, ImageSource, Normalization, error_line
from fl_lightning.data.published import check_grey, check_published, file_fault
from fl_lightning.data.sources import AUTHORS
from fl_lightning.data.splits import Split
from fl_lightning.utils.settings import check_choice

EMNISTSplit = Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"]


class _VisionSource(ImageSource):
    """Finds and checks the files of a data set of torchvision."""

    classes_by = AUTHORS
    dataset: ClassVar[str]
    """Name of the class in `torchvision.datasets`."""
    shape: ClassVar[tuple[int, int, int]] = (3, 32, 32)
    """Shape of an image."""
    places = ("root", "download")
    is_published = True
    named: ClassVar[bool] = True
    """True where the names of the classes say more than their numbers."""

    def __init__(
        self,
        root: str = "data",
        download: bool = False,
        augmentation: Augmentation = "none",
        normalize: Normalization = "standard",
        *,
        limit: int | None = None,
    ) -> None:
        super().__init__(root=root, augmentation=augmentation, normalize=normalize, limit=limit)
        self.download = download

    def prepare(self) -> None:
        if self.download:
            # This fetches both splits and reads only the smaller one.
            self._open(train=False, download=True)

    def load(self) -> tuple[Split, Split]:
        train = self._open(train=True)
        test = self._open(train=False)
        self.class_names = self._names(train) if self.named else None
        training_images = self._checked(train, "train")
        test_images = self._checked(test, "test")
        found = [(images.y, images.x.shape[1:]) for images in (training_images, test_images)]
        check_published(name=self._name, place=self.root, shape=self.shape, splits=found)
        check_grey(self._name, self.root, training_images.x)
        training, testing = self.splits(training_images, test_images)
        return training, testing

    @property
    def _name(self) -> str:
        """Name of the files' data set among `PUBLISHED`."""
        return self.dataset

    def _names(self, opened: Any) -> tuple[str, ...]:
        """Get the names of the classes."""
        return tuple(opened.classes)

    @abstractmethod
    def _files(self, dataset: Any) -> dict[Path, str | None]:
        """List the files that torchvision reads, and their md5 where it compares it."""

    @abstractmethod
    def _images(self, opened: Any) -> Tensor:
        """Get the images that torchvision holds, (n, C, H, W) uint8, without a copy."""

    def _targets(self, opened: Any) -> Tensor:
        """Get the classes, (n,)."""
        return torch.as_tensor(opened.targets)

    def _make(self, dataset: Any, train: bool, download: bool) -> Any:
        """Let torchvision read a split."""
        return dataset(self.root, train=train, download=download)

    def _checked(self, opened: Any, name: str) -> Images:
        """Return the images and classes of a split.

        Raises:
            ValueError: There are not as many images as classes.
        """
        x = self._images(opened)
        y = self._targets(opened)
        if len(x) != len(y):
            raise ValueError(
                f"the {name} split of {self.dataset} in {self.root} holds {len(x)} images and "
                f"{len(y)} labels: delete its files and fetch them again"
            )
        return Images(x, y)

    def _open(self, train: bool, download: bool = False) -> Any:
        """Open a split, with the file in the sentence of what torchvision raises."""
        from torchvision import datasets  # noqa: PLC0415 - slow to import

        dataset = getattr(datasets, self.dataset)
        try:
            return self._make(dataset, train, download)
        except Exception as error:  # torchvision raises all kinds, with sentences that name no file
            raise self._explained(error, dataset, download) from error

    def _explained(self, error: Exception, dataset: Any, download: bool) -> Exception:
        """Return an error that names the file and what to do."""
        again = "delete it and set `download: true`, or copy it again"
        files = self._files(dataset)
        missing = next((path for path in files if not path.is_file()), None)
        if missing is None:
            for path, md5 in files.items():
                fault = file_fault(path, md5)
                if fault:
                    return ValueError(f"{path} is corrupt ({fault}): {again}")
            folder = next(iter(files)).parent
            return ValueError(f"{self.dataset} in {folder} could not be read ({error_line(error)}): {again}")
        if download:
            return OSError(
                f"{self.dataset} could not be downloaded to {self.root} ({error_line(error)}): "
                f"put its files where {missing} is looked for and leave `download: false`"
            )
        remedy = "call prepare() first" if self.download else "set `download: true`"
        return FileNotFoundError(
            f"{self.dataset} was not found in root {self.root}, which should hold {missing}: "
            f"{remedy} or name the folder that holds {missing.relative_to(Path(self.root).expanduser())}"
        )


class MNIST(_VisionSource):
    """Reads handwritten digits, 60,000 / 10,000 images of 1×28×28.

    Args:
        root: Folder that holds, or will hold, `MNIST/raw/*-ubyte`.
        download: Whether missing files are fetched into `root`.
        augmentation: Augmentation of training batches. `flip` mirrors half of the images. `crop_flip` also pads by 4
            and crops at random. `reflect_crop_flip` does so with reflected padding, as FedNTD's code for CINIC-10.
            `resized_crop_flip` resizes a random rectangle, as FedCL's code. `fedntd` is `crop_flip` and a Cutout of 16
            after normalizing, as in FedNTD's code, which mirrors MNIST, too. `autoaugment` is `crop_flip` and
            AutoAugment with the policy found on CIFAR-10, as in FedED's code for CIFAR. `autoaugment_only` leaves out
            `crop_flip`, as FedED's code for Tiny-ImageNet.
        normalize: Normalization of the images of every split. `standard` takes the mean and the standard deviation of
            the data set, and `half` takes 0.5 and 0.5. Numbers are [means, standard deviations], one for each channel
            or one for all.
        limit: Most samples of each split, drawn by class. None: all.
    """

    num_classes = 10
    channels = 1
    shape = (1, 28, 28)
    dataset = "MNIST"
    named = False  # "7 - seven" says no more than the number
    mean: tuple[float, ...] | None = (0.1307,)
    std: tuple[float, ...] | None = (0.3081,)

    def _files(self, dataset: Any) -> dict[Path, str | None]:
        folder = Path(self.root).expanduser() / dataset.__name__ / "raw"
        return {folder / name.removesuffix(".gz"): None for name, _ in dataset.resources}

    def _images(self, opened: Any) -> Tensor:
        x: Tensor = opened.data
        return x[:, None]


class FashionMNIST(MNIST):
    """Reads Zalando's article images, 60,000 / 10,000 of 1×28×28.

    It takes the arguments of `MNIST`, and the folder is `FashionMNIST/raw`.
    """

    dataset = "FashionMNIST"
    named = True
    mean = (0.2860,)
    std = (0.3530,)


class KMNIST(MNIST):
    """Reads cursive Japanese letters, 60,000 / 10,000 images of 1×28×28.

    It takes the arguments of `MNIST`, and `standard` measures the training images. The folder is `KMNIST/raw`.
    """

    dataset = "KMNIST"
    named = True
    mean = std = None


class EMNIST(MNIST):
    """Reads handwritten letters and digits, upright images of 1×28×28.

    The splits have these training and test images and classes: `byclass` 697,932 / 116,323 of 62, `bymerge` the same of
    47, `balanced` 112,800 / 18,800 of 47, `letters` 124,800 / 20,800 of 26, `digits` 240,000 / 40,000 of 10, and
    `mnist` 60,000 / 10,000 of 10.

    Args:
        split: Name of the split.
        base: Arguments of `MNIST`. `standard` measures the mean and the deviation of the training images. `root` holds,
            or will hold, `EMNIST/raw/emnist-*-ubyte`. `download` fetches all splits, 536 MB.

    Source:
        Cohen et al. 2017, arXiv:1702.05373.
    """

    dataset = "EMNIST"
    named = True
    mean = std = None

    def __init__(self, split: EMNISTSplit = "balanced", **base: Any) -> None:
        check_choice(get_args(EMNISTSplit), split=split)
        super().__init__(**base)
        self.split = split

    @property
    def _name(self) -> str:
        return f"{self.dataset} {self.split}"

    def _make(self, dataset: Any, train: bool, download: bool) -> Any:
        opened = dataset(self.root, self.split, train=train, download=download)
        self.num_classes = len(self._names(opened))
        return opened

    def _files(self, dataset: Any) -> dict[Path, str | None]:
        folder = Path(self.root).expanduser() / "EMNIST" / "raw"
        files: dict[Path, str | None] = {}
        for part in ("train", "test"):
            for kind in ("images-idx3", "labels-idx1"):
                files[folder / f"emnist-{self.split}-{part}-{kind}-ubyte"] = None
        return files

    def _names(self, opened: Any) -> tuple[str, ...]:
        return tuple(name for name in opened.classes if name != "N/A")

    def _images(self, opened: Any) -> Tensor:
        # The files hold images that lie on their side.
        return super()._images(opened).transpose(2, 3)

    def _targets(self, opened: Any) -> Tensor:
        targets = super()._targets(opened)
        # The files number letters from 1.
        return targets - 1 if self.split == "letters" else targets


class CIFAR10(_VisionSource):
    """Reads tiny photographs, 50,000 / 10,000 images of 3×32×32.

    Args:
        root: Folder that holds, or will hold, `cifar-10-batches-py/*`.
        download: Whether missing files are fetched into `root`.
        augmentation: Augmentation of training batches, as for `MNIST`.
        normalize: Normalization of all images, as for `MNIST`.
        limit: Most samples of each split, drawn by class. None: all.
    """

    num_classes = 10
    dataset = "CIFAR10"
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)

    def _files(self, dataset: Any) -> dict[Path, str | None]:
        folder = Path(self.root).expanduser() / dataset.base_folder
        listed = [*dataset.train_list, *dataset.test_list, (dataset.meta["filename"], dataset.meta["md5"])]
        return {folder / name: md5 for name, md5 in listed}

    def _images(self, opened: Any) -> Tensor:
        return torch.from_numpy(opened.data).movedim(-1, 1)  # as the files hold them


class CIFAR100(CIFAR10):
    """Reads tiny photographs of 100 classes in the folder `cifar-100-python`, with the arguments of `CIFAR10`."""

    num_classes = 100
    dataset = "CIFAR100"
    mean = (0.5071, 0.4865, 0.4409)
    std = (0.2673, 0.2564, 0.2762)


class SVHN(_VisionSource):
    """Reads house numbers, 73,257 / 26,032 images of 3×32×32, ten digits.

    Args:
        root: Folder that holds, or will hold, `train_32x32.mat` and `test_32x32.mat`.
        download: Whether missing files are fetched into `root`.
        augmentation: Augmentation of training batches, as for `MNIST`.
        normalize: Normalization of all images, as for `MNIST`. `standard` measures the mean and the deviation of the
            training images.
        limit: Most samples of each split, drawn by class. None: all.

    Source:
        Netzer et al. 2011, Reading Digits in Natural Images.
    """

    num_classes = 10
    dataset = "SVHN"
    named = False

    def _make(self, dataset: Any, train: bool, download: bool) -> Any:
        if download:
            # Each split is a file of its own.
            dataset(self.root, split="train", download=True)
        return dataset(self.root, split="train" if train else "test", download=download)

    def _files(self, dataset: Any) -> dict[Path, str | None]:
        folder = Path(self.root).expanduser()
        return {folder / name: md5 for _, name, md5 in (dataset.split_list[part] for part in ("train", "test"))}

    def _images(self, opened: Any) -> Tensor:
        return torch.from_numpy(opened.data)

    def _targets(self, opened: Any) -> Tensor:
        return torch.from_numpy(opened.labels)
