"""Nets that read a sequence of characters, numbered from 0, (B, T), and tell a class, such as the next character."""

from abc import abstractmethod

import torch
from torch import Tensor, nn

from fl_lightning.nets.backbone import Backbone, check_shape
from fl_lightning.utils.settings import check_count


class CharacterNet(Backbone):
    """An embedding, a body that reads it in order, and a head on what it holds at the last place.

    Args:
        num_classes: C ≥ 1.
        input_shape: (T,), the length of a sequence.
        vocabulary: kinds of characters V, numbered from 0; None: C, as where the class is the next character.
        embedding: numbers of a character.
        features: numbers that the head reads.

    Raises:
        ValueError: not the shape of a sequence, or a size below 1.
    """

    def __init__(
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
        """Read a sequence in order: (B, T, embedding) -> (B, D), D the numbers that the head reads."""

    def features(self, x: Tensor) -> Tensor:
        return self.read(self.embedding(x))


class CharLSTM(CharacterNet):
    """An LSTM over characters, as LEAF's net of Shakespeare by default, with 819,920 parameters for 80 classes.

    Args:
        num_classes: as of `CharacterNet`.
        input_shape: (T,).
        vocabulary: V; None: C.
        embedding: numbers of a character.
        hidden: numbers of a layer's state.
        layers: LSTM layers, one on top of the other.

    Source:
        Caldas et al. 2018, arXiv:1812.01097, and its code.
    """

    def __init__(
        self,
        num_classes: int,
        input_shape: tuple[int, ...],
        vocabulary: int | None = None,
        embedding: int = 8,
        hidden: int = 256,
        layers: int = 2,
    ) -> None:
        super().__init__(num_classes, input_shape, vocabulary, embedding, hidden)
        check_count(1, layers=layers)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)

    def read(self, embedded: Tensor) -> Tensor:
        states: Tensor = self.lstm(embedded)[0]
        return states[:, -1]


class CharTransformer(CharacterNet):
    """A small transformer over characters, whose last place sees all before it, without dropout.

    Args:
        num_classes: as of `CharacterNet`.
        input_shape: (T,).
        vocabulary: V; None: C.
        width: numbers of a place, a multiple of `heads`.
        heads: of attention.
        layers: each attention and an MLP of four times the width, normalised before (pre-norm).
    """

    def __init__(
        self,
        num_classes: int,
        input_shape: tuple[int, ...],
        vocabulary: int | None = None,
        width: int = 64,
        heads: int = 4,
        layers: int = 2,
    ) -> None:
        super().__init__(num_classes, input_shape, vocabulary, width, width)
        check_count(1, heads=heads, layers=layers)
        if width % heads:
            raise ValueError(f"the width of CharTransformer must be a multiple of its heads, got {width} and {heads}")
        self.places = nn.Parameter(0.02 * torch.randn(input_shape[0], width))
        block = nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def read(self, embedded: Tensor) -> Tensor:
        states: Tensor = self.body(embedded + self.places[: embedded.shape[1]])
        return states[:, -1]
