"""Laws of the federation itself, whatever the method: sums, order, empty clients, BatchNorm, one client alone."""

from fractions import Fraction
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.nn import functional as F

from fl_lightning import FederatedLoop
from fl_lightning.functional import state as S
from fl_lightning.methods import FedAvg, FedNTD, FedProx
from fl_lightning.nets import Perceptron
from tests.toys import SIZES, BatchNormNet, equal, fit, sgd, toy_data, weights_of

Small = partial(Perceptron, hidden=(6,))
Plain = partial(BatchNormNet, dropout=0.0)
METHODS = [FedAvg, partial(FedProx, mu=0.3), partial(FedNTD, beta=0.7)]
MOMENTUM = partial(torch.optim.SGD, lr=0.7, momentum=0.9)


class Watch(pl.Callback):
    """Copies of what each client returned, of the global model after each round, and of each round's values."""

    def __init__(self):
        self.updates = []
        self.after = []
        self.rows = []

    def on_train_epoch_start(self, trainer, loop):
        self.updates.append({})

    def on_client_end(self, trainer, loop, update):
        self.updates[-1][update.client_id] = (S.clone(update.weights), update.num_samples)

    def on_train_epoch_end(self, trainer, loop):
        self.after.append(S.clone(loop.client.state_dict()))
        self.rows.append(dict(loop.round_metrics))


# --- aggregation


def nearest(values, weights, dtype):
    """Σ n·w / Σ n in exact arithmetic, rounded once."""
    exact = sum(n * Fraction(value) for value, n in zip(values, weights, strict=True)) / sum(weights)
    return torch.tensor(float(exact), dtype=torch.float64).to(dtype).item() if dtype.is_floating_point else round(exact)


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_the_new_model_is_the_exact_mean_of_every_entry(weighting):
    """Parameters and running statistics alike; counters rounded half to even; a client without data weighs nothing."""
    watch = Watch()
    fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 2, toy_data((7, 0, 12, 5)), callbacks=[watch], weighting=weighting)
    for updates, after in zip(watch.updates, watch.after, strict=True):
        taking_part = [(weights, n) for weights, n in updates.values() if n]
        weights = [n if weighting == "samples" else 1 for _, n in taking_part]
        for name, value in after.items():
            columns = zip(*(state[name].reshape(-1).tolist() for state, _ in taking_part), strict=True)
            assert value.reshape(-1).tolist() == [nearest(column, weights, value.dtype) for column in columns]


def test_counters_are_rounded_half_to_even():
    """One and two batches: 1.5 becomes 2; from there 3 and 4: 3.5 becomes 4; two and three batches: 2.5 becomes 2."""
    watch = Watch()
    data = toy_data((5, 5))
    fit(FedAvg(net=Plain), 2, data, callbacks=[watch], local_epochs=[1, 2])
    assert [after["net.body.1.num_batches_tracked"].item() for after in watch.after] == [2, 4]
    fit(FedAvg(net=Plain), 1, data, callbacks=[watch], local_epochs=[2, 3])
    assert watch.after[-1]["net.body.1.num_batches_tracked"] == 2


@pytest.mark.parametrize("method", METHODS)
def test_the_order_of_clients_does_not_show(method):
    """Bit for bit, and in every value that is logged."""
    orders = ([[0, 1, 2, 3, 4], [3, 1, 0]], [[4, 2, 0, 3, 1], [0, 3, 1]])
    runs = []
    for schedule in orders:
        watch = Watch()
        client = method(net=BatchNormNet, optimizer=sgd())
        loop = fit(client, 2, toy_data(schedule=schedule), callbacks=[watch], server_optimizer=MOMENTUM)
        runs.append((weights_of(loop), watch.rows))
    assert equal(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]


@pytest.mark.parametrize("method", METHODS)
def test_a_client_without_samples_has_no_influence(method):
    runs = []
    for schedule in ([[0, 1, 2], [1, 2]], [[0, 2], [2]]):
        client = method(net=BatchNormNet, optimizer=sgd())
        runs.append(weights_of(fit(client, 2, toy_data((7, 0, 12), schedule=schedule))))
    assert equal(*runs)


@pytest.mark.parametrize("server_optimizer", [None, MOMENTUM])
def test_a_cohort_without_any_sample_leaves_the_model(server_optimizer):
    watch = Watch()
    data = toy_data((7, 0, 0, 5), schedule=[[0, 3], [1, 2], [2]])
    client = FedAvg(net=BatchNormNet, optimizer=sgd())
    loop = fit(client, 3, data, callbacks=[watch], server_optimizer=server_optimizer)
    assert equal(watch.after[0], watch.after[1])
    assert equal(watch.after[0], watch.after[2])
    assert loop.trainer.global_step == 3


# --- one client, and what equals what


@pytest.mark.parametrize("net", [Small, Plain])
def test_one_client_is_centralised_training(net):
    """A round of one client is an epoch of SGD, its momentum begun anew and its lr decayed once a round."""
    rounds = 3
    decay = 0.8
    optimizer = sgd(0.1, 0.9, weight_decay=1e-3)
    data = toy_data((23,), batch_size=5)
    loop = fit(FedAvg(net=net, optimizer=optimizer), rounds, data, lr_decay=decay)
    reference = fit(FedAvg(net=net, optimizer=optimizer), 0, data).client.net.train()
    for t in range(rounds):
        steps = torch.optim.SGD(reference.parameters(), lr=0.1 * decay**t, momentum=0.9, weight_decay=1e-3)
        for x, y in data.view(0, t).batches(epoch=0):
            steps.zero_grad()
            F.cross_entropy(reference(x), y).backward()
            steps.step()
    for name, value in reference.state_dict().items():
        assert torch.equal(loop.client.net.state_dict()[name], value)


@pytest.mark.parametrize("method", METHODS)
def test_accumulated_batches_are_one_large_batch(method):
    runs = []
    for size, every in ((10, 1), (5, 2)):
        data = toy_data((20, 10), batch_size=size, dtype=torch.float64)
        client = method(net=Small, optimizer=sgd())
        runs.append(fit(client, 2, data, accumulate_grad_batches=every, precision="64-true").client.state_dict())
    torch.testing.assert_close(*runs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_runs_repeat_and_depend_on_the_seed(method):
    first, again, other = (
        weights_of(fit(method(net=BatchNormNet, optimizer=sgd()), 2, seed=seed)) for seed in (1, 1, 2)
    )
    assert equal(first, again)
    assert not equal(first, other)


class Batches(pl.Callback):
    """Which samples each step of each client saw."""

    def __init__(self):
        self.seen = []

    def on_client_start(self, trainer, loop, client_id):
        view = loop.data.view(client_id, trainer.current_epoch)
        self.seen.append((client_id, [y.tolist() for _, y in view.batches(epoch=0)]))


def test_every_method_sees_the_same_cohorts_and_batches():
    watches = [Batches() for _ in METHODS]
    for method, watch in zip(METHODS, watches, strict=True):
        fit(method(net=Small), 3, toy_data(participation=0.4), callbacks=[watch])
    assert watches[0].seen == watches[1].seen == watches[2].seen
    assert len({client_id for client_id, _ in watches[0].seen}) > 2


# --- BatchNorm and small batches


def test_a_last_batch_of_one_is_left_out_with_batchnorm_only():
    def trained(net, n):
        data = toy_data((n, 12 - n), schedule=[[0], [0]], shuffle=False)  # the first n of the same samples
        return fit(FedAvg(net=net, optimizer=sgd()), 2, data).client.state_dict()

    assert equal(trained(Plain, 11), trained(Plain, 10))
    assert not equal(trained(Small, 11), trained(Small, 10))
    assert not equal(trained(Plain, 12), trained(Plain, 10))  # two samples do train


def test_a_client_with_one_sample_trains_by_the_running_statistics():
    """It moves the weights as a net in eval mode does, and leaves the statistics and the counter alone."""
    watch = Watch()
    data = toy_data((9, 1), schedule=[[0], [1]])
    fit(FedAvg(net=Plain, optimizer=sgd(0.1, 0.9)), 2, data, callbacks=[watch])
    before, after = watch.after
    net = Plain(3, (4,)).eval()
    net.load_state_dict({name.removeprefix("net."): value for name, value in before.items()})
    x, y = data.view(1, 1).all()
    F.cross_entropy(net(x), y).backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    for name, value in net.state_dict().items():
        torch.testing.assert_close(after[f"net.{name}"], value)
        if (name.startswith("body.1.") and "running" in name) or name.endswith("tracked"):
            assert torch.equal(after[f"net.{name}"], before[f"net.{name}"])


def test_the_next_client_of_a_single_sample_trains_in_train_mode():
    runs = [
        weights_of(fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 1, toy_data((9, 1, 12), schedule=[order])))
        for order in ([0, 1, 2], [1, 2, 0])
    ]
    assert equal(*runs)


def test_batches_of_one_are_refused_with_batchnorm_only():
    with pytest.raises(ValueError, match=r"batch_size must be at least 2 for a net with BatchNorm, got 1"):
        fit(FedAvg(net=BatchNormNet), 1, toy_data(batch_size=1))
    assert all(
        value.isfinite().all() for value in fit(FedAvg(net=Small), 1, toy_data(batch_size=1)).state_dict().values()
    )


class Bare(BatchNormNet):
    """BatchNorm without running statistics, with a cumulative average, and a boolean and a half-precision entry."""

    def __init__(self, num_classes, input_shape):
        super().__init__(num_classes, input_shape)
        self.body.append(nn.BatchNorm1d(8, track_running_stats=False))
        self.body.append(nn.BatchNorm1d(8, momentum=None))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("coarse", torch.ones(2, dtype=torch.bfloat16))


def test_entries_of_every_type_survive_a_round():
    loop = fit(FedAvg(net=Bare, optimizer=sgd()), 2)
    net = loop.client.net
    assert net.mask.tolist() == [True, False]
    assert net.coarse.dtype == torch.bfloat16
    assert net.coarse.tolist() == [1.0, 1.0]
    assert (net.body[1].running_var > 0).all()
    assert net.body[5].num_batches_tracked.dtype == torch.int64


@pytest.mark.parametrize("server_optimizer", [partial(torch.optim.SGD, lr=3.0), partial(torch.optim.Adam, lr=0.1)])
def test_a_server_optimizer_moves_parameters_only(server_optimizer):
    """Buffers are the plain mean: extrapolated, a running variance would become negative."""
    watch = Watch()
    loop = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 2, callbacks=[watch], server_optimizer=server_optimizer)
    for updates, after in zip(watch.updates, watch.after, strict=True):
        mean = S.weighted_mean([weights for weights, _ in updates.values()], [n for _, n in updates.values()])
        for name, value in after.items():
            if name not in loop.client.params():
                assert torch.equal(value, mean[name])
            elif "bias" not in name:
                assert not torch.equal(value, mean[name])


def test_a_server_sgd_step_of_one_takes_the_mean():
    runs = [
        weights_of(fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 2, server_optimizer=server))
        for server in (None, partial(torch.optim.SGD, lr=1.0))
    ]
    torch.testing.assert_close(*({n: v for n, v in run.items() if n.startswith("client.")} for run in runs))


# --- classes


@pytest.mark.parametrize("method", METHODS)
def test_relabelled_classes_permute_class_wise_results(method, tmp_path):
    """Classes c and π(c) trade places in the labels and in the head; losses stay, class accuracies move along."""
    to = torch.tensor([2, 0, 1])
    start = fit(method(net=Small), 0, toy_data(dtype=torch.float64)).client.state_dict()
    moved = {n: torch.empty_like(v).index_copy_(0, to, v) if ".head." in n else v for n, v in start.items()}
    rows = []
    for weights, relabel in ((start, None), (moved, to)):
        torch.save(weights, tmp_path / "start.pt")
        data = toy_data(dtype=torch.float64)
        if relabel is not None:
            source = data.source
            source.train, source.test = ((x, relabel[y]) for x, y in (source.train, source.test))
        watch = Watch()
        client = method(net=Small, optimizer=sgd())
        fit(client, 3, data, callbacks=[watch], initial_weights=tmp_path / "start.pt", precision="64-true")
        rows.append(watch.rows)
    for row, other in zip(*rows, strict=True):
        for c, moved_to in enumerate(to.tolist()):
            assert row[f"global/acc_class/{c:02d}"] == other[f"global/acc_class/{moved_to:02d}"]
        for key in set(row) - {key for key in row if "acc_class" in key}:
            assert other[key] == pytest.approx(row[key], rel=1e-9), key
    assert len({rows[0][-1][f"global/acc_class/{c:02d}"] for c in range(3)}) > 1


# --- updates that are not finite


class Explodes(FedAvg):
    """Client 2 of round 1 returns a NaN."""

    def reply(self, exchange, local):
        if (local.client_id, local.round_idx) == (2, 1):
            with torch.no_grad():
                self.net.head.bias[0] = torch.nan
        return {}


def test_an_update_that_is_not_finite_names_client_and_round_and_loses_nothing():
    loop = FederatedLoop(Explodes(net=BatchNormNet, optimizer=sgd()), seed=3)
    with pytest.raises(RuntimeError, match=r"client 2 returned NaN or infinite values in round 1; .*nonfinite to skip"):
        fit(None, 3, loop=loop)
    assert equal(weights_of(loop), weights_of(fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 1)))


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_a_skipped_update_counts_as_a_client_without_samples(weighting):
    watch = Watch()
    everyone = list(range(len(SIZES)))
    skipping = fit(
        Explodes(net=BatchNormNet, optimizer=sgd()), 3, callbacks=[watch], nonfinite="skip", weighting=weighting
    )
    schedule = [everyone, [0, 1, 3, 4], everyone]
    without = fit(FedAvg(net=BatchNormNet, optimizer=sgd()), 3, toy_data(schedule=schedule), weighting=weighting)
    assert equal(weights_of(skipping), weights_of(without))
    assert [row["train/skipped"] for row in watch.rows] == [0, 1, 0]
