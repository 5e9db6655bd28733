"""Codecs by themselves: what they lose, how many bytes they take, what they refuse."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fl_lightning.aggregation import FP16, QSGD, Codec, RandomK, Sign, TopK
from fl_lightning.functional.coding import index_bits, pack, quantise, unpack
from fl_lightning.functional.traffic import traffic

CONTRACTING = [
    FP16(feedback=True),
    *(QSGD(bits, bucket, feedback=True) for bits, bucket in ((2, 512), (4, 64), (8, 512))),
    *(TopK(fraction) for fraction in (0.01, 0.3)),
    *(Sign(bucket) for bucket in (16, 512)),
]
PLAIN = [
    FP16(),
    QSGD(8),
    QSGD(4, 7),
    QSGD(3),
    QSGD(2, 64),
    TopK(0.1, feedback=False),
    RandomK(0.1),
    Sign(feedback=False),
]
names = [f"{type(codec).__name__}-{'-'.join(map(str, vars(codec).values()))}" for codec in CONTRACTING]


def draws(seed=0):
    return torch.Generator().manual_seed(seed)


def through(codec, x, seed=0):
    return codec.decode(codec.encode(x, draws(seed)), x, draws(seed))


def shortening(codec, n):
    """δ of ‖x − C(x)‖² ≤ (1 − δ) ‖x‖²; float16 has nothing for numbers below 3e-8, until they have added up."""
    if isinstance(codec, FP16):
        return 0
    return codec.fraction if isinstance(codec, TopK) else 1 / min(codec.bucket, n)


@pytest.mark.parametrize("codec", CONTRACTING, ids=names)
@settings(max_examples=40, deadline=None)
@given(st.integers(1, 1200), st.integers(0, 2**31), st.sampled_from([0.3, 1.0, 8.0]), st.sampled_from([1e-4, 1.0, 1e3]))
def test_with_feedback_it_contracts(codec, n, seed, tail, scale):
    """For every vector, those with few large numbers and with zeros too."""
    x = torch.randn(n, generator=draws(seed)).double()
    x = (scale * x.sign() * x.abs().pow(tail)).float()
    x[:: 1 + seed % 5] *= seed % 2
    lost, whole = (value.double().square().sum() for value in (x - through(codec, x), x))
    assert lost <= (1 - shortening(codec, n)) * whole * (1 + 1e-6)


def test_random_places_lose_more_than_there_is():
    """E‖x − C(x)‖² = (n / k − 1) ‖x‖²: there is no feedback."""
    x = torch.randn(200, generator=draws())
    lost = [(x - through(RandomK(0.1), x, seed)).square().sum() for seed in range(500)]
    assert torch.stack(lost).mean() / x.square().sum() == pytest.approx(1 / 0.1 - 1, rel=0.05)


@pytest.mark.parametrize("codec", [QSGD(2, 16), QSGD(4, 512), RandomK(0.25)])
def test_without_feedback_the_mean_over_draws_is_exact(codec):
    x = torch.randn(40, generator=draws())
    found = torch.stack([through(codec, x, seed) for seed in range(500)]).double()
    error = (found.mean(0) - x) / (found.std(0).clamp(min=0.05 * x.abs().max()) / math.sqrt(500))
    assert error.abs().max() < 4.5


@pytest.mark.parametrize(
    ("codec", "size"),
    [
        (FP16(), 2 * 1000),
        (QSGD(8), 1000 + 4 * 2),
        (QSGD(4), 500 + 4 * 2),
        (QSGD(3, 100), 375 + 4 * 10),
        (QSGD(2), 250 + 4 * 2),
        (TopK(0.05), 50 * 4 + 63),  # 50 places of 10 bits
        (RandomK(0.05), 50 * 4),
        (Sign(), 125 + 4 * 2),
    ],
)
def test_bytes_are_those_of_the_message(codec, size):
    """The tensors' own bytes, from which the vector is read again."""
    x = torch.randn(1000, generator=draws())
    message = codec.encode(x, draws())
    content = {name: (value.numpy().tobytes(), value.dtype) for name, value in message.items()}
    assert traffic(message, {}) == sum(len(data) for data, _ in content.values()) == size
    again = {name: torch.frombuffer(bytearray(data), dtype=dtype) for name, (data, dtype) in content.items()}
    assert torch.equal(codec.decode(again, x, draws()), codec.decode(message, x, draws()))


@given(st.integers(1, 20), st.integers(1, 70), st.integers(0, 2**31))
@settings(max_examples=60, deadline=None)
def test_bits_are_packed_and_read_again(bits, n, seed):
    codes = torch.randint(2**bits, (n,), generator=draws(seed))
    packed = pack(codes, bits)
    assert (packed.dtype, packed.numel()) == (torch.uint8, -(-n * bits // 8))
    assert unpack(packed, bits, n).tolist() == codes.tolist()
    assert max(range(n)) < 2 ** index_bits(n)


@pytest.mark.parametrize("codec", PLAIN, ids=lambda codec: type(codec).__name__)
@pytest.mark.parametrize("n", [1, 5, 513])
def test_any_length_and_type_comes_back(codec, n):
    for dtype in (torch.float32, torch.float64):
        x = torch.randn(n, generator=draws(n)).to(dtype)
        found = through(codec, x)
        assert (found.shape, found.dtype) == (x.shape, dtype)
        assert not through(codec, torch.zeros_like(x)).any()
        assert not through(codec, torch.full_like(x, torch.nan)).isfinite().all()


def test_what_is_large_or_tiny_stays_finite():
    x = torch.tensor([1e30, -70000.0, 1e-30, 0.0])
    assert through(FP16(), x).tolist() == [65504.0, -65504.0, 0.0, 0.0]
    for codec in (QSGD(4), Sign(), TopK(0.5)):
        assert through(codec, x).isfinite().all()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: QSGD(1), "bits must be at least 2, got 1; one of them is the sign"),
        (lambda: QSGD(9), "bits must be at most 8, got 9; FP16 has 16"),
        (lambda: QSGD(bucket=0), "bucket must be at least 1"),
        (lambda: TopK(0.0), "fraction must be above 0, got 0.0; it is the share"),
        (lambda: RandomK(1.5), "fraction must be at most 1, got 1.5"),
        (lambda: RandomK(feedback=True), "feedback keeps what a codec loses.*RandomK does not say so"),
        (lambda: Own(feedback=True), "feedback keeps what a codec loses.*Own does not say so"),
        (lambda: Own(down=True), "down codes the weights themselves, and Own codes what they moved"),
    ],
)
def test_what_does_not_hold_is_refused(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


class Own(Codec):
    """A user's codec: everything in bfloat16."""

    def encode(self, vector, draws):
        return {"values": vector.bfloat16()}

    def decode(self, message, like, draws):
        return message["values"].to(like.dtype)


@pytest.mark.parametrize("noise", [None, torch.full((4,), 0.5)])
def test_a_bucket_of_zeros_has_the_code_of_zero(noise):
    codes, scales = quantise(torch.tensor([0.0, 0.0, 1.0, -1.0]), levels=3, bucket=2, noise=noise)
    assert codes.tolist() == [3, 3, 6, 0]
    assert scales.tolist() == [0, 1]
