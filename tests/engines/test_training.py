"""Phases of local training: on some samples, in stages, uncounted."""

import copy
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from torch.nn import functional as F

from fl_lightning.members.faults import ClientError
from fl_lightning.methods import FedAvg, FedNTD
from fl_lightning.nets import Perceptron
from fl_lightning.types import Phase
from tests.hooks.toy import Updates
from tests.toys import fit, sgd, toy_data, weights_of

Small = partial(Perceptron, hidden=(3,))


class Phases(FedAvg):
    """Trains in the given phases; the loop's optimizer is SGD(0.1, momentum=0.9)."""

    def __init__(self, *made, **base):
        super().__init__(**{"net": Small, "optimizer": sgd(), **base})
        self.made = made

    def phases(self, exchange):
        return self.made


def run(client, rounds=1, sizes=(9,), **settings):
    """In float64, in the samples' order; returns the loop and every update."""
    watch = Updates()
    data = toy_data(sizes, dtype=torch.float64, shuffle=False, batch_size=4)
    loop = fit(client, rounds, data, callbacks=[watch], precision="64-true", **settings)
    return loop, watch.rounds


def by_hand(loop, *segments):
    """The net of the start, trained in each segment of (optimizer factory, batches of (x, y)) by a fresh optimizer."""
    net = fit(FedAvg(net=Small), 0, loop.data, precision="64-true").client.net.double()
    for factory, batches in segments:
        optimizer = factory(net.parameters())
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(net(x), y).backward()
            optimizer.step()
    return {f"net.{name}": value for name, value in net.state_dict().items()}


def batches_of(loop, rows, size, epochs):
    x, y = (part[rows] for part in loop.data.view(0, 0).all())
    return list(zip(x.split(size), y.split(size), strict=True)) * epochs


ROWS = torch.tensor([7, 2, 4, 0, 8])


def test_a_phase_on_some_samples_equals_a_loop_by_hand():
    """In their given order, in batches and epochs of their own; n_i stays that of the client."""
    loop, rounds = run(Phases(Phase(indices=ROWS, epochs=2, batch_size=2)))
    wanted = by_hand(loop, (sgd(), batches_of(loop, ROWS, 2, 2)))
    torch.testing.assert_close(dict(loop.client.state_dict()), wanted, rtol=1e-12, atol=1e-12)
    assert (rounds[0][0].num_samples, rounds[0][0].num_steps) == (9, 6)


def test_positions_of_a_restricted_phase_count_its_own_samples():
    class Positions(Phases):
        def training_step(self, batch, batch_idx):
            batch, positions = batch
            (x, _), own = batch, loop_data.view(0, 0).all()[0][ROWS]
            assert torch.equal(x, own[positions])
            return super().training_step(batch, batch_idx)

    loop_data = toy_data((9,), batch_size=2)
    loop_data.setup()
    fit(Positions(Phase(indices=ROWS, epochs=2, with_index=True)), 1, loop_data)


def test_teachers_answer_for_the_phase_s_own_samples():
    """Their logits of the first epoch are looked up in the others."""

    class Teaches(FedNTD):
        def phases(self, exchange):
            yield Phase(indices=ROWS, epochs=3)
            yield Phase(indices=ROWS.flip(0)[:3], epochs=2)

    class Asks(Teaches):
        def training_step(self, batch, batch_idx):
            self.context.logit_cache = None
            return super().training_step(batch, batch_idx)

    looked_up, asked = (fit(kind(net=Small, optimizer=sgd()), 2, toy_data((9, 10))) for kind in (Teaches, Asks))
    torch.testing.assert_close(weights_of(looked_up), weights_of(asked))


def test_no_samples_are_no_phase():
    loop, rounds = run(Phases(Phase(indices=torch.arange(0)), Phase(epochs=0)))
    assert rounds[0][0].num_steps == rounds[0][0].accumulated_lr == 0
    torch.testing.assert_close(dict(loop.client.state_dict()), by_hand(loop), rtol=1e-12, atol=1e-12)


def test_an_optimizer_that_is_handed_out_again_begins_with_the_state_it_was_given():
    """As Adagrad's, whose sums exist before its first step."""

    class Counting(torch.optim.SGD):
        def __init__(self, params):
            super().__init__(params, lr=0.1)
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter]["steps"] = torch.zeros(())

        def step(self, closure=None):
            for state in self.state.values():
                state["steps"] += 1
            return super().step(closure)

    class HandsOut(FedAvg):
        def configure_optimizers(self):
            if not hasattr(self, "kept"):
                self.kept = Counting(self.net.parameters())
            return self.kept

        def reply(self, exchange, local):
            counted.append({state["steps"].item() for state in self.kept.state.values()})
            return {}

    counted = []
    run(HandsOut(), rounds=2, sizes=(9, 5))
    assert counted == [{3.0}, {2.0}] * 2


def test_steps_that_do_not_count_are_neither_in_k_nor_in_e_nor_in_the_limit():
    warm = Phase(epochs=3, counts=False, lr=0.02)
    loop, rounds = run(Phases(warm, Phase(epochs=2), warm), max_local_steps=4)
    update = rounds[0][0]
    assert update.num_steps == 4
    momentum = accumulated_lr = 0.0
    for _ in range(4):
        momentum = 0.9 * momentum + 1
        accumulated_lr += 0.1 * momentum
    assert update.accumulated_lr == pytest.approx(accumulated_lr, rel=1e-12)
    everything = torch.arange(9)
    slow = sgd(0.02)
    three = batches_of(loop, everything, 4, 3)
    wanted = by_hand(loop, (slow, three), (sgd(), batches_of(loop, everything, 4, 2)[:4]), (slow, three))
    torch.testing.assert_close(dict(loop.client.state_dict()), wanted, rtol=1e-12, atol=1e-12)


def test_phases_as_a_generator_have_code_between_them():
    """Here the head is reset to what it was before the first phase, and a third phase is only for some clients."""
    events = []

    class Between(FedAvg):
        def phases(self, exchange):
            before = copy.deepcopy(self.net.head.state_dict())
            events.append((self.context.client_id, "begin", self.num_steps))
            yield Phase(epochs=1)
            assert not torch.equal(self.net.head.weight, before["weight"])
            self.net.head.load_state_dict(before)
            events.append((self.context.client_id, "between", self.num_steps))
            yield Phase(epochs=2, trains=("net.body.*",))
            assert torch.equal(self.net.head.weight, before["weight"])
            events.append((self.context.client_id, "end", self.num_steps))
            if self.context.client_id == 1:
                yield Phase(epochs=1, trains=("net.head.*",))

    watch = Updates()
    fit(Between(net=Small, optimizer=sgd()), 1, toy_data((5, 6)), callbacks=[watch])
    assert events == [
        (0, "begin", 0),
        (0, "between", 1),
        (0, "end", 3),
        (1, "begin", 0),
        (1, "between", 2),
        (1, "end", 6),
    ]
    assert [watch.rounds[0][c].num_steps for c in range(2)] == [3, 8]


def test_a_failure_in_a_phase_s_own_code_is_that_failure():
    class Fails(Phases):
        def phases(self, exchange):
            yield Phase()
            raise ZeroDivisionError

    with pytest.raises(ClientError, match="raised ZeroDivisionError"):
        fit(Fails(), 1)


@pytest.mark.filterwarnings("error:.*lr_scheduler.step")  # torch's, where it saw no step of the optimizer
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.LBFGS])
def test_what_optimizers_returns_passes_for_torchs_own(kind):
    """As Lightning's does: schedulers of torch, and modules that look, take it."""

    class Manual(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(4, 3)
            self.automatic_optimization = False
            self.rates = []

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            assert isinstance(optimizer, torch.optim.Optimizer)
            assert isinstance(optimizer, kind)
            if batch_idx == 0:
                self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            self.rates.append(optimizer.param_groups[0]["lr"])

            def closure():
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
                self.manual_backward(loss)
                return loss

            optimizer.step(closure)
            self.scheduler.step()
            copy.deepcopy(optimizer)

        def configure_optimizers(self):
            return kind(self.parameters(), lr=0.1)

    module = Manual()
    fit(module, rounds=1, data=toy_data((12, 5)))
    assert module.rates == pytest.approx([0.1, 0.05, 0.025, 0.1])


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_last_group_of_fewer_batches_travels_less(nesterov):
    """Five batches, two a step: the last gradient is half of one, on which E is the way of a constant gradient."""

    class Constant(FedAvg):
        def training_step(self, batch, batch_idx):
            return sum(value.sum() for value in self.params().values())

    client = Constant(net=Small, optimizer=sgd(0.1, 0.9, nesterov=nesterov))
    loop, rounds = run(client, sizes=(17,), accumulate_grad_batches=2, local_epochs=2)
    start = fit(FedAvg(net=Small), 0, loop.data, precision="64-true").client.state_dict()
    update = rounds[0][0]
    assert update.num_steps == 6
    for name, value in update.weights.items():
        torch.testing.assert_close(
            start[name] - value, torch.full_like(value, update.accumulated_lr), rtol=0, atol=1e-12
        )


def test_a_phase_that_does_not_count_has_the_batches_of_the_first_passes():
    class Notes(Phases):
        def training_step(self, batch, batch_idx):
            seen.append(batch[0])
            return super().training_step(batch, batch_idx)

    seen = []
    fit(Notes(Phase(epochs=2), Phase(epochs=2, counts=False), Phase(epochs=1)), 1, toy_data((9,)))
    first = seen[:4]
    between = seen[4:8]
    last = seen[8:]
    assert all(map(torch.equal, first, between))
    assert not any(torch.equal(last[0], other) for other in (first[0], first[2]))
