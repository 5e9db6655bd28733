"""Coding of vectors in fewer bits: equations without draws, bounds of their errors, and packed bits."""

import torch
from torch import Tensor
from torch.nn.functional import pad

BYTE = 8
"""Number of bits in a byte."""


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack whole numbers of `bits` bits each end to end, (n,) in [0, 2^bits) -> (⌈n · bits / 8⌉,) uint8.

    >>> pack(torch.tensor([1, 0, 3, 2, 1]), bits=2)
    tensor([177,   1], dtype=torch.uint8)
    """
    if bits == BYTE:
        return codes.to(torch.uint8)
    stream = torch.stack([(codes >> place & 1).to(torch.uint8) for place in range(bits)], dim=1).reshape(-1)
    columns = pad(stream, (0, -len(stream) % BYTE)).view(-1, BYTE).unbind(1)
    packed = columns[0].clone()
    for place, column in enumerate(columns[1:], start=1):
        packed |= column << place
    return packed


def unpack(packed: Tensor, bits: int, size: int) -> Tensor:
    """Return `size` whole numbers of `bits` bits each, (⌈size · bits / 8⌉,) uint8 -> (size,) int32.

    >>> unpack(torch.tensor([177, 1], dtype=torch.uint8), bits=2, size=5)
    tensor([1, 0, 3, 2, 1], dtype=torch.int32)
    """
    if bits == BYTE:
        return packed[:size].to(torch.int32)
    stream = torch.stack([packed >> place & 1 for place in range(BYTE)], dim=1).reshape(-1)
    columns = stream[: size * bits].view(size, bits).unbind(1)
    codes = torch.zeros(size, dtype=torch.int32, device=packed.device)
    for place, column in enumerate(columns):
        codes |= column.to(torch.int32) << place
    return codes


def index_bits(size: int) -> int:
    """Return the number of bits of an index into a vector of `size` numbers.

    >>> index_bits(1), index_bits(1024), index_bits(1025)
    (1, 10, 11)
    """
    return max(1, (size - 1).bit_length())


def in_buckets(x: Tensor, bucket: int) -> Tensor:
    """Cut a vector into rows of `bucket` neighbors, the last filled up with 0: (n,) -> (⌈n / bucket⌉, bucket)."""
    return pad(x, (0, -len(x) % bucket)).view(-1, bucket)


def quantise(x: Tensor, levels: int, bucket: int, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Round the numbers of a bucket to multiples of M / s, where M is the greatest magnitude in the bucket.

    With noise a number is rounded up or down, floor(x / M · s + u), so that the mean over uniform u is the number.
    Without noise it is rounded to the nearest multiple. 0 is a multiple, so that no number is further from its code
    than from 0, and the greatest magnitude is exact: ‖x − C(x)‖² ≤ (1 − 1 / bucket) ‖x‖².

    Args:
        x: The numbers, (n,) floats.
        levels: Number of multiples above 0, s ≥ 1.
        bucket: Number of neighbors that share a scale, ≥ 1.
        noise: Noise u in [0, 1), (n,). None rounds to the nearest multiple.

    Returns:
        Codes in [0, 2 s], (n,) int32, where s stands for 0. The scale M of every bucket, (⌈n / bucket⌉,).

    >>> codes, scales = quantise(torch.tensor([1.0, -0.2, 0.6, 2.0]), levels=1, bucket=2)
    >>> codes, scales, dequantise(codes, scales, levels=1, bucket=2)
    (tensor([2, 1, 1, 2], dtype=torch.int32), tensor([1., 2.]), tensor([1., 0., 0., 2.]))
    """
    scales = in_buckets(x, bucket).abs().amax(1)
    scale_of = scales.repeat_interleave(bucket)[: len(x)]
    multiples = torch.where(scale_of > 0, x / scale_of, 0.0) * levels
    rounded = multiples.round() if noise is None else (multiples + noise).floor()
    return rounded.clamp(-levels, levels).to(torch.int32) + levels, scales


def dequantise(codes: Tensor, scales: Tensor, levels: int, bucket: int) -> Tensor:
    """Return the numbers that `quantise` has coded: (n,), (⌈n / bucket⌉,) -> (n,)."""
    scale_of = scales.repeat_interleave(bucket)[: len(codes)]
    return (codes - levels).to(scales.dtype) / levels * scale_of


def largest(x: Tensor, k: int) -> Tensor:
    """Find the k numbers of greatest magnitude: (n,) -> their places (k,) int64, without an order.

    The vector C(x) of these numbers, 0 elsewhere, has ‖x − C(x)‖² ≤ (1 − k / n) ‖x‖².

    >>> largest(torch.tensor([0.1, -3.0, 2.0]), 2).sort().values
    tensor([1, 2])
    """
    return x.abs().topk(k, sorted=False).indices


def mean_magnitudes(x: Tensor, bucket: int) -> Tensor:
    """Average the magnitudes of every bucket, m = ‖x‖₁ / d over its d numbers: (n,) -> (⌈n / bucket⌉,).

    For the signs m is the best scale: ‖x − m · sign(x)‖² = ‖x‖² − ‖x‖₁² / d ≤ (1 − 1 / d) ‖x‖², whichever sign 0 has.

    >>> mean_magnitudes(torch.tensor([1.0, -3.0, 4.0]), bucket=2)
    tensor([2., 4.])
    """
    counts = in_buckets(torch.ones_like(x), bucket).sum(1)
    return in_buckets(x.abs(), bucket).sum(1) / counts
