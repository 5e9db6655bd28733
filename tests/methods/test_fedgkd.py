"""FedGKD: who teaches, what is sent and kept, and the identities with FedAvg and plain distillation."""

import copy
from functools import partial

import pytest
import pytorch_lightning as pl
import torch

from fl_lightning import FederatedLoop
from fl_lightning.attacks import sign_flip
from fl_lightning.client.teacher import Teacher
from fl_lightning.functional.state import weighted_mean
from fl_lightning.methods import DPFedAvg, FedAvg, FedGKD, FedNTD
from fl_lightning.nets import Perceptron
from tests.methods.test_fedavg import Regression
from tests.toys import SIZES, BatchNormNet, equal, fit, sgd, toy_data, weights_of

Small = partial(Perceptron, hidden=(6,))


class Watched(FedGKD):
    """Notes the received model, the extras and the teacher of each client."""

    def receive(self, broadcast, local):
        super().receive(broadcast, local)
        teacher = self.teacher("global").net.state_dict() if self.distils else {}
        noted = (
            broadcast.round_idx,
            copy.deepcopy(dict(broadcast.weights)),
            set(broadcast.extras),
            copy.deepcopy(teacher),
        )
        self.noted = [*getattr(self, "noted", []), noted]


def of_rounds(loop):
    """By round: received model, extras, teacher, of which all clients of a round have the same."""
    found = {}
    for round_idx, received, extras, teacher in loop.client.noted:
        assert equal(found.setdefault(round_idx, (received, extras, teacher))[2], teacher)
    return found


@pytest.mark.parametrize("models", [1, 2, 3, 9])
def test_the_mean_of_the_last_models_after_the_initial_one_teaches(models):
    rounds = of_rounds(fit(Watched(models=models, net=BatchNormNet, optimizer=sgd()), 5))
    received = [rounds[r][0] for r in range(5)]
    assert not rounds[0][2]
    for r in range(1, 5):
        last = received[1 : r + 1][-models:]
        expected = weighted_mean(last, [1] * len(last))
        assert equal({f"net.{name}": value for name, value in rounds[r][2].items()}, expected)
        assert rounds[r][1] == ({"teacher"} if len(last) > 1 else set())


def teaches_the_mean_of(loop, rounds):
    """Whether the models with which rounds ended teach, by the round that they teach in."""
    found = of_rounds(loop)
    for round_idx, ended in rounds.items():
        models = [found[r][0] for r in ended]
        expected = weighted_mean(models, [1] * len(models))
        if not equal({f"net.{name}": value for name, value in found[round_idx][2].items()}, expected):
            return False
    return True


class BreaksInRound2(Watched):
    def receive(self, broadcast, local):
        super().receive(broadcast, local)
        self.breaks = broadcast.round_idx == 2

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss * torch.nan if self.breaks else loss


@pytest.mark.parametrize("faults", [{"nonfinite": "skip"}, {"nonfinite": "skip", "max_update_norm": 1e6}], ids=str)
def test_a_round_that_is_given_up_ends_with_no_model(faults):
    """The model that round 1 ended with is received in rounds 2 and 3, and teaches once."""
    client = BreaksInRound2(models=3, net=BatchNormNet, optimizer=sgd())
    loop = fit(client, 6, patience=3, **faults)
    assert teaches_the_mean_of(loop, {1: [1], 2: [1, 2], 3: [1, 3], 4: [1, 3, 4], 5: [3, 4, 5]})


def test_a_run_that_is_continued_after_a_round_that_was_given_up_has_the_same_models(tmp_path):
    made = partial(BreaksInRound2, models=3, net=BatchNormNet, optimizer=sgd())
    faults = {"nonfinite": "skip", "patience": 3}
    whole = fit(made(), 6, **faults)
    half = fit(made(), 3, **faults)
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    continued = fit(made(), 6, ckpt_path=tmp_path / "half.ckpt", **faults)
    assert equal(weights_of(continued), weights_of(whole))


def test_a_round_whose_cohort_is_too_small_ends_with_no_model():
    data = toy_data(SIZES, schedule=[[0, 1], [2, 3], [4], [0, 4], [1, 3]])
    loop = fit(Watched(models=3, net=BatchNormNet, optimizer=sgd()), 5, data, min_clients=2)
    assert teaches_the_mean_of(loop, {1: [1], 3: [1, 3], 4: [1, 3, 4]})


def test_a_round_without_samples_ends_with_the_model_that_it_began_with():
    data = toy_data((7, 12, 0, 9), schedule=[[0, 1], [0, 3], [2], [0, 1, 3], [1, 3]])
    loop = fit(Watched(models=3, net=BatchNormNet, optimizer=sgd()), 5, data)
    assert teaches_the_mean_of(loop, {1: [1], 2: [1, 2], 3: [1, 2, 3], 4: [2, 3, 4]})


def test_a_second_fit_begins_without_models_as_the_first_did():
    loop = FederatedLoop(Watched(models=3, net=BatchNormNet, optimizer=sgd()), seed=3)
    fit(None, 4, loop=loop)
    loop.client.noted = []
    fit(None, 4, loop=loop)
    assert teaches_the_mean_of(loop, {1: [1], 2: [1, 2], 3: [1, 2, 3]})


def test_gamma_0_is_fedavg_and_keeps_and_sends_nothing():
    plain = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 3)
    ours = fit(FedGKD(gamma=0.0, net=BatchNormNet, optimizer=sgd()), 3)
    assert equal(weights_of(ours), weights_of(plain))
    assert not ours.server_module.state_dict()
    assert ours.round_metrics["comm/bytes_down"] == plain.round_metrics["comm/bytes_down"]


def test_gamma_0_keeps_and_sends_nothing_under_an_attack_either():
    runs = []
    for made in (FedGKD(gamma=0.0, net=BatchNormNet, optimizer=sgd()), FedAvg(net=BatchNormNet, optimizer=sgd())):
        runs.append(fit(sign_flip(made, attackers=[1]), 3))
    ours, plain = runs
    assert equal(weights_of(ours), weights_of(plain))
    assert not ours.client.distils
    assert ours.round_metrics["comm/bytes_down"] == plain.round_metrics["comm/bytes_down"]


def test_one_model_is_plain_distillation_from_round_1_on():
    """FedNTD with λ = 0 distils the received model over all classes: γ/2 is its β."""

    class FromRound1(FedNTD):
        def receive(self, broadcast, local):
            super().receive(broadcast, local)
            self.beta = 0.3 if broadcast.round_idx else 0.0

    ours = fit(FedGKD(gamma=0.6, models=1, net=Small, optimizer=sgd()), 4)
    theirs = fit(FromRound1(beta=0.3, ntd_weight=0.0, net=Small, optimizer=sgd()), 4)
    assert equal(weights_of(ours), weights_of(theirs))
    assert not ours.server_module.state_dict()


class OwnHeads(FedGKD):
    """Notes in each round the client's own head when it receives, and the head of its teacher."""

    def receive(self, broadcast, local):
        super().receive(broadcast, local)
        if self.distils:
            own = self.net.head.weight.detach().clone()
            teacher = self.teacher("global").net.head.weight.detach().clone()
            self.noted = [*getattr(self, "noted", []), (own, teacher)]


@pytest.mark.parametrize("models", [1, 5])
def test_personal_entries_teach_their_own_client(models):
    loop = fit(OwnHeads(models=models, net=Small, optimizer=sgd()), 4, personal="net.head.*")
    assert not {name for name in loop.server_module.state_dict() if "head" in name}
    owns = [own for own, _ in loop.client.noted]
    assert len(owns) == 3 * 5
    assert not torch.equal(owns[0], owns[1])
    assert all(torch.equal(own, teacher) for own, teacher in loop.client.noted)


def test_the_history_is_of_the_models_after_the_server_optimizer():
    """A step of half the way: the teacher is the mean of what clients receive, not of the aggregates."""
    half = partial(torch.optim.SGD, lr=0.5)
    rounds = of_rounds(fit(Watched(models=2, net=Small, optimizer=sgd()), 4, server_optimizer=half))
    expected = weighted_mean([rounds[2][0], rounds[3][0]], [1, 1])
    assert equal({f"net.{name}": value for name, value in rounds[3][2].items()}, expected)


class FailsFromRound2(FedGKD):
    def receive(self, broadcast, local):
        super().receive(broadcast, local)
        if broadcast.round_idx >= 2:
            raise RuntimeError("no memory")


class Histories(pl.Callback):
    def __init__(self):
        self.states = []

    def on_train_epoch_end(self, trainer, loop):
        self.states.append(copy.deepcopy(dict(loop.server_module.state_dict())))


def test_a_round_that_is_given_up_leaves_the_history_as_it_was():
    watch = Histories()
    client = FailsFromRound2(models=2, net=Small, optimizer=sgd())
    fit(client, 4, on_error="skip", patience=5, callbacks=[watch])
    assert not equal(watch.states[0], watch.states[1])
    assert equal(watch.states[1], watch.states[2])
    assert equal(watch.states[1], watch.states[3])


def test_a_private_rule_goes_with_it():
    loop = fit(
        FedGKD(net=Small, optimizer=sgd()),
        3,
        toy_data(sampling="poisson", participation=0.6),
        aggregator=DPFedAvg(noise_multiplier=1.0, delta=0.01, clip=0.5),
    )
    assert loop.round_metrics["privacy/epsilon"] > 0


def test_a_stack_of_clients_has_one_teacher():
    alone = fit(FedGKD(net=Small, optimizer=sgd()), 4)
    stacked = fit(FedGKD(net=Small, optimizer=sgd()), 4, chunk=3)
    assert stacked.engine.why_not() is None
    for name, value in weights_of(alone).items():
        torch.testing.assert_close(weights_of(stacked)[name], value)


def test_one_copy_of_the_teacher_serves_all_clients_of_a_round(monkeypatch):
    copies = []
    load = Teacher.load

    def counted(teacher, *args, **settings):
        copies.append(teacher)
        load(teacher, *args, **settings)

    monkeypatch.setattr(Teacher, "load", counted)
    fit(FedGKD(models=2, net=Small, optimizer=sgd()), 4)
    assert len(copies) == 3


def test_a_resumed_run_has_the_same_models(tmp_path):
    whole = fit(FedGKD(models=3, net=BatchNormNet, optimizer=sgd()), 5)
    half = fit(FedGKD(models=3, net=BatchNormNet, optimizer=sgd()), 3)
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    continued = fit(FedGKD(models=3, net=BatchNormNet, optimizer=sgd()), 5, ckpt_path=tmp_path / "half.ckpt")
    assert equal(weights_of(continued), weights_of(whole))
    assert equal(continued.server_module.state_dict(), whole.server_module.state_dict())


def test_what_it_refuses():
    with pytest.raises(ValueError, match="gamma must be at least 0"):
        FedGKD(gamma=-1.0)
    with pytest.raises(ValueError, match="models must be at least 1"):
        FedGKD(models=0)
    with pytest.raises(ValueError, match="temperature must be above 0"):
        FedGKD(temperature=0.0)
    with pytest.raises(ValueError, match="FedGKD needs the logits"):
        FederatedLoop(FedGKD(module=Regression()))
