"""Local: every client as if it were alone in the world."""

import copy

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F

from fl_lightning.methods import Local
from tests.methods.own_models import THREE, model_of, models_of, stepped
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, trainer, weights_of


def local(**settings):
    return Local(**{"net": THREE, "optimizer": sgd(0.1, 0.9), **settings})


def test_three_architectures_against_a_loop_by_hand():
    """Both stretches begin with a fresh momentum; client 3 is empty, client 4 comes late."""
    schedule = [[0, 1, 3], [0, 2], [4, 1, 2]]
    data = toy_data((7, 12, 5, 0, 16), dtype=torch.float64, schedule=schedule)
    loop = fit(local(finetune_epochs=2), 3, data, precision="64-true")
    wanted = [copy.deepcopy(loop.client.net.nets[c % 3]) for c in range(5)]
    for round_idx, cohort in enumerate(schedule):
        for client_id in cohort:
            for epochs in ([0], [1, 2]):  # the second stretch goes on in a new order
                view = data.view(client_id, round_idx)
                batches = [(batch, None) for epoch in epochs for batch in view.batches("train", epoch)]
                stepped(
                    wanted[client_id], batches, lambda net, b, _: F.cross_entropy(net(b[0]), b[1]), lr=0.1, momentum=0.9
                )
    for client_id, net in enumerate(wanted):
        torch.testing.assert_close(model_of(loop, client_id), dict(net.state_dict()), rtol=1e-9, atol=1e-12)


def test_nothing_is_exchanged():
    every = fit(local(), 2, toy_data())
    assert every.round_metrics["comm/bytes_down"] == every.round_metrics["comm/bytes_up"] == 0
    assert "local/alma" in every.round_metrics
    assert not any(name.startswith("global/") for name in every.round_metrics)
    alone = fit(local(), 2, toy_data(schedule=[[3], [3]]))
    assert equal(model_of(every, 3), model_of(alone, 3))
    assert equal(weights_of(every), weights_of(alone))


def test_resume_is_exact(tmp_path):
    settings = {"schedule": [[0, 1, 2], [1, 3], [0, 4]]}
    whole, half = (fit(local(net=BatchNormNet), rounds, toy_data(**settings)) for rounds in (3, 2))
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(local(net=BatchNormNet), 3, toy_data(**settings), ckpt_path=tmp_path / "half.ckpt")
    assert all(map(equal, models_of(resumed), models_of(whole)))
    assert resumed.round_metrics == whole.round_metrics


def test_alma_may_be_evaluated_less_often():
    rows = []

    class Rows(pl.Callback):
        def on_train_epoch_end(self, trainer, loop):
            rows.append("local/alma" in loop.round_metrics)

    fit(local(), 4, toy_data(), evaluate_clients_every=2, callbacks=[Rows()])
    assert rows == [False, True, False, True]


class Regression(pl.LightningModule):
    """A user's module."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.layer(batch[0])[:, 0], batch[1].float())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def test_around_a_user_s_module():
    loop = fit(Local(module=Regression()), 2, toy_data())
    assert "local/alma" not in loop.round_metrics  # only a classifier has an accuracy
    models = [loop.store.personal(client_id) for client_id in range(5)]
    assert not any(equal(models[0], model) for model in models[1:])


def test_without_a_global_model_nothing_is_predicted():
    loop = fit(local(), 1, toy_data())
    with pytest.raises(ValueError, match="needs a global model, but the clients of this Local share no weights"):
        trainer(0).predict(loop, toy_data())


def test_bad_settings():
    with pytest.raises(ValueError, match="finetune_epochs must be at least 0, got -1"):
        local(finetune_epochs=-1)
