"""Local privacy: its accounts, its noise, and what is refused."""

import math

import pytest
import pytorch_lightning as pl
import torch

from fl_lightning import FederatedLoop
from fl_lightning.functional.privacy import epsilon
from fl_lightning.methods import SCAFFOLD, FedAvg, FedNovaAggregator, local_dp
from tests.methods.test_dpsgd import Wide, client
from tests.toys import BatchNormNet, equal, fit, toy_data, trainer, weights_of

pytest.importorskip("dp_accounting")


def test_local_privacy_is_accounted_as_replace_one():
    loop = FederatedLoop(local_dp(client(), 0.5, delta=1e-3), seed=3)
    trainer(2).fit(loop, datamodule=toy_data())
    curve = loop.recorder.history.curve("privacy/epsilon_local")
    assert curve[0] == pytest.approx(19.6, abs=0.05), "not 7.6, which adding or removing a client would cost"
    assert curve[1] == pytest.approx(epsilon(1.0, 0.25, 2, 1e-3), abs=1e-9)


def test_a_client_sends_clip_and_noise_of_its_own():
    class Sent(pl.Callback):
        def __init__(self):
            self.wide = {}
            self.counts = set()

        def on_client_end(self, trainer, loop, update):
            self.wide[update.client_id] = update.weights["net.wide"].double().clone()

    watch = Sent()
    loop = fit(local_dp(client(net=Wide), 2.0, 0.3, delta=1e-3), 1, callbacks=[watch])
    for noise in watch.wide.values():
        assert abs(noise.std() / 0.6 - 1) < 4 / math.sqrt(2 * len(noise))
    noises = torch.stack(list(watch.wide.values()))
    assert (torch.corrcoef(noises).triu(1).abs() < 5 / math.sqrt(noises.shape[1])).all()
    assert "unprotected/train/ce" in loop.round_metrics


def test_local_privacy_sends_no_count_of_steps():
    loop = fit(local_dp(client(net=BatchNormNet), 5.0, delta=1e-3), 2)
    assert loop.client.state_dict()["net.body.1.num_batches_tracked"] == 0


def test_what_would_reach_the_server_as_it_is_is_refused():
    with pytest.raises(ValueError, match="SCAFFOLD also sends control"):
        local_dp(client(SCAFFOLD), 1.0)

    class Talks(FedAvg):
        def reply(self, exchange, local):
            return {"mean": torch.ones(3)}

    with pytest.raises(ValueError, match="local_dp adds noise to weights, and an update also has 'mean'"):
        fit(local_dp(client(Talks), 1.0, delta=1e-3), 1)


def test_a_client_sends_no_numbers_of_its_samples_and_steps():
    class Sent(pl.Callback):
        def __init__(self):
            self.said = set()

        def on_client_end(self, trainer, loop, update):
            numbers = update.num_samples, update.num_steps, update.accumulated_lr, update.lr
            self.said.add(tuple(map(float, numbers)))

    watch = Sent()
    fit(local_dp(client(), 1.0, delta=1e-3), 1, toy_data((40, 4, 7)), callbacks=[watch])
    assert watch.said == {(1.0, 0.0, 0.0, 0.0)}
    with pytest.raises(ValueError, match="FedNovaAggregator needs to know the steps of each client"):
        fit(local_dp(client(), 1.0, delta=1e-3), 1, aggregator=FedNovaAggregator())


def test_variances_stay_positive():
    loop = fit(local_dp(client(net=BatchNormNet), 5.0, delta=1e-3), 3)
    assert (loop.client.state_dict()["net.body.1.running_var"] > 0).all()
    assert math.isfinite(loop.round_metrics["global/loss"])


def test_a_run_that_is_continued_ends_like_the_whole_one(tmp_path):
    class Saves(pl.Callback):
        def on_train_epoch_end(self, trainer, loop):
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    whole = fit(local_dp(client(), 1.0, delta=1e-3), 3, callbacks=[Saves()])
    rest = fit(local_dp(client(), 1.0, delta=1e-3), 3, None, tmp_path / "0.ckpt")
    assert equal(weights_of(whole), weights_of(rest))
    assert whole.round_metrics == rest.round_metrics
