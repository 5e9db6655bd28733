"""Selective-FD: which samples clients answer for, which the server keeps, and what is learnt of them."""

import math
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from fl_lightning import FederatedLoop
from fl_lightning.federation.codistillation import KnowledgeServer
from fl_lightning.functional.density import DensityRatio, gaussian
from fl_lightning.methods import KnFu, SelectiveFD
from fl_lightning.methods.selectivefd import SelectiveFDServer, ambiguity_of, kept_ensemble
from tests.methods.own_models import THREE, TRANSFER, Flat, model_of, models_of, stepped, transfer_data
from tests.methods.test_local import Regression
from tests.toys import equal, fit, sgd


def selective(kind=SelectiveFD, **settings):
    return kind(**{"net": THREE, "optimizer": sgd(0.1, 0.9), "width": 1.0, **settings})


def test_the_density_ratio_is_high_where_the_known_samples_are():
    g = torch.Generator().manual_seed(0)
    known = torch.randn(200, 2, generator=g, dtype=torch.float64) * 0.3
    ratio = DensityRatio.fit(known, torch.rand(300, 2, generator=g, dtype=torch.float64) * 8 - 4, width=0.5)
    near, far = ratio(torch.tensor([[0.0, 0.0], [3.5, 3.5]]).double())
    assert near > 10 * far.abs()
    assert gaussian(known, known, 1.0).diagonal().eq(1).all()


def test_the_fit_minimises_its_objective():
    """½ αᵀ(K₁₁/n)α + ... : the gradient of KuLSIF's objective in α vanishes."""
    g = torch.Generator().manual_seed(1)
    known, reference = (torch.randn(n, 3, generator=g, dtype=torch.float64) for n in (7, 20))
    ratio = DensityRatio.fit(known, reference, 1.5, 0.2)
    left = gaussian(reference, reference, 1.5) @ ratio.alpha / 20 + 0.2 * ratio.alpha
    torch.testing.assert_close(left, -gaussian(reference, known, 1.5).sum(1) / (20 * 7 * 0.2))


def test_the_server_keeps_what_somebody_answered_clearly():
    p = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.9, 0.1], [0.0, 0.0]]).double()
    counts = torch.tensor([1.0, 2.0, 1.0, 0.0]).double()
    every = kept_ensemble(p * counts[:, None], counts, math.inf)
    assert every.rows.tolist() == [0, 1, 2]
    torch.testing.assert_close(every.mean, p[:3])
    assert kept_ensemble(p * counts[:, None], counts, 0.5).rows.tolist() == [0, 2]
    torch.testing.assert_close(ambiguity_of(p[:2]), torch.tensor([0.0, math.log(2)]).double())
    assert ambiguity_of(p[:3], "l1").tolist() == pytest.approx([0.0, 1.0, 0.2])


def test_a_client_answers_for_the_same_samples_in_every_round():
    settings = {"sizes": (7, 12, 0, 9, 16), "schedule": [[0, 1, 2], [0, 2, 3]]}
    once, twice = (fit(selective(), rounds, transfer_data(**settings)) for rounds in (1, 2))
    for client_id in (0, 1):
        chosen = twice.store.memory(client_id)["selected"]
        assert torch.equal(chosen, once.store.memory(client_id)["selected"])
        assert 0 < len(chosen) <= TRANSFER
    assert len(twice.store.memory(2)["selected"]) == 0  # without data it answers for nothing
    answers = sum(len(twice.store.memory(c)["selected"]) for c in (0, 3))
    assert twice.round_metrics["comm/bytes_up"] == (4 * 3 + 8) * answers  # and which they are
    assert twice.round_metrics["comm/bytes_down"] == 3 * (8 * 3 + 8) * len(twice.server_module.ensemble.rows)


def test_a_higher_quantile_answers_less():
    def answered(quantile):
        loop = fit(selective(quantile=quantile), 1, transfer_data())
        return sum(len(loop.store.memory(c)["selected"]) for c in range(5))

    assert answered(0.0) >= answered(0.5) >= answered(0.95)
    assert answered(0.0) > answered(0.95)


@pytest.mark.parametrize("selector", ["features", "inputs"])
def test_the_ensemble_is_the_mean_of_those_who_answered(selector):
    class Seen(SelectiveFD):
        def reply(self, exchange, local):
            sent = super().reply(exchange, local)
            if sent:
                self.seen[local.client_id] = sent
            return sent

    client = selective(Seen, selector=selector)
    client.seen = {}
    loop = fit(client, 1, transfer_data())
    kept = loop.server_module.ensemble
    for row, mean in zip(kept.rows.tolist(), kept.mean, strict=True):
        own = [one["knowledge"][one["rows"].tolist().index(row)] for one in client.seen.values() if row in one["rows"]]
        torch.testing.assert_close(mean, torch.stack(own).double().mean(0))


def test_fine_tuning_by_hand():
    """Soft cross-entropy to the ensemble on the kept rows only, after local training."""
    data = transfer_data(sizes=(9,), dtype=torch.float64, shuffle=False)
    loop = fit(selective(net=Flat, lam=2.0, finetune_epochs=2), 1, data, precision="64-true")
    trained = fit(selective(net=Flat, finetune_epochs=0), 1, data, precision="64-true")
    rows, mean, _ = loop.server_module.ensemble
    net = Flat(3, (4,)).double()
    net.load_state_dict(model_of(trained, 0))
    x, _ = data.split("transfer").all()
    batches = [(x[rows[k : k + 5]], mean[k : k + 5]) for _ in range(2) for k in range(0, len(rows), 5)]

    def loss(net, x, target):
        return 4.0 * F.cross_entropy(net(x), target)

    assert len(rows) > 5
    stepped(net, batches, loss, lr=0.1, momentum=0.9)
    torch.testing.assert_close(model_of(loop, 0), dict(net.state_dict()), rtol=1e-9, atol=1e-12)


def test_without_a_kept_row_nothing_is_learnt():
    none, skipped = (
        fit(selective(**settings), 2, transfer_data()) for settings in ({"tau_server": 1e-9}, {"finetune_epochs": 0})
    )
    assert all(map(equal, models_of(none), models_of(skipped)))
    assert none.round_metrics["comm/bytes_down"] == 0


def test_features_may_be_those_of_another_net(tmp_path):
    other = Flat(3, (4,))
    torch.save({f"net.{name}": value for name, value in other.state_dict().items()}, tmp_path / "net.pt")
    settings = {"net": partial(Flat.func, hidden=(6,))}
    torch.save({f"net.{n}": 3 * v for n, v in settings["net"](3, (4,)).state_dict().items()}, tmp_path / "wide.pt")
    plain = fit(selective(**settings), 1, transfer_data())
    given = fit(selective(**settings, selector_weights=tmp_path / "wide.pt"), 1, transfer_data())
    assert any(not torch.equal(plain.store.memory(c)["selected"], given.store.memory(c)["selected"]) for c in range(5))
    assert plain.initial_personal.keys() == given.initial_personal.keys()
    with pytest.raises(ValueError, match=r"net\.body"):
        fit(selective(**settings, selector_weights=tmp_path / "net.pt"), 1, transfer_data())
    with pytest.raises(ValueError, match=r"selector_weights must be a file, .* got nowhere.pt"):
        selective(selector_weights="nowhere.pt")


def test_resume_is_exact(tmp_path):
    settings = {"schedule": [[0, 1, 2], [1, 3], [0, 4]]}
    whole, half = (fit(selective(), rounds, transfer_data(**settings)) for rounds in (3, 2))
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(selective(), 3, transfer_data(**settings), ckpt_path=tmp_path / "half.ckpt")
    assert all(map(equal, models_of(resumed), models_of(whole)))
    assert torch.equal(resumed.store.memory(4)["selected"], whole.store.memory(4)["selected"])


class Other(KnFu):
    server_class = KnowledgeServer


def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match="SelectiveFD needs the logits of a net, got module=Regression"):
        FederatedLoop(SelectiveFD(module=Regression()))
    with pytest.raises(ValueError, match="a SelectiveFDServer needs a SelectiveFD client, got Other"):
        fit(Other(net=THREE), 1, transfer_data(), server_module=SelectiveFDServer())
    for setting, message in (
        ({"quantile": 1.0}, "quantile must be below 1"),
        ({"tau_server": 0}, "tau_server must be above 0"),
        ({"ambiguity": "variance"}, "ambiguity must be one of entropy, l1, got 'variance'"),
        ({"selector": "pixels"}, "selector must be one of features, inputs, got 'pixels'"),
    ):
        with pytest.raises(ValueError, match=message):
            SelectiveFD(**setting)
