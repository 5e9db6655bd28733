"""Who may write a key of the package: nobody overwrites it, and it overwrites nobody's value."""

import pytest
import torch
import torchmetrics
from pytorch_lightning import Callback, LightningModule
from torch import nn

from fl_lightning import FederatedLoop
from fl_lightning.client.services import ClientServices, EvaluationServices
from fl_lightning.methods import FedAvg
from fl_lightning.metrics.history import UNPROTECTED
from fl_lightning.metrics.keys import OWN, check_metric_name, describe
from tests.toys import BatchNormNet, fit, sgd, toy_data, trainer

pytestmark = pytest.mark.filterwarnings("ignore")

PATTERNS = [entry.pattern for entry in OWN]
REFUSAL = "self.log must not be given .*which the package writes itself; log the value under another name"


def name_of(pattern: str) -> str:
    """A key that matches a pattern of the registry."""
    return pattern.replace("*", "cat")


class Module(LightningModule):
    """A user's module, which logs a key in one of its hooks or steps."""

    def __init__(self, key: str, hook: str, value=0.123) -> None:
        super().__init__()
        self.net = nn.Linear(4, 3)
        self.mean = torchmetrics.MeanMetric()
        self.key = key
        self.hook = hook
        self.value = value

    def say(self, hook: str) -> None:
        if hook != self.hook:
            return
        if self.value is None:
            self.mean(0.123)
            self.log(self.key, self.mean)
        else:
            self.log_dict({self.key: self.value})

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        self.say("training_step")
        return nn.functional.cross_entropy(self.net(batch[0].float()), batch[1])

    def validation_step(self, batch, batch_idx):
        self.say("validation_step")

    def on_train_epoch_start(self):
        self.say("on_train_epoch_start")

    def on_train_epoch_end(self):
        self.say("on_train_epoch_end")

    def on_validation_epoch_end(self):
        self.say("on_validation_epoch_end")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Own(FedAvg):
    """A client with a net, which the loop evaluates itself."""

    def __init__(self, key: str, hook: str) -> None:
        super().__init__(net=BatchNormNet, optimizer=sgd())
        self.key = key
        self.hook = hook

    def training_step(self, batch, batch_idx):
        if self.hook == "training_step":
            self.log(self.key, 0.123)
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self):
        if self.hook == "on_validation_epoch_end":
            self.log(self.key, 0.123)


@pytest.mark.parametrize("mark", ["", UNPROTECTED])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_key_of_the_registry_has_one_writer(pattern, mark):
    key = mark + name_of(pattern)
    training, evaluation = ClientServices(), EvaluationServices()
    evaluation.evaluates = True
    by_clients = describe(key).writer == "clients"
    by_modules = pattern.startswith(("val/", "test/"))
    for services, may_log in ((training, by_clients), (evaluation, by_clients or by_modules)):
        for value in (0.5, torch.tensor(0.5), torchmetrics.MeanMetric()):
            if may_log:
                services.log(key, value)
                continue
            with pytest.raises(ValueError, match=REFUSAL):
                services.log(key, value)
            with pytest.raises(ValueError, match=REFUSAL):
                services.log_dict({key: value})
            assert not services.logged.rows
            assert not services.logged.metrics


@pytest.mark.parametrize("key", ["local/alma", "global/acc", "cost/steps", "comm/bytes_up", "global/forgetting"])
@pytest.mark.parametrize("hook", ["training_step", "validation_step", "on_train_epoch_end", "on_validation_epoch_end"])
@pytest.mark.parametrize("value", [0.123, None])
def test_a_module_of_the_user_is_refused_at_its_first_log(key, hook, value):
    with pytest.raises(Exception, match=REFUSAL):
        fit(Module(key, hook, value), rounds=1, evaluate_clients_every=1)


@pytest.mark.parametrize("hook", ["training_step", "on_validation_epoch_end"])
@pytest.mark.parametrize("key", ["global/acc", "val/loss", "local/alma"])
def test_a_client_with_a_net_is_refused_the_values_that_the_loop_measures(key, hook):
    with pytest.raises(Exception, match=REFUSAL):
        fit(Own(key, hook), rounds=1)


def test_a_module_that_evaluates_itself_reports_its_accuracy():
    loop = fit(Module("val/acc", "validation_step"), rounds=1)
    assert loop.round_metrics["val/acc"] == pytest.approx(0.123)


@pytest.mark.parametrize("key", ["local/alma", "global/acc", "val/acc_class/cat", "comm/bytes_down", "privacy/epsilon"])
@pytest.mark.parametrize("hook", ["on_client_end", "on_train_epoch_end"])
def test_a_callback_is_refused_what_the_loop_writes(key, hook):
    class Says(Callback):
        pass

    setattr(Says, hook, lambda self, trainer, loop, *args: loop.log(key, 0.123))
    fitted = trainer(1, callbacks=[Says()])
    loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), evaluate_clients_every=1)
    with pytest.raises(Exception, match=REFUSAL):
        fitted.fit(loop, datamodule=toy_data((8, 12)))


def test_a_callback_may_measure_what_a_monitor_would():
    class Says(Callback):
        def on_client_end(self, trainer, loop, *args):
            loop.log("local/drift", 0.5)

    loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()))
    trainer(1, callbacks=[Says()]).fit(loop, datamodule=toy_data((8, 12)))
    assert loop.round_metrics["local/drift"] == 0.5


@pytest.mark.parametrize("pattern", [p for p in PATTERNS if p.startswith(("global/", "val/", "test/", "local/"))])
def test_no_metric_object_has_the_name_of_a_key(pattern):
    with pytest.raises(ValueError, match=r"model\.metrics must not be named"):
        check_metric_name(name_of(pattern).partition("/")[2])
