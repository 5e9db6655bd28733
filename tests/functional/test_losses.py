import math

import pytest
import torch
import torch.nn.functional as F

from fl_lightning.functional.losses import calibrated_cross_entropy, cross_entropy, kl_divergence, proximal


def logits(seed, rows=6, classes=5, dtype=torch.float64):
    return torch.randn(rows, classes, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def naive_kl(local, teacher, temperature, exclude):
    total = 0.0
    for z, t, out in zip(local.tolist(), teacher.tolist(), exclude.tolist(), strict=True):
        kept = [c for c in range(len(z)) if not out[c]]
        p = [math.exp(t[c] / temperature) for c in kept]
        q = [math.exp(z[c] / temperature) for c in kept]
        total += sum(a / sum(p) * math.log((a / sum(p)) / (b / sum(q))) for a, b in zip(p, q, strict=True))
    return temperature**2 * total / len(local)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0])
def test_kl_equals_torch_and_a_naive_loop(temperature):
    local = logits(0)
    teacher = logits(1)
    reference = F.kl_div(
        F.log_softmax(local / temperature, 1), F.softmax(teacher / temperature, 1), reduction="batchmean"
    )
    torch.testing.assert_close(kl_divergence(local, teacher, temperature), temperature**2 * reference)
    exclude = logits(2) > 0.3
    exclude[0] = True
    exclude[1] = torch.tensor([True, True, False, True, True])
    value = kl_divergence(local, teacher, temperature, exclude)
    assert value.item() == pytest.approx(naive_kl(local, teacher, temperature, exclude), rel=1e-12)


def test_kl_gradient_is_the_difference_of_the_softmaxes_and_zero_where_excluded():
    temperature = 2.0
    local = logits(0).requires_grad_()
    teacher = logits(1)
    true = F.one_hot(torch.tensor([0, 1, 2, 3, 4, 0]), 5).bool()
    kl_divergence(local, teacher, temperature, true).backward()
    q_local, q_teacher = (
        F.softmax(z.detach().masked_fill(true, -torch.inf) / temperature, 1) for z in (local, teacher)
    )
    torch.testing.assert_close(local.grad, temperature * (q_local - q_teacher) / 6)
    assert (local.grad[true] == 0).all()


def test_kl_is_zero_at_the_teacher_and_blind_to_shifts_and_excluded_values():
    local = logits(0)
    teacher = logits(1)
    exclude = logits(2) > 0.8
    assert kl_divergence(local, local).item() == 0
    value = kl_divergence(local, teacher, 1.5, exclude)
    assert value > 0
    torch.testing.assert_close(kl_divergence(local + 7, teacher - 3, 1.5, exclude), value)
    changed = torch.where(exclude, 1e4, local)
    assert kl_divergence(changed, teacher, 1.5, exclude) == value


def test_kl_takes_one_mask_for_the_whole_batch_and_treats_the_teacher_as_constant():
    local = logits(0)
    teacher = logits(1).requires_grad_()
    mask = torch.tensor([True, False, False, True, False])
    value = kl_divergence(local.requires_grad_(), teacher, 1.0, mask)
    assert value == kl_divergence(local, teacher, 1.0, mask.expand(6, 5))
    value.backward()
    assert teacher.grad is None


@pytest.mark.parametrize("left", [0, 1])
def test_kl_with_fewer_than_two_classes_left_is_zero_with_zero_gradient(left):
    local = logits(0, dtype=torch.float32).requires_grad_()
    exclude = torch.arange(5).expand(6, 5) >= left
    value = kl_divergence(local, logits(1, dtype=torch.float32), 1.0, exclude)
    value.backward()
    assert value == 0
    assert (local.grad == 0).all()
    assert kl_divergence(logits(0, classes=1), logits(1, classes=1)) == 0


@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_losses_are_finite_for_huge_logits(temperature):
    local = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 1e4]]).requires_grad_()
    teacher = -local.detach()
    exclude = torch.tensor([[True, False, False], [False, False, False]])
    for value in (kl_divergence(local, teacher, temperature, exclude), kl_divergence(local, teacher)):
        (gradient,) = torch.autograd.grad(value, local)
        assert value.isfinite()
        assert gradient.isfinite().all()
    assert cross_entropy(local, torch.tensor([1, 0])).isfinite()


@pytest.mark.parametrize("temperature", [0.0, -1.0, math.nan])
def test_kl_refuses_a_temperature_that_is_not_positive(temperature):
    with pytest.raises(ValueError, match="temperature must be positive, got"):
        kl_divergence(logits(0), logits(1), temperature)


def test_losses_run_under_vmap_with_gradients():
    local = torch.stack([logits(s) for s in range(3)])
    teacher = logits(9)
    target = torch.tensor([0, 1, 2, 3, 4, 0])
    exclude = torch.stack([logits(s) > s - 1 for s in (20, 21, 22)])  # the last rows lose most classes, or all

    def loss(z, mask):
        near = proximal({"z": z}, {"z": teacher})
        return kl_divergence(z, teacher, 2.0, mask) + cross_entropy(z, target) + near

    stacked = torch.func.vmap(torch.func.grad_and_value(loss))(local, exclude)
    for i in range(3):
        gradient, value = torch.func.grad_and_value(loss)(local[i], exclude[i])
        torch.testing.assert_close((stacked[0][i], stacked[1][i]), (gradient, value))


def test_losses_raise_half_types_and_keep_float64():
    target = torch.tensor([0, 1, 2, 3, 4, 0])
    for dtype, result in [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ]:
        local = logits(0).to(dtype)
        teacher = logits(1).to(dtype)
        values = (
            (cross_entropy(local, target), cross_entropy(local.double(), target)),
            (kl_divergence(local, teacher), kl_divergence(local.double(), teacher.double())),
            (
                proximal({"a": local}, {"a": teacher}),
                proximal({"a": local.double()}, {"a": teacher.double()}),
            ),
        )
        for value, exact in values:
            assert value.dtype == result
            torch.testing.assert_close(value.double(), exact, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_losses_do_not_change_under_cpu_autocast(dtype):
    target = torch.tensor([0, 1, 2, 3, 4, 0])
    local = logits(0).to(dtype)
    teacher = logits(1).to(dtype)

    def values():
        exclude = F.one_hot(target, 5).bool()
        near = proximal({"a": local}, {"a": teacher})
        return cross_entropy(local, target), kl_divergence(local, teacher, 2.0, exclude), near

    outside = values()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert values() == outside


def test_cross_entropy_equals_a_naive_loop_and_refuses_unknown_classes():
    z = logits(3)
    target = torch.tensor([0, 1, 2, 3, 4, 0])
    naive = [math.log(sum(map(math.exp, row))) - row[y] for row, y in zip(z.tolist(), target, strict=True)]
    assert cross_entropy(z, target).item() == pytest.approx(sum(naive) / 6, rel=1e-12)
    with pytest.raises(IndexError):
        cross_entropy(z, target + 1)


def test_proximal_is_half_the_squared_distance_and_its_gradient_the_difference():
    params = {"w": logits(0).requires_grad_(), "b": logits(1)[0].requires_grad_()}
    reference = {name: (p.detach() - 0.5).requires_grad_() for name, p in params.items()}
    value = proximal(params, {**reference, "running_mean": torch.ones(3)})
    assert value.item() == pytest.approx(0.5 * 35 * 0.25)
    value.backward()
    for name, p in params.items():
        torch.testing.assert_close(p.grad, torch.full_like(p, 0.5))
        assert reference[name].grad is None


def test_proximal_has_zero_value_and_gradient_at_the_reference():
    w = logits(0).requires_grad_()
    value = proximal({"w": w}, {"w": w.detach().clone()})
    value.backward()
    assert value == 0
    assert (w.grad == 0).all()
    with pytest.raises(KeyError, match="w"):
        proximal({"w": w}, {})


def test_calibrated_cross_entropy_is_a_softmax_over_the_classes_left_in():
    z = logits(0).requires_grad_()
    target = torch.tensor([0, 2, 2, 4, 0, 4])
    shift = torch.tensor([0.3, -torch.inf, -1.0, -torch.inf, 0.5], dtype=torch.float64)
    value = calibrated_cross_entropy(z, target, shift)
    kept = [0, 2, 4]
    reference = F.cross_entropy((z + shift)[:, kept], torch.tensor([kept.index(int(label)) for label in target]))
    torch.testing.assert_close(value, reference)
    (gradient,) = torch.autograd.grad(value, z)
    assert (gradient[:, [1, 3]] == 0).all()
    assert torch.equal(calibrated_cross_entropy(z, target, torch.zeros(5)), cross_entropy(z, target))
    assert calibrated_cross_entropy(z, torch.ones(6, dtype=torch.int64), shift) == torch.inf
