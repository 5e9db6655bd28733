"""FedNTD: every form of the distillation against loops in plain Python, and what the teacher is."""

import copy
import math
from functools import partial
from itertools import product

import pytest
import torch
from torch.nn import functional as F

from fl_lightning.methods import FedAvg, FedNTD
from fl_lightning.methods.fedntd import distillation, not_true_distillation, not_true_mse
from fl_lightning.nets import Perceptron
from tests.toys import BatchNormNet, fit, sgd, toy_data, weights_of

Small = partial(Perceptron, hidden=(6,))
TARGET = torch.tensor([0, 3, 3, 1, 2])


def logits(seed, rows=5, classes=4, dtype=torch.float64):
    return 2 * torch.randn(rows, classes, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def softmax(z, temperature):
    powers = [math.exp(value / temperature) for value in z]
    return [value / sum(powers) for value in powers]


def naive(local, teacher, target, temperature, not_true):
    """τ²/B Σ_b Σ_c q_g(c) log(q_g(c) / q_l(c)), without the true class where `not_true`."""
    total = 0.0
    for z, t, y in zip(local.tolist(), teacher.tolist(), target.tolist(), strict=True):
        kept = [c for c in range(len(z)) if not (not_true and c == y)]
        q_l, q_g = (softmax([row[c] for c in kept], temperature) for row in (z, t))
        total += sum(g * math.log(g / q) for g, q in zip(q_g, q_l, strict=True))
    return temperature**2 * total / len(local)


def naive_mse(local, teacher, target):
    squares = [
        (z[c] - t[c]) ** 2
        for z, t, y in zip(local.tolist(), teacher.tolist(), target.tolist(), strict=True)
        for c in range(len(z))
        if c != y
    ]
    return sum(squares) / len(squares)


# --- equations


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("ntd_weight", [0.0, 0.3, 1.0])
def test_distillation_equals_a_naive_loop(temperature, ntd_weight):
    local = logits(0)
    teacher = logits(1)
    kd, ntd = (naive(local, teacher, TARGET, temperature, not_true) for not_true in (False, True))
    value = distillation(local, teacher, TARGET, temperature, ntd_weight)
    assert value.item() == pytest.approx((1 - ntd_weight) * kd + ntd_weight * ntd, rel=1e-12)


def test_mse_equals_a_naive_loop():
    local = logits(0)
    teacher = logits(1)
    value = distillation(local, teacher, TARGET, distance="mse")
    assert value.item() == pytest.approx(naive_mse(local, teacher, TARGET), rel=1e-12)
    kept = ~F.one_hot(TARGET, 4).bool()
    torch.testing.assert_close(value, F.mse_loss(local[kept], teacher[kept]))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
def test_the_gradient_is_that_of_the_paper_and_none_in_the_true_class(temperature):
    """∂L/∂z_c = τ (q̃_l − q̃_g) / B for c ≠ y, exactly 0 for c = y; none in the teacher."""
    local = logits(0).requires_grad_()
    teacher = logits(1).requires_grad_()
    not_true_distillation(local, teacher, TARGET, temperature).backward()
    for b, y in enumerate(TARGET.tolist()):
        kept = [c for c in range(4) if c != y]
        q_l, q_g = (softmax(z[b, kept].tolist(), temperature) for z in (local, teacher))
        expected = [temperature * (q - g) / 5 for q, g in zip(q_l, q_g, strict=True)]
        assert local.grad[b, kept].tolist() == pytest.approx(expected, rel=1e-10, abs=1e-15)
        assert local.grad[b, y] == 0
    assert teacher.grad is None


@pytest.mark.parametrize("distance", ["kl", "mse"])
def test_it_does_not_see_true_logits_nor_the_order_of_classes(distance):
    local = logits(0)
    teacher = logits(1)
    form = partial(distillation, distance=distance)
    value = form(local, teacher, TARGET)
    true = F.one_hot(TARGET, 4).bool()
    assert form(local.masked_fill(true, 50.0), teacher.masked_fill(true, -50.0), TARGET) == value
    order = torch.tensor([2, 0, 3, 1])
    relabelled = order.argsort()[TARGET]
    torch.testing.assert_close(form(local[:, order], teacher[:, order], relabelled), value)
    if distance == "kl":
        shift = logits(2)[:, :1]
        torch.testing.assert_close(form(local + shift, teacher - shift, TARGET), value)
    assert form(local, local, TARGET) == 0
    assert value > 0


@pytest.mark.parametrize("classes", [1, 2])
def test_one_or_two_classes_leave_nothing_to_distil(classes):
    target = torch.zeros(3, dtype=torch.int64)
    local = logits(0, 3, classes).requires_grad_()
    value = not_true_distillation(local, logits(1, 3, classes), target)
    value.backward()
    assert value == 0
    assert not local.grad.any()
    assert not_true_mse(logits(0, 3, 1), logits(1, 3, 1), torch.zeros(3, dtype=torch.int64)) == 0


def test_a_batch_of_one_and_a_batch_of_one_class():
    for target in (TARGET[:1], torch.full((5,), 2)):
        local = logits(0)[: len(target)]
        teacher = logits(1)[: len(target)]
        expected = naive(local, teacher, target, 1.0, True)
        assert not_true_distillation(local, teacher, target).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("temperature", "ntd_weight"), [*product([0.1, 1.0, 3.0], [0.0, 0.5, 1.0])])
def test_huge_logits_stay_finite_in_float32(temperature, ntd_weight):
    local = torch.tensor([[1e4, -1e4, 0.0, 1e4], [-1e4, -1e4, 1e4, 0.0]]).requires_grad_()
    for target in (torch.tensor([0, 1]), torch.tensor([1, 2])):
        value = distillation(local, -local.detach(), target, temperature, ntd_weight)
        (gradient,) = torch.autograd.grad(value, local)
        assert value.isfinite()
        assert gradient.isfinite().all()
    assert not_true_mse(local, -local, torch.tensor([0, 1])).isfinite()


@pytest.mark.parametrize("distance", ["kl", "mse"])
def test_half_types_are_raised(distance):
    local = logits(0).bfloat16()
    teacher = logits(1).bfloat16()
    value = distillation(local, teacher, TARGET, distance=distance)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, distillation(local.float(), teacher.float(), TARGET, distance=distance))


def test_it_runs_under_vmap():
    local = logits(0).view(5, 1, 4)
    teacher = logits(1).view(5, 1, 4)
    target = TARGET.view(5, 1)
    for distance, ntd_weight in (("kl", 1.0), ("kl", 0.4), ("mse", 1.0)):
        form = partial(distillation, distance=distance, ntd_weight=ntd_weight)
        stacked = torch.func.vmap(torch.func.grad_and_value(form))(local, teacher, target)
        for b in range(5):
            torch.testing.assert_close(
                (stacked[0][b], stacked[1][b]), torch.func.grad_and_value(form)(local[b], teacher[b], target[b])
            )


# --- the client


FORMS = [
    {},
    {"beta": 0.5, "temperature": 2.0},
    {"beta": 0.3, "ntd_weight": 0.0, "kd_form": "sum"},
    {"beta": 0.3, "ntd_weight": 0.0, "kd_form": "convex", "temperature": 3.0},
    {"beta": 2.0, "ntd_weight": 0.25},
    {"beta": 0.1, "distance": "mse"},
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_two_rounds_equal_a_loop_by_hand(form):
    """CE + β L, or (1 − β) CE + β L, with the received model as the teacher of each round."""
    data = toy_data((9,), batch_size=4, dtype=torch.float64)
    loop = fit(FedNTD(**form, net=Small, optimizer=sgd()), 2, data, precision="64-true", local_epochs=2)
    net = fit(FedAvg(net=Small), 0, data, precision="64-true").client.net.double()
    beta = form.get("beta", 1.0)
    convex = form.get("kd_form") == "convex"
    temperature = form.get("temperature", 1.0)
    weight = form.get("ntd_weight", 1.0)
    for t in range(2):
        teacher = copy.deepcopy(net).eval()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        for epoch in range(2):
            for x, y in data.view(0, t).batches(epoch=epoch):
                z = net(x)
                g = teacher(x).detach()
                if form.get("distance") == "mse":
                    kept = ~F.one_hot(y, 3).bool()
                    term = F.mse_loss(z[kept], g[kept])
                else:
                    kept = torch.stack([torch.arange(3)[torch.arange(3) != label] for label in y])
                    pairs = ((z, g), (z.gather(1, kept), g.gather(1, kept)))
                    kd, ntd = (
                        temperature**2
                        * F.kl_div(
                            (a / temperature).log_softmax(1), (b / temperature).softmax(1), reduction="batchmean"
                        )
                        for a, b in pairs
                    )
                    term = (1 - weight) * kd + weight * ntd
                optimizer.zero_grad()
                ((1 - beta if convex else 1) * F.cross_entropy(z, y) + beta * term).backward()
                optimizer.step()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(loop.client.net.state_dict()[name], value, rtol=1e-9, atol=1e-12)


class First(FedNTD):
    """Notes the distillation and its gradient at the first step of every client, and the largest of all steps."""

    def training_step(self, batch, batch_idx):
        x, y = batch
        value = distillation(self(x), self.teacher("global")(x), y)
        gradients = torch.autograd.grad(value, list(self.params().values()), allow_unused=True)
        largest = max(g.abs().max().item() for g in gradients if g is not None)
        self.noted.append((self.num_steps, value.item(), largest))
        return super().training_step(batch, batch_idx)


def test_the_distillation_is_zero_at_the_first_step_of_a_round():
    """Without BatchNorm and dropout the model is its own teacher there."""
    client = First(net=Small, optimizer=sgd())
    client.noted = []
    fit(client, 2)
    first = [rest for step, *rest in client.noted if step == 0]
    assert [value for value, _ in first] == [0.0] * 10
    assert max(gradient for _, gradient in first) < 1e-6
    assert min(value for step, value, _ in client.noted if step) > 0


def test_a_teacher_in_train_mode_follows_the_batch():
    """With BatchNorm, without dropout: batch statistics make it the model itself at the first step."""
    first = {}
    for mode in ("eval", "train"):
        client = First(net=partial(BatchNormNet, dropout=0.0), optimizer=sgd(), teacher_mode=mode)
        client.noted = []
        fit(client, 1, toy_data((8, 8)))
        first[mode] = [value for step, value, _ in client.noted if step == 0]
    assert first["train"] == pytest.approx([0.0, 0.0], abs=1e-12)
    assert min(first["eval"]) > 1e-6


def test_without_distillation_no_teacher_is_made():
    client = FedNTD(beta=0.0, net=Small)
    fit(client, 1)
    assert not client._teachers


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"beta": -1.0}, "beta must be at least 0, and at most 1 with kd_form=convex, got -1.0"),
        ({"beta": 1.5, "kd_form": "convex"}, "beta must be at least 0, and at most 1 .* got 1.5"),
        ({"beta": float("nan")}, "beta must be at least 0.* got nan"),
        ({"temperature": 0.0}, "temperature must be above 0, got 0.0"),
        ({"ntd_weight": 1.1}, r"ntd_weight must lie in \[0, 1\], got 1.1; 1 is NTD, 0 is KD"),
        ({"kd_form": "product"}, "kd_form must be one of sum, convex, got 'product'"),
        ({"distance": "l1"}, "distance must be one of kl, mse, got 'l1'"),
        ({"teacher_mode": "off"}, "teacher_mode must be one of eval, train, got 'off'"),
    ],
)
def test_wrong_settings_are_refused(form, words):
    with pytest.raises(ValueError, match=words):
        FedNTD(**form)


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_outside_the_classes_is_refused(label):
    client = FedNTD(net=Small, num_classes=3, input_shape=(4,))
    with pytest.raises(IndexError):
        client.training_step((torch.zeros(2, 4), torch.tensor([0, label])), 0)


class Uncached(FedNTD):
    """Asks the teacher at every step."""

    def training_step(self, batch, batch_idx):
        self.context.logit_cache = None
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("sizes", [(7, 12, 9), (11, 6, 16)])
def test_the_teachers_logits_are_computed_in_the_first_epoch_only(sizes):
    """With 11 or 6 samples the last batch of one is left out, and the next epoch must compute what was not seen."""

    class Counting(FedNTD):
        """Counts the batches that the teacher sees."""

        calls = 0

        def receive(self, broadcast, local):
            super().receive(broadcast, local)
            teacher = self.teacher("global")
            if "_logits" not in vars(teacher):
                computed = teacher._logits
                teacher._logits = lambda x: (setattr(Counting, "calls", Counting.calls + 1), computed(x))[1]

    settings = {"net": BatchNormNet, "optimizer": sgd()}
    cached = fit(Counting(**settings), 2, toy_data(sizes, batch_size=5), local_epochs=4)
    computed = fit(Uncached(**settings), 2, toy_data(sizes, batch_size=5), local_epochs=4)
    for name, value in weights_of(computed).items():
        torch.testing.assert_close(weights_of(cached)[name], value)
    first_epoch = 2 * sum(-(-n // 5) for n in sizes)
    everything = 4 * 2 * sum(-(-n // 5) - (n % 5 == 1) for n in sizes)
    assert (Counting.calls == first_epoch) if all(n % 5 != 1 for n in sizes) else (Counting.calls == everything)


def test_logits_are_not_looked_up_where_they_depend_on_the_batch():
    """BatchNorm without running statistics normalises with the batch in eval mode too, and batches differ."""
    net = partial(BatchNormNet, running=False)
    cached, computed = (
        fit(kind(net=net, optimizer=sgd()), 2, toy_data((7, 12)), local_epochs=3) for kind in (FedNTD, Uncached)
    )
    for name, value in weights_of(computed).items():
        torch.testing.assert_close(weights_of(cached)[name], value)


def test_a_teacher_in_train_mode_takes_one_sample_and_has_no_dropout():
    class Twice(FedNTD):
        def training_step(self, batch, batch_idx):
            teacher = self.teacher("global")
            assert torch.equal(teacher(batch[0]), teacher(batch[0]))
            return super().training_step(batch, batch_idx)

    client = Twice(net=partial(BatchNormNet, dropout=0.5), optimizer=sgd(), teacher_mode="train")
    assert fit(client, 1, toy_data((1, 8))).round_metrics["train/ntd"] >= 0
