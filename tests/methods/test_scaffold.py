"""SCAFFOLD: its invariant, its optimum, its two options and places, and what it refuses."""

import copy
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from fl_lightning.methods import SCAFFOLD, FedAvg
from fl_lightning.nets import Perceptron
from tests.methods.convex import mean_in_memory, solve
from tests.methods.test_fedavg import Regression
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, weights_of

Small = partial(Perceptron, hidden=(6,))
PARTIAL = [[0, 1, 2, 3], [0, 2], [1, 2, 3]]
FORMS = [{}, {"where": "param"}, {"option": "I"}]


@pytest.mark.parametrize("form", FORMS)
def test_c_is_the_mean_of_all_clients_c_i(form):
    """Under partial participation, with a client that has no data."""
    data = toy_data((7, 0, 5, 9, 16), participation=0.6)
    loop = fit(SCAFFOLD(net=BatchNormNet, optimizer=sgd(), **form), 4, data, local_epochs=2)
    control = loop.server_module.control
    mean = mean_in_memory(loop, "control")
    assert any(value.abs().max() > 1e-3 for value in mean.values())
    for name, value in mean.items():
        assert control[name].dtype == torch.float64
        torch.testing.assert_close(control[name], value, rtol=1e-5, atol=1e-6)


class Breaks(Perceptron):
    """Gives NaN for a batch of four: the client with four samples."""

    def forward(self, x):
        return super().forward(x) * (torch.nan if len(x) == 4 else 1.0)


def test_the_invariant_holds_where_a_client_is_skipped():
    data = toy_data((7, 4, 5, 9), batch_size="full", schedule=PARTIAL)
    loop = fit(SCAFFOLD(net=Breaks, optimizer=sgd()), 3, data, nonfinite="skip")
    assert loop.round_metrics["train/skipped"] == 1
    assert "control" not in loop.store.record(1)[0]
    for name, value in mean_in_memory(loop, "control").items():
        torch.testing.assert_close(loop.server_module.control[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("momentum", "lr"), [pytest.param(0.0, 0.1, marks=pytest.mark.slow), (0.9, 0.03)])
def test_it_reaches_the_optimum_that_fedavg_misses(momentum, lr):
    """Unequal quadratics, unequal work, partial participation; inside momentum, too."""
    _, missed = solve(FedAvg, 60, PARTIAL, lr=lr, momentum=momentum)
    _, gap = solve(SCAFFOLD, 60, PARTIAL, lr=lr, momentum=momentum)
    assert missed > 0.02
    assert gap < missed / 50


def test_after_one_step_c_i_is_the_gradient_of_either_option():
    """K = 1 and plain SGD: (x − y) / lr is the gradient at x; weight decay is inside it in option II only."""
    data = toy_data((9,), batch_size="full", dtype=torch.float64)
    start = fit(FedAvg(net=Small), 0, data, precision="64-true").client.net.double()
    (x, y) = data.view(0, 0).all()
    gradients = torch.autograd.grad(F.cross_entropy(start(x), y), list(start.parameters()))
    for option in ("I", "II"):
        client = SCAFFOLD(option=option, net=Small, optimizer=sgd(0.3, 0.0, weight_decay=0.01 * (option == "I")))
        loop = fit(client, 1, data, precision="64-true")
        for own, gradient in zip(loop.store.record(0)[0]["control"].values(), gradients, strict=True):
            torch.testing.assert_close(own, gradient, rtol=1e-9, atol=1e-12)


def test_option_i_takes_the_mean_over_samples_in_eval_mode():
    """Batches of 5, 5 and 2 weigh by their samples; running statistics and dropout play no part."""
    data = toy_data((12,), dtype=torch.float64)
    net = fit(FedAvg(net=BatchNormNet), 0, data, precision="64-true").client.net.double().eval()
    before = copy.deepcopy(net.state_dict())
    loop = fit(SCAFFOLD(option="I", net=BatchNormNet, optimizer=sgd()), 1, data, precision="64-true")
    (x, y) = data.view(0, 0).all()
    gradients = torch.autograd.grad(F.cross_entropy(net(x), y), list(net.parameters()))
    for own, gradient in zip(loop.store.record(0)[0]["control"].values(), gradients, strict=True):
        torch.testing.assert_close(own, gradient, rtol=1e-9, atol=1e-12)
    assert equal(before, net.state_dict())


def test_without_momentum_and_decay_both_places_are_the_same():
    data = partial(toy_data, (10, 20, 30), dtype=torch.float64)
    settings = {"precision": "64-true", "accumulate_grad_batches": 2, "lr_decay": 0.5}
    runs = [
        fit(SCAFFOLD(where=where, net=Small, optimizer=sgd(0.1, 0.0)), 3, data(), **settings)
        for where in ("grad", "param")
    ]
    for a, b in zip(*(weights_of(loop).values() for loop in runs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    assert runs[0].client.accumulated_lr == pytest.approx(runs[1].client.travelled)


class SameOptimizer(Regression):
    """A module that hands out one optimizer again and again, with a schedule."""

    def configure_optimizers(self):
        if not hasattr(self, "mine"):
            self.mine = torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.5)
        return [self.mine], [torch.optim.lr_scheduler.StepLR(self.mine, 1, 0.5)]


def test_a_module_s_own_optimizer_corrects_once_a_step():
    class Fresh(SameOptimizer):
        def configure_optimizers(self):
            vars(self).pop("mine", None)
            return super().configure_optimizers()

    torch.manual_seed(0)
    start = Regression().state_dict()
    runs = []
    for kind in (SameOptimizer, Fresh):
        module = kind()
        module.load_state_dict(start)
        runs.append(fit(SCAFFOLD(where="param", module=module), 3, local_epochs=3, lr_decay=0.9))
    assert equal(*map(weights_of, runs))


def test_the_server_s_lr_moves_parameters_only():
    client = SCAFFOLD(net=BatchNormNet, optimizer=sgd())
    whole, half = (fit(copy.deepcopy(client), 1, server_optimizer=step) for step in (None, sgd(0.5, 0.0)))
    start = fit(copy.deepcopy(client), 0).client.state_dict()
    trained = {name for name, _ in client.build(3, (4,)) or client.named_parameters()}
    for name, value in half.client.state_dict().items():
        full = whole.client.state_dict()[name]
        expected = (start[name] + full) / 2 if name in trained else full
        torch.testing.assert_close(value, expected)


def test_personal_entries_have_no_control_variate():
    loop = fit(SCAFFOLD(net=BatchNormNet, optimizer=sgd()), 2, personal="net.head.*")
    assert loop.store.record(0)[0]["control"].keys() == set(loop.server_module.control)
    assert not [name for name in loop.server_module.control if "head" in name]


@pytest.mark.parametrize("settings", [{"option": "III"}, {"where": "momentum"}])
def test_bad_settings(settings):
    with pytest.raises(ValueError, match="must be one of"):
        SCAFFOLD(**settings)


def two_rates(params):
    first, *rest = params
    return torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": rest, "lr": 0.2}])


@pytest.mark.parametrize("optimizer", [partial(torch.optim.Adam, lr=0.1), two_rates])
def test_a_local_optimizer_without_exposure_is_refused(optimizer):
    with pytest.raises(ValueError, match=r"SCAFFOLD needs to know how far.*set that optimizer"):
        fit(SCAFFOLD(net=Small, optimizer=optimizer), 1)


@pytest.mark.parametrize("step", [partial(torch.optim.Adam, lr=0.1), sgd(1.0, 0.9), sgd(1.0, 0.0, weight_decay=0.1)])
def test_a_server_optimizer_that_is_not_x_plus_lr_times_the_change_is_refused(step):
    with pytest.raises(ValueError, match=r"SCAFFOLD's server step is .*, got (Adam|SGD); set that, or leave it unset"):
        fit(SCAFFOLD(net=Small, optimizer=sgd()), 1, server_optimizer=step)


@pytest.mark.parametrize("where", ["grad", "param"])
def test_a_last_group_of_fewer_batches_counts_by_its_share(where):
    """Batches of 4, 4 and 1, two a step: under a constant gradient c_i⁺ is that gradient."""

    class Constant(SCAFFOLD):
        def local_loss(self, batch, batch_idx):
            return 3.0 * sum(value.sum() for value in self.params().values())

    client = Constant(net=Small, optimizer=sgd(0.1, 0.0), where=where)
    data = toy_data((9, 17), batch_size=4, dtype=torch.float64)
    loop = fit(client, 3, data, precision="64-true", accumulate_grad_batches=2)
    for client_id in (0, 1):
        for value in loop.store.memory(client_id)["control"].values():
            torch.testing.assert_close(value, torch.full_like(value, 3.0), rtol=0, atol=1e-9)


def test_its_server_side_needs_its_clients():
    with pytest.raises(ValueError, match="a SCAFFOLDServer needs a SCAFFOLD client, got FedAvg; leave"):
        fit(FedAvg(net=Small), 1, server_module=SCAFFOLD.server_class())


class Warmed(Regression):
    """The learning rate of a client's first step is 0."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(step, 1))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.parametrize("where", ["grad", "param"])
def test_a_client_whose_steps_have_a_learning_rate_of_0_keeps_its_c_i(where):
    loop = fit(SCAFFOLD(module=Warmed(), where=where), 2, toy_data((5, 12)), clock="round")
    assert not loop.store.memory(0)
    assert all(value.isfinite().all() for value in loop.store.memory(1)["control"].values())
    assert all(value.isfinite().all() for value in loop.state_dict().values())


class TwoTypes(Perceptron):
    """With a scale in double precision."""

    def __init__(self, num_classes, input_shape):
        super().__init__(num_classes, input_shape, hidden=(6,))
        self.scale = torch.nn.Parameter(torch.ones(6, dtype=torch.float64))

    def features(self, x):
        return super().features(x) * self.scale.float()


@pytest.mark.parametrize("option", ["I", "II"])
def test_a_net_of_two_types_goes_with_a_client_without_data(option):
    loop = fit(SCAFFOLD(option=option, net=TwoTypes, optimizer=sgd(0.05)), 2, toy_data((7, 0, 12)))
    mean = mean_in_memory(loop, "control")
    for name, value in loop.server_module.control.items():
        torch.testing.assert_close(value, mean[name], rtol=1e-5, atol=1e-7)
