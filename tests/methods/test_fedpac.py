"""FedPAC: statistics, prototypes, combined heads."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from fl_lightning import FederatedLoop
from fl_lightning.methods import FedAvg, FedPAC
from fl_lightning.methods.fedpac import (
    FedPACServer,
    combinations,
    discrepancies,
    feature_statistics,
    head_weights,
)
from fl_lightning.nets import Perceptron
from tests.methods.test_local import Regression
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, weights_of

Small = partial(Perceptron, hidden=(6,))
SIZES = (7, 12, 0, 9, 16)
W = 4 * (4 * 6 + 6 + 6 * 3 + 3)


def fedpac(kind=FedPAC, **settings):
    return kind(**{"net": Small, "optimizer": sgd(0.05), **settings})


def test_statistics_by_a_loop():
    f = torch.randn(9, 4).double()
    y = torch.tensor([0, 0, 2, 2, 2, 0, 2, 2, 2])
    found = feature_statistics(f, y, 4)
    p = torch.tensor([3, 0, 6, 0]).double() / 9
    means = torch.stack([f[y == c].mean(0) if p[c] else torch.zeros(4).double() for c in range(4)])
    squares = torch.stack([f[y == c].square().sum(1).mean() if p[c] else torch.tensor(0.0).double() for c in range(4)])
    torch.testing.assert_close(found.means, means)
    torch.testing.assert_close(found.h, p[:, None] * means)
    torch.testing.assert_close(found.v, ((p * squares).sum() - (p.square() * means.square().sum(1)).sum()) / 9)
    nothing = feature_statistics(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), 4)
    assert all(not part.any() for part in nothing)


def test_equal_clients_share_a_head_and_a_distant_one_keeps_its_own():
    h = torch.zeros(3, 2, 2).double()
    v = torch.tensor([0.1, 0.1, 0.1]).double()
    h[2] = 50.0
    found = combinations(h, v)
    torch.testing.assert_close(found, torch.tensor([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]).double())
    assert head_weights(torch.full((2, 2), torch.nan).double()) is None
    assert torch.equal(combinations(h * torch.nan, v), torch.eye(3).double())
    assert discrepancies(h, v, 2)[0, 1] == 4 * 50.0**2


class Seen(FedPAC):
    """Notes the head of every client after its own training, and the targets of its features."""

    def reply(self, exchange, local):
        sent = super().reply(exchange, local)
        if exchange == "train":
            self.seen[local.round_idx, local.client_id] = sent, self.round.get("targets")
        return sent


def seen(rounds, data, **settings):
    client = fedpac(Seen, **settings)
    client.seen = {}
    return fit(client, rounds, data), client.seen


def test_heads_are_combined_of_those_with_data():
    loop, found = seen(1, toy_data(SIZES))
    weights = loop.server_module.combined
    assert sorted(weights) == [0, 1, 3, 4]
    for client_id, row in weights.items():
        assert float(row.sum()) == pytest.approx(1)
        mean = sum(w * found[0, c][0]["head"]["weight"].double() for w, c in zip(row, weights, strict=True))
        torch.testing.assert_close(loop.store.personal(client_id)["net.head.weight"], mean.float())
    begun = fit(fedpac(), 0, toy_data(SIZES)).client.state_dict()["net.head.weight"]
    assert torch.equal(loop.store.personal(2)["net.head.weight"], begun)


def test_clients_whose_features_are_all_0_keep_their_heads():
    none = torch.zeros(3, 4, 5, dtype=torch.float64)
    assert torch.equal(combinations(none, none[:, 0, 0]), torch.eye(3, dtype=torch.float64))


def test_prototypes_are_weighted_by_class_counts_and_stay_while_nobody_has_the_class():
    schedule = [[0, 1], [3]]
    once, found = seen(1, toy_data(SIZES, schedule=schedule))
    sent = [found[0, c][0] for c in (0, 1)]
    total = sum(one["counts"][:, None] * one["prototypes"].double() for one in sent)
    torch.testing.assert_close(once.server_module.prototypes, total / sum(one["counts"] for one in sent)[:, None])
    data = toy_data(SIZES, schedule=schedule)
    data.setup("fit")
    alone = data.view(3, 0).label_counts
    twice = fit(fedpac(), 2, toy_data(SIZES, schedule=schedule))
    for c, count in enumerate(alone.tolist()):
        same = torch.equal(twice.server_module.prototypes[c], once.server_module.prototypes[c])
        assert same == (count == 0)


def test_a_class_without_prototype_is_aligned_to_the_client_s_own_mean():
    class Forgetful(FedPACServer):
        def finish(self, exchange, aggregate):
            result = super().finish(exchange, aggregate)
            self.seen[1] = False
            return result

    client = fedpac(Seen)
    client.seen = {}
    data = toy_data((30, 30))
    loop = fit(client, 2, data, server_module=Forgetful())
    assert client.seen[0, 0][1] is None  # no alignment in round 0
    targets = client.seen[1, 0][1]
    before = fit(fedpac(), 1, toy_data((30, 30)))
    x, y = data.view(0, 0).all()
    own = before.client.net.features(x)[y == 1].mean(0)
    torch.testing.assert_close(targets[1], own.detach())
    torch.testing.assert_close(targets[0], before.server_module.prototypes[0].float())
    assert loop.round_metrics["train/alignment"] > 0


def test_one_client_by_hand():
    """Head alone at its own rate, then the body alone with the alignment; fresh momentum, decay of the trained part."""
    data = toy_data((9,), batch_size=4, dtype=torch.float64, shuffle=False)
    settings = {"lam": 0.7, "head_epochs": 2, "head_lr": 0.3, "optimizer": sgd(0.1, 0.5, weight_decay=0.01)}
    loop = fit(fedpac(**settings), 2, data, precision="64-true", lr_decay=0.5)
    net = fit(fedpac(**settings), 0, toy_data((9,), dtype=torch.float64), precision="64-true").client.net
    batches = [*data.view(0, 0).batches()]
    x, y = data.view(0, 0).all()
    prototypes = None
    for factor in (1.0, 0.5):
        for part, lr, epochs in ((net.head, 0.3, 2), (net.body, 0.1, 1)):
            optimizer = torch.optim.SGD(part.parameters(), lr=lr * factor, momentum=0.5, weight_decay=0.01)
            for _ in range(epochs):
                for bx, by in batches:
                    net.zero_grad()
                    loss = F.cross_entropy(net(bx), by)
                    if prototypes is not None:
                        loss = loss + 0.7 * F.mse_loss(net.features(bx), prototypes[by])
                    loss.backward()
                    optimizer.step()
        prototypes = torch.stack([net.features(x)[y == c].mean(0).detach() for c in range(3)])
    wanted = {f"net.{name}": value for name, value in net.state_dict().items()}
    torch.testing.assert_close(dict(loop.client.state_dict()), wanted, rtol=1e-9, atol=1e-12)


def test_bytes():
    loop = fit(fedpac(), 2, toy_data(SIZES))
    assert loop.round_metrics["comm/bytes_down"] == 5 * (W + 8 * 3 * 6 + 3)  # prototypes in float64, and their flags
    assert loop.round_metrics["comm/bytes_up"] == 5 * (W + 2 * 4 * 3 * 6 + 4 + 3 * 8)
    assert loop.recorder.history.curve("comm/bytes_down")[0] == 5 * W  # no prototypes yet


def test_resume_is_exact_with_batchnorm(tmp_path):
    settings = {"schedule": [[0, 1, 2], [1, 3], [0, 4]]}
    whole, half = (fit(fedpac(net=BatchNormNet), rounds, toy_data(SIZES, **settings)) for rounds in (3, 1))
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(fedpac(net=BatchNormNet), 3, toy_data(SIZES, **settings), ckpt_path=tmp_path / "half.ckpt")
    assert equal(weights_of(resumed), weights_of(whole))
    assert all(equal(resumed.store.personal(c), whole.store.personal(c)) for c in range(5))


def test_a_client_that_is_skipped_teaches_nobody():
    """Its prototypes and its head are left out, and it keeps the head it had."""

    class Broken(FedPAC):
        def reply(self, exchange, local):
            sent = super().reply(exchange, local)
            if exchange == "train" and local.client_id == 1:
                self.head.weight.data.fill_(torch.nan)
                sent["head"]["weight"].fill_(torch.nan)
                sent["prototypes"].fill_(torch.nan)
                sent["h"].fill_(torch.nan)
            return sent

    broken = fit(fedpac(Broken), 1, toy_data(SIZES), nonfinite="skip")
    without = fit(fedpac(), 1, toy_data(SIZES, schedule=[[0, 2, 3, 4]]))
    torch.testing.assert_close(dict(broken.server_module.state_dict()), dict(without.server_module.state_dict()))
    assert equal(broken.store.personal(0), without.store.personal(0))
    assert equal(dict(broken.client.state_dict()), dict(without.client.state_dict()))  # the mean of the heads, too
    assert broken.store.personal(1) is None
    with pytest.raises(RuntimeError, match="client 1 returned NaN or infinite values in round 0"):
        fit(fedpac(Broken), 1, toy_data(SIZES))


def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match="FedPAC needs the logits of a net, got module=Regression"):
        FederatedLoop(FedPAC(module=Regression()))
    with pytest.raises(ValueError, match="a FedPACServer needs a FedPAC client, got FedAvg"):
        fit(FedAvg(net=Small), 1, server_module=FedPACServer())
    with pytest.raises(ValueError, match="head_lr must be above 0, got 0"):
        FedPAC(head_lr=0)
    with pytest.raises(ValueError, match="lam must be at least 0, got -1; 0 leaves its part out"):
        FedPAC(lam=-1)
