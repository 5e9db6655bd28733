import pytest
import torch
from torchvision.transforms import AutoAugment as LibraryAutoAugment
from torchvision.transforms import AutoAugmentPolicy, InterpolationMode
from torchvision.transforms.autoaugment import _apply_op

from fl_lightning.data.autoaugment import OPERATIONS, STEPS, AutoAugment, apply_operations, policy


def images(batch, channels=3, height=32, width=32, low=0, high=256):
    return torch.randint(low, high, (batch, channels, height, width), dtype=torch.uint8, generator=generator(99))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def library():
    return LibraryAutoAugment(AutoAugmentPolicy.CIFAR10)


@pytest.mark.parametrize("name", list(OPERATIONS)[1:])
@pytest.mark.parametrize(
    "x",
    [images(4), images(3, 1, 20, 37), images(2, 3, 64, 64, 90, 140), images(2, 3, 9, 9, 7, 8), images(2, 3, 2, 2)],
    ids=["rgb", "grey", "faint", "one colour", "four pixels"],
)
def test_an_operation_is_torchvisions_at_every_level(library, name, x):
    magnitudes, has_sign = library._augmentation_space(STEPS + 1, x.shape[2:])[name]
    for level in range(-STEPS, STEPS + 1):
        magnitude = float(magnitudes[abs(level)]) if magnitudes.ndim else 0.0
        magnitude *= -1 if has_sign and level < 0 else 1
        expected = [_apply_op(image, name, magnitude, InterpolationMode.NEAREST, None) for image in x]
        operation = torch.full((len(x),), list(OPERATIONS).index(name))
        result = apply_operations(x, operation, torch.full_like(operation, level))
        assert torch.equal(result, torch.stack(expected)), level


def test_images_of_a_batch_have_operations_and_levels_of_their_own():
    operation = torch.arange(40) % len(OPERATIONS)
    x = images(40)
    level = torch.arange(40) % (2 * STEPS + 1) - STEPS
    expected = [apply_operations(x[i : i + 1], operation[i : i + 1], level[i : i + 1]) for i in range(40)]
    assert torch.equal(apply_operations(x, operation, level), torch.cat(expected))


def test_a_batch_is_torchvisions_image_by_image_with_the_same_draws(library, monkeypatch):
    """The draws are independent and uniform on both sides, so equal results mean equal distributions."""
    x = images(400)
    draws = generator()
    number = torch.randint(25, (400,), generator=draws)
    chance, sign = torch.rand((2, 400, 2), generator=draws)
    parameters = zip(number.tolist(), chance, (sign >= 0.5).long(), strict=True)
    monkeypatch.setattr(library, "get_params", lambda count: next(parameters))
    result = AutoAugment()(x, generator())
    assert torch.equal(result, torch.stack([library(image) for image in x]))
    assert len(number.unique()) == len(policy()[0]) == len(library.policies)


def test_draws_follow_the_generator_alone():
    x = images(30)
    before = x.clone()
    state = torch.get_rng_state()
    first = generator(1)
    again = AutoAugment()(x, generator(1))
    assert torch.equal(AutoAugment()(x, first), again)
    assert not torch.equal(AutoAugment()(x, first), again)  # it moved on
    assert torch.equal(AutoAugment()(x), x)  # without a generator
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("batch", [0, 1])
def test_small_batches(batch):
    assert AutoAugment()(images(batch), generator()).shape == (batch, 3, 32, 32)


@pytest.mark.parametrize(
    ("x", "got"), [(images(2).float(), "torch.float32 with 3"), (images(2, 2), "torch.uint8 with 2")]
)
def test_other_images_are_refused(x, got):
    with pytest.raises(ValueError, match=rf"needs uint8 images with 1 or 3 channels, got {got}; put it before Scale"):
        AutoAugment()(x, generator())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_draws_as_a_cpu():
    x = images(256)
    result = AutoAugment()(x.cuda(), generator()).cpu()
    expected = AutoAugment()(x, generator())
    assert (result.int() - expected.int()).abs().max() <= 1
