"""Per-FedAvg: the gradient after a first step, on other samples, steps w; what moves, is logged and drawn once."""

from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from torch.nn import functional as F
from torchmetrics import SumMetric

from fl_lightning import FederatedLoop, FineTuning
from fl_lightning.methods import FedAvg, PerFedAvg, dp_sgd
from fl_lightning.methods.perfedavg import cut
from fl_lightning.nets import Perceptron
from fl_lightning.types import Phase
from tests.methods.test_fedavg import Regression
from tests.test_precision import federate
from tests.toys import BatchNormNet, equal, fit, samples, sgd, toy_data, weights_of

Small = partial(Perceptron, hidden=(6,))
Norm = partial(BatchNormNet, dropout=0.0)
SIZES = (7, 12, 0, 1, 16)


def per(**settings):
    return PerFedAvg(**{"net": Small, "optimizer": sgd(), **settings})


# --- the cut of a batch


@pytest.mark.parametrize("number", [2, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7, 8, 11])
def test_parts_are_consecutive_and_nearly_equal_or_the_whole_batch(size, number):
    x = torch.arange(size)
    parts = [part for (part, _) in cut((x, x + 1), number)]
    if size < 2 * number:
        assert all(torch.equal(part, x) for part in parts)
        return
    assert torch.equal(torch.cat(parts), x)
    lengths = [len(part) for part in parts]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1
    assert min(lengths) >= 2


def test_any_batch_whose_tensors_have_samples_first_is_cut():
    batch = {"x": [torch.zeros(4, 2), torch.ones(4)], "text": ["a", "b", "c", "d"], "scale": torch.tensor(3.0), "n": 7}
    first, second = cut(batch, 2)
    assert first["text"] == ["a", "b"]
    assert [tuple(tensor.shape) for tensor in second["x"]] == [(2, 2), (2,)]
    assert (second["scale"], second["n"]) == (3.0, 7)


@pytest.mark.parametrize("batch", [(torch.zeros(4, 2), torch.zeros(3)), object(), ["a", "b"]])
def test_another_batch_is_refused(batch):
    with pytest.raises(ValueError, match=r"PerFedAvg cuts each batch into parts, .* along dimension 0, got a "):
        cut(batch, 2)


# --- the step


class Part(FedAvg):
    """FedAvg on one part of every batch."""

    def __init__(self, place, number, **base):
        super().__init__(**base)
        self.place = place
        self.number = number

    def training_step(self, batch, batch_idx):
        return self.local_loss(cut(batch, self.number)[self.place], batch_idx)


def test_without_an_inner_step_it_is_fedavg_on_the_second_part():
    """w is restored after the inner step: nothing but the gradient moves it."""
    ours = fit(per(inner_lr=0.0), 3, toy_data(SIZES))
    theirs = fit(Part(1, 2, net=Small, optimizer=sgd()), 3, toy_data(SIZES))
    assert equal(weights_of(ours), weights_of(theirs))
    assert ours.round_metrics["train/ce"] == theirs.round_metrics["train/ce"]


@pytest.mark.parametrize(("form", "number"), [("fo", 2), ("hf", 3)])
def test_statistics_move_in_the_pass_at_w_on_the_first_part_only(form, number):
    optimizer = sgd(0.0)  # w stays, so that the statistics are those of its own passes
    data = partial(toy_data, (8, 12, 7, 1))
    theirs = fit(Part(0, number, net=Norm, optimizer=optimizer), 2, data(), local_epochs=2)
    ours = fit(per(net=Norm, optimizer=optimizer, inner_lr=0.7, form=form), 2, data(), local_epochs=2)
    assert equal(weights_of(ours), weights_of(theirs))
    assert weights_of(ours)["client.net.body.1.num_batches_tracked"] > 4


def test_the_first_order_step_by_hand():
    data = partial(toy_data, (17,), dtype=torch.float64)
    settings = {"inner_lr": 0.3, "optimizer": sgd(0.1, 0.9, weight_decay=0.01)}
    loop = fit(per(**settings), 2, data(), precision="64-true", lr_decay=0.5, local_epochs=2, clip_norm=0.4)
    net = fit(per(**settings), 0, data(), precision="64-true").client.net
    for round_idx in range(2):
        optimizer = torch.optim.SGD(net.parameters(), 0.1 * 0.5**round_idx, 0.9, weight_decay=0.01)
        for epoch in range(2):
            for x, y in loop.data.view(0, round_idx).batches("train", epoch):
                half = (len(x) + 1) // 2 if len(x) >= 4 else len(x)
                rest = slice(half if half < len(x) else 0, None)
                start = [w.detach().clone() for w in net.parameters()]
                inner = torch.autograd.grad(F.cross_entropy(net(x[:half]), y[:half]), [*net.parameters()])
                with torch.no_grad():
                    for w, g in zip(net.parameters(), inner, strict=True):
                        w.sub_(0.3 * g)
                optimizer.zero_grad()
                F.cross_entropy(net(x[rest]), y[rest]).backward()
                with torch.no_grad():
                    for w, value in zip(net.parameters(), start, strict=True):
                        w.copy_(value)
                torch.nn.utils.clip_grad_norm_(net.parameters(), 0.4)
                optimizer.step()
    expected = {f"net.{name}": value for name, value in net.state_dict().items()}
    torch.testing.assert_close(dict(loop.client.state_dict()), expected, rtol=1e-8, atol=1e-10)


class Smooth(pl.LightningModule):
    """A small net of smooth functions, on features and classes."""

    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3))

    def loss(self, w, batch):
        return F.cross_entropy((batch[0] @ w).tanh() * 2, batch[1])

    def training_step(self, batch, batch_idx):
        return self.loss(self.w, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def test_the_second_order_step_is_that_of_the_hessian():
    module = Smooth()
    start = module.w.detach().clone()
    data = toy_data((9,), dtype=torch.float64, batch_size="full")
    client = PerFedAvg(module=module, form="hf", inner_lr=0.4, delta=1e-4)
    loop = fit(client, 1, data, precision="64-true")
    parts = cut(next(iter(data.view(0, 0).batches("train", 0))), 3)

    def slope(w, part):
        return torch.func.grad(lambda value: module.loss(value, parts[part]))(w)

    outer = slope(start - 0.4 * slope(start, 0), 1)
    hessian = torch.func.hessian(lambda value: module.loss(value, parts[2]))(start)
    direction = outer - 0.4 * torch.einsum("abcd,cd->ab", hessian, outer)
    moved = (start - loop.client.module.w.detach()) / 0.5
    torch.testing.assert_close(moved, direction, rtol=1e-6, atol=1e-9)
    assert (direction - outer).norm() > 0.05 * outer.norm()


class Masked(Regression):
    """Its loss is linear in the parameters and draws a mask, so that its Hessian is 0 for every mask."""

    def training_step(self, batch, batch_idx):
        x, _ = batch
        return self.line(F.dropout(x, 0.5)).mean()


def test_both_ends_of_the_difference_draw_the_same_numbers():
    """With masks of their own the difference would be noise, divided by 2 delta."""

    def run(inner_lr):
        torch.manual_seed(1)
        client = PerFedAvg(module=Masked(), form="hf", inner_lr=inner_lr, delta=1e-3)
        return weights_of(fit(client, 2, toy_data((12,))))

    plain = run(0.0)
    for name, value in run(0.5).items():
        torch.testing.assert_close(value, plain[name], rtol=1e-3, atol=1e-5)


# --- what is logged, counted and given to hooks


class Logs(Regression):
    """Logs and counts in each pass, and returns an output."""

    def __init__(self):
        super().__init__()
        self.counted = SumMetric()
        self.outputs = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.counted.update(len(batch[0]))
        self.log("mine", loss)
        self.log("counted", self.counted)
        return {"loss": loss, "size": len(batch[0])}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.outputs.append((outputs["size"], outputs["loss"].item()))


@pytest.mark.parametrize(("form", "size"), [("fo", 4), ("hf", 3)])
def test_the_outer_pass_alone_is_logged_and_counted(form, size):
    module = Logs()
    loop = fit(PerFedAvg(module=module, form=form), 1, toy_data((9, 9), batch_size=9))
    assert [given for given, _ in module.outputs] == [size, size]
    assert loop.round_metrics["counted"] == 2 * size
    assert loop.round_metrics["mine"] == pytest.approx(sum(loss for _, loss in module.outputs) / 2)


# --- fine-tuning


def test_fine_tuning_takes_the_inner_rate_unless_another_is_asked_for():
    client = per(inner_lr=0.03)
    assert [phase.lr for phase in client.fine_tuning(Phase(max_steps=1))] == [0.03]
    assert [phase.lr for phase in client.fine_tuning(Phase(lr=0.5))] == [0.5]


def test_one_step_of_fine_tuning_is_the_inner_step():
    """A batch of the usual size at inner_lr, with a fresh optimizer, whatever the local rate and its decay."""
    settings = {"evaluate_clients_every": 1, "fine_tuning": FineTuning(max_steps=1)}
    optimizer = sgd(0.1, 0.9)
    loop = fit(per(inner_lr=0.3, optimizer=optimizer), 2, toy_data((9, 7), batch_size="full"), lr_decay=0.5, **settings)
    net = loop.client.net
    x, y = loop.data.view(1, 0).all()
    gradients = torch.autograd.grad(F.cross_entropy(net(x), y), [*net.parameters()])
    tuned = loop.client_model(1, tuned=True).net
    for w, g, value in zip(net.parameters(), gradients, tuned.parameters(), strict=True):
        torch.testing.assert_close(value, w - 0.3 * g)
    assert "local/tuned/alma" in loop.round_metrics


# --- edges


@pytest.mark.parametrize("form", ["fo", "hf"])
def test_resume_is_exact_also_around_a_module(form, tmp_path):
    def client(seed):
        torch.manual_seed(seed)
        return PerFedAvg(module=Logs(), form=form)

    data = partial(toy_data, SIZES, participation=0.6)
    whole, half = (fit(client(1), rounds, data()) for rounds in (4, 2))
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(client(2), 4, data(), ckpt_path=tmp_path / "half.ckpt")
    assert equal(weights_of(resumed), weights_of(whole))


@pytest.mark.parametrize("form", ["fo", "hf"])
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_half_precision_follows_float32(form, precision):
    full, half = (
        weights_of(federate(per(form=form, net=Norm, inner_lr=0.05), kind, 2)) for kind in ("32-true", precision)
    )
    a, b = (torch.cat([value.double().flatten() for value in each.values()]) for each in (full, half))
    assert (a - b).norm() < 2e-2 * a.norm()


def test_stacks_are_trained_one_by_one():
    loop = fit(per(), 2, toy_data(SIZES), chunk=3)
    assert loop.engine.why_not() == "PerFedAvg says stackable = False"
    assert equal(weights_of(loop), weights_of(fit(per(), 2, toy_data(SIZES))))


def test_accumulated_gradients_are_means_of_those_of_the_batches():
    """Two batches at one w: the mean of the directions, by a rate of 1 without momentum."""
    optimizer = sgd(1.0, 0.0)
    start = fit(per(optimizer=optimizer), 0, toy_data((10,))).client.state_dict()
    both = fit(per(optimizer=optimizer), 1, toy_data((10,), shuffle=False), accumulate_grad_batches=2)
    assert both.client.num_steps == 1
    moves = []
    for part in (slice(0, 5), slice(5, 10)):
        data = toy_data((10,), shuffle=False)
        client = per(optimizer=optimizer)
        client.training_data = lambda local, part=part: local.restricted("train", torch.arange(10)[part])
        one = fit(client, 1, data).client.state_dict()
        moves.append({name: value - start[name] for name, value in one.items()})
    for name, value in both.client.state_dict().items():
        torch.testing.assert_close(value - start[name], (moves[0][name] + moves[1][name]) / 2, rtol=1e-4, atol=1e-6)


# --- what is refused


def test_bad_settings():
    with pytest.raises(ValueError, match=r"inner_lr must be at least 0, got -0.1"):
        PerFedAvg(inner_lr=-0.1)
    with pytest.raises(ValueError, match="form must be one of fo, hf, got 'maml'"):
        PerFedAvg(form="maml")
    with pytest.raises(ValueError, match="delta must be above 0, got 0"):
        PerFedAvg(delta=0)


class ByHand(Regression):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


def test_a_module_that_steps_by_itself_is_refused():
    with pytest.raises(ValueError, match="PerFedAvg adds terms to the loss, but ByHand steps its optimizers itself"):
        FederatedLoop(PerFedAvg(module=ByHand()))


def test_noise_on_gradients_of_samples_is_refused():
    with pytest.raises(ValueError, match="a step of PerFedAvg has gradients of its own"):
        dp_sgd(per(), noise_multiplier=1.0)


def test_alone_under_a_plain_trainer_it_trains():
    client = per(num_classes=3, input_shape=(4,))
    before = {name: value.clone() for name, value in client.state_dict().items()}
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*samples(12)), batch_size=4)
    pl.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False).fit(client, loader)
    assert not equal(before, dict(client.state_dict()))
