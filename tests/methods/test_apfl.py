"""APFL: the global model is FedAvg's; own models and their shares step beside it, and the mixtures are deployed."""

import copy
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from torch.nn import functional as F

from fl_lightning import FederatedLoop, FineTuning, NonFiniteUpdateError
from fl_lightning.methods import APFL, SAM, Ditto, FedAvg, dp_sgd
from fl_lightning.methods import apfl as file
from fl_lightning.nets import HeterogeneousNets, Perceptron
from tests.methods.test_fedavg import Regression
from tests.test_precision import federate
from tests.toys import BatchNormNet, equal, fit, samples, sgd, toy_data, trainer, weights_of

Small = partial(Perceptron, hidden=(6,))
LATE = {"sizes": (7, 12, 5, 0, 16), "schedule": [[0, 1, 3], [0, 2], [4, 1, 3], [0, 1, 2]]}
"""Client 3 never has data, client 4 comes in round 2 for the first time."""


def apfl(**settings):
    return APFL(**{"net": Small, "optimizer": sgd(), **settings})


def own_of(loop, client_id):
    """v of a client, with v̄'s statistics. None: it has no own model."""
    return next(iter(loop.store.memory(client_id).get("own_models", [])), None)


def alpha_of(loop, client_id):
    return loop.store.memory(client_id)["alpha"].item()


def nets_of(loop, client_id):
    """A client's v and the present w, as nets."""
    own = copy.deepcopy(loop.client.net)
    own.load_state_dict({name.removeprefix("net."): value for name, value in own_of(loop, client_id).items()})
    return own, loop.client.net


def mixed_loss(own, shared, alpha, batch):
    """f(αv + (1 − α)w) of a net without buffers."""
    pairs = zip(own.named_parameters(), shared.parameters(), strict=True)
    mixture = {name: alpha * v + (1 - alpha) * w for (name, v), w in pairs}
    return F.cross_entropy(torch.func.functional_call(own, mixture, (batch[0],)), batch[1])


# --- identities


@pytest.mark.parametrize("settings", [{}, {"alpha": 0.0}, {"alpha": 1.0, "adaptive": False}])
def test_the_global_model_is_fedavg_s_bit_for_bit_also_with_dropout(settings):
    net = partial(BatchNormNet, dropout=0.2)
    plain = fit(FedAvg(net=net, optimizer=sgd()), 4, toy_data(**LATE))
    ours = fit(apfl(net=net, **settings), 4, toy_data(**LATE))
    assert equal(weights_of(ours), weights_of(plain))
    for key in ("comm/bytes_down", "comm/bytes_up", "train/ce"):
        assert ours.round_metrics[key] == plain.round_metrics[key]


class Restless(pl.LightningModule):
    """A regression that draws from a generator of its own, and moves a buffer that no state dict has."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(4, 1)
        self.generator = torch.Generator().manual_seed(0)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.seen += x.abs().mean() * self.line.bias.detach().squeeze()
        noise = torch.randn(x.shape, generator=self.generator)
        loss = (self.line(x + noise + self.seen).squeeze(1) - y.float()).square().mean()
        self.log("mine", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_the_global_model_is_fedavg_s_around_a_module_that_draws_and_counts():
    module = Restless()
    plain = fit(FedAvg(module=copy.deepcopy(module)), 3, toy_data(**LATE))
    ours = fit(APFL(module=copy.deepcopy(module)), 3, toy_data(**LATE))
    assert equal(weights_of(ours), weights_of(plain))
    assert ours.round_metrics["mine"] == plain.round_metrics["mine"]


def test_alpha_1_is_ditto_without_a_pull():
    net = partial(BatchNormNet, dropout=0.0)
    optimizer = sgd(0.1, 0.9, weight_decay=0.01)
    theirs = fit(Ditto(lam=0.0, personal_epochs=2, net=net, optimizer=optimizer), 4, toy_data(**LATE), local_epochs=2)
    ours = fit(apfl(alpha=1.0, adaptive=False, net=net, optimizer=optimizer), 4, toy_data(**LATE), local_epochs=2)
    assert equal(weights_of(ours), weights_of(theirs))
    for client_id in (0, 1, 2, 4):
        assert equal(own_of(ours, client_id), own_of(theirs, client_id))


def test_at_alpha_0_v_stays_and_decays_under_weight_decay():
    still = fit(apfl(alpha=0.0, adaptive=False), 2, toy_data((9,)))
    start = still.client.initial
    assert equal(own_of(still, 0), start)
    decay = 0.2
    optimizer = sgd(0.1, 0.0, weight_decay=decay)
    loop = fit(apfl(alpha=0.0, adaptive=False, optimizer=optimizer), 2, toy_data((9,)))
    for name, value in own_of(loop, 0).items():
        torch.testing.assert_close(value, start[name] * (1 - 0.1 * decay) ** 4)  # two steps in each of two rounds


# --- the steps


def test_v_and_w_step_from_the_values_before_the_step():
    """By two optimizers, from a late first participation on, with momentum, decay and lr_decay."""
    settings = {"alpha": 0.3, "adaptive": False, "optimizer": sgd(0.1, 0.9, weight_decay=0.01)}
    data = toy_data(dtype=torch.float64, shuffle=False, **LATE)
    loop = fit(apfl(**settings), 4, data, precision="64-true", lr_decay=0.5)
    wanted = {}
    for round_idx, cohort in enumerate(LATE["schedule"]):
        before = fit(
            apfl(**settings),
            round_idx,
            toy_data(dtype=torch.float64, shuffle=False, **LATE),
            precision="64-true",
            lr_decay=0.5,
        )
        for client_id in cohort:
            w = copy.deepcopy(before.client.net)
            v = wanted.setdefault(client_id, start_of(before))
            rate = 0.1 * 0.5**round_idx
            both = [torch.optim.SGD(net.parameters(), rate, 0.9, weight_decay=0.01) for net in (w, v)]
            for x, y in data.view(client_id, round_idx).batches():
                names = [name for name, _ in v.named_parameters()]
                mixture = [0.3 * own + 0.7 * shared for own, shared in zip(v.parameters(), w.parameters(), strict=True)]
                mixture = [value.detach().requires_grad_() for value in mixture]
                named = dict(zip(names, mixture, strict=True))
                F.cross_entropy(torch.func.functional_call(v, named, (x,)), y).backward()
                both[0].zero_grad()
                F.cross_entropy(w(x), y).backward()
                for own, value in zip(v.parameters(), mixture, strict=True):
                    own.grad = 0.3 * value.grad
                for optimizer in both:
                    optimizer.step()
    for client_id in (0, 1, 2, 4):
        own = {name.removeprefix("net."): value for name, value in own_of(loop, client_id).items()}
        torch.testing.assert_close(own, dict(wanted[client_id].state_dict()), rtol=1e-9, atol=1e-12)
    assert own_of(loop, 3) is None


def start_of(loop):
    net = copy.deepcopy(loop.client.net)
    start = loop.client.initial or loop.client.state_dict()
    net.load_state_dict({name.removeprefix("net."): value for name, value in start.items()})
    return net


@pytest.mark.parametrize(("alpha_lr", "rate"), [(None, 0.1 * 0.5), (0.7, 0.7)])
@pytest.mark.parametrize("accumulated", [1, 3])
def test_alpha_takes_one_step_a_round_by_the_true_derivative_of_the_first_batch(alpha_lr, rate, accumulated):
    """The derivative by finite differences. With a rate of its own lr_decay does not touch it."""
    settings = {"precision": "64-true", "lr_decay": 0.5, "accumulate_grad_batches": accumulated, "local_epochs": 2}

    def run(rounds):
        data = toy_data((17,), dtype=torch.float64)
        return fit(apfl(alpha_lr=alpha_lr), rounds=rounds, data=data, **settings)

    before = run(1)
    after = run(2)
    assert before.client.num_steps > 1
    assert alpha_of(before, 0) == 0.5  # v and w began as one
    own, shared = nets_of(before, 0)
    first = next(iter(after.data.view(0, 1).batches("train", 0)))
    h = 1e-5
    ahead = mixed_loss(own, shared, alpha=0.5 + h, batch=first)
    behind = mixed_loss(own, shared, alpha=0.5 - h, batch=first)
    slope = (ahead - behind).item() / (2 * h)
    assert abs(slope) > 1e-4
    assert alpha_of(after, 0) == pytest.approx(0.5 - rate * slope, abs=1e-9)


def test_a_new_alpha_is_used_from_the_next_batch_on_and_in_the_next_rounds(monkeypatch):
    alphas = [alpha_of(fit(apfl(), rounds, toy_data((17,)), local_epochs=2), 0) for rounds in (1, 2, 3)]
    seen = []
    mixture = file.mixture
    monkeypatch.setattr(
        file, "mixture", lambda alpha, **models: seen.append(float(alpha)) or mixture(**models, alpha=alpha)
    )
    fit(apfl(), 3, toy_data((17,)), local_epochs=2)
    assert len(set(alphas)) == 3
    assert seen == [0.5] * 8 + [alphas[0]] + [alphas[1]] * 7 + [alphas[1]] + [alphas[2]] * 7


def test_alpha_stays_in_its_interval():
    for alpha_lr in (1e6, 1.0):
        loop = fit(apfl(alpha_lr=alpha_lr), 3, toy_data(**LATE))
        assert all(0 <= alpha_of(loop, client_id) <= 1 for client_id in (0, 1, 2))
    assert {alpha_of(fit(apfl(alpha_lr=1e6), 3, toy_data((17,))), 0)} <= {0.0, 1.0}


def test_alpha_that_does_not_adapt_stays_with_any_optimizer():
    loop = fit(apfl(adaptive=False, alpha=0.3, optimizer=torch.optim.Adam), 3, toy_data(**LATE))
    assert [alpha_of(loop, client_id) for client_id in (0, 1, 2)] == [0.3] * 3


class Gentle(Regression):
    """Its gradients are small enough for the first scale of a gradient scaler, unless a batch overflows."""

    def __init__(self, overflows=()):
        super().__init__()
        self.overflows = overflows

    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (1e36 if batch_idx in self.overflows else 1e-3)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=20.0)


@pytest.mark.parametrize("skipped", [0, 1, 2])
def test_alpha_s_derivative_is_unscaled_and_of_the_first_step_that_a_scaler_takes(skipped):
    def run(rounds):
        torch.manual_seed(1)
        client = APFL(module=Gentle(range(skipped)))
        return federate(client, precision="16-mixed", rounds=rounds, data=toy_data((17,)))

    before = run(1)
    after = run(2)
    assert before.client.num_steps == after.client.num_steps == 4 - skipped
    assert alpha_of(before, 0) == 0.5
    x, y = list(after.data.view(0, 1).batches("train", 0))[skipped]
    own = own_of(before, 0)
    shared = before.client.state_dict()
    alpha = torch.tensor(0.5, requires_grad=True)
    weight, bias = (
        alpha * own[name] + (1 - alpha) * shared[name] for name in ("module.line.weight", "module.line.bias")
    )
    loss = 1e-3 * (F.linear(x, weight, bias).squeeze(1) - y.float()).square().mean()
    (slope,) = torch.autograd.grad(loss, alpha)
    assert abs(20 * slope) > 3e-4
    assert alpha_of(after, 0) - 0.5 == pytest.approx(-20 * slope.item(), rel=0.05)


def test_the_norm_of_clipping_is_of_both():
    loops = [fit(apfl(adaptive=False), 1, toy_data((9,)), clip_norm=norm) for norm in (None, 1e-6)]
    moved = [own_of(loop, 0)["net.head.weight"] - loop.client.initial["net.head.weight"] for loop in loops]
    assert moved[1].norm() < 1e-5 < moved[0].norm()


# --- what is kept, deployed and checked


def test_statistics_of_the_mixture_are_its_own():
    loop = fit(apfl(net=BatchNormNet), 2, toy_data((10,)), local_epochs=3)
    own = own_of(loop, 0)
    shared = loop.client.state_dict()
    name = "net.body.1.running_mean"
    assert own["net.body.1.num_batches_tracked"] == shared["net.body.1.num_batches_tracked"] == 12
    assert not torch.equal(own[name], shared[name])
    alone = fit(apfl(net=BatchNormNet), 1, toy_data((1,)))  # one sample: eval mode
    assert own_of(alone, 0)["net.body.1.num_batches_tracked"] == 0


def test_the_mixture_with_the_present_global_model_is_deployed_and_without_an_own_model_the_global_one():
    loop = fit(apfl(net=BatchNormNet), 4, toy_data(**LATE), evaluate_clients_every=1)
    shared = loop.client.state_dict()
    for client_id in (0, 1, 4):  # client 4 was absent in the last round
        own = own_of(loop, client_id)
        alpha = loop.store.memory(client_id)["alpha"]
        deployed = loop.client_model(client_id).state_dict()
        for name, value in deployed.items():
            is_buffer = "running" in name or "num_batches" in name
            wanted = own[name] if is_buffer else alpha * own[name] + (1 - alpha) * shared[name]
            torch.testing.assert_close(value, wanted, rtol=0, atol=0)
    assert equal(loop.client_model(3).state_dict(), shared)


def test_a_late_client_begins_with_the_initial_model():
    client = apfl(alpha=0.0, adaptive=False)
    loop = fit(client, 3, toy_data(**LATE))
    assert equal(own_of(loop, 4), client.initial)  # alpha 0: it is kept as it began
    assert not equal(client.initial, dict(loop.client.state_dict()))


def test_a_client_without_data_keeps_nothing():
    loop = fit(apfl(), 4, toy_data(**LATE))
    assert not loop.store.memory(3)


def test_a_client_without_a_step_keeps_nothing():
    class Idle(APFL):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if self.context.client_id == 1 else None

    loop = fit(Idle(net=Small, optimizer=sgd()), 2, toy_data(**LATE))
    assert own_of(loop, 0)
    assert not loop.store.memory(1)


def test_resume_is_exact_also_around_a_module(tmp_path):
    def client(seed):
        torch.manual_seed(seed)
        return APFL(module=Regression())

    whole, half = (fit(client(1), rounds, toy_data(**LATE)) for rounds in (4, 2))
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(client(2), 4, toy_data(**LATE), ckpt_path=tmp_path / "half.ckpt")
    assert equal(weights_of(resumed), weights_of(whole))
    for client_id in (0, 1, 2, 4):
        assert equal(own_of(resumed, client_id), own_of(whole, client_id))
        assert alpha_of(resumed, client_id) == alpha_of(whole, client_id)


class Breaks(APFL):
    """Client 1 comes to an infinite v, or an alpha that is NaN."""

    broken = "v"

    def receive(self, broadcast, local):
        super().receive(broadcast, local)
        if local.client_id == 1 and self.broken == "v":
            with torch.no_grad():
                self.own_side.twins["net.head.bias"].fill_(torch.inf)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        super().on_train_batch_end(outputs, batch, batch_idx)
        is_last = batch_idx == 1  # a later batch would spoil v
        if self.context.client_id == 1 and self.broken == "alpha" and is_last:
            self.own_side.alpha = torch.tensor(torch.nan, dtype=torch.float64)


@pytest.mark.parametrize("broken", ["v", "alpha"])
def test_what_stays_with_a_client_makes_its_update_not_finite_if_it_is_not(broken):
    def run(rounds=1, kind=Breaks, **settings):
        client = kind(net=Small, optimizer=sgd(), adaptive=False)
        client.broken = broken
        return fit(client, rounds, **settings)

    with pytest.raises(NonFiniteUpdateError, match="client 1 returned NaN or infinite values in round 0"):
        run(data=toy_data((9, 7)))
    loop = run(data=toy_data((9, 7)), nonfinite="skip")
    assert loop.round_metrics["train/skipped"] == 1
    assert own_of(loop, 1) is None
    alone = run(kind=APFL, data=toy_data((9, 7), schedule=[[0]]))
    assert equal(weights_of(loop), weights_of(alone))


def test_fine_tuning_trains_the_mixture_and_leaves_the_rounds_alone():
    settings = {"evaluate_clients_every": 1, "fine_tuning": FineTuning(epochs=2, lr=0.2)}
    tuned = fit(apfl(net=BatchNormNet), 3, toy_data(**LATE), **settings)
    plain = fit(apfl(net=BatchNormNet), 3, toy_data(**LATE))
    assert equal(weights_of(tuned), weights_of(plain))
    assert all(equal(own_of(tuned, client_id), own_of(plain, client_id)) for client_id in (0, 1, 2, 4))
    assert not equal(tuned.client_model(0, tuned=True).state_dict(), tuned.client_model(0).state_dict())


def test_clients_with_different_nets_keep_their_own_entries():
    net = partial(HeterogeneousNets, nets=[partial(BatchNormNet, dropout=0.0), Small])
    loop = fit(apfl(net=net), 2, toy_data((9, 7)), personal="*", evaluate_clients_every=1)
    for client_id in (0, 1):
        assert own_of(loop, client_id).keys() == set(loop.global_weights.personal_of(client_id))


def test_stacks_are_trained_one_by_one():
    loop = fit(apfl(), 3, toy_data(**LATE), chunk=3)
    assert loop.engine.why_not() == "APFL says stackable = False"
    assert equal(weights_of(loop), weights_of(fit(apfl(), 3, toy_data(**LATE))))


# --- the optimizer


class TwoGroups(Regression):
    """Weights and bias with rates of their own, and a schedule of steps."""

    def __init__(self, kind=torch.optim.SGD, rates=(0.05, 0.01), named=False):
        super().__init__()
        self.kind = kind
        self.rates = rates
        self.named = named
        self.made = []

    def configure_optimizers(self):
        parameters = [("weight", self.line.weight), ("bias", self.line.bias)]
        groups = []
        for (name, parameter), lr in zip(parameters, self.rates, strict=True):
            groups.append({"params": [(name, parameter)] if self.named else [parameter], "lr": lr})
        optimizer = self.kind(groups, lr=0.05)
        self.made.append(optimizer)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Begun(torch.optim.SGD):
    """Has a state of each parameter from the start, as Adagrad has in some versions of torch."""

    def __init__(self, params, **settings):
        super().__init__(params, **settings)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["factor"] = torch.full_like(parameter, 0.5)

    def step(self, closure=None):
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(self.state[parameter]["factor"])
        super().step()
        return loss


KINDS = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad, torch.optim.RMSprop, Begun]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_v_is_stepped_like_w_in_the_groups_of_a_module_s_own_optimizer(kind):
    """At alpha 1 v has w's gradients, and so becomes w in the first round, whatever the optimizer and its schedule."""
    client = APFL(alpha=1.0, adaptive=False, module=TwoGroups(kind))
    loop = fit(client, 1, toy_data((17,)), local_epochs=2)
    assert equal(own_of(loop, 0), loop.client.state_dict())
    assert not equal(own_of(loop, 0), client.initial)


def test_a_user_s_names_of_parameters_go_on_with_the_own_ones():
    client = APFL(alpha_lr=0.1, module=TwoGroups(named=True))
    fit(client, 1, toy_data((17,)))
    names = [group["param_names"] for group in client.module.made[-1].param_groups]
    assert names == [["weight", "own.module.line.weight"], ["bias", "own.module.line.bias"]]


class GivesOut(Regression):
    """Makes its optimizer once, or anew each time."""

    def __init__(self, anew):
        super().__init__()
        self.anew = anew
        self.made = None

    def configure_optimizers(self):
        if self.made is None or self.anew:
            self.made = Begun(self.parameters(), lr=0.01, momentum=0.9)
        return self.made


def test_an_optimizer_that_a_module_gives_out_again_keeps_no_earlier_model():
    loops = []
    for anew in (False, True):
        torch.manual_seed(1)
        loops.append(fit(APFL(alpha_lr=0.1, module=GivesOut(anew)), 3, toy_data(**LATE)))
    again, anew = loops
    assert equal(weights_of(again), weights_of(anew))
    assert equal(own_of(again, 0), own_of(anew, 0))
    optimizer = again.client.module.made
    assert [len(group["params"]) for group in optimizer.param_groups] == [4]
    assert len(optimizer.state) == 4


def test_sam_steps_both():
    optimizer = partial(SAM, base=sgd(0.05))
    loop = fit(apfl(optimizer=optimizer, alpha_lr=0.1), 2, toy_data((17,)))
    plain = fit(FedAvg(net=Small, optimizer=optimizer), 2, toy_data((17,)))
    assert weights_of(loop).keys() == weights_of(plain).keys()
    assert 0 < alpha_of(loop, 0) < 1
    assert alpha_of(loop, 0) != 0.5


# --- what is refused


class Never(pl.Callback):
    def on_client_start(self, trainer, loop, client_id):
        pytest.fail("a client was trained")


@pytest.mark.parametrize(
    "client",
    [
        lambda **more: apfl(optimizer=torch.optim.Adam, **more),
        lambda **more: apfl(optimizer=sgd(0.1, maximize=True), **more),
        lambda **more: APFL(module=TwoGroups(), **more),
    ],
    ids=["Adam", "maximize", "two rates"],
)
def test_an_optimizer_without_one_rate_needs_a_rate_for_alpha(client):
    sentence = r"APFL steps alpha with the learning rate of torch.optim.SGD .*, got (SGD|Adam); set alpha_lr"
    with pytest.raises(ValueError, match=sentence):
        fit(client(), 1, callbacks=[Never()])
    loop = fit(client(alpha_lr=0.05), 3, toy_data(**LATE))
    assert alpha_of(loop, 0) != 0.5


def test_bad_settings():
    with pytest.raises(ValueError, match=r"alpha must be at least 0, got -0.1"):
        APFL(alpha=-0.1)
    with pytest.raises(ValueError, match=r"alpha must be at most 1, got 1.5"):
        APFL(alpha=1.5)
    with pytest.raises(ValueError, match="alpha_lr must be above 0, got 0"):
        APFL(alpha_lr=0)


class ByHand(Regression):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


def test_a_module_that_steps_by_itself_is_refused():
    with pytest.raises(ValueError, match="APFL adds terms to the loss, but ByHand steps its optimizers itself"):
        FederatedLoop(APFL(module=ByHand()))


def test_noise_on_gradients_of_samples_is_refused():
    with pytest.raises(ValueError, match="a step of APFL has gradients of its own"):
        dp_sgd(apfl(), noise_multiplier=1.0)


def test_a_plain_trainer_is_refused():
    client = apfl(num_classes=3, input_shape=(4,))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*samples(12)), batch_size=4)
    with pytest.raises(ValueError, match="APFL needs a federation"):
        trainer(1).fit(client, loader)
