"""Only what is trained travels: parameters that are frozen when a round begins stay where they are."""

import copy

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn

from fl_lightning import FederatedLoop
from fl_lightning.aggregation import MedianAggregator, NormClip
from fl_lightning.functional.state import weighted_mean
from fl_lightning.methods import FedAvg, FedProx
from fl_lightning.methods.fedexp import FedEXPAggregator as FedEXP
from fl_lightning.methods.fednova import FedNovaAggregator
from tests.toys import equal, fit, folded, sgd, toy_data, trainer, weights_of
from tests.user_modules import Adapted

SIZES = (8, 12, 5)


class Averaged(Adapted):
    """With a teacher that the client moves itself, as BYOL's."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.body).requires_grad_(False)

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for mine, own in zip(self.teacher.parameters(), self.body.parameters(), strict=True):
            mine.data.lerp_(own.data, 0.1)


class Bytes(pl.Callback):
    """Notes each round's bytes, and the entries of every message up."""

    def __init__(self):
        self.down = []
        self.up = []
        self.names = []

    def on_client_end(self, trainer, loop, update):
        self.names.append(set(update.weights))

    def on_train_epoch_end(self, trainer, loop):
        self.down.append(loop.round_metrics["comm/bytes_down"])
        self.up.append(loop.round_metrics["comm/bytes_up"])


def data(**settings):
    return toy_data(SIZES, batch_size=4, shuffle=False, **settings)


def run(module, rounds=3, callbacks=(), given=None, wrap=lambda module: module, ckpt_path=None, **settings):
    loop = FederatedLoop(wrap(module()), seed=1, **folded(settings))
    trainer(rounds, callbacks=list(callbacks)).fit(loop, datamodule=given or data(), ckpt_path=ckpt_path)
    return loop


def by_hand(module, rounds=3):
    """FedAvg with everything sent: fresh copies, the mean of all entries."""
    federated = data()
    federated.setup()
    server = module()
    for _ in range(rounds):
        states = []
        sizes = []
        for client_id, size in enumerate(SIZES):
            client = copy.deepcopy(server)
            (optimizer,) = [client.configure_optimizers()]
            for batch in federated.view(client_id, 0).batches("train", 0):
                if len(batch[1]) == 1:  # BatchNorm leaves it out
                    continue
                optimizer.zero_grad()
                client.training_step(batch, 0).backward()
                optimizer.step()
                client.on_train_batch_end(None, batch, 0)
            states.append(client.state_dict())
            sizes.append(size)
        server.load_state_dict(weighted_mean(states, sizes))
    return server.state_dict()


def size_of(module, *, trained_only):
    values = module.state_dict(keep_vars=True).values()
    frozen = [v for v in values if isinstance(v, nn.Parameter) and not v.requires_grad]
    return sum(v.nbytes for v in values) - trained_only * sum(v.nbytes for v in frozen)


@pytest.mark.parametrize("module", [Adapted, Averaged])
def test_is_the_loop_by_hand_bit_for_bit(module):
    assert equal(dict(run(module).client.module.state_dict()), by_hand(module))


def test_frozen_parameters_travel_in_the_first_round_only():
    counts = Bytes()
    run(Adapted, callbacks=[counts])
    whole = size_of(Adapted(), trained_only=False)
    part = size_of(Adapted(), trained_only=True)
    assert counts.down == counts.up == [3 * whole, 3 * part, 3 * part]
    assert [any("base" in name for name in names) for names in counts.names] == [True] * 3 + [False] * 6
    assert all("module.norm.running_mean" in names for names in counts.names)


def test_a_client_that_comes_later_is_sent_what_it_lacks():
    counts = Bytes()
    run(Adapted, 4, [counts], data(schedule=[[0, 1], [0], [2], [2]]))
    whole = size_of(Adapted(), trained_only=False)
    part = size_of(Adapted(), trained_only=True)
    assert counts.down == [2 * whole, part, whole, part]
    assert counts.up == [2 * whole, part, part, part]


def test_what_clients_move_themselves_goes_on_travelling():
    counts = Bytes()
    run(Averaged, callbacks=[counts])
    teacher = 4 * sum(p.numel() for p in Averaged().teacher.parameters())
    base = 4 * sum(p.numel() for p in Averaged().teacher.base.parameters())  # never moved: its own base is the same
    part = size_of(Averaged(), trained_only=True)
    assert counts.up == [3 * size_of(Averaged(), trained_only=False)] + [3 * (part + teacher - base)] * 2


class Switch(pl.Callback):
    """Freezes or unfreezes a part of the module when a round begins."""

    def __init__(self, part, freeze=(), unfreeze=()):
        self.part = part
        self.freeze = freeze
        self.unfreeze = unfreeze

    def on_train_epoch_start(self, trainer, loop):
        part = loop.client.module.get_submodule(self.part)
        if trainer.current_epoch in self.freeze:
            part.requires_grad_(False)
        if trainer.current_epoch in self.unfreeze:
            part.requires_grad_(True)


def test_a_part_frozen_or_unfrozen_later_is_noticed():
    counts = Bytes()
    seen = []

    class Prox(FedProx):
        def training_step(self, batch, batch_idx):
            seen.append("module.norm.weight" in self.params() and "module.norm.weight" in self.received)
            return super().training_step(batch, batch_idx)

    def wrap(module):
        return Prox(module=module, mu=0.1)

    loop = run(Adapted, 6, [counts, Switch("norm", freeze=[2], unfreeze=[5])], wrap=wrap)
    part = size_of(Adapted(), trained_only=True)
    norm = 4 * 2 * 64
    assert counts.up[1:] == [3 * part, 3 * part, 3 * (part - norm), 3 * (part - norm), 3 * part]
    assert counts.down == counts.up
    steps = len(seen) // 6
    assert seen == [True] * 2 * steps + [False] * 3 * steps + [True] * steps
    assert "module.norm.weight" in loop.global_weights.trainable


@pytest.mark.parametrize(
    ("settings", "name"),
    [({"server_optimizer": sgd(1.0)}, "the server_optimizer"), ({"aggregator": FedNovaAggregator}, "FedNova")],
)
def test_a_state_of_the_trained_entries_bears_freezing_but_not_unfreezing(settings, name):
    def made():
        return {key: value() if isinstance(value, type) else value for key, value in settings.items()}

    counts = Bytes()
    run(Adapted, 4, [counts, Switch("norm", freeze=[1])], **made())
    assert counts.up[1:] == [3 * size_of(Adapted(), trained_only=True)] * 3  # it goes on travelling
    said = f"{name}.* keeps a state of the entries that are trained.*'module.body.base.bias' was"
    with pytest.raises(ValueError, match=said):
        run(Adapted, 3, [Switch("body", unfreeze=[1])], **made())


class Sneaky(Adapted):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.current_epoch == 1 and len(batch[1]) == 4:
            self.body.base.bias.data.add_(1.0)


def test_a_client_that_changes_what_stays_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'module\.body\.base\.bias'; let it require .* client 0 in round 1"):
        run(Sneaky)


def test_or_it_is_skipped_and_leaves_no_trace():
    class One(Sneaky):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if self.trainer.lightning_module.client.context.client_id == 1:
                super().on_train_batch_end(outputs, batch, batch_idx)

    loop = run(One, 2, on_error="skip")
    assert [fault.client_id for fault in loop.skipped] == [1]
    assert torch.equal(loop.client.module.body.base.bias, Adapted().body.base.bias)
    plain = run(Adapted, 2, given=data(schedule=[[0, 1, 2], [0, 2]]))
    assert equal(weights_of(loop), weights_of(plain))


@pytest.mark.parametrize(
    "settings",
    [
        {"aggregator": MedianAggregator},
        {"aggregator": FedEXP},
        {"aggregator": FedNovaAggregator},
        {"transforms": NormClip(0.5), "max_update_norm": 100.0},
        {"nonfinite": "skip"},
        {"server_optimizer": sgd(1.0)},
        {"personal": ["module.head.*"]},
        {"evaluate_clients_every": None, "weighting": "uniform"},
    ],
    ids=["median", "FedEXP", "FedNova", "clipped", "skip", "server SGD", "personal head", "uniform"],
)
def test_every_rule_leaves_them_as_they_are(settings):
    settings = {key: value() if isinstance(value, type) else value for key, value in settings.items()}
    counts = Bytes()
    loop = run(Adapted, 3, [counts], **settings)
    assert counts.up[1] < counts.up[0]
    assert torch.equal(loop.client.module.body.base.weight, Adapted().body.base.weight)
    assert not torch.equal(loop.client.module.body.up, Adapted().body.up)


def test_resume_is_exact(tmp_path):
    schedule = [[0, 1], [0], [2, 1], [2, 0]]
    whole = Bytes()
    rest = Bytes()
    expected = run(Adapted, 4, [whole], data(schedule=schedule))
    keep = ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1)
    loop = FederatedLoop(Adapted(), seed=1)
    trainer(2, callbacks=[keep], enable_checkpointing=True).fit(loop, datamodule=data(schedule=schedule))
    resumed = run(Adapted, 4, [rest], data(schedule=schedule), ckpt_path=tmp_path / "epoch=1.ckpt")
    assert equal(weights_of(resumed), weights_of(expected))
    assert (rest.down, rest.up) == (whole.down[2:], whole.up[2:])
    whole.down.clear()
    trainer(4, callbacks=[whole]).fit(loop, datamodule=data(schedule=schedule))  # a federation of its own
    assert whole.down[0] == 2 * size_of(Adapted(), trained_only=False)


def test_nothing_is_kept_where_everything_is_trained():
    loop = fit(FedAvg(), 2)
    assert not loop.global_weights.frozen.already_sent
    assert not loop.global_weights.frozen.state_dict()
    assert loop.global_weights.transmitted_entries is loop.global_weights.shared


class Twice(pl.LightningModule):
    """A layer under two names, beside one that is used by both."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.second = self.first
        self.head = nn.Linear(4, 3)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.head(self.second(self.first(x).relu())), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_submodule_under_two_names_is_sent_once():
    counts = Bytes()
    loop = run(Twice, callbacks=[counts])
    assert equal(dict(loop.client.module.state_dict()), by_hand(Twice))
    own = [*Twice().parameters(), *Twice().buffers()]
    assert counts.up == [3 * sum(value.nbytes for value in own)] * 3
