"""DP-SGD of clients: bounds, noise, batches, accounts, and what is refused."""

import math
import re

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

from fl_lightning import FaultPolicy, FederatedDataModule, FederatedLoop
from fl_lightning.data import IIDPartition
from fl_lightning.data.poisson import PoissonSamples
from fl_lightning.functional.privacy import clipped_sum, epsilon
from fl_lightning.methods import (
    SAM,
    SCAFFOLD,
    DPFedAvg,
    FedAvg,
    FedCurv,
    FedLC,
    FedMD,
    FedNTD,
    FedProx,
    dp_sgd,
)
from fl_lightning.nets import Backbone
from fl_lightning.runs.best import BestCheckpoint
from tests.toys import BatchNormNet, equal, fit, samples, sgd, toy_data, trainer, weights_of

pytest.importorskip("dp_accounting")


class Net(Backbone):
    """Linear, ReLU, linear."""

    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(math.prod(input_shape), 8), nn.LayerNorm(8), nn.ReLU())
        self.head = nn.Linear(8, num_classes)

    def features(self, x):
        return self.body(x.flatten(1))


class Wide(Net):
    """With many weights that no loss depends on."""

    def __init__(self, num_classes, input_shape):
        super().__init__(num_classes, input_shape)
        self.wide = nn.Parameter(torch.zeros(20_000))


def client(kind=FedAvg, net=Net, lr=0.1, momentum=0.0, **settings):
    return kind(net=net, optimizer=sgd(lr, momentum), **settings)


def private(kind=FedAvg, net=Net, lr=0.1, z=1.0, bound=1.0, rate=0.25, **settings):
    return dp_sgd(client(kind, net, lr, **settings), z, bound, delta=1e-3, sample_rate=rate)


# --- gradients


def test_the_sum_of_clipped_gradients_is_a_loop_over_samples():
    torch.manual_seed(0)
    net = Net(3, (4,))
    x = torch.randn(6, 4)
    y = torch.randint(3, (6,))
    expected = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in net.named_parameters()}
    rows = {name: [] for name in expected}
    for i in range(6):
        net.zero_grad()
        nn.functional.cross_entropy(net(x[i : i + 1]), y[i : i + 1]).backward()
        norm = math.sqrt(sum(float(p.grad.double().square().sum()) for p in net.parameters()))
        for name, parameter in net.named_parameters():
            rows[name].append(parameter.grad.clone())
            expected[name] += parameter.grad.double() * min(1.0, 0.3 / norm)
    summed = clipped_sum({name: torch.stack(values) for name, values in rows.items()}, 0.3)
    for name, value in expected.items():
        torch.testing.assert_close(summed[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kind", [FedAvg, FedProx, FedNTD])
def test_without_bound_noise_and_sampling_it_is_the_method_itself_by_full_batches(kind):
    """A bound that nothing reaches, noise below the last bit, every sample in every step."""
    settings = {} if kind is FedAvg else {"mu": 0.5} if kind is FedProx else {"beta": 0.5}
    data = {"batch_size": "full", "sizes": (7, 12, 5)}
    made = private(kind, z=1e-12, bound=1e3, rate=1.0, **settings)
    hidden = fit(made, 3, toy_data(dtype=torch.float64, **data), local_epochs=2, precision="64-true")
    plain = fit(client(kind, **settings), 3, toy_data(dtype=torch.float64, **data), local_epochs=2, precision="64-true")
    for name, value in weights_of(plain).items():
        torch.testing.assert_close(weights_of(hidden)[name], value, rtol=1e-6, atol=1e-8)


def test_removing_a_sample_changes_a_gradient_by_no_more_than_the_bound():
    generator = torch.Generator().manual_seed(0)
    rows = {"w": torch.randn(50, 300, generator=generator) * torch.logspace(-3, 6, 50)[:, None]}
    whole = clipped_sum(rows, 0.7)["w"]
    rest = clipped_sum({"w": rows["w"][:-1]}, 0.7)["w"]
    assert (whole - rest).norm() <= 0.7 * (1 + 1e-12)
    assert (whole - rest).norm() > 0.69


def test_the_noise_of_a_step_has_the_standard_deviation_that_is_paid_for():
    made = private(net=Wide, lr=1.0, z=2.0, bound=0.5, rate=1.0)
    n = 10
    loop = fit(made, 2, toy_data((n,)), local_epochs=1)
    wide = loop.client.net.wide.detach().double()
    sigma = math.sqrt(2) * 2.0 * 0.5 / n  # two rounds of one step
    assert abs(wide.std() / sigma - 1) < 4 / math.sqrt(2 * len(wide))
    single = fit(private(net=Wide, lr=1.0, z=2.0, bound=0.5, rate=1.0), 1, toy_data((n,))).client.net.wide
    first = single.detach().double()
    second = wide - single.detach().double()
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 4 / math.sqrt(len(wide)), "not the same noise"


# --- batches


def test_every_sample_is_in_a_batch_with_the_probability_whatever_the_others_are():
    data = toy_data((40,))
    data.setup("fit")
    samples = PoissonSamples(data.view(0, 0), 0.2, "train")
    sizes = [len(batch[0]) for epoch in range(60) for batch in samples.batches("train", epoch)]
    assert len(sizes) == 60 * 5, "an epoch has 1 / q batches"
    mean = sum(sizes) / len(sizes)
    deviation = math.sqrt(40 * 0.2 * 0.8)
    assert abs(mean - 8) < 4 * deviation / math.sqrt(len(sizes))
    assert len(set(sizes)) > 5
    again = PoissonSamples(data.view(0, 1), 0.2, "train")
    assert [len(batch[0]) for batch in again.batches("train", 0)] != sizes[:5], "of another round"


def test_empty_batches_are_steps_with_noise_only_and_the_number_of_steps_tells_nothing_of_the_samples():
    class Steps(pl.Callback):
        def __init__(self):
            self.steps = {}

        def on_client_end(self, trainer, loop, update):
            self.steps[update.client_id] = update.num_steps

    watch = Steps()
    loop = fit(private(rate=0.1), 1, toy_data((1, 2, 30, 0)), local_epochs=2, callbacks=[watch])
    assert watch.steps == {0: 20, 1: 20, 2: 20, 3: 0}
    assert all(value.isfinite().all() for value in weights_of(loop).values())


# --- accounts


def test_epsilon_is_each_clients_own_by_the_steps_it_has_taken():
    data = toy_data(schedule=[[0, 1], [0], [2, 0]])
    loop = fit(private(), 3, data, local_epochs=2)
    steps = {client_id: loop.store.record(client_id)[0]["privacy:counted"]["count"] for client_id in loop.store.clients}
    assert steps == {0: 24, 1: 8, 2: 8}
    curve = loop.recorder.history.curve("privacy/epsilon_samples")
    spent = [epsilon(0.25, 1.0, count, 1e-3) for count in (8, 16, 24)]
    assert [curve[t] for t in range(3)] == [pytest.approx(value, abs=1e-9) for value in spent]
    assert "unprotected/comm/bytes_up" in loop.round_metrics
    assert not [key for key in loop.round_metrics if "train/" in key], "no loss of samples is logged"


def test_a_run_that_is_continued_ends_like_the_whole_one(tmp_path):
    class Saves(pl.Callback):
        def on_train_epoch_end(self, trainer, loop):
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    whole = fit(private(FedProx, mu=0.1), 3, callbacks=[Saves()])
    for done in range(2):
        rest = fit(private(FedProx, mu=0.1), 3, ckpt_path=tmp_path / f"{done}.ckpt")
        assert equal(weights_of(rest), weights_of(whole))
        assert rest.round_metrics == whole.round_metrics


def test_a_secret_seed_draws_batches_and_noise():
    runs = [weights_of(fit(private(), 1, toy_data(secret_seed=True))) for _ in range(2)]
    assert not equal(*runs)
    assert equal(*(weights_of(fit(private(), 1)) for _ in range(2)))


def test_it_goes_around_a_module_and_with_a_private_rule(caplog):
    caplog.set_level("INFO")
    data = toy_data(sampling="poisson", participation=0.8)
    loop = fit(private(), 2, data, aggregator=DPFedAvg(1.0, delta=0.01))
    assert {"privacy/epsilon", "privacy/epsilon_samples"} <= loop.round_metrics.keys()

    class Plain(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 3)

        def training_step(self, batch, batch_idx):
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("my_loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    loop = fit(dp_sgd(Plain(), 1.0, delta=1e-3, sample_rate=0.5), 2)
    assert loop.round_metrics["privacy/epsilon_samples"] == pytest.approx(epsilon(0.5, 1.0, 4, 1e-3), abs=1e-9)
    assert any(record.getMessage().startswith("privacy: epsilon_samples ") for record in caplog.records)


# --- what is refused


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: private(z=0), "noise_multiplier must be above 0, got 0"),
        (lambda: private(bound=-1.0), "max_grad_norm must be above 0, got -1.0"),
        (lambda: private(rate=1.5), "sample_rate must lie in (0, 1], got 1.5"),
        (lambda: dp_sgd(client(), 1.0, delta=0.0), "delta must lie in (0, 1), got 0.0"),
        (lambda: private(FedLC), "FedLC also reads label counts of its data"),
        (lambda: private(FedCurv), "FedCurv also reads batches of its data"),
        (lambda: private(SCAFFOLD, option="I"), "SCAFFOLD also reads batches"),
        (lambda: fit(private(net=BatchNormNet), 1), "BatchNorm1d 'net.body.1' makes of the whole batch"),
        (
            lambda: fit(dp_sgd(FedAvg(net=Net, optimizer=lambda p: SAM(p, base=sgd())), 1.0), 1),
            "dp_sgd has one noisy gradient a batch, and SAM asks for more",
        ),
    ],
)
def test_what_the_guarantee_does_not_cover_is_refused(make, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        make()


def test_under_a_plain_trainer_whose_batches_are_of_a_fixed_size_it_is_refused():
    alone = dp_sgd(FedAvg(net=Net, optimizer=sgd(), num_classes=3, input_shape=(4,)), 1.0)
    with pytest.raises(ValueError, match=r"needs a federation \(the draws and accounts of its guarantee\)"):
        trainer(1).fit(alone, DataLoader(TensorDataset(*samples(24)), batch_size=8))


class Branches(FedAvg):
    """Looks at a value."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > 0 else 2 * loss


def test_a_step_that_has_no_gradient_of_single_samples_is_named():
    with pytest.raises(RuntimeError, match="whose rules the step of DPSGDBranches must keep"):
        fit(private(Branches), 1)


# --- what shows besides the gradients


def test_gradients_of_samples_are_of_full_precision():
    rough, full = (fit(private(z=1e-9), 1, precision=kind) for kind in ("bf16-mixed", "32-true"))
    for name, value in weights_of(full).items():
        torch.testing.assert_close(weights_of(rough)[name], value)


class Centred(pl.LightningModule):
    """Takes the mean of the batch from each sample."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch[0] - batch[0].mean(0), batch[1]

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_hooks_that_mix_samples_are_refused():
    with pytest.raises(ValueError, match=r"Centred\.on_after_batch_transfer may make a sample of several"):
        dp_sgd(Centred(), 1.0)


class Graphs:
    """Keeps tensors where only its own class finds them, and iterates over pairs as a graph does."""

    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __iter__(self):
        return iter([("x", self.x), ("y", self.y)])

    def to(self, device, **settings):
        return self


def separate(items):
    """Collate to a dictionary for each sample."""
    return [{"x": x[None], "y": y[None]} for x, y in items]


def halves(items):
    """Collate the mean of two samples to one row."""
    x, y = default_collate(items)
    return x[: len(x) // 2 + 1], y[: len(y) // 2 + 1]


NOT_BY_ROWS = {
    "a dictionary a sample": (separate, r"dp_sgd needs one row of the batch for each sample, got 1 for \d+ samples"),
    "a list a sample": (lambda items: [list(item) for item in items], "needs one row of the batch for each sample"),
    "fewer rows": (halves, r"needs one row of the batch for each sample, got \d+ for \d+ samples"),
    "a graph": (lambda items: Graphs(*default_collate(items)), "need the tensors of a batch, got Graphs"),
}


class OfAnyBatch(Centred):
    on_after_batch_transfer = pl.LightningModule.on_after_batch_transfer

    def training_step(self, batch, batch_idx):
        return self.net.weight.sum()


class CollatedLoaders(pl.LightningDataModule):
    def __init__(self, collate_fn):
        super().__init__()
        self.collate_fn = collate_fn

    def train_dataloader(self):
        return DataLoader(TensorDataset(*samples(24)), batch_size=8, collate_fn=self.collate_fn)


@pytest.mark.parametrize("kind", NOT_BY_ROWS)
def test_a_batch_whose_rows_are_not_its_samples_is_refused(kind):
    """The gradient of several samples would be clipped as if it was that of one."""
    collate_fn, says = NOT_BY_ROWS[kind]
    data = FederatedDataModule.from_datamodule(CollatedLoaders(collate_fn), num_clients=2)
    with pytest.raises(ValueError, match=says):
        fit(dp_sgd(OfAnyBatch(), 1.0, sample_rate=0.5), 1, data)


READS = {
    "label counts": lambda local: local.label_counts,
    "labels": lambda local: local.labels(),
    "samples": lambda local: local.all(),
    "batches": lambda local: list(local.batches()),
}


@pytest.mark.parametrize("what", READS)
@pytest.mark.parametrize("hook", ["receive", "reply"])
def test_what_a_client_reads_without_saying_so_is_refused_when_it_reads(what, hook):
    def read(self, first, local):
        READS[what](local)
        return getattr(FedAvg, hook)(self, first, local)

    sly = type("Sly", (FedAvg,), {hook: read})
    with pytest.raises(ValueError, match=f"this client also reads {what} of its data"):
        fit(private(sly), 1)


@pytest.mark.parametrize("policy", [{"min_clients": 2}, {"max_update_norm": 1.0}, {"nonfinite": "skip"}])
def test_messages_that_have_arrived_are_counted(policy):
    (name,) = policy
    with pytest.raises(ValueError, match=f"model.faults.{name}=.* drops messages that have arrived"):
        fit(private(), 1, faults=FaultPolicy(**policy))
    fit(private(), 1, faults=FaultPolicy(on_error="skip"))


def test_other_terms_are_not_accounted_as_if_they_had_always_held(tmp_path):
    class Saves(pl.Callback):
        def on_train_end(self, trainer, loop):
            trainer.save_checkpoint(tmp_path / "1.ckpt")

    fit(private(), 1, callbacks=[Saves()])
    loop = FederatedLoop(private(z=5.0), seed=3)
    loop.identity.allow(["model.client"])
    with pytest.raises(ValueError, match="noise_multiplier was 1 in the 4 so far and is 5"):
        fit(None, 2, None, tmp_path / "1.ckpt", loop=loop)


def test_the_best_round_and_the_report_know_values_that_are_not_covered(tmp_path):
    data = toy_data(transfer_size=4, partition=IIDPartition())
    best = BestCheckpoint(tmp_path, "best")
    made = dp_sgd(client(FedMD), 1.0, delta=1e-3, sample_rate=0.5)
    loop = FederatedLoop(made, seed=3, evaluate_clients_every=1)
    trainer(2, tmp_path, callbacks=[best], enable_checkpointing=True).fit(loop, datamodule=data)
    assert (tmp_path / "clients").is_dir()  # and not in the working folder
    assert best.monitor == "unprotected/local/alma"
    assert (tmp_path / "best-on-test.ckpt").is_file()
    assert loop.recorder.history.curve("comm/bytes_up")
