"""FedLMD: its term against loops in plain Python, FedNTD where a client is balanced, and what is masked."""

import math
from functools import partial

import pytest
import torch

from fl_lightning import FederatedLoop
from fl_lightning.methods import FedAvg, FedLMD, FedNTD
from fl_lightning.methods.fedlmd import label_masking_distillation, majority
from fl_lightning.methods.fedntd import not_true_distillation
from fl_lightning.nets import Perceptron
from tests.hooks.toy import Updates
from tests.methods.stacked import stacked_and_alone
from tests.methods.test_fedavg import Regression
from tests.toys import BatchNormNet, equal, fit, samples, sgd, toy_data, weights_of

Small = partial(Perceptron, hidden=(6,))
TARGET = torch.tensor([0, 3, 3, 1, 2])
MASKED = torch.tensor([True, False, False, True])


def logits(seed, rows=5, classes=4):
    return 2 * torch.randn(rows, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def naive(local, teacher, target, masked, temperature):
    """τ²/B Σ_b Σ_{c ≠ y, not masked} t_c log(t_c / q_c), row by row."""
    total = 0.0
    for z, t, y in zip(local.tolist(), teacher.tolist(), target.tolist(), strict=True):
        others = [c for c in range(len(z)) if c != y]
        taught = [c for c in others if not masked[c]]
        q = {c: math.exp(z[c] / temperature) / sum(math.exp(z[k] / temperature) for k in others) for c in others}
        p = {c: math.exp(t[c] / temperature) / sum(math.exp(t[k] / temperature) for k in taught) for c in taught}
        total += sum(p[c] * math.log(p[c] / q[c]) for c in taught)
    return temperature**2 * total / len(local)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("masked", [MASKED, torch.tensor([True, True, False, True]), torch.zeros(4, dtype=torch.bool)])
def test_the_term_equals_a_naive_loop(temperature, masked):
    local = logits(0)
    teacher = logits(1)
    value = label_masking_distillation(local, teacher, TARGET, masked, temperature)
    assert value.item() == pytest.approx(naive(local, teacher, TARGET, masked, temperature), rel=1e-12)
    uniform = label_masking_distillation(local, None, TARGET, masked, temperature)
    assert uniform.item() == pytest.approx(naive(local, 0 * teacher, TARGET, masked, temperature), rel=1e-12)


def test_a_sample_without_a_class_in_the_sum_adds_nothing_and_has_no_gradient():
    local = logits(0).requires_grad_()
    masked = torch.tensor([True, True, True, False])
    value = label_masking_distillation(local, logits(1), TARGET, masked)
    (gradient,) = torch.autograd.grad(value, local)
    assert gradient.isfinite().all()
    assert not gradient[TARGET == 3].any()
    assert gradient[TARGET != 3].any(1).all()


def test_the_last_class_in_the_sum_has_a_gradient_and_the_masked_ones_are_pushed_down():
    local = logits(0).requires_grad_()
    value = label_masking_distillation(local, logits(1), TARGET[:1].expand(5), torch.tensor([False, True, True, False]))
    (gradient,) = torch.autograd.grad(value, local)
    assert (gradient[:, 1:3] > 0).all()
    assert (gradient[:, 3] < 0).all()


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([5, 5, 5], [False, False, False]),
        ([1, 0, 0], [True, False, False]),
        ([0, 0, 0], [False, False, False]),
        ([4, 3, 2], [True, False, False]),
        ([2**40, 2**40 + 1, 2**40 - 1], [False, True, False]),
    ],
)
def test_a_class_is_of_the_majority_above_the_mean_count(counts, expected):
    assert majority(torch.tensor(counts)).tolist() == expected


def test_a_balanced_client_distils_as_fedntd():
    local = logits(0)
    teacher = logits(1)
    expected = not_true_distillation(local, teacher, TARGET, 2.0)
    none = torch.zeros(4, dtype=torch.bool)
    torch.testing.assert_close(
        label_masking_distillation(local, teacher, TARGET, none, 2.0), expected, rtol=1e-12, atol=0
    )


def test_clients_of_equally_many_samples_a_class_train_as_fedntd_s():
    """Whole runs, with the received model in eval mode as the teacher of both."""
    x, y = samples(60)
    by_class = [x[y == c][:10] for c in range(3)]
    runs = []
    for client in (FedLMD(beta=0.7, temperature=2.0), FedNTD(beta=0.7, temperature=2.0)):
        client.net_factory = BatchNormNet
        client.optimizer_factory = sgd()
        data = toy_data((15, 15), dtype=torch.float64)
        # Samples of the classes take turns, so that each client has five of each.
        data.source.train = (torch.stack(by_class, dim=1).flatten(0, 1).double(), torch.arange(3).repeat(10))
        runs.append(weights_of(fit(client, 3, data, precision="64-true")))
    for name, value in runs[0].items():
        torch.testing.assert_close(value, runs[1][name], rtol=1e-9, atol=1e-12)


def test_with_two_classes_a_client_of_one_is_taught_the_other_and_an_even_one_too():
    local = torch.tensor([[2.0, -1.0]], dtype=torch.float64, requires_grad=True)
    one = torch.tensor([0])
    for counts, value in (([5, 0], 0.0), ([3, 3], 0.0), ([2, 4], 0.0)):
        found = label_masking_distillation(local, logits(1, rows=1, classes=2), one, majority(torch.tensor(counts)))
        assert found.item() == value
        (gradient,) = torch.autograd.grad(found, local)
        assert not gradient.any(), "q over the single not-true class is 1"


def test_the_counts_stay_with_the_client():
    watch = Updates()
    fit(FedLMD(net=Small, optimizer=sgd()), 1, callbacks=[watch])
    assert not any(update.extras for update in watch.rounds[0].values())


def test_two_rounds_differ_from_fedntd_and_depend_on_the_teacher():
    found = [
        weights_of(fit(kind(net=Small, optimizer=sgd()), 2))
        for kind in (FedNTD, FedLMD, partial(FedLMD, teacher="uniform"))
    ]
    assert not equal(found[0], found[1])
    assert not equal(found[1], found[2])


def test_it_stacks():
    client = FedLMD(teacher="uniform", net=Small, num_classes=3, input_shape=(4,)).double()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 4, generator=g).double()
    y = torch.randint(3, (3, 5), generator=g)
    masked = torch.tensor([[True, False, False], [False, False, True], [True, True, False]])
    torch.testing.assert_close(*stacked_and_alone(client, {"majority": masked}, x, y))


def test_the_uniform_teacher_is_no_copy_of_the_model():
    loop = fit(FedLMD(teacher="uniform", net=BatchNormNet, optimizer=sgd()), 2)
    assert not loop.client.distils


def test_what_it_refuses():
    with pytest.raises(ValueError, match="beta must be at least 0"):
        FedLMD(beta=-1.0)
    with pytest.raises(ValueError, match="temperature must be above 0"):
        FedLMD(temperature=0.0)
    with pytest.raises(ValueError, match="teacher must be one of received, uniform"):
        FedLMD(teacher="none")
    with pytest.raises(ValueError, match="FedLMD needs the logits"):
        FederatedLoop(FedLMD(module=Regression()))


def test_beta_0_is_fedavg():
    plain = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 2)
    ours = fit(FedLMD(beta=0.0, net=BatchNormNet, optimizer=sgd()), 2)
    assert equal(weights_of(ours), weights_of(plain))
