"""FedNova: its step, which lengths count, what it leaves alone and what it refuses."""

from functools import partial

import pytest
import pytorch_lightning as pl
import torch

from fl_lightning import FaultPolicy, FederatedLoop
from fl_lightning.methods import SAM, Ditto, FedAvg, FedEXPAggregator, FedFOMO, FedNovaAggregator, FedProx, FedRep
from fl_lightning.nets import Perceptron
from fl_lightning.types import ClientUpdate, Phase
from tests.hooks.toy import Updates
from tests.methods.test_fedavg import Regression
from tests.toys import BatchNormNet, equal, fit, folded, sgd, toy_data, weights_of

Small = partial(Perceptron, hidden=(6,))
UNEQUAL = [1, 4, 2, 3, 1]


def nova(client=None, rounds=2, data=None, precision="64-true", weighting="samples", epochs=2, **settings):
    """A run's rule, updates and weights, in float64."""
    watch = Updates()
    rule = FedNovaAggregator(weighting=weighting, **settings)
    client = client or FedAvg(net=BatchNormNet, optimizer=sgd())
    loop = FederatedLoop(client, rule, seed=3, local_epochs=epochs)
    fit(None, rounds, data or toy_data(dtype=torch.float64), loop=loop, callbacks=[watch], precision=precision)
    return loop, watch


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("tau_eff", ["accumulated_lr", "steps"])
def test_the_step_is_that_of_a_loop(tau_eff, weighting):
    """Clients of unequal work with momentum, one without data, one whose work is done before its first step."""
    client = FedProx(mu=0.2, net=BatchNormNet, optimizer=sgd(0.05))
    data = toy_data((7, 0, 12, 5, 9), dtype=torch.float64)
    loop, watch = nova(client, 2, data, tau_eff=tau_eff, weighting=weighting, epochs=[1, 2, 4, 0, 3])
    updates = watch.rounds[1]
    before = watch.after[0]
    after = watch.after[1]
    assert [update.num_steps > 0 for update in updates.values()] == [True, False, True, False, True]
    n = {c: update.num_samples if weighting == "samples" else 1 for c, update in updates.items() if update.num_steps}
    E = {c: updates[c].accumulated_lr for c in n}
    total = sum(n.values())
    tau = sum(n[c] * (0.05 * updates[c].num_steps if tau_eff == "steps" else E[c]) for c in n) / total
    for name in loop.server.trainable:
        step = sum(n[c] * (updates[c].weights[name] - before[name]) / E[c] for c in n) / total
        torch.testing.assert_close(after[name], before[name] + tau * step, rtol=0, atol=1e-12)
    torch.testing.assert_close(float(loop.aggregator.tau_eff) * (0.05 if tau_eff == "steps" else 1), tau)


def test_clients_that_train_alike_give_fedavg():
    """With momentum, FedProx's term and partial participation; what is not trained is the mean in any case."""
    data = partial(toy_data, (10, 10, 10, 10), dtype=torch.float64, participation=0.5)
    client = partial(FedProx, mu=0.3, net=BatchNormNet, optimizer=sgd())
    plain = fit(client(), 3, data(), precision="64-true", local_epochs=2)
    rule, _ = nova(client(), 3, data())
    for name, value in rule.client.state_dict().items():
        torch.testing.assert_close(value, plain.client.state_dict()[name], rtol=0, atol=1e-12)


def test_without_momentum_and_terms_both_lengths_agree():
    """A schedule too: E is η K for plain SGD."""
    found = [
        weights_of(nova(FedAvg(net=Small, optimizer=sgd(0.1, 0.0)), tau_eff=kind, epochs=UNEQUAL)[0])
        for kind in ("accumulated_lr", "steps")
    ]
    for name, value in found[0].items():
        if name.startswith("client."):
            torch.testing.assert_close(found[1][name], value, rtol=0, atol=1e-12)


def test_running_statistics_take_the_mean_and_stay_positive():
    loop, watch = nova(epochs=[1, 40, 1, 1, 1], rounds=1)
    updates = watch.rounds[0].values()
    n = sum(update.num_samples for update in watch.rounds[0].values())
    name = "net.body.1.running_var"
    mean = sum(update.num_samples * update.weights[name] for update in updates) / n
    torch.testing.assert_close(watch.after[0][name], mean)
    assert loop.client.state_dict()["net.body.1.num_batches_tracked"].dtype == torch.int64


def test_each_client_sends_one_number_more():
    plain = fit(FedAvg(net=Small, optimizer=sgd()), 1, toy_data((7, 0, 5))).round_metrics
    row = nova(FedAvg(net=Small, optimizer=sgd()), 1, toy_data((7, 0, 5)), precision="32-true")[0].round_metrics
    assert row["comm/bytes_up"] == plain["comm/bytes_up"]
    assert row["comm/bytes_down"] == plain["comm/bytes_down"]


def test_a_client_that_is_skipped_is_left_out():
    class Broken(FedAvg):
        def reply(self, exchange, local):
            if local.client_id == 1:
                with torch.no_grad():
                    next(self.parameters()).fill_(torch.nan)
            return {}

    loops = []
    for kind, schedule in ((Broken, [[0, 1, 2]]), (FedAvg, [[0, 2]])):
        loop = FederatedLoop(
            kind(net=Small, optimizer=sgd()), FedNovaAggregator(), seed=3, faults=FaultPolicy(nonfinite="skip")
        )
        loops.append(fit(None, 1, toy_data(schedule=schedule), loop=loop))
    for name, value in loops[0].client.state_dict().items():
        torch.testing.assert_close(value, loops[1].client.state_dict()[name])


def test_no_valid_update_changes_nothing():
    rule = FedNovaAggregator()
    rule.attach(type("Server", (), {"weights": {}, "trainable": ()})())
    assert rule.finish() is None
    rule.gather(ClientUpdate(0, 0, 0, 0.0, None))
    assert rule.finish() is None


def test_one_dominating_update_is_warned_of():
    with pytest.warns(UserWarning, match=r"weighs the update of client \d by \d+\.\d in round 0"):
        nova(rounds=1, epochs=[60, 1, 60, 60, 60])


def test_around_a_module():
    loop, _ = nova(FedProx(module=Regression(), mu=0.1), epochs=UNEQUAL, precision="32-true", data=toy_data())
    assert all(value.isfinite().all() for value in loop.client.state_dict().values())


class Scheduled(Regression):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


@pytest.mark.parametrize(
    ("client", "settings", "sentence"),
    [
        (lambda: FedAvg(net=Small, optimizer=torch.optim.Adam), {}, "FedNovaAggregator needs to know how far .* Adam"),
        (lambda: FedAvg(net=Small, optimizer=partial(SAM, base=sgd())), {}, "one torch.optim.SGD .* got SAM"),
        (lambda: FedAvg(module=Scheduled()), {"tau_eff": "steps"}, "has a scheduler; set tau_eff to accumulated_lr"),
    ],
)
def test_other_local_optimizers_are_refused_before_anyone_trains(client, settings, sentence):
    class NeverTrained(pl.Callback):
        def on_client_start(self, trainer, loop, client_id):
            raise AssertionError

    loop = FederatedLoop(client(), FedNovaAggregator(**folded(settings)))
    with pytest.raises(ValueError, match=sentence):
        fit(None, 1, loop=loop, callbacks=[NeverTrained()])


def test_wrong_settings_are_refused():
    with pytest.raises(ValueError, match="tau_eff must be one of accumulated_lr, steps, got 'code'"):
        FedNovaAggregator(tau_eff="code")


class Warmed(Regression):
    """The learning rate of a client's first step is 0."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step, 1))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_a_client_whose_steps_have_a_learning_rate_of_0_is_left_out():
    sizes = (5, 9, 12)  # the first takes one step
    rule = FedNovaAggregator()
    loop = fit(None, 2, toy_data(sizes), loop=FederatedLoop(FedAvg(module=Warmed()), rule, seed=3, clock="round"))
    assert all(value.isfinite().all() for value in weights_of(loop).values())
    assert float(rule.tau_eff) == pytest.approx((9 * 0.1 + 12 * 0.2) / 21)


def test_any_unit_of_the_weights_gives_the_same_step():
    class Hundredths(FedNovaAggregator):
        def weight(self, update: ClientUpdate) -> float:
            return update.num_samples / 100

    loops = [
        fit(None, 2, loop=FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), rule(), seed=3))
        for rule in (FedNovaAggregator, Hundredths)
    ]
    for name, value in loops[0].client.state_dict().items():
        torch.testing.assert_close(loops[1].client.state_dict()[name], value)


@pytest.mark.parametrize("rule", [FedNovaAggregator, FedEXPAggregator])
def test_a_client_that_starts_from_its_own_model_is_refused_by_both_names(rule):
    loop = FederatedLoop(FedFOMO(net=Small, optimizer=sgd()), rule())
    with pytest.raises(
        ValueError, match=f"{rule.__name__} stretches the way .* FedFOMO start from models of their own"
    ):
        fit(None, 1, loop=loop)


def test_only_the_steps_that_train_what_is_shared_are_a_client_s_length():
    """FedRep's steps of the head move nothing that is sent: they count as steps, but not as length."""
    watch = Updates()
    settings = {"net": BatchNormNet, "optimizer": sgd(0.05, momentum=0.0)}
    loop = FederatedLoop(FedRep(head_epochs=3, body_epochs=1, **folded(settings)), FedNovaAggregator(), seed=3)
    fit(None, 1, toy_data((7, 12)), loop=loop, callbacks=[watch])
    assert [(u.num_steps, pytest.approx(u.accumulated_lr)) for u in watch.rounds[0].values()] == [(8, 0.1), (12, 0.15)]


def test_steps_that_train_nothing_shared_are_in_neither_length():
    """Without momentum both lengths are the same, for FedRep's body too."""
    settings = {"head_epochs": 3, "body_epochs": 1, "net": BatchNormNet, "optimizer": sgd(0.05, momentum=0.0)}
    (accumulated_lr, _), (steps, _) = (
        nova(FedRep(**settings), tau_eff=tau_eff) for tau_eff in ("accumulated_lr", "steps")
    )
    for name in accumulated_lr.server.trainable:
        torch.testing.assert_close(steps.server.weights[name], accumulated_lr.server.weights[name], rtol=0, atol=1e-12)


CLIENTS = [partial(FedProx, mu=0.2), partial(FedRep, head_epochs=2), partial(Ditto, personal_epochs=2)]


@pytest.mark.parametrize("chunk", [3, 2, "auto"])
@pytest.mark.parametrize("tau_eff", ["accumulated_lr", "steps"])
@pytest.mark.parametrize("kind", CLIENTS, ids=lambda kind: kind.func.__name__)
def test_clients_trained_at_once_have_the_lengths_of_single_ones(kind, tau_eff, chunk):
    """Where the learning rate falls, too: η is that of the round, of the steps that train what is shared."""
    loops = []
    for size in (1, chunk):
        client = kind(net=Small, optimizer=sgd(0.05, momentum=0.5))
        loop = FederatedLoop(client, FedNovaAggregator(tau_eff), seed=3, local_epochs=UNEQUAL, chunk=size, lr_decay=0.5)
        data = toy_data((7, 0, 12, 5, 9), dtype=torch.float64)
        loops.append(fit(None, 2, data, loop=loop, precision="64-true"))
    for name, value in loops[0].client.state_dict().items():
        torch.testing.assert_close(loops[1].client.state_dict()[name], value, rtol=0, atol=1e-12)
    torch.testing.assert_close(loops[0].aggregator.tau_eff, loops[1].aggregator.tau_eff)


def test_steps_count_with_the_learning_rate_of_their_phase_and_round():
    """τ_eff is a number of steps, and the move that of η Σ p_i K_i with the η of the phase."""

    class Phased(FedAvg):
        def phases(self, exchange):
            return (Phase(lr=0.02), Phase(lr=0.02))

    watch = Updates()
    sizes = (5, 15)
    client = Phased(net=Small, optimizer=sgd(0.7, momentum=0.0))
    loop = FederatedLoop(client, FedNovaAggregator("steps"), seed=3, lr_decay=0.5)
    fit(None, 2, toy_data(sizes, dtype=torch.float64), loop=loop, callbacks=[watch], precision="64-true")
    updates = watch.rounds[1]
    before = watch.after[0]
    after = watch.after[1]
    assert float(loop.aggregator.tau_eff) == pytest.approx((5 * 2 + 15 * 6) / 20)
    name = "net.head.weight"
    step = sum(n * (updates[c].weights[name] - before[name]) / (2, 6)[c] for c, n in enumerate(sizes)) / 20
    torch.testing.assert_close(after[name], before[name] + 5 * step)


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("tau_eff", ["accumulated_lr", "steps"])
def test_a_learning_rate_of_0_leaves_the_weights(tau_eff, chunk):
    watch = Updates()
    loop = FederatedLoop(FedProx(mu=0.1, net=Small, optimizer=sgd(0.0)), FedNovaAggregator(tau_eff), chunk=chunk)
    fit(None, 2, loop=loop, callbacks=[watch])
    assert equal(watch.after[0], watch.after[1])
    assert all(value.isfinite().all() for value in weights_of(loop).values())
