import pickle

import pytest
import torch
from torch import Tensor

from fl_lightning.data.transforms import Compose, CropFlip, Cutout, Normalize, ResizedCropFlip, Scale


def images(batch: int = 7, channels: int = 3, height: int = 10, width: int = 6) -> Tensor:
    return torch.randint(1, 256, (batch, channels, height, width), dtype=torch.uint8, generator=generator(99))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def naive_crop_flip(x: Tensor, padding: int, draw: Tensor) -> Tensor:
    """Image by image, pixel by pixel, from the draws that `CropFlip` makes."""
    out = torch.zeros_like(x)
    batch, _, height, width = x.shape
    for b in range(batch):
        top, left = (int(draw[k, b, 0] * (2 * padding + 1)) - padding for k in (0, 1))
        for i in range(height):
            for j in range(width):
                row = i + top
                column = (width - 1 - j if draw[2, b, 0] < 0.5 else j) + left
                if 0 <= row < height and 0 <= column < width:
                    out[b, :, i, j] = x[b, :, row, column]
    return out


def naive_cutout(x: Tensor, size: int, draw: Tensor) -> Tensor:
    out = x.clone()
    batch, _, height, width = x.shape
    for b in range(batch):
        top = int(draw[0, b, 0] * height) - size // 2
        left = int(draw[1, b, 0] * width) - size // 2
        out[b, :, max(top, 0) : max(top + size, 0), max(left, 0) : max(left + size, 0)] = 0
    return out


@pytest.mark.parametrize("padding", [0, 1, 4, 11])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float64])
def test_crop_flip_is_the_loop_over_images(padding, dtype):
    x = images().to(dtype)
    expected = naive_crop_flip(x, padding, torch.rand((3, 7, 1), generator=generator()))
    result = CropFlip(padding)(x, generator())
    assert result.dtype == dtype
    assert torch.equal(result, expected)


@pytest.mark.parametrize("padding", [0, 1, 4, 5])
def test_a_reflected_crop_is_a_crop_of_torchvisions_padded_image(padding):
    from torchvision.transforms import functional as tv

    x = images()
    draw = torch.rand((3, 7, 1), generator=generator())
    expected = []
    for image, (top, left, mirror) in zip(x, draw[:, :, 0].T.tolist(), strict=True):
        padded = tv.pad(image, [padding] * 4, padding_mode="reflect")
        places = 2 * padding + 1
        cut = tv.crop(padded, int(top * places), int(left * places), *image.shape[1:])
        expected.append(tv.hflip(cut) if mirror < 0.5 else cut)
    assert torch.equal(CropFlip(padding, reflect=True)(x, generator()), torch.stack(expected))


def test_a_reflection_needs_an_image_larger_than_the_padding():
    with pytest.raises(ValueError, match="smaller than the image to be reflected, got 6 for 6 pixels"):
        CropFlip(6, reflect=True)(images(), generator())


@pytest.mark.parametrize("size", [1, 2, 5, 16])
def test_cutout_is_the_loop_over_images(size):
    x = images().float()
    expected = naive_cutout(x, size, torch.rand((2, 7, 1), generator=generator()))
    assert torch.equal(Cutout(size)(x, generator()), expected)


def test_crop_flip_reaches_every_place_and_both_sides_equally():
    x = torch.zeros(20_000, 1, 3, 3)
    x[:, :, 1, 0] = 1
    seen = CropFlip(1)(x, generator())[:, 0].sum(0) / len(x)
    # each row a third of the time; columns 1, 0 or out of sight a third each, and 1, 2 or out where mirrored
    torch.testing.assert_close(seen, torch.tensor([[1, 2, 1]] * 3) / 18, atol=0.01, rtol=0)


def test_normalize_without_a_mean_is_refused():
    with pytest.raises(ValueError, match="needs one mean for each channel, or one for all, got none"):
        Normalize((), ())


def test_normalize_is_torchvisions():
    from torchvision.transforms import functional as tv

    x = images()
    mean = (0.5, 0.4, 0.1)
    std = (0.2, 0.3, 0.25)
    expected = tv.normalize(x / 255, mean, std)
    result = Normalize(mean, std)(x)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(
        Normalize(mean, std)(x.double()), tv.normalize(x.double() / 255, mean, std), atol=1e-14, rtol=1e-14
    )


def test_scale_keeps_floats_and_the_given_tensor():
    x = torch.tensor([0, 8, 16], dtype=torch.uint8)
    assert torch.equal(Scale(16)(x), torch.tensor([0, 0.5, 1]))
    for dtype in (torch.float32, torch.float64):
        given = torch.ones(3, dtype=dtype)
        assert Scale(2)(given).dtype == dtype
        assert torch.equal(given, torch.ones(3, dtype=dtype))


PIPELINE = Compose(CropFlip(2), Normalize((0.5,), (0.25,)), Cutout(4))


def test_evaluation_draws_nothing_and_given_images_stay():
    x = images(channels=1)
    before = x.clone()
    state = torch.get_rng_state()
    assert torch.equal(PIPELINE(x, None), Normalize((0.5,), (0.25,))(x))
    assert not torch.equal(PIPELINE(x, generator()), PIPELINE(x, None))
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)


def test_draws_follow_the_generator():
    x = images()
    first = generator(1)
    again = PIPELINE(x, generator(1))
    assert torch.equal(PIPELINE(x, first), again)
    assert not torch.equal(PIPELINE(x, first), again)  # it moved on


def test_a_first_batch_in_inference_mode_does_not_spoil_training():
    normalize = Normalize((0.123,), (0.321,))
    x = torch.rand(2, 1, 4, 4)
    with torch.inference_mode():
        normalize(x)
    weight = torch.ones((), requires_grad=True)
    (normalize(x) * weight).sum().backward()
    assert weight.grad is not None


@pytest.mark.parametrize("batch", [0, 1])
def test_small_batches(batch):
    assert PIPELINE(images(batch), generator()).shape == (batch, 3, 10, 6)


def test_transforms_pickle():
    x = images()
    assert torch.equal(pickle.loads(pickle.dumps(PIPELINE))(x, generator()), PIPELINE(x, generator()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_sees_the_draws_of_a_cpu():
    x = images()
    torch.testing.assert_close(PIPELINE(x.cuda(), generator()).cpu(), PIPELINE(x, generator()))


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Scale(0), "must be > 0, got 0"),
        (lambda: Normalize((0, 0), (1,)), "got 2 and 1"),
        (lambda: Normalize((0,), (0,)), "must be > 0, got std"),
        (lambda: CropFlip(-1), "must be >= 0, got -1"),
        (lambda: Cutout(0), "must be >= 1, got 0"),
        (lambda: Normalize((0, 0), (1, 1))(images()), "2 means for samples with 3 channels"),
    ],
)
def test_wrong_values_are_refused(make, sentence):
    with pytest.raises(ValueError, match=sentence):
        make()


def test_a_resized_crop_of_everything_is_the_image_or_its_mirror_image():
    x = images()
    found = ResizedCropFlip(scale=1.0, ratio=1.0)(x, generator())
    mirrored = torch.rand((5, len(x)), generator=generator())[4] < 0.5
    assert 0 < mirrored.sum() < len(x)
    torch.testing.assert_close(found, torch.where(mirrored[:, None, None, None], x.flip(-1), x))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_resized_crop_interpolates_within_the_image(dtype):
    x = images(batch=50).to(dtype)
    found = ResizedCropFlip()(x, generator())
    assert found.shape == x.shape
    assert found.dtype == dtype
    low = x.amin((2, 3), keepdim=True)
    high = x.amax((2, 3), keepdim=True)
    assert bool(((found >= low) & (found <= high)).all())
    torch.testing.assert_close(found, ResizedCropFlip()(x, generator()))
    assert bool((found != x).flatten(1).any(1).all())
    torch.testing.assert_close(ResizedCropFlip()(x), x)  # without a generator


def test_a_resized_crop_keeps_at_least_its_share():
    """Columns of a ramp: the range that is left tells how wide the crop was."""
    ramp = torch.arange(64.0).expand(400, 1, 64, 64)
    wide = ResizedCropFlip(scale=0.5, ratio=1.0)(ramp, generator()).flatten(1)
    width = (wide.amax(1) - wide.amin(1) + 1) / 64
    assert bool((width >= 0.5**0.5 - 0.03).all())
    assert float(width.std()) > 0.02


def test_a_resized_crop_is_as_wide_to_its_height_as_the_ratio_allows():
    """Ramps of columns and rows: the ranges that are left tell how wide and how high the crop was."""
    ramp = torch.arange(64.0)
    both = torch.stack([ramp.expand(64, 64), ramp[:, None].expand(64, 64)]).expand(400, 2, 64, 64)
    found = ResizedCropFlip(scale=0.2, ratio=2.0)(both, generator()).flatten(2)
    width, height = ((found.amax(2) - found.amin(2) + 1) / 64).unbind(1)
    inside = (width < 0.95) & (height < 0.95)
    shape = (width / height)[inside]
    assert float(shape.max()) == pytest.approx(2.0, rel=0.1)
    assert float(shape.min()) == pytest.approx(0.5, rel=0.1)
    middle = float(shape.log().mean())
    assert abs(middle) < 0.1


def test_the_defaults_of_a_resized_crop_are_torchvisions():
    x = images()
    torch.testing.assert_close(ResizedCropFlip()(x, generator()), ResizedCropFlip(0.08, 4 / 3)(x, generator()))
    assert (ResizedCropFlip().scale, ResizedCropFlip().ratio) == (0.08, 4 / 3)


@pytest.mark.parametrize("given", [{"scale": 0.0}, {"scale": 1.1}, {"ratio": 0.5}], ids=str)
def test_a_resized_crop_refuses(given):
    with pytest.raises(ValueError, match="ResizedCropFlip needs a scale"):
        ResizedCropFlip(**given)
