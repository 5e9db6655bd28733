"""Codecs: what the entries of a message moved, in fewer bytes."""

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from fl_lightning.functional.coding import (
    dequantise,
    index_bits,
    largest,
    mean_magnitudes,
    pack,
    quantise,
    unpack,
)
from fl_lightning.types import State
from fl_lightning.utils.devices import to_device
from fl_lightning.utils.settings import check_above, check_at_most, check_count
from fl_lightning.utils.signatures import check_overrides

LEAST_DOWN = 3
"""Least bits with which weights are coded (docs/compression.md has what 2 bits do)."""


class Codec(ABC):
    """Base of the codecs of what the trained entries of a client's message moved since they were sent to it.

    They are laid end to end as one vector (n,), float32 or float64. A vector of NaN must not come back finite: that is
    how an update with NaN or inf is found behind the codec.

    Args:
        feedback: error feedback: what is lost stays in the client's memory and is added to what it sends next time.
        down: code the weights that go down, too, once when a round begins; everybody measures from what was sent, and
            what the server's own weights are besides stays at the server.

    Attributes:
        contracts: whether with `feedback` a decoded C(x) has E‖x − C(x)‖² ≤ (1 − δ) ‖x‖² for a δ > 0, so that what is
            kept back stays bounded (Karimireddy et al., ICML 2019, arXiv:1901.09847).
        codes_weights: whether weights themselves can be coded, not only what they moved.
        is_sparse: whether most of the numbers arrive as 0.
        needs: `clients`, as of the server's parts: with all samples at one place nothing is sent.

    Raises:
        ValueError: feedback or `down` of a codec for which it does not hold.
    """

    contracts: ClassVar[bool] = False
    codes_weights: ClassVar[bool] = False
    is_sparse: ClassVar[bool] = False
    needs: ClassVar[frozenset[str]] = frozenset({"clients"})
    feedback: bool = False
    down: bool = False

    def __init__(self, feedback: bool = False, down: bool = False) -> None:
        kind = type(self).__name__
        if feedback and not self.contracts:
            raise ValueError(
                f"feedback keeps what a codec loses, which grows without bound unless the codec contracts, and "
                f"{kind} does not say so; leave feedback out, or take TopK, Sign or QSGD"
            )
        if down and not self.codes_weights:
            raise ValueError(
                f"down codes the weights themselves, and {kind} codes what they moved; leave down out, or take "
                f"FP16 or QSGD"
            )
        self.feedback = feedback
        self.down = down

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        check_overrides(cls)

    @abstractmethod
    def encode(self, vector: Tensor, draws: torch.Generator) -> State:
        """Make the message: tensors by name, whose bytes are counted.

        Args:
            vector: (n,), n ≥ 1, not to be edited.
            draws: a CPU generator, keyed by (seed, round, client); `decode` is given an equal one.
        """

    @abstractmethod
    def decode(self, message: State, like: Tensor, draws: torch.Generator) -> Tensor:
        """Make the vector of a message, (n,) in the type of `like` (n,), which may come from anybody.

        Raises:
            Exception: whatever a message brings about that is none.
        """


class FP16(Codec):
    """Half the bytes: float16, to the nearest, and beyond ±65504 that."""

    contracts = codes_weights = True

    def encode(self, vector: Tensor, draws: torch.Generator) -> State:
        most = torch.finfo(torch.float16).max
        return {"values": vector.clamp(-most, most).half()}

    def decode(self, message: State, like: Tensor, draws: torch.Generator) -> Tensor:
        return message["values"].to(like.dtype)


class QSGD(Codec):
    """b bits a number: a multiple of the greatest magnitude in its bucket over s = 2^(b-1) − 1.

    Rounding is random, so that the mean over the draws is exact; with `feedback`, and downwards, it is to the nearest.

    Args:
        bits: b, from 2 to 8 (int8).
        bucket: neighbours that share a scale.
        feedback: error feedback.
        down: code the weights that go down, too, with 3 bits or more.

    Source:
        Alistarh et al., NeurIPS 2017, arXiv:1610.02132, Section 3, with the maximum for the norm as in its experiments.
    """

    contracts = codes_weights = True

    def __init__(self, bits: int = 8, bucket: int = 512, feedback: bool = False, down: bool = False) -> None:
        super().__init__(feedback, down)
        check_count(2, "one of them is the sign", bits=bits)
        check_at_most(8, "FP16 has 16", bits=bits)
        check_count(1, bucket=bucket)
        if down and bits < LEAST_DOWN:
            raise ValueError(
                f"down rounds the weights themselves to the nearest level, with few bits most of them to 0, which "
                f"ruins the model: bits must be at least {LEAST_DOWN}, got {bits}; raise bits, or leave down out"
            )
        self.bits = bits
        self.bucket = bucket

    @property
    def levels(self) -> int:
        """Multiples above 0, s."""
        return (1 << self.bits - 1) - 1

    def encode(self, vector: Tensor, draws: torch.Generator) -> State:
        noise = None if self.feedback else torch.rand(len(vector), generator=draws).to(vector)
        codes, scales = quantise(vector, self.levels, self.bucket, noise)
        return {"codes": pack(codes, self.bits), "scales": scales}

    def decode(self, message: State, like: Tensor, draws: torch.Generator) -> Tensor:
        codes = unpack(message["codes"], self.bits, len(like))
        return dequantise(codes, message["scales"], self.levels, self.bucket)


class SparseCodec(Codec, ABC):
    """Base of codecs that send some of the numbers.

    Args:
        fraction: share of the numbers that are sent, in (0, 1].
        feedback: error feedback.
    """

    contracts = is_sparse = True

    def __init__(self, fraction: float, feedback: bool) -> None:
        super().__init__(feedback)
        check_above(0, "it is the share of the numbers that are sent", fraction=fraction)
        check_at_most(1, "it is the share of the numbers that are sent", fraction=fraction)
        self.fraction = fraction

    def count(self, size: int) -> int:
        """Count the numbers that are sent of so many."""
        return max(1, math.ceil(self.fraction * size - 1e-9))


class TopK(SparseCodec):
    """The numbers that moved most, as they are, each with its place in ⌈log₂ n⌉ bits.

    Args:
        fraction: share of the numbers that are sent, in (0, 1].
        feedback: error feedback.

    Source:
        Stich et al., NeurIPS 2018, arXiv:1809.07599, Definition 2.1 and Algorithm 1.
    """

    def __init__(self, fraction: float = 0.05, feedback: bool = True) -> None:
        super().__init__(fraction, feedback)

    def encode(self, vector: Tensor, draws: torch.Generator) -> State:
        places = largest(vector, self.count(len(vector)))
        return {"values": vector[places], "places": pack(places, index_bits(len(vector)))}

    def decode(self, message: State, like: Tensor, draws: torch.Generator) -> Tensor:
        size = len(like)
        places = unpack(message["places"], index_bits(size), self.count(size)).long().clamp(max=size - 1)
        return torch.zeros_like(like).scatter(0, places, message["values"])


class RandomK(SparseCodec):
    """Numbers at places that both sides draw, times n / k, so that only values are sent and their mean is exact.

    Args:
        fraction: share of the numbers that are sent, in (0, 1].
        feedback: refused: what is lost may be n / k − 1 times what moved, and would grow from round to round.

    Source:
        Konečný et al. 2016, arXiv:1610.05492, Section 2 (random mask).
    """

    contracts = False

    def __init__(self, fraction: float = 0.05, feedback: bool = False) -> None:
        super().__init__(fraction, feedback)

    def places(self, size: int, draws: torch.Generator, device: torch.device) -> Tensor:
        """Draw the places of the numbers that are sent, (k,) int64."""
        return to_device(torch.randperm(size, generator=draws)[: self.count(size)], device)

    def encode(self, vector: Tensor, draws: torch.Generator) -> State:
        size = len(vector)
        return {"values": vector[self.places(size, draws, vector.device)] * (size / self.count(size))}

    def decode(self, message: State, like: Tensor, draws: torch.Generator) -> Tensor:
        return torch.zeros_like(like).scatter(0, self.places(len(like), draws, like.device), message["values"])


class Sign(Codec):
    """A bit a number: its sign, times the mean magnitude in its bucket.

    Args:
        bucket: neighbours that share a scale.
        feedback: error feedback.

    Source:
        Karimireddy et al., ICML 2019, arXiv:1901.09847, Algorithm 1 (EF-signSGD), of buckets in place of layers.
    """

    contracts = True

    def __init__(self, bucket: int = 512, feedback: bool = True) -> None:
        super().__init__(feedback)
        check_count(1, bucket=bucket)
        self.bucket = bucket

    def encode(self, vector: Tensor, draws: torch.Generator) -> State:
        return {"signs": pack((vector >= 0).to(torch.uint8), 1), "scales": mean_magnitudes(vector, self.bucket)}

    def decode(self, message: State, like: Tensor, draws: torch.Generator) -> Tensor:
        signs = unpack(message["signs"], 1, len(like)) * 2 - 1
        return signs * message["scales"].repeat_interleave(self.bucket)[: len(like)]
