"""pFedMe: the steps on each batch, what is sent and what is deployed, and what its optimizer does outside a round."""

import copy
import math
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import StepLR

from fl_lightning import FederatedLoop, FineTuning, NonFiniteUpdateError
from fl_lightning.engines.building import check_automatic
from fl_lightning.functional.state import clone
from fl_lightning.methods import SAM, FedAvg, FedNovaAggregator, PFedMe
from fl_lightning.methods.pfedme import PFedMeSteps
from fl_lightning.nets import Perceptron
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, weights_of

Small = partial(Perceptron, hidden=(6,))
Norm = partial(BatchNormNet, dropout=0.0)
LATE = {"sizes": (7, 12, 5, 0, 1), "schedule": [[0, 1, 3, 4], [0, 2], [4, 1, 3]]}
LAM = 2.0
ETA = 0.2
INNER = 3


def pfedme(**settings):
    return PFedMe(**{"net": Small, "optimizer": sgd(), "lam": LAM, "eta": ETA, "inner_steps": INNER, **settings})


def own_of(loop, client_id):
    return next(iter(loop.store.memory(client_id).get("own_models", [])), None)


def in_float64(client, rounds, **settings):
    data = toy_data(dtype=torch.float64, shuffle=False, **LATE)
    return fit(client, rounds, data, precision="64-true", local_epochs=2, lr_decay=0.5, **settings)


def trained_by_hand(received, batches, lr, start, epochs=2):
    """Return θ and w of a client: the net with its statistics, and the parameters that it sends."""
    theta = copy.deepcopy(received).train()
    w = [parameter.detach().clone() for parameter in theta.parameters()]
    optimizer = SGD(theta.parameters(), lr=lr, momentum=0.9, weight_decay=0.01)
    if sum(len(y) for _, y in batches) == 1:
        theta.body[1].eval()
    for _ in range(epochs):
        for x, y in batches:
            if len(y) == 1 and len(batches) > 1:
                continue  # which BatchNorm cannot normalize
            if start == "anchor":
                nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(w), theta.parameters())
            for _ in range(INNER):
                away = [(p - a).square().sum() for p, a in zip(theta.parameters(), w, strict=True)]
                optimizer.zero_grad()
                (F.cross_entropy(theta(x), y) + LAM / 2 * sum(away)).backward()
                optimizer.step()
            w = [a - ETA * LAM * (a - p.detach()) for a, p in zip(w, theta.parameters(), strict=True)]
    return theta, w


@pytest.mark.parametrize("start", ["last", "anchor"])
def test_three_rounds_by_hand(start):
    """Momentum goes on through a round, the rate decays and η does not, late clients start from the global model."""
    settings = {"net": Norm, "optimizer": sgd(weight_decay=0.01), "start": start}
    loop = in_float64(pfedme(**settings), 3)
    data = loop.data
    server = copy.deepcopy(in_float64(pfedme(**settings), 0).client.net)
    own = {}
    for round_idx, cohort in enumerate(LATE["schedule"]):
        sums = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in server.state_dict().items()}
        total = 0
        for client_id in cohort:
            view = data.view(client_id, round_idx)
            num_samples = view.size()
            if not num_samples:
                continue
            theta, w = trained_by_hand(server, [*view.batches()], lr=0.1 * 0.5**round_idx, start=start)
            own[client_id] = theta.state_dict()
            sent = {**theta.state_dict(), **dict(zip(dict(theta.named_parameters()), w, strict=True))}
            total += num_samples
            for name, value in sent.items():
                sums[name] += num_samples * value
        means = {name: value / total for name, value in sums.items()}
        server.load_state_dict(
            {k: v if v.is_floating_point() and "num" not in k else v.round() for k, v in means.items()}
        )
    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)
    close(dict(loop.client.net.state_dict()), dict(server.state_dict()))
    for client_id in (0, 1, 2, 4):
        close(
            {name.removeprefix("net."): value for name, value in own_of(loop, client_id).items()}, dict(own[client_id])
        )
    assert own_of(loop, 3) is None  # it never had data


def test_it_sends_w_and_keeps_theta():
    class Sent(pl.Callback):
        def on_client_end(self, trainer, loop, update):
            self.w = clone(update.weights)
            self.own = clone(loop.client.own_model())

    watch = Sent()
    loop = fit(pfedme(net=Norm), 1, toy_data((10,)), callbacks=[watch])
    start = fit(pfedme(net=Norm), 0, toy_data((10,))).client.state_dict()
    assert equal(watch.w, loop.client.state_dict())
    trained = [name for name, _ in loop.client.named_parameters()]
    for name, theta in watch.own.items():
        if name in trained:  # w has gone a part of the way
            assert (watch.w[name] - start[name]).norm() <= 0.9 * (theta - start[name]).norm()
        else:  # the statistics are those of the last pass
            assert torch.equal(watch.w[name], theta)
    assert not torch.equal(watch.w["net.head.weight"], start["net.head.weight"])
    assert watch.own["net.body.1.num_batches_tracked"] == 2 * INNER


def test_it_deploys_theta_and_before_its_first_round_the_global_model():
    loop = fit(pfedme(), 2, toy_data((7, 9, 5), schedule=[[0, 1], [0]]), evaluate_clients_every=1)
    for client_id in (0, 1):
        model = loop.client_model(client_id).state_dict()
        assert equal(model, own_of(loop, client_id))
        assert not equal(model, loop.client.state_dict())
    assert equal(loop.client_model(2).state_dict(), loop.client.state_dict())


def test_a_whole_step_of_w_after_one_step_of_theta_is_fedavg():
    """η·λ = 1 and K = 1: θ never leaves w."""
    settings = {"precision": "64-true", "local_epochs": 2, "lr_decay": 0.8}
    fedavg, ours = (
        fit(client, 3, toy_data(dtype=torch.float64, participation=0.6), **settings)
        for client in (
            FedAvg(net=BatchNormNet, optimizer=sgd(weight_decay=0.01)),
            PFedMe(lam=5.0, eta=0.2, inner_steps=1, net=BatchNormNet, optimizer=sgd(weight_decay=0.01)),
        )
    )
    torch.testing.assert_close(weights_of(ours), weights_of(fedavg), rtol=1e-10, atol=1e-12)


def test_beta_is_the_rate_of_the_server():
    """x ← (1 − β) x + β Σ p_i w_i, and the statistics are the mean."""
    start = weights_of(fit(pfedme(net=Norm), 0))
    plain = weights_of(fit(pfedme(net=Norm), 1))
    ours = fit(pfedme(net=Norm), 1, server_optimizer=partial(SGD, lr=0.25))
    names = [name for name, _ in ours.named_parameters()]
    for name, value in weights_of(ours).items():
        moved = 0.75 * start[name] + 0.25 * plain[name]
        torch.testing.assert_close(value, moved if name in names else plain[name])


def test_steps_count_by_batch_and_the_distance_is_not_defined():
    class Counts(pl.Callback):
        found = ()

        def on_client_end(self, trainer, loop, update):
            self.found = (*self.found, (update.num_steps, update.accumulated_lr))

    watch = Counts()
    fit(pfedme(), 1, toy_data((7, 12)), local_epochs=2, callbacks=[watch])
    assert [steps for steps, _ in watch.found] == [4, 6]
    assert all(math.isnan(distance) for _, distance in watch.found)
    watch = Counts()
    fit(pfedme(), 1, toy_data((7, 12)), local_epochs=2, max_local_steps=3, callbacks=[watch])
    assert [steps for steps, _ in watch.found] == [3, 3]


def test_a_rule_of_distances_is_refused_and_the_sentence_names_the_method():
    words = "FedNovaAggregator needs to know how far .* not defined for the steps of PFedMe; take another rule"
    with pytest.raises(ValueError, match=words):
        fit(pfedme(), 1, aggregator=FedNovaAggregator())
    with pytest.raises(ValueError, match=r"defined for one torch.optim.SGD with one learning rate, got Adam; set"):
        fit(FedAvg(net=Small, optimizer=partial(Adam, lr=0.1)), 1, aggregator=FedNovaAggregator())


# --- outside a round


@pytest.mark.parametrize("start", ["last", "anchor"])
def test_fine_tuning_takes_one_plain_step_a_batch_from_theta(start):
    data = toy_data((10, 9), dtype=torch.float64, shuffle=False)
    settings = {"precision": "64-true", "evaluate_clients_every": 1}
    loop = fit(pfedme(start=start), 2, data, fine_tuning=FineTuning(epochs=2), **settings)
    for client_id in (0, 1):
        net = Small(3, (4,)).double()
        net.load_state_dict({name.removeprefix("net."): value for name, value in own_of(loop, client_id).items()})
        optimizer = SGD(net.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            for x, y in loop.data.view(client_id, 0).batches():
                optimizer.zero_grad()
                F.cross_entropy(net(x), y).backward()
                optimizer.step()
        tuned = loop.client_model(client_id, tuned=True).net.state_dict()
        torch.testing.assert_close(dict(tuned), dict(net.state_dict()), rtol=1e-9, atol=1e-12)
    plain = fit(pfedme(start=start), 2, toy_data((10, 9), dtype=torch.float64, shuffle=False), **settings)
    assert equal(weights_of(plain), weights_of(loop))
    assert all(equal(own_of(plain, client_id), own_of(loop, client_id)) for client_id in (0, 1))


# --- around a module, and with other optimizers


class Classifier(pl.LightningModule):
    """The net above, trained by a module of the user's; counts the calls of its hooks."""

    def __init__(self, optimizer=None, scheduled=False):
        super().__init__()
        torch.manual_seed(0)
        self.net = Norm(3, (4,))
        self.optimizer = optimizer or sgd()
        self.scheduled = scheduled
        self.calls = {
            "on_before_zero_grad": 0,
            "on_before_backward": 0,
            "on_after_backward": 0,
            "on_train_batch_end": 0,
        }

    def training_step(self, batch, batch_idx):
        x, y = batch
        return F.cross_entropy(self.net(x), y)

    def on_before_zero_grad(self, optimizer):
        self.calls["on_before_zero_grad"] += 1

    def on_before_backward(self, loss):
        self.calls["on_before_backward"] += 1

    def on_after_backward(self):
        self.calls["on_after_backward"] += 1

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.calls["on_train_batch_end"] += 1

    def configure_optimizers(self):
        optimizer = self.optimizer(self.parameters())
        if not self.scheduled:
            return optimizer
        schedule = {"scheduler": StepLR(optimizer, step_size=2, gamma=0.5), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}


def test_around_a_module_it_is_the_same_and_hooks_run_on_every_pass():
    module = Classifier()
    ours = fit(PFedMe(module=module, lam=LAM, eta=ETA, inner_steps=INNER), 2, toy_data((7, 12)))
    torch.manual_seed(0)
    net = Norm(3, (4,))
    inside = fit(pfedme(net=lambda classes, shape: copy.deepcopy(net)), 2, toy_data((7, 12)))
    renamed = {name.replace("module.net.", "net."): value for name, value in ours.client.state_dict().items()}
    assert equal(renamed, dict(inside.client.state_dict()))
    batches = 2 * (2 + 3)
    assert module.calls.pop("on_train_batch_end") == batches
    assert set(module.calls.values()) == {INNER * batches}


@pytest.mark.parametrize("optimizer", [sgd(), partial(Adam, lr=0.02)], ids=["SGD", "Adam"])
@pytest.mark.parametrize("clock", ["round", "run"])
def test_schedules_of_a_module_count_batches_and_set_the_rates_of_its_steps(optimizer, clock):
    """With η·λ = 1 and K = 1 it is FedAvg, schedules included."""
    fedavg, ours = (
        fit(client, 2, toy_data((12, 9)), local_epochs=2, clock=clock)
        for client in (
            FedAvg(module=Classifier(optimizer, scheduled=True)),
            PFedMe(module=Classifier(optimizer, scheduled=True), lam=2.0, eta=0.5, inner_steps=1),
        )
    )
    torch.testing.assert_close(weights_of(ours), weights_of(fedavg), rtol=1e-5, atol=1e-6)


class SameOptimizer(Classifier):
    """Gives out the same optimizer again and again, whose momentum must not pass from client to client."""

    def configure_optimizers(self):
        self.given = getattr(self, "given", None) or super().configure_optimizers()
        return self.given


class AddsGroup(Classifier):
    """Makes an optimizer of the body, and adds the head when a client begins."""

    def configure_optimizers(self):
        return self.optimizer(self.net.body.parameters())

    def on_train_epoch_start(self):
        optimizer = self.optimizers()
        if len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": list(self.net.head.parameters())})


@pytest.mark.parametrize("kind", [SameOptimizer, AddsGroup])
def test_what_a_module_does_with_its_optimizer_reaches_the_steps(kind):
    settings = {"lam": LAM, "eta": ETA, "inner_steps": INNER}
    plain, ours = (fit(PFedMe(module=made(), **settings), 2, toy_data((7, 12))) for made in (Classifier, kind))
    assert equal(weights_of(ours), weights_of(plain))


def test_any_local_optimizer_takes_the_steps():
    """One that asks for the gradient itself, too: SAM of radius 0 is its base."""

    def sam(params):
        return SAM(params, base=sgd(), sam_rho=0.0)

    assert equal(weights_of(fit(pfedme(optimizer=sam), 2)), weights_of(fit(pfedme(), 2)))


def test_gradients_are_clipped_in_every_step():
    loop = fit(pfedme(optimizer=sgd(1.0, 0.0), lam=1e-6, inner_steps=7), 1, toy_data((5,)), clip_norm=1e-3)
    start = fit(pfedme(), 0, toy_data((5,))).client.state_dict()
    away = [(value - start[name]).square().sum() for name, value in own_of(loop, 0).items()]
    assert torch.stack(away).sum().sqrt() <= 7e-3 * 1.001


# --- what it goes with


def test_personal_entries_are_trained_and_not_pulled():
    loop = fit(pfedme(lam=4.0, eta=0.25), 2, personal="net.head.*")
    for client_id in range(5):
        personal = loop.store.personal(client_id)
        own = own_of(loop, client_id)
        assert {name: torch.equal(own[name], value) for name, value in personal.items()} == dict.fromkeys(
            personal, True
        )
        assert len(personal) == 2
    heads = [loop.store.personal(client_id)["net.head.weight"] for client_id in range(5)]
    assert not any(torch.equal(heads[0], head) for head in heads[1:])


def test_without_shared_entries_clients_train_apart():
    loop = fit(pfedme(), 2, personal="*")
    assert loop.round_metrics["comm/bytes_up"] == 0
    assert all(value.isfinite().all() for value in own_of(loop, 0).values())


def test_equal_clients_send_equal_weights():
    """The w of a client moves in place, and must not move what the next one receives."""
    twins = toy_data((10, 10), shuffle=False)
    twins.partition.indices = [twins.partition.indices[0]] * 2
    loop = fit(pfedme(), 2, twins)
    assert equal(own_of(loop, 0), own_of(loop, 1))


def test_a_resumed_run_has_the_same_bits(tmp_path):
    whole, half = (fit(pfedme(net=BatchNormNet), rounds, toy_data(**LATE)) for rounds in (3, 1))
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(pfedme(net=BatchNormNet), 3, toy_data(**LATE), ckpt_path=tmp_path / "half.ckpt")
    assert equal(weights_of(resumed), weights_of(whole))
    for client_id in (0, 1, 2, 4):
        assert equal(own_of(resumed, client_id), own_of(whole, client_id))


def test_a_client_that_diverges_is_named_or_left_out_without_a_trace():
    data = {"sizes": (9, 7), "schedule": [[0, 1], [0]]}
    diverging = {"optimizer": sgd(1e6, 0.0), "lam": 15.0, "eta": 0.005}
    with pytest.raises(NonFiniteUpdateError, match=r"pFedMe's personal models need rate · lam below 2: lower lam"):
        fit(pfedme(**diverging), 1, toy_data(**data), local_epochs=9)
    loop = fit(pfedme(**diverging), 1, toy_data(**data), local_epochs=9, nonfinite="skip")
    assert loop.round_metrics["train/skipped"] == 2
    assert own_of(loop, 0) is None
    assert equal(loop.client.state_dict(), fit(pfedme(), 0, toy_data(**data)).client.state_dict())


class Broken(PFedMe):
    """pFedMe whose client 0 ends with a w that is not finite."""

    def follow(self):
        super().follow()
        if self.context.client_id == 0:
            self.round["anchor"]["net.head.bias"].fill_(torch.nan)


def test_a_client_that_is_left_out_is_as_if_it_were_absent():
    settings = {"net": Norm, "optimizer": sgd()}
    skipped = fit(Broken(**settings), 2, toy_data((9, 7), schedule=[[0, 1], [0, 1]]), nonfinite="skip")
    absent = fit(PFedMe(**settings), 2, toy_data((9, 7), schedule=[[1], [1]]))
    assert skipped.round_metrics["train/skipped"] == 1
    assert equal(weights_of(skipped), weights_of(absent))
    assert own_of(skipped, 0) is None
    assert equal(own_of(skipped, 1), own_of(absent, 1))


def test_clients_of_a_stack_are_trained_one_by_one_with_the_same_bits():
    alone, stacked = (fit(pfedme(), 2, chunk=chunk) for chunk in (1, 3))
    assert "PFedMe" in stacked.engine.why_not()
    assert equal(weights_of(alone), weights_of(stacked))


def test_what_it_refuses():
    with pytest.raises(ValueError, match=r"eta \* lam must be at most 1, got 1.5; lower eta, or w moves beyond"):
        PFedMe(lam=15.0, eta=0.1)
    assert PFedMe(lam=2.0, eta=0.5).lam == 2
    for name in ("lam", "eta"):
        with pytest.raises(ValueError, match=f"{name} must be above 0, got 0"):
            PFedMe(**{name: 0.0})
    with pytest.raises(ValueError, match="inner_steps must be at least 1, got 0"):
        PFedMe(inner_steps=0)
    with pytest.raises(ValueError, match="start must be one of last, anchor, got 'first'"):
        PFedMe(start="first")
    with pytest.raises(
        ValueError, match=r"PFedMeSteps computes its gradient more than once .*accumulate_grad_batches=1"
    ):
        fit(pfedme(), 1, accumulate_grad_batches=2)
    client = pfedme(num_classes=3, input_shape=(4,))
    ([optimizer], _) = client.configure_optimizers()
    assert isinstance(optimizer, PFedMeSteps)
    with pytest.raises(ValueError, match=r"without a gradient scaler; set trainer.precision=bf16-mixed"):
        check_automatic([optimizer], owner="PFedMe", accumulated=1, scaled=True)

    class ByHand(Classifier):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

    with pytest.raises(ValueError, match=r"PFedMe adds terms to the loss, but ByHand steps its optimizers itself"):
        FederatedLoop(PFedMe(module=ByHand()))
