"""FedCurv: its sums over partial participation, its penalty by hand, both Fisher estimates, and what it refuses."""

import copy
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from torch.nn import functional as F

from fl_lightning.functional import state as S
from fl_lightning.functional.importance import batch_fisher
from fl_lightning.methods import FedCurv
from fl_lightning.methods.fedcurv import curvature_penalty
from fl_lightning.nets import Perceptron
from tests.methods.convex import mean_in_memory
from tests.methods.stacked import stacked_and_alone
from tests.methods.test_fedavg import Regression
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, weights_of

Small = partial(Perceptron, hidden=(6,))
PARTIAL = [[0, 1, 2, 3], [0, 2], [1, 3]]


def per_sample(net, x, y):
    """Mean over samples of the squared gradient, one by one."""
    total = [torch.zeros_like(p) for p in net.parameters()]
    for one, label in zip(x, y, strict=True):
        gradients = torch.autograd.grad(F.cross_entropy(net(one[None]), label[None]), list(net.parameters()))
        total = [t + g.square() / len(x) for t, g in zip(total, gradients, strict=True)]
    return total


@pytest.mark.parametrize("fisher", ["sample", "batch"])
def test_u_and_v_are_the_sums_of_all_clients_latest(fisher):
    """Under partial participation, with a client that has no data."""
    data = toy_data((7, 0, 5, 9), schedule=PARTIAL)
    loop = fit(FedCurv(lam=0.1, fisher=fisher, net=BatchNormNet, optimizer=sgd()), 3, data)
    assert not loop.store.record(1)[0]
    for name in ("u", "v"):
        kept = getattr(loop.server_module, name)
        mean = mean_in_memory(loop, name)
        for entry, value in mean.items():
            torch.testing.assert_close(kept[entry], 4 * value, rtol=1e-5, atol=1e-6)


def test_the_last_round_s_sums_hold_its_clients_only():
    loop = fit(
        FedCurv(lam=0.1, scope="last_round", net=Small, optimizer=sgd()), 3, toy_data((7, 3, 5, 9), schedule=PARTIAL)
    )
    ones = [loop.store.record(client_id)[0] for client_id in (1, 3)]
    for name in ("u", "v"):
        for entry, value in getattr(loop.server_module, name).items():
            torch.testing.assert_close(value, sum(one[name][entry].double() for one in ones), rtol=1e-5, atol=1e-6)


class Pulls(pl.Callback):
    """Notes the penalty's coefficients that each client had in each round."""

    def __init__(self):
        self.rounds = []
        self.memories = []

    def on_train_epoch_start(self, trainer, loop):
        self.rounds.append({})
        self.memories.append({i: loop.store.record(i)[0] for i in range(4)})

    def on_client_end(self, trainer, loop, update):
        self.rounds[-1][update.client_id] = copy.deepcopy(loop.client.round)


@pytest.mark.parametrize("scope", ["seen", "last_round"])
def test_a_client_is_pulled_by_the_others_only(scope):
    """By hand: the sum over j ≠ i of those seen, or of the last round's cohort."""
    pulls = Pulls()
    client = FedCurv(lam=0.1, scope=scope, net=Small, optimizer=sgd())
    fit(
        client, 3, toy_data((7, 3, 5, 9), dtype=torch.float64, schedule=PARTIAL), callbacks=[pulls], precision="64-true"
    )
    for r, cohort in enumerate(PARTIAL):
        before = pulls.memories[r]
        counted = range(4) if scope == "seen" else PARTIAL[r - 1] if r else ()
        for i in cohort:
            for name in ("u", "v"):
                for entry, value in pulls.rounds[r][i][name].items():
                    others = [before[j][name][entry] for j in counted if j != i and name in before[j]]
                    expected = sum(others, torch.zeros_like(value))
                    torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12)


def test_a_lost_round_is_not_the_last_round():
    """U and V are then of the round before it, and a client of that round subtracts its own pair all the same."""

    class Lost(FedCurv):
        def receive(self, broadcast, local):
            super().receive(broadcast, local)
            found.append(max(float(value.abs().max()) for value in self.round["u"].values()))
            if local.round_idx == 1:
                raise RuntimeError("no power")

    found: list[float] = []
    client = Lost(scope="last_round", net=Small, optimizer=sgd())
    fit(client, 3, toy_data((7, 3), schedule=[[0]] * 3), on_error="skip")
    assert found == [0.0, 0.0, 0.0]


def test_the_penalty_is_the_others_quadratic_less_a_constant():
    g = torch.Generator().manual_seed(0)
    F_j = [{"w": torch.rand(5, generator=g).double()} for _ in range(3)]
    theta_j = [{"w": torch.randn(5, generator=g).double()} for _ in range(3)]
    P = {"w": sum(f["w"] for f in F_j)}
    Q = {"w": sum(f["w"] * t["w"] for f, t in zip(F_j, theta_j, strict=True))}

    def naive(w):
        return sum((f["w"] * (w - t["w"]).square()).sum() for f, t in zip(F_j, theta_j, strict=True))

    for _ in range(3):
        a, b = (torch.randn(5, generator=g).double() for _ in range(2))
        ours = curvature_penalty({"w": a}, P, Q) - curvature_penalty({"w": b}, P, Q)
        torch.testing.assert_close(ours, naive(a) - naive(b))


def test_the_fisher_of_samples_is_taken_at_the_trained_weights_in_eval_mode():
    data = toy_data((12,), dtype=torch.float64)
    loop = fit(FedCurv(net=BatchNormNet, optimizer=sgd()), 1, data, precision="64-true")
    net = loop.client.net.eval()  # one client: the server has its weights
    expected = per_sample(net, *data.view(0, 0).all())
    own = loop.store.record(0)[0]
    for (entry, u), other in zip(own["u"].items(), expected, strict=True):
        torch.testing.assert_close(u, other, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(own["v"][entry], other * net.get_parameter(entry.removeprefix("net.")))


@pytest.mark.parametrize(("most", "used"), [(500, 11), (499, 10), (50, 2), (1, 1), (None, 20)])
def test_the_batch_that_passes_the_number_of_samples_is_the_last(most, used):
    """500 samples in batches of 50: eleven batches."""
    x = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0)).double()
    found = batch_fisher(lambda p, x: (x @ p["w"]).mean(), {"w": torch.zeros(3).double()}, x.split(50), most)
    torch.testing.assert_close(found["w"], torch.stack([b.mean(0).square() for b in x.split(50)[:used]]).mean(0))


def test_around_a_module():
    for fisher in ("sample", "batch"):
        loop = fit(FedCurv(lam=0.01, fisher=fisher, module=Regression()), 2)
        assert loop.round_metrics["train/penalty"] != 0
        assert all(bool((value > 0).any()) for value in loop.server_module.u.values())


def test_the_order_of_clients_does_not_matter():
    """The own statistics are subtracted out of place."""
    runs = [
        fit(FedCurv(lam=0.1, net=Small, optimizer=sgd()), 2, toy_data((7, 3, 5), schedule=[order] * 2))
        for order in ([0, 1, 2], [2, 0, 1])
    ]
    weights = [runs[k].client.state_dict() for k in range(2)]
    assert equal(*weights)


def test_it_stacks():
    client = FedCurv(lam=0.3, net=Small, num_classes=3, input_shape=(4,)).double()
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 4, generator=g).double()
    y = torch.randint(3, (3, 5), generator=g)
    params = client.params() or dict(client.named_parameters())
    u, v = ({n: torch.rand(3, *p.shape, generator=g).double() for n, p in params.items()} for _ in range(2))
    torch.testing.assert_close(*stacked_and_alone(client, {"u": u, "v": v}, x, y))


def test_three_times_fedavg_s_traffic_goes_both_ways():
    loop = fit(FedCurv(net=Small, optimizer=sgd()), 1, toy_data((7, 3)))
    size = sum(value.numel() for value in S.clone(loop.client.state_dict()).values())
    assert loop.round_metrics["comm/bytes_up"] == loop.round_metrics["comm/bytes_down"] == 2 * 3 * 4 * size
    assert weights_of(loop)


def test_divergence_names_the_step_size():
    with pytest.raises(RuntimeError, match=r"FedCurv needs lr · lam · max\(U\) well below 1: lower lam \(1e\+30\)"):
        fit(FedCurv(lam=1e30, net=Small, optimizer=sgd()), 5, local_epochs=20)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"lam": -1.0}, "lam must be at least 0"),
        ({"fisher": "full"}, "fisher must be one of"),
        ({"fisher_samples": 0}, "fisher_samples must be at least 1"),
        ({"scope": "all"}, "scope must be one of"),
    ],
)
def test_bad_settings(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        FedCurv(**settings)


def test_a_server_optimizer_that_leaves_the_clients_weights_is_refused():
    for step in (sgd(1.0, 0.9), partial(torch.optim.Adam, lr=0.1)):
        with pytest.raises(ValueError, match=r"FedCurv's Fisher information.*set that, or leave it unset"):
            fit(FedCurv(net=Small, optimizer=sgd()), 1, server_optimizer=step)
    fit(FedCurv(net=Small, optimizer=sgd()), 1, server_optimizer=sgd(0.5, 0.0))
