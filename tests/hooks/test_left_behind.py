"""What one client, or a fit, must not leave to the next: gradients, metric values, modes, precision."""

import pytest
import pytorch_lightning as pl
import torch
from torchmetrics import MeanMetric

from fl_lightning import ClientModule, FederatedLoop
from fl_lightning.members.faults import ClientError
from fl_lightning.methods import FedAvg, FedProx
from tests.toys import BatchNormNet, fit, sgd, toy_data


def test_a_subclass_of_a_neutral_method_keeps_its_own_step():
    class Counts(FedProx):
        calls = 0

        def training_step(self, batch, batch_idx):
            self.calls += 1
            return super().training_step(batch, batch_idx)

    assert fit(Counts(mu=0.0, net=BatchNormNet, optimizer=sgd()), 1).client.calls > 0


def test_a_coefficient_that_a_callback_raises_from_0_has_an_effect():
    class WarmUp(pl.Callback):
        def on_train_epoch_start(self, trainer, loop):
            loop.client.mu = float(trainer.current_epoch)

    loop = fit(FedProx(mu=0.0, net=BatchNormNet, optimizer=sgd()), 2, callbacks=[WarmUp()])
    assert "train/proximal" in loop.round_metrics


def test_gradients_of_manual_optimization_stay_with_their_client():
    class Accumulates(ClientModule):
        def __init__(self, **base):
            super().__init__(**base)
            self.automatic_optimization = False
            self.first = []

        def training_step(self, batch, batch_idx):
            if batch_idx == 0:
                self.first.append(any(p.grad is not None for p in self.parameters()))
            self.manual_backward(self.local_loss(batch, batch_idx))

    assert not any(fit(Accumulates(net=BatchNormNet, optimizer=sgd()), 2).client.first)


def test_a_metric_of_a_client_that_failed_is_reset():
    class Fails(FedAvg):
        fails = True

        def __init__(self, **base):
            super().__init__(**base)
            self.level = MeanMetric()

        def training_step(self, batch, batch_idx):
            self.level.update(1000.0 if self.fails else 1.0)
            self.log("level", self.level)
            if self.fails:
                raise ZeroDivisionError
            return super().training_step(batch, batch_idx)

    loop = FederatedLoop(Fails(net=BatchNormNet, optimizer=sgd()), seed=3)
    with pytest.raises(ClientError, match="raised ZeroDivisionError"):
        fit(None, 1, loop=loop)
    loop.client.fails = False
    fit(None, 1, loop=loop)
    assert loop.round_metrics["level"] == 1


def test_what_a_client_logs_before_its_first_round_is_in_it():
    class Logs(FedAvg):
        def on_train_start(self):
            self.log("start", 3.0)

    assert fit(Logs(net=BatchNormNet, optimizer=sgd()), 1).round_metrics["start"] == 3


def test_values_of_one_fit_are_not_in_the_next():
    class Logs(FedAvg):
        fits = 0

        def training_step(self, batch, batch_idx):
            self.log(f"fit{self.fits}", 1.0)
            return super().training_step(batch, batch_idx)

    loop = fit(Logs(net=BatchNormNet, optimizer=sgd()), 1)
    loop.client.fits = 1
    fit(None, 1, loop=loop)
    assert "fit1" in loop.round_metrics
    assert "fit0" not in loop.round_metrics


def test_a_client_of_one_sample_leaves_no_mode_to_the_next():
    class Looks(FedAvg):
        def receive(self, broadcast, local):
            assert self.net.body[1].training

    fit(Looks(net=BatchNormNet, optimizer=sgd()), 1, toy_data((1, 7, 1, 5)))


def test_after_a_fit_the_client_is_in_full_precision():
    loop = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 1, precision="bf16-mixed")
    assert loop.client.eval()(torch.randn(2, 4)).dtype == torch.float32
