"""What client, server module and rule need is checked at start, before any client trains."""

from functools import partial

import pytest
import torch
from pytorch_lightning.plugins.precision import MixedPrecision

from fl_lightning import Aggregator, FederatedLoop
from fl_lightning.aggregation import ServerModule
from fl_lightning.methods import FedAvg, FedEXPAggregator, KnFu, Local
from tests.hooks.toy import Median, Quadratic
from tests.methods.own_models import transfer_data
from tests.toys import BatchNormNet, fit, folded, sgd, toy_data, trainer


def sides(need):
    """The settings of a loop in which the client, its server side or the rule needs something, and who is named."""

    class Client(FedAvg):
        needs = frozenset({need})

        def training_step(self, batch, batch_idx):
            pytest.fail("a client was trained")

    class Side(ServerModule):
        needs = frozenset({need})

    class Sided(FedAvg):
        server_class = Side
        training_step = Client.training_step

    class Plain(FedAvg):
        training_step = Client.training_step

    class Rule(Aggregator):
        needs = frozenset({need})

    return [(Client, None, "Client"), (Sided, None, "Sided"), (Plain, Rule, "Rule")]


def start(kind, rule, precision=None, **settings):
    loop = FederatedLoop(kind(**folded(settings)), rule and rule())
    run = trainer(1) if precision is None else trainer(1, plugins=[precision])
    run.fit(loop, datamodule=toy_data())


@pytest.mark.parametrize("side", range(3))
def test_exposure_refuses_an_optimizer_for_which_it_is_not_defined(side):
    kind, rule, name = sides("accumulated_lr")[side]
    for optimizer in (torch.optim.Adam, partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1)):
        with pytest.raises(ValueError, match=f"{name} needs to know how far the local optimizer travels.*set that"):
            start(kind, rule, optimizer=optimizer)


@pytest.mark.parametrize("side", range(3))
def test_exposure_refuses_a_gradient_scaler(side):
    kind, rule, name = sides("accumulated_lr")[side]
    scaled = MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(ValueError, match=f"{name} counts local steps, .*=16-mixed is refused; use bf16-mixed"):
        start(kind, rule, scaled, optimizer=sgd())


@pytest.mark.parametrize("side", range(3))
def test_a_split_that_the_data_lack_is_refused(side):
    kind, rule, name = sides("proxy")[side]
    with pytest.raises(ValueError, match=rf"{name} needs the split 'proxy'.*data\.proxy_size"):
        start(kind, rule)


@pytest.mark.parametrize("side", range(3))
def test_logits_are_refused_around_a_module(side):
    kind, rule, name = sides("logits")[side]
    with pytest.raises(ValueError, match=f"{name} needs the logits of a net, got module=Quadratic"):
        start(kind, rule, module=Quadratic())


def test_a_need_that_is_met_trains_and_costs_no_bytes():
    class Needs(FedAvg):
        needs = frozenset({"accumulated_lr", "logits"})

    row = fit(Needs(optimizer=sgd()), 1).round_metrics
    assert "train/ce" in row
    assert "comm/bytes_sets" not in row


def test_a_rule_is_refused_where_there_is_nothing_to_aggregate():
    with pytest.raises(ValueError, match=r"Median makes one set of weights.*those of Local share none.*aggregator"):
        fit(Local(), 1, aggregator=Median())
    with pytest.raises(ValueError, match=r"FedEXPAggregator makes one set of weights.*those of KnFu share none"):
        fit(KnFu(), 1, transfer_data(), aggregator=FedEXPAggregator())
    with pytest.raises(ValueError, match=r"Median makes one set of weights.*those of FedAvg share none"):
        fit(FedAvg(), 1, aggregator=Median(), personal=["*"])
    with pytest.raises(ValueError, match=r"FedEXPAggregator makes one set of weights.*share none that is trained"):
        fit(FedAvg(net=BatchNormNet), 1, aggregator=FedEXPAggregator(), personal=["*weight", "*bias"])


def test_the_server_side_of_another_method_is_refused():
    class Side(ServerModule):
        pass

    class Client(FedAvg):
        server_class = Side

    class Further(Side):
        pass

    with pytest.raises(ValueError, match="Client needs a Side, got ServerModule; leave server_module unset"):
        FederatedLoop(Client(), server_module=ServerModule())
    with pytest.raises(TypeError, match=r"aggregator must be a rule, .* got Side; a method's server side"):
        FederatedLoop(Client(), Side())
    with pytest.raises(TypeError, match=r"aggregator must be a rule, an instance of .* got FedEXPAggregator"):
        FederatedLoop(Client(), FedEXPAggregator)
    assert FederatedLoop(Client(), server_module=Further())
    assert isinstance(FederatedLoop(Client()).server_module, Side)
    assert type(FederatedLoop(Quadratic()).server_module) is ServerModule
