"""CCVR: what clients are asked, the moments and draws of the server, the head that is evaluated, FedAvg as it is."""

from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks.weight_averaging import EMAWeightAveraging
from torch import nn
from torch.nn import functional as F

from fl_lightning import FederatedDataModule, FederatedLoop, NonFiniteUpdateError
from fl_lightning.aggregation import QSGD, KrumAggregator, MedianAggregator
from fl_lightning.data import FixedPartition, TensorSource
from fl_lightning.methods import (
    MOON,
    CCVRServer,
    FedAvg,
    FedBN,
    FedEXPAggregator,
    FedNovaAggregator,
    FedProx,
    FedRep,
    FedRoD,
)
from fl_lightning.methods.ccvr import ClassMoments, symmetric_root
from fl_lightning.nets import Backbone, Perceptron
from tests.federation.faulty import Faulty
from tests.methods.test_fedavg import Regression
from tests.toys import BatchNormNet, EdgePartition, equal, fit, folded, samples, sgd, toy_data, trainer, weights_of

Small = partial(Perceptron, hidden=(6,))
QUICK = {"samples_per_class": 20, "calibration_lr": 0.1}
HEAD = ("net.head.weight", "net.head.bias")
SIZES = (7, 0, 12, 1, 5)


class Rows(pl.Callback):
    """Row, evaluated head and moments of each round."""

    def __init__(self):
        self.rows = []
        self.heads = []

    def on_train_epoch_end(self, trainer, loop):
        self.rows.append(dict(loop.round_metrics))
        with loop.evaluation.evaluated_entries():
            self.heads.append({name: loop.client.state_dict()[name].clone() for name in HEAD})


class Noted(CCVRServer):
    """Notes the weights under which features were taken, the answers, and the moments of each calibration."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.under = {}
        self.moments = {}
        self.answers = {}

    def add(self, update):
        super().add(update)
        if update.extras:
            self.under[self.server.round_idx] = {n: v.clone() for n, v in self.server.weights.items()}
            of_round = self.answers.setdefault(self.server.round_idx, {})
            of_round[update.client_id] = dict(update.extras)

    def calibrate(self, moments):
        self.moments[self.server.round_idx] = moments
        return super().calibrate(moments)


def client(kind=FedAvg, net=BatchNormNet, **settings):
    return kind(net=net, optimizer=sgd(0.05), **settings)


def ccvr(made=None, rounds=3, data=None, rule=None, callbacks=None, loop=None, ckpt_path=None, given=None, **settings):
    """Fit with CCVR's server; `loop`: settings of the loop."""
    side = given or Noted(**{"every": 1, **QUICK, **settings})
    whole = FederatedLoop(made or client(), rule, server_module=side, seed=3, **folded(loop or {}))
    data = toy_data(SIZES) if data is None else data
    return fit(None, rounds, data, ckpt_path=ckpt_path, loop=whole, callbacks=callbacks)


def shared(loop):
    return {name: value for name, value in weights_of(loop).items() if not name.startswith("server_module.")}


# --- training is that of the clients' own method


@pytest.mark.parametrize(
    "made",
    [client, partial(client, FedProx, mu=0.1), partial(client, MOON), partial(client, FedBN), partial(client, FedRoD)],
    ids=["FedAvg", "FedProx", "MOON", "FedBN", "FedRoD"],
)
@pytest.mark.parametrize("settings", [{"every": 1}, {"every": 2}, {"every": None}], ids=str)
def test_weights_and_training_are_those_of_the_method_bit_for_bit(made, settings):
    plain_rows = Rows()
    ours_rows = Rows()
    plain = fit(made(), 3, toy_data(SIZES), callbacks=[plain_rows])
    ours = ccvr(made(), callbacks=[ours_rows], **settings)
    assert equal(shared(ours), shared(plain))
    for row, expected in zip(ours_rows.rows, plain_rows.rows, strict=True):
        trained = {key: value for key, value in expected.items() if key.startswith("train/")}
        assert trained
        assert {key: row[key] for key in trained} == trained
    kept = [[loop.store.record(i)[0].keys() for i in sorted(loop.store.clients)] for loop in (ours, plain)]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("rule", [MedianAggregator, partial(KrumAggregator, f=0), FedNovaAggregator])
def test_any_rule_makes_the_weights_under_which_features_are_taken(rule):
    data = toy_data((7, 6, 12, 8, 5))
    plain = fit(client(), 2, data, aggregator=rule())
    ours = ccvr(rounds=2, data=data, rule=rule())
    assert equal(shared(ours), shared(plain))
    last = ours.client.state_dict()
    assert all(torch.equal(last[name], value) for name, value in ours.server_module.under[1].items())


# --- the moments


def features_under(weights, x):
    net = BatchNormNet(3, (4,)).eval()
    net.load_state_dict({name.removeprefix("net."): value for name, value in weights.items()})
    with torch.no_grad():
        return net.features(x).double()


def parts(data, cohort):
    """Samples and classes of the cohort, in the order of its clients."""
    batches = [data.view(i, 0).all("train") for i in cohort if data.size(i, 0)]
    return [torch.cat(values) for values in zip(*batches, strict=True)]


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
@pytest.mark.parametrize("cohort", [[0, 1, 2, 3, 4], [3], [0, 3, 4]], ids=str)
def test_the_merged_moments_are_those_of_all_samples_together(cohort, covariance):
    """In eval mode under the mean and its statistics, and unbiased, whoever has how many samples of a class."""
    data = toy_data(SIZES, schedule=[cohort])
    side = ccvr(rounds=1, data=data, covariance=covariance).server_module
    x, y = parts(data, cohort)
    features = features_under(side.under[0], x)
    moments = side.moments[0]
    assert moments.counts.tolist() == y.bincount(minlength=3).tolist()
    for c, count in enumerate(moments.counts.tolist()):
        of_class = features[y == c]
        expected = of_class.T.cov() if count > 1 else torch.zeros(8, 8, dtype=torch.float64)
        found = moments.covariances[c]
        if count:
            torch.testing.assert_close(moments.means[c], of_class.mean(0), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(
            found, expected if covariance == "full" else expected.diagonal(), rtol=1e-4, atol=1e-6
        )


def test_a_client_sends_its_counts_means_and_unbiased_covariances_and_zeros_without_samples():
    data = toy_data(SIZES)
    side = ccvr(rounds=1, data=data).server_module
    for client_id, size in enumerate(SIZES):
        answer = side.answers[0][client_id]
        assert {name: value.shape for name, value in answer.items()} == {
            "counts": (3,),
            "means": (3, 8),
            "covariances": (3, 8, 8),
        }
        assert answer["counts"].dtype == torch.int64
        assert int(answer["counts"].sum()) == size
        lacks = answer["counts"] == 0
        assert not answer["means"][lacks].any()
        assert not answer["covariances"][answer["counts"] <= 1].any()
    of_two = next(a for a in side.answers[0].values() if (a["counts"] == 2).any())
    c = int((of_two["counts"] == 2).nonzero()[0])
    trace = of_two["covariances"][c].trace()
    client_id = next(i for i, a in side.answers[0].items() if a is of_two)
    x, y = data.view(client_id, 0).all("train")
    first, second = features_under(side.under[0], x[y == c])
    torch.testing.assert_close(trace.double(), (first - second).square().sum() / 2, rtol=1e-4, atol=1e-6)


def test_one_sample_of_a_class_is_given_away_and_so_are_two():
    """What docs/privacy.md says of the messages."""
    x, y = samples(40)
    one = (y == 0).nonzero().flatten()[:1]
    two = (y == 1).nonzero().flatten()[:2]
    source = TensorSource((x, y), samples(6, seed=1), num_classes=3)
    parts_of_clients = [torch.cat([one, two]).tolist(), list(range(20, 40))]
    data = FederatedDataModule(source, 2, FixedPartition(parts_of_clients), batch_size=5)
    side = ccvr(rounds=1, data=data).server_module
    answer = side.answers[0][0]
    assert answer["counts"].tolist() == [1, 2, 0]
    truth = features_under(side.under[0], x)
    torch.testing.assert_close(answer["means"][0].double(), truth[one[0]], rtol=1e-5, atol=1e-6)
    values, vectors = torch.linalg.eigh(answer["covariances"][1].double())
    half = vectors[:, -1] * (values[-1] / 2).sqrt()
    mean = answer["means"][1].double()
    found = sorted([(mean + half).tolist(), (mean - half).tolist()])
    torch.testing.assert_close(torch.tensor(found), torch.tensor(sorted(truth[two].tolist())), rtol=1e-4, atol=1e-4)


def test_sums_do_not_depend_on_the_order_of_clients():
    """Not in a bit, as with two processes."""
    orders = ([0, 2, 3, 4], [4, 3, 2, 0], [2, 4, 0, 3])
    sides = [ccvr(rounds=1, data=toy_data((30, 0, 41, 1, 33), schedule=[order])).server_module for order in orders]
    for side in sides[1:]:
        assert all(map(torch.equal, side.moments[0], sides[0].moments[0]))
        assert equal(side.state_dict(), sides[0].state_dict())


def test_features_are_of_samples_as_they_are():
    """Without dropout, and with the statistics of the mean."""
    data = toy_data(SIZES)
    plain = ccvr(client(net=partial(BatchNormNet, dropout=0.9)), 1, data).server_module
    x, y = parts(data, range(5))
    torch.testing.assert_close(
        plain.moments[0].means[0], features_under(plain.under[0], x[y == 0]).mean(0), rtol=1e-5, atol=1e-6
    )


# --- virtual features


def rank_deficient(width, rank, seed=0):
    rows = torch.randn(rank, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return rows.T @ rows


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_the_root_of_a_singular_covariance_is_symmetric_and_squares_to_it(rank):
    covariance = rank_deficient(7, rank)
    root = symmetric_root(covariance)
    torch.testing.assert_close(root @ root, covariance, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(root, root.T, rtol=1e-9, atol=1e-12)
    assert torch.linalg.matrix_rank(root, rtol=1e-9) == rank


def test_rounding_errors_of_a_singular_covariance_leave_no_trace_in_the_root():
    """The root of 1e-17 would be 3e-9, in a direction that another BLAS would choose otherwise."""
    covariance = rank_deficient(5, 2)
    values, vectors = torch.linalg.eigh(covariance)
    values[:3] = 0
    clean = symmetric_root(vectors * values @ vectors.T)
    for noise in (0.9e-12, -0.9e-12):
        values[0] = noise * values[-1]
        assert (symmetric_root(vectors * values @ vectors.T) - clean).norm() < 1e-12
    values[0] = 1e-11 * values[-1]
    assert (symmetric_root(vectors * values @ vectors.T) - clean).norm() > 1e-6


def test_the_root_does_not_depend_on_the_choice_of_eigenvectors():
    """A rotation of the features rotates it, also where eigenvalues are equal."""
    generator = torch.Generator().manual_seed(1)
    rotation, _ = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64))
    covariance = torch.diag(torch.tensor([2.0, 2.0, 5.0, 0.0], dtype=torch.float64))
    turned = symmetric_root(rotation @ covariance @ rotation.T)
    torch.testing.assert_close(turned, rotation @ symmetric_root(covariance) @ rotation.T, rtol=1e-12, atol=1e-12)
    assert not symmetric_root(torch.zeros(3, 3, dtype=torch.float64)).any()


def drawn_by(moments, samples_per_class, round_idx=0, **settings):
    side = Noted(samples_per_class=samples_per_class, every=1, **settings)
    loop = FederatedLoop(client(), server_module=side, seed=3)
    fit(None, 0, loop=loop)
    side.server.round_idx = round_idx
    return side.virtual_features(moments)


def moments_of(counts, width=3, diagonal=False):
    covariances = torch.stack([rank_deficient(width, 2, seed=c) for c in range(len(counts))])
    return ClassMoments(
        counts=torch.tensor(counts, dtype=torch.float64),
        means=torch.arange(3.0 * len(counts), dtype=torch.float64).view(-1, width),
        covariances=covariances.diagonal(dim1=1, dim2=2) if diagonal else covariances,
    )


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_virtual_features_have_the_moments_of_their_class(covariance):
    moments = moments_of([4, 0, 9], diagonal=covariance == "diagonal")
    x, y = drawn_by(moments, 40_000, covariance=covariance)
    assert y.bincount().tolist() == [40_000, 0, 40_000]
    for c in (0, 2):
        torch.testing.assert_close(x[y == c].mean(0), moments.means[c], rtol=0.02, atol=0.05)
        found = x[y == c].T.cov()
        expected = moments.covariances[c] if covariance == "full" else moments.covariances[c].diag()
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.1)


def test_draws_are_keyed_by_round_and_class():
    """Neither who else is there nor earlier rounds change them, and each round draws anew."""
    x, y = drawn_by(moments_of([4, 2, 9]), 5)
    others, classes = drawn_by(moments_of([0, 0, 3]), 5)
    assert torch.equal(others, x[y == 2])
    assert classes.tolist() == [2] * 5
    again, _ = drawn_by(moments_of([4, 2, 9]), 5, round_idx=1)
    assert not torch.equal(again, x)


def test_a_class_of_one_sample_is_copies_of_one_point():
    side = ccvr(rounds=1, data=toy_data(SIZES, schedule=[[3]])).server_module
    (c,) = side.moments[0].counts.nonzero().flatten().tolist()
    assert side.moments[0].counts[c] == 1
    assert not side.moments[0].covariances.any()
    features, labels = drawn_by(side.moments[0], 4)
    assert torch.equal(features, side.moments[0].means[c].expand(4, -1))
    assert labels.tolist() == [c] * 4


# --- the head


class Watched(Noted):
    """Notes the virtual features of each calibration."""

    drawn = ()

    def virtual_features(self, moments):
        features = super().virtual_features(moments)
        self.drawn = (*self.drawn, features)
        return features


def test_the_head_is_trained_by_sgd_from_the_global_one_on_the_classes_that_are_there():
    side = Watched(every=1, samples_per_class=9, calibration_epochs=2, calibration_batch=4, calibration_lr=0.2)
    ccvr(client(), 1, toy_data(SIZES, schedule=[[0, 3]]), given=side)
    ((x, y),) = side.drawn
    start = [side.under[0][name] for name in HEAD]
    head = nn.Linear(8, 3)
    nn.utils.vector_to_parameters(torch.cat([value.flatten() for value in start]), head.parameters())
    optimizer = torch.optim.SGD(head.parameters(), lr=0.2, momentum=0.9)
    for rows in side.order(len(x)):
        optimizer.zero_grad()
        absent = side.moments[0].counts == 0
        logits = head(x[rows].float()).masked_fill(absent, -torch.inf)
        F.cross_entropy(logits, y[rows]).backward()
        optimizer.step()
    for name, value in zip(HEAD, head.parameters(), strict=True):
        torch.testing.assert_close(side.calibrated[name].float(), value.detach())
    assert [len(rows) for rows in side.order(10)] == [4, 4, 2] * 2


def test_a_class_that_nobody_has_keeps_its_row_and_bias_in_every_bit():
    data = toy_data((9, 9), partition=None, schedule=[[0]])
    data.setup("fit")
    data.set_class_count(client_id=0, class_idx=0, count=0)
    side = ccvr(rounds=1, data=data, calibration_epochs=3).server_module
    counts = side.moments[0].counts
    assert counts[0] == 0
    assert counts[1:].all()
    for name in HEAD:
        start = side.under[0][name].double()
        assert torch.equal(side.calibrated[name][0], start[0])
        assert not torch.equal(side.calibrated[name][1], start[1])


def test_a_head_without_a_bias():
    class Unbiased(BatchNormNet):
        def __init__(self, *sizes):
            super().__init__(*sizes)
            self.head = nn.Linear(8, 3, bias=False)

    loop = ccvr(client(net=Unbiased), 1)
    assert list(loop.server_module.calibrated) == ["net.head.weight"]
    assert not torch.equal(loop.server_module.calibrated["net.head.weight"].float(), loop.client.net.head.weight)


def test_no_epoch_leaves_the_head_as_it_is():
    rows = Rows()
    plain_rows = Rows()
    ccvr(calibration_epochs=0, callbacks=[rows])
    fit(client(), 3, toy_data(SIZES), callbacks=[plain_rows])
    for row, expected in zip(rows.rows, plain_rows.rows, strict=True):
        assert all(row[key] == value for key, value in expected.items() if key.startswith(("global/", "train/")))


# --- when, what is sent, and what is evaluated


@pytest.mark.parametrize(("every", "due"), [(1, [0, 1, 2, 3, 4]), (2, [1, 3, 4]), (9, [4]), (None, [4])])
def test_every_so_many_rounds_and_the_last_one(every, due):
    watch = Rows()
    loop = ccvr(rounds=5, every=every, callbacks=[watch])
    assert sorted(loop.server_module.moments) == due
    sizes = [row["comm/bytes_down/statistics"] > 0 for row in watch.rows]
    assert [r for r in range(5) if sizes[r]] == due


def test_a_calibration_costs_the_model_once_more_down_and_the_moments_up():
    watch = Rows()
    ccvr(rounds=2, every=2, callbacks=[watch])
    plain = fit(client(), 1, toy_data(SIZES)).round_metrics
    m = len(SIZES)
    first, second = watch.rows
    for way in ("comm/bytes_down", "comm/bytes_up"):
        assert first[way] == second[f"{way}/train"] == plain[way]
        assert first[f"{way}/statistics"] == 0
    assert second["comm/bytes_down/statistics"] == plain["comm/bytes_down"]
    assert second["comm/bytes_up/statistics"] == m * (4 * 3 * 8 * (8 + 1) + 8 * 3)
    diagonal = Rows()
    ccvr(rounds=1, every=1, covariance="diagonal", callbacks=[diagonal])
    assert diagonal.rows[0]["comm/bytes_up/statistics"] == m * (4 * 3 * 8 * 2 + 8 * 3)


def test_the_calibrated_head_is_evaluated_in_its_round_only_and_never_trained_from():
    watch = Rows()
    plain = Rows()
    loop = ccvr(rounds=4, every=2, callbacks=[watch], calibration_lr=1.0, samples_per_class=200)
    fit(client(), 4, toy_data(SIZES), callbacks=[plain])
    differs = [not equal(ours, theirs) for ours, theirs in zip(watch.heads, plain.heads, strict=True)]
    assert differs == [False, True, False, True]
    for r in (0, 2):
        evaluated = {key: value for key, value in plain.rows[r].items() if key.startswith("global/acc")}
        assert evaluated
        assert {key: watch.rows[r][key] for key in evaluated} == evaluated
    x, y = samples(30, seed=1)
    weights = {**loop.client.state_dict(), **watch.heads[3]}
    net = BatchNormNet(3, (4,)).eval()
    net.load_state_dict({name.removeprefix("net."): value for name, value in weights.items()})
    accuracy = (net(x).argmax(1) == y).double().mean()
    assert watch.rows[3]["global/acc"] == pytest.approx(float(accuracy), abs=1e-6)


def test_clients_deploy_the_calibrated_head_too():
    evaluates = {"evaluate_clients_every": 1}
    calibrated = ccvr(rounds=1, calibration_lr=5.0, loop=evaluates).round_metrics
    plain = ccvr(rounds=1, calibration_epochs=0, loop=evaluates).round_metrics
    assert calibrated["local/alma"] != plain["local/alma"]


def test_what_is_evaluated_is_a_copy():
    side = ccvr(rounds=1).server_module
    live = dict(side.server.weights)
    evaluated = side.evaluation_weights(live)
    assert all(evaluated[name] is live[name] for name in live if name not in HEAD)
    kept = {name: value.clone() for name, value in side.calibrated.items()}
    for name in HEAD:
        assert evaluated[name].dtype == live[name].dtype
        evaluated[name].zero_()
        in_double = side.evaluation_weights({n: value.double() for n, value in live.items()})
        in_double[name].zero_()
    assert equal(dict(side.calibrated), kept)
    side.is_calibrated.fill_(False)
    assert side.evaluation_weights(live) is live


# --- the end of a round, a resume, a failure


class Save(pl.Callback):
    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, loop, *_):
        trainer.save_checkpoint(self.folder / f"trained-{trainer.current_epoch}.ckpt")

    def on_train_epoch_end(self, trainer, loop):
        trainer.save_checkpoint(self.folder / f"ended-{trainer.current_epoch}.ckpt")


@pytest.mark.parametrize("moment", ["trained", "ended"])
@pytest.mark.parametrize("r", [0, 1, 2])
def test_a_continued_run_and_an_evaluation_of_a_checkpoint_know_whether_the_round_was_due(r, moment, tmp_path):
    """`every=2`: round 1 is, rounds 0 and 2 are not; the checkpoints are of before and after the evaluation."""
    watch = Rows()
    whole = ccvr(rounds=4, every=2, callbacks=[watch, Save(tmp_path)])
    path = tmp_path / f"{moment}-{r}.ckpt"
    assert bool(torch.load(path)["state_dict"]["server_module.is_calibrated"]) == (r == 1)
    fresh = FederatedLoop(client(), server_module=Noted(every=2, **QUICK), seed=3)
    (values,) = trainer(4).validate(fresh, datamodule=toy_data(SIZES), ckpt_path=path)
    assert values["global/acc"] == pytest.approx(watch.rows[r]["global/acc"], abs=1e-6)
    again = Rows()
    continued = ccvr(rounds=4, every=2, callbacks=[again], ckpt_path=path)
    assert equal(weights_of(continued), weights_of(whole))
    assert again.rows[-1] == watch.rows[-1]
    assert equal(again.heads[-1], watch.heads[-1])


def test_a_longer_run_is_another_run_unless_it_was_planned(tmp_path):
    ccvr(rounds=2, every=None, callbacks=[Save(tmp_path)])
    with pytest.raises(ValueError, match="planned_rounds"):
        ccvr(rounds=4, every=None, ckpt_path=tmp_path / "ended-1.ckpt")
    planned = {"planned_rounds": 4}
    half = ccvr(rounds=2, every=None, loop=planned, callbacks=[Save(tmp_path)])
    assert not half.server_module.moments
    continued = ccvr(rounds=4, every=None, loop=planned, ckpt_path=tmp_path / "ended-1.ckpt")
    assert equal(weights_of(continued), weights_of(ccvr(rounds=4, every=None)))


def test_every_round_needs_no_plan(tmp_path):
    """A run that calibrates in every round is continued for as long as one likes."""
    ccvr(rounds=2, every=1, callbacks=[Save(tmp_path)])
    continued = ccvr(rounds=4, every=1, ckpt_path=tmp_path / "ended-1.ckpt")
    assert equal(weights_of(continued), weights_of(ccvr(rounds=4, every=1)))
    assert not CCVRServer.plans({"every": 1})
    assert CCVRServer.plans({"every": 2})
    assert CCVRServer.plans({})


def test_an_aborted_round_leaves_the_calibration_of_the_round_before():
    watch = Rows()
    faulty = Faulty(how="exception", net=BatchNormNet, optimizer=sgd(0.05))
    loop = ccvr(faulty, 2, toy_data((7, 12, 5)), callbacks=[watch], loop={"on_error": "skip", "min_clients": 3})
    assert sorted(loop.server_module.moments) == [0]
    assert bool(loop.server_module.is_calibrated)
    assert equal(watch.heads[0], watch.heads[1])


@pytest.mark.parametrize("how", ["exception", "receive"])
def test_a_skipped_client_is_an_absent_one(how):
    faulty = Faulty(how=how, net=BatchNormNet, optimizer=sgd(0.05))
    skipped = ccvr(faulty, 3, toy_data((7, 12, 5, 9)), loop={"faults": "skip"})
    absent = Faulty(net=BatchNormNet, optimizer=sgd(0.05))
    schedule = [[0, 1, 2, 3], [0, 1, 3], [0, 1, 2, 3]]
    expected = ccvr(absent, 3, toy_data((7, 12, 5, 9), schedule=schedule))
    assert equal(weights_of(skipped), weights_of(expected))


class Broken(FedAvg):
    """Client 2 answers with features that are not finite, in round 1."""

    def answer(self, inquiry, broadcast, local):
        answer = super().answer(inquiry, broadcast, local)
        if (local.client_id, local.round_idx) == (2, 1):
            answer["covariances"] = answer["covariances"] * torch.nan
        return answer


def test_moments_that_are_not_finite_are_left_out_or_end_the_run():
    skipped = ccvr(client(Broken), 2, toy_data((7, 12, 5, 9)), loop={"faults": "skip"})
    expected = ccvr(client(), 2, toy_data((7, 12, 5, 9), schedule=[[0, 1, 2, 3], [0, 1, 3]]))
    assert equal(weights_of(skipped), weights_of(expected))
    with pytest.raises(NonFiniteUpdateError, match="client 2 returned NaN or infinite values in round 1"):
        ccvr(client(Broken), 2, toy_data((7, 12, 5, 9)))


def test_nobody_s_samples_leave_the_head_as_it_is():
    loop = ccvr(rounds=2, data=toy_data(SIZES, schedule=[[0], [1]]))
    assert sorted(loop.server_module.moments) == [0]
    assert not loop.server_module.is_calibrated


def test_clients_that_are_trained_at_once_give_the_same_up_to_the_order_of_sums():
    alone = ccvr(client(net=Small), 2, toy_data((7, 6, 12, 8, 5)))
    stacked = ccvr(client(net=Small), 2, toy_data((7, 6, 12, 8, 5)), loop={"chunk": 3})
    assert stacked.engine.why_not() is None
    for name, value in weights_of(alone).items():
        torch.testing.assert_close(weights_of(stacked)[name], value, rtol=1e-4, atol=1e-5)


def test_awkward_clients_in_half_precision():
    data = toy_data(EdgePartition.SIZES, partition=EdgePartition(), batch_size=8)
    side = Noted(every=1, **QUICK)
    loop = FederatedLoop(client(), server_module=side, seed=3)
    fit(None, 2, data, loop=loop, precision="bf16-mixed")
    assert all(a["covariances"].dtype == torch.float32 for a in side.answers[1].values())
    assert all(value.isfinite().all() for value in weights_of(loop).values())


# --- refusals


class Cosine(nn.Linear):
    def forward(self, x):
        return F.linear(F.normalize(x), F.normalize(self.weight))


class CosineNet(BatchNormNet):
    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.head = Cosine(8, 3)


class Headless(Backbone):
    def __init__(self, num_classes, input_shape):
        super().__init__()
        self.head = nn.Sequential(nn.Linear(4, num_classes))

    def features(self, x):
        return x


def never_trains():
    class Never(pl.Callback):
        def on_client_start(self, trainer, loop, client_id):
            pytest.fail("a client was trained")

    return [Never()]


@pytest.mark.parametrize(
    ("made", "settings", "sentence"),
    [
        (
            client,
            {"loop": {"server_optimizer": sgd(1.0)}},
            r"a server_optimizer \(SGD\) moves the weights after CCVRServer has asked .*; leave model.server_optimizer",
        ),
        (
            client,
            {"loop": {"personal": "net.head.*"}},
            "CCVRServer calibrates a head that the clients share, but 'net.head.weight' stays with each client; leave",
        ),
        (
            partial(client, FedRep),
            {},
            "'net.head.weight' stays with each client; leave model.personal unset, or take a",
        ),
        (lambda: FedAvg(module=Regression()), {}, r"Noted needs the logits of a net, got module=Regression"),
        (
            partial(client, net=Headless),
            {},
            "a torch.nn.Linear called head, .* Headless has Sequential there; derive the",
        ),
        (
            partial(client, net=CosineNet),
            {},
            "a torch.nn.Linear called head, .* CosineNet has Cosine there; derive the",
        ),
        (
            client,
            {"rule": FedEXPAggregator()},
            r"FedEXPAggregator evaluates averages of them; turn these off \(average_",
        ),
        (client, {"loop": {"codec": QSGD(bits=8, down=True)}}, r"codes what is sent down .* leave down unset"),
        (client, {"callbacks": [EMAWeightAveraging()]}, "got EMAWeightAveraging and Noted"),
        (
            client,
            {"every": None, "rounds": -1},
            "every=None of CCVRServer calibrates the head after the last planned round, and no number of rounds is "
            "planned; set trainer.max_epochs, or every",
        ),
    ],
)
def test_what_it_cannot_do_is_refused_before_anybody_trains(made, settings, sentence):
    callbacks = [*settings.pop("callbacks", []), *never_trains()]
    with pytest.raises(ValueError, match=sentence):
        ccvr(made(), callbacks=callbacks, **settings)


def test_a_missing_plan_is_refused_before_the_first_round_begins():
    class NoRound(pl.Callback):
        def on_train_start(self, trainer, loop):
            pytest.fail("the rounds have begun")

    with pytest.raises(ValueError, match="no number of rounds is planned"):
        ccvr(every=None, rounds=-1, callbacks=[NoRound()])


def test_what_works_beside_it():
    ccvr(rule=FedEXPAggregator(average_last=False))
    ccvr(loop={"codec": QSGD(bits=8)})
    ccvr(loop={"personal": "net.body.1.*"})


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"every": 0}, "every must be at least 1, got 0"),
        ({"samples_per_class": 0}, "samples_per_class must be at least 1, got 0"),
        ({"covariance": "low-rank"}, "covariance must be one of full, diagonal, got 'low-rank'"),
        ({"calibration_epochs": -1}, "calibration_epochs must be at least 0, got -1"),
        ({"calibration_lr": 0.0}, "calibration_lr must be above 0, got 0.0"),
        ({"calibration_momentum": 1.0}, r"calibration_momentum must lie in \[0, 1\), got 1.0"),
        ({"calibration_batch": 0}, "calibration_batch must be at least 1, got 0"),
    ],
)
def test_wrong_settings_are_refused(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        CCVRServer(**settings)


def test_a_node_of_another_covariance_is_another_run():
    """What a client is asked is part of the settings that all parties of a real federation have alike."""
    described = [ccvr(rounds=0, covariance=c).parts.described("32-true", 1) for c in ("full", "diagonal")]
    assert [settings["model.server_module.covariance"] for settings in described] == ["full", "diagonal"]
