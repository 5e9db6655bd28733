"""Nets that read sequences of characters (B, T), numbered from 0, and predict a class, such as the next character."""

from abc import abstractmethod

import torch
from torch import Tensor, nn

from fl_lightning.nets.backbone import Backbone, check_shape
from fl_lightning.utils.settings import check_count


class CharacterNet(Backbone):
    """Embeds characters, reads them in order, and classifies by the features at the last place.

    Args:
        num_classes: Number of classes C, ≥ 1.
        input_shape: Length of a sequence, (T,).
        vocabulary: Number of different characters V. None is C, for classes that are the next character.
        embedding: Width of the embedding of a character.
        features: Number of features that the head reads.

    Raises:
        ValueError: The shape is not that of a sequence, or a size is below 1.
    """

    def __init__(  # noqa: PLR0917 - called by position
        self, num_classes: int, input_shape: tuple[int, ...], vocabulary: int | None, embedding: int, features: int
    ) -> None:
        super().__init__()
        net = type(self).__name__
        shape = check_shape(net, num_classes, input_shape)
        if len(shape) != 1:
            raise ValueError(f"{net} needs sequences of numbers: an input_shape (length,), got {shape}")
        check_count(1, vocabulary=vocabulary, embedding=embedding, features=features)
        self.embedding = nn.Embedding(vocabulary or num_classes, embedding)
        self.head = nn.Linear(features, num_classes)

    @abstractmethod
    def read(self, embedded: Tensor) -> Tensor:
        """Compute the D features that the head reads: (B, T, embedding) -> (B, D)."""

    def features(self, x: Tensor) -> Tensor:
        return self.read(self.embedding(x))


class CharLSTM(CharacterNet):
    """Reads characters with an LSTM. The defaults are LEAF's net of Shakespeare, 819,920 parameters for 80 classes.

    Args:
        num_classes: Number of classes C, ≥ 1.
        input_shape: Length of a sequence, (T,).
        vocabulary: Number of different characters V. None is C.
        embedding: Width of the embedding of a character.
        hidden: Number of units in a layer's state.
        layers: Number of LSTM layers, one on top of the other.

    Source:
        Caldas et al. 2018, arXiv:1812.01097, and its code.
    """

    def __init__(  # noqa: PLR0917 - called by position
        self,
        num_classes: int,
        input_shape: tuple[int, ...],
        vocabulary: int | None = None,
        embedding: int = 8,
        hidden: int = 256,
        layers: int = 2,
    ) -> None:
        super().__init__(num_classes, input_shape, vocabulary=vocabulary, embedding=embedding, features=hidden)
        check_count(1, layers=layers)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)

    def read(self, embedded: Tensor) -> Tensor:
        states: Tensor
        states, _ = self.lstm(embedded)
        return states[:, -1]


class CharTransformer(CharacterNet):
    """Reads characters with a small transformer without dropout, in which every place attends to all places.

    Args:
        num_classes: Number of classes C, ≥ 1.
        input_shape: Length of a sequence, (T,).
        vocabulary: Number of different characters V. None is C.
        width: Number of features of a place, a multiple of `heads`.
        heads: Number of attention heads.
        layers: Number of layers, each of attention and an MLP of four times the width, normalized before (pre-norm).
    """

    def __init__(  # noqa: PLR0917 - called by position
        self,
        num_classes: int,
        input_shape: tuple[int, ...],
        vocabulary: int | None = None,
        width: int = 64,
        heads: int = 4,
        layers: int = 2,
    ) -> None:
        super().__init__(num_classes, input_shape, vocabulary=vocabulary, embedding=width, features=width)
        check_count(1, heads=heads, layers=layers)
        if width % heads:
            raise ValueError(f"the width of CharTransformer must be a multiple of its heads, got {width} and {heads}")
        self.places = nn.Parameter(0.02 * torch.randn(input_shape[0], width))
        block = nn.TransformerEncoderLayer(
            d_model=width,
            nhead=heads,
            dim_feedforward=4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.body = nn.TransformerEncoder(
            block, num_layers=layers, norm=nn.LayerNorm(width), enable_nested_tensor=False
        )

    def read(self, embedded: Tensor) -> Tensor:
        states: Tensor = self.body(embedded + self.places[: embedded.shape[1]])
        return states[:, -1]
