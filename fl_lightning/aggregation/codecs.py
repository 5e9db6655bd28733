"""Codecs, which send what the entries of a message moved in fewer bytes."""

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
from fl_lightning.utils.devices import copy_to_device
from fl_lightning.utils.settings import check_above, check_at_most, check_count
from fl_lightning.utils.signatures import check_overrides

LEAST_DOWN = 3
"""Smallest number of bits with which weights are coded (docs/compression.md shows what 2 bits do)."""


class Codec(ABC):
    """Codes what the trained entries of a client's message moved since they were sent to the client.

    The entries are laid end to end as one vector (n,), float32 or float64. A vector with NaN must not come back finite,
    because an update with NaN or inf is found behind the codec.

    Args:
        feedback: Whether there is error feedback: what is lost stays in the client's memory, and is added to what the
            client sends next time.
        down: Whether the weights that go down are coded too, once when a round begins. Everybody then measures from
            what was sent. The difference to the server's own weights stays at the server.

    Attributes:
        contracts: Whether with `feedback` a decoded C(x) has E‖x − C(x)‖² ≤ (1 − δ) ‖x‖² for a δ > 0, so that what is
            kept back stays bounded (Karimireddy et al., ICML 2019, arXiv:1901.09847).
        codes_weights: Whether weights themselves can be coded, not only what they moved.
        is_sparse: Whether most of the numbers arrive as 0.
        needs: `clients`, as in the server's parts: with all samples at one place nothing is sent.

    Raises:
        ValueError: The codec does not allow `feedback` or `down`.
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
        """Return the message: tensors by name, whose bytes are counted.

        Args:
            vector: The vector (n,), n ≥ 1, which must not be edited.
            draws: A CPU generator, keyed by (seed, round, client). `decode` is given an equal one.
        """

    @abstractmethod
    def decode(self, message: State, like: Tensor, draws: torch.Generator) -> Tensor:
        """Return the vector of a message, (n,) in the type of `like`.

        Args:
            message: What `encode` returned, or something else, because a message may come from anybody.
            like: A vector of the same size, type and device, (n,).
            draws: A CPU generator, equal to that of `encode`.

        Raises:
            Exception: The message is not one of this codec.
        """


class FP16(Codec):
    """Sends float16, half the bytes, rounded to the nearest and at most ±65504."""

    contracts = codes_weights = True

    def encode(self, vector: Tensor, draws: torch.Generator) -> State:
        largest_half = torch.finfo(torch.float16).max
        return {"values": vector.clamp(-largest_half, largest_half).half()}

    def decode(self, message: State, like: Tensor, draws: torch.Generator) -> Tensor:
        return message["values"].to(like.dtype)


class QSGD(Codec):
    """Sends b bits a number: a multiple of the greatest magnitude in its bucket over s = 2^(b-1) − 1.

    Rounding is random, so that the mean over the draws is exact. With `feedback`, and downwards, it is to the nearest.

    Args:
        bits: Bits of a number b, from 2 to 8 (int8).
        bucket: Number of neighbors that share a scale, ≥ 1.
        feedback: Whether there is error feedback.
        down: Whether the weights that go down are coded too, which takes 3 bits or more.

    Source:
        Alistarh et al., NeurIPS 2017, arXiv:1610.02132, Section 3, with the maximum for the norm as in its experiments.
    """

    contracts = codes_weights = True

    def __init__(self, bits: int = 8, bucket: int = 512, feedback: bool = False, down: bool = False) -> None:
        super().__init__(feedback=feedback, down=down)
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
        """Number of multiples above 0, s."""
        return (1 << self.bits - 1) - 1

    def encode(self, vector: Tensor, draws: torch.Generator) -> State:
        noise = None if self.feedback else torch.rand(len(vector), generator=draws).to(vector)
        codes, scales = quantise(x=vector, levels=self.levels, bucket=self.bucket, noise=noise)
        return {"codes": pack(codes, self.bits), "scales": scales}

    def decode(self, message: State, like: Tensor, draws: torch.Generator) -> Tensor:
        codes = unpack(packed=message["codes"], bits=self.bits, size=len(like))
        return dequantise(codes=codes, scales=message["scales"], levels=self.levels, bucket=self.bucket)


class SparseCodec(Codec, ABC):
    """Sends some of the numbers.

    It is the base of such codecs.

    Args:
        fraction: Share of the numbers that are sent, in (0, 1].
        feedback: Whether there is error feedback.
    """

    contracts = is_sparse = True

    def __init__(self, fraction: float, feedback: bool) -> None:
        super().__init__(feedback)
        meaning = "it is the share of the numbers that are sent"
        check_above(0, meaning, fraction=fraction)
        check_at_most(1, meaning, fraction=fraction)
        self.fraction = fraction

    def count(self, size: int) -> int:
        """Return how many of `size` numbers are sent, at least 1."""
        return max(1, math.ceil(self.fraction * size - 1e-9))


class TopK(SparseCodec):
    """Sends the numbers that moved most, as they are, each with its place in ⌈log₂ n⌉ bits.

    Args:
        fraction: Share of the numbers that are sent, in (0, 1].
        feedback: Whether there is error feedback.

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
        places = unpack(packed=message["places"], bits=index_bits(size), size=self.count(size))
        places = places.long().clamp(max=size - 1)  # A message of somebody else may name places that do not exist.
        return torch.zeros_like(like).scatter(0, places, message["values"])


class RandomK(SparseCodec):
    """Sends the numbers at places that both sides draw, times n / k.

    Only values are sent, and their mean over the draws is exact.

    Args:
        fraction: Share of the numbers that are sent, in (0, 1].
        feedback: Always False. With error feedback, what is lost may be n / k − 1 times what moved, and would grow
            from round to round.

    Source:
        Konečný et al. 2016, arXiv:1610.05492, Section 2 (random mask).
    """

    contracts = False

    def __init__(self, fraction: float = 0.05, feedback: bool = False) -> None:
        super().__init__(fraction, feedback)

    def places(self, size: int, draws: torch.Generator, device: torch.device) -> Tensor:
        """Draw the places of the k numbers that are sent, (k,) int64."""
        return copy_to_device(torch.randperm(size, generator=draws)[: self.count(size)], device)

    def encode(self, vector: Tensor, draws: torch.Generator) -> State:
        size = len(vector)
        places = self.places(size, draws, vector.device)
        return {"values": vector[places] * (size / self.count(size))}

    def decode(self, message: State, like: Tensor, draws: torch.Generator) -> Tensor:
        places = self.places(len(like), draws, like.device)
        return torch.zeros_like(like).scatter(0, places, message["values"])


class Sign(Codec):
    """Sends a bit a number: its sign, times the mean magnitude in its bucket.

    Args:
        bucket: Number of neighbors that share a scale, ≥ 1.
        feedback: Whether there is error feedback.

    Source:
        Karimireddy et al., ICML 2019, arXiv:1901.09847, Algorithm 1 (EF-signSGD), with buckets in place of layers.
    """

    contracts = True

    def __init__(self, bucket: int = 512, feedback: bool = True) -> None:
        super().__init__(feedback)
        check_count(1, bucket=bucket)
        self.bucket = bucket

    def encode(self, vector: Tensor, draws: torch.Generator) -> State:
        is_positive = (vector >= 0).to(torch.uint8)
        return {"signs": pack(is_positive, bits=1), "scales": mean_magnitudes(vector, self.bucket)}

    def decode(self, message: State, like: Tensor, draws: torch.Generator) -> Tensor:
        size = len(like)
        signs = unpack(packed=message["signs"], bits=1, size=size) * 2 - 1
        scales = message["scales"].repeat_interleave(self.bucket)[:size]
        return signs * scales
