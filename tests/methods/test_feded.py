"""FedED: its terms against loops over samples and classes, its laws, and what happens where it diverges."""

import math
from functools import partial

import pytest
import torch

from fl_lightning import FederatedDataModule, FederatedLoop, NonFiniteUpdateError
from fl_lightning.data import FixedPartition, TensorSource
from fl_lightning.functional.classes import in_local
from fl_lightning.methods import SAM, FedAvg, FedED, FedEXPAggregator
from fl_lightning.methods.feded import calibrated_softmax, empty_class_distillation, logit_suppression
from fl_lightning.nets import Perceptron
from tests.methods.stacked import stacked_and_alone
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, weights_of

COUNTS = [
    [30, 0, 5, 0, 0, 65],
    [10, 20, 30, 25, 15, 7],  # no empty class
    [9, 0, 3, 1, 2, 2],  # one empty class
    [0, 0, 12, 0, 0, 0],  # one class
]
Small = partial(Perceptron, hidden=(6,))


def problem(counts, batch=7, scale=2.0, dtype=torch.float64):
    """Local and received logits, targets that the client has, and its prior."""
    g = torch.Generator().manual_seed(sum(counts))
    prior = in_local(torch.tensor(counts))
    target = torch.multinomial(prior, batch, replacement=True, generator=g)
    local, teacher = (scale * torch.randn(batch, len(counts), generator=g, dtype=torch.float64) for _ in range(2))
    return local.to(dtype).requires_grad_(), teacher.to(dtype), target, prior.to(dtype)


def naive_cal(z, y, p):
    total = 0.0
    for row, label in zip(z.tolist(), y.tolist(), strict=True):
        total -= math.log(p[label] * math.exp(row[label]) / sum(p[c] * math.exp(row[c]) for c in range(len(p)) if p[c]))
    return total / len(y)


def naive_dis(z, teacher, p):
    empty = [c for c in range(len(p)) if not p[c]]
    total = 0.0
    for row, other in zip(z.tolist(), teacher.tolist(), strict=True):
        q = [math.exp(row[c]) / sum(math.exp(row[o]) for o in empty) for c in empty]
        q_g = [math.exp(other[c]) / sum(math.exp(other[o]) for o in empty) for c in empty]
        total += sum(a * math.log(a / b) for a, b in zip(q_g, q, strict=True))
    return total / len(z)


def naive_logit(z, y, p, form):
    total = 0.0
    rows = list(zip(z.tolist(), y.tolist(), strict=True))
    for c in range(len(p)):
        if not p[c]:
            continue
        offset = math.log(p[c]) + math.log(len(p))
        if form == "official":
            mean = sum(1.0 if label == c else math.exp(row[c] - offset) for row, label in rows) / len(rows)
        else:
            mean = sum(math.exp(row[c]) for row, label in rows if label != c) / len(rows)
        total += p[c] * math.log(mean) if mean else 0.0
    return total


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("batch", [1, 7])
def test_terms_are_those_of_a_loop(counts, batch):
    local, teacher, y, prior = problem(counts, batch)
    p = prior.tolist()
    assert calibrated_softmax(local, y, prior).item() == pytest.approx(naive_cal(local, y, p), abs=1e-12)
    assert empty_class_distillation(local, teacher, prior).item() == pytest.approx(
        naive_dis(local, teacher, p), abs=1e-12
    )
    for form in ("paper", "official"):
        assert logit_suppression(local, y, prior, form).item() == pytest.approx(naive_logit(local, y, p, form))


@pytest.mark.parametrize("counts", COUNTS)
def test_which_logits_each_term_pulls_at(counts):
    """L_cal and L_logit never at an empty class, L_dis never at an observed one: exact zeros."""
    local, teacher, y, prior = problem(counts)
    empty = prior == 0
    for term, left in (
        (calibrated_softmax(local, y, prior), empty),
        (logit_suppression(local, y, prior), empty),
        (logit_suppression(local, y, prior, "official"), empty),
        (empty_class_distillation(local, teacher, prior), ~empty),
    ):
        (gradient,) = torch.autograd.grad(term, local)
        assert gradient.isfinite().all()
        assert not gradient[:, left].any()


def test_fewer_than_two_empty_classes_are_not_protected_and_one_class_is_trained_by_distillation_only():
    for counts in COUNTS[1:3]:
        local, teacher, _, prior = problem(counts)
        value = empty_class_distillation(local, teacher, prior)
        assert value == 0
        assert not torch.autograd.grad(value, local)[0].any()
    local, teacher, y, prior = problem(COUNTS[3])
    for term in (calibrated_softmax(local, y, prior), logit_suppression(local, y, prior)):
        assert term == 0
        assert not torch.autograd.grad(term, local)[0].any()
    assert empty_class_distillation(local, teacher, prior) > 0
    assert empty_class_distillation(local, local.detach(), prior) == 0


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_terms_and_gradients_are_finite_at_large_logits(counts, dtype):
    local, teacher, y, prior = problem(counts, scale=1e4, dtype=dtype)
    prior = prior.float()
    terms = [calibrated_softmax(local, y, prior), empty_class_distillation(local, teacher, prior)]
    terms += [logit_suppression(local, y, prior, form) for form in ("paper", "official")]
    for term in terms:
        assert term.dtype == torch.float32
        assert term.isfinite()
        assert torch.autograd.grad(term, local)[0].isfinite().all()


def test_relabelling_the_classes_changes_nothing():
    local, teacher, y, prior = problem(COUNTS[0])
    order = torch.randperm(6, generator=torch.Generator().manual_seed(1))
    moved = (local[:, order], teacher[:, order], order.argsort()[y], prior[order])
    for form in ("paper", "official"):
        a, b = (logit_suppression(z, t, p, form) for z, t, p in ((local, y, prior), (moved[0], moved[2], moved[3])))
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(calibrated_softmax(local, y, prior), calibrated_softmax(moved[0], *moved[2:]))
    torch.testing.assert_close(
        empty_class_distillation(local, teacher, prior), empty_class_distillation(*moved[:2], moved[3])
    )


def test_the_printed_form_has_no_lower_bound_and_the_official_one_has():
    local, _, _, prior = problem(COUNTS[1], batch=6)
    y = torch.arange(6)  # of the classes that the batch has
    down = local - 1000.0
    torch.testing.assert_close(calibrated_softmax(down, y, prior), calibrated_softmax(local, y, prior))
    torch.testing.assert_close(logit_suppression(down, y, prior), logit_suppression(local, y, prior) - 1000.0)
    assert logit_suppression(down, y, prior, "official") > math.log(1 / len(y)) - 1e-9


# --- runs


def test_neutral_weights_leave_calibration_alone():
    """λ = ω = 0 is training with L_cal: a term of weight 0 is not there, and a tiny one changes next to nothing."""

    class Calibrated(FedAvg):
        def receive(self, broadcast, local):
            self.round_buffer("prior", in_local(local.label_counts).float())

        def training_step(self, batch, batch_idx):
            x, y = batch
            return calibrated_softmax(self(x), y, self.round["prior"])

    clients = (Calibrated, partial(FedED, lam=0, omega=0), partial(FedED, lam=1e-5, omega=1e-5))
    a, b, c = (weights_of(fit(client(net=Small, optimizer=sgd()), 2)) for client in clients)
    assert equal(a, b)
    assert not equal(b, c)
    for name, value in b.items():
        torch.testing.assert_close(c[name], value, rtol=0, atol=1e-3)


def test_steps_of_clients_with_other_classes_stack():
    client = FedED(lam=0.3, omega=0.02, net=Small, num_classes=3, input_shape=(4,)).double()
    client.load_teacher("global")
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 4, generator=g).double()
    y = torch.tensor([[0, 1, 0, 1, 1], [2] * 5, [0, 1, 2, 2, 0]])
    prior = in_local(torch.tensor([[5, 3, 0], [0, 0, 9], [1, 2, 4]]))
    torch.testing.assert_close(*stacked_and_alone(client, {"prior": prior}, x, y))


def test_the_teacher_is_no_part_of_the_client():
    client = FedED(lam=1.0, net=BatchNormNet, optimizer=sgd())
    loop = fit(client, 1)
    assert not [name for name in loop.state_dict() if "teacher" in name]
    teacher = client.teacher("global").net
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in teacher.parameters())
    assert not teacher.training


@pytest.mark.parametrize("omega", [1.0, 1e6])
def test_the_printed_weight_stops_the_run_with_cause_and_remedy(omega):
    client = FedED(omega=omega, logit_form="paper", net=partial(Perceptron, hidden=(32, 32)), optimizer=sgd(lr=0.3))
    remedy = rf"client \d+ .* round \d+.*no lower bound.* every omega above 0, here {omega}: set logit_form to official"
    with pytest.raises(NonFiniteUpdateError, match=remedy):
        fit(client, 40, local_epochs=5)


def test_the_default_is_the_authors_form_and_the_printed_one_has_no_default_weight():
    ours = FedED()
    printed = FedED(omega=1, logit_form="paper")
    assert (ours.logit_form, ours.omega, ours.lam) == ("official", 0.005, 0.1)
    assert (printed.logit_form, printed.omega) == ("paper", 1)


def test_the_remedy_of_other_settings_does_not_blame_omega():
    for client in (FedED(), FedED(omega=0, logit_form="paper"), FedED(omega=1.0)):
        assert "omega" not in client.nonfinite_hint()


def test_feded_with_fedexp_and_sam():
    """Composition is a choice of aggregator and optimizer; each changes the result."""
    data = partial(toy_data, sizes=(2, 2, 2, 2))  # so unlike that FedEXP's step is longer than 1
    runs = []
    for optimizer in (sgd(), partial(SAM, base=sgd(), sam_rho=0.1)):
        for aggregator in (None, FedEXPAggregator(eps=1e-6)):
            client = FedED(net=Small, optimizer=optimizer)
            runs.append(fit(client, 2, data(), loop=FederatedLoop(client, aggregator, seed=3)))
    states = [{n: v for n, v in weights_of(run).items() if n.startswith("client.")} for run in runs]
    assert all(value.isfinite().all() for state in states for value in state.values())
    assert all(not equal(a, b) for i, a in enumerate(states) for b in states[:i])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"lam": -1}, "lam must be at least 0, got -1"),
        ({"omega": float("nan")}, "omega must be at least 0, got nan"),
        ({"logit_form": "code"}, "logit_form must be one of paper, official, got 'code'"),
        ({"logit_form": "paper"}, "logit_form=paper needs omega, got None.* diverges .* leave logit_form at official"),
        ({"logit_form": "paper", "omega": -1.0}, "omega must be at least 0, got -1.0"),
    ],
)
def test_wrong_settings_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        FedED(**settings)


def test_the_number_of_empty_classes_is_logged():
    data = toy_data((4, 12))
    loop = fit(FedED(net=Small, optimizer=sgd()), 1, data)
    assert loop.round_metrics["train/empty_classes"] == (data.label_counts == 0).sum(1).double().mean()


def prototypes(n, seed):
    """Six classes of 784 inputs with MNIST's mean square and more noise than signal."""
    centres = torch.randn(6, 784, generator=torch.Generator().manual_seed(99))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(6, (n,), generator=g)
    return centres[y] + 2 * torch.randn(n, 784, generator=g), y


@pytest.mark.slow
def test_the_default_does_not_run_away_where_the_printed_form_does_at_the_same_weight():
    """As on MNIST: two classes a client, hundreds of steps a round, at the paper's rate, net and batches."""
    x, y = prototypes(6_000, seed=0)
    clients = [(y // 2 == pair).nonzero().flatten().tolist() for pair in range(3)]
    source = TensorSource((x, y), prototypes(1_000, seed=1), num_classes=6)
    data = FederatedDataModule(source, num_clients=3, batch_size=64, partition=FixedPartition(clients))
    client = partial(FedED, net=partial(Perceptron, hidden=(200, 200)), optimizer=sgd(lr=0.01, weight_decay=1e-5))
    with pytest.raises(NonFiniteUpdateError, match=r"no lower bound.* here 0\.005: set logit_form to official"):
        fit(client(omega=0.005, logit_form="paper"), 1, data, local_epochs=16)
    loop = fit(client(), 1, data, local_epochs=16)
    assert loop.round_metrics["global/acc"] > 0.9
    assert loop.round_metrics["train/suppression"] > -5
