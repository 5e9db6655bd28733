"""KnFu: the fusion's laws, whole rounds against a loop by hand, personal models of several architectures."""

import copy
import math
from functools import partial

import pytest
import pytorch_lightning as pl
import torch
from torch.nn import functional as F

from fl_lightning import FederatedLoop
from fl_lightning.data import TensorSource
from fl_lightning.federation.codistillation import soft_label_divergence, soft_labels
from fl_lightning.functional.classes import estimated_distribution
from fl_lightning.methods import FedAvg, FedMD, KnFu, Local
from fl_lightning.methods.knfu import (
    KnFuServer,
    distances,
    fused_knowledge,
    fusion_weights,
)
from fl_lightning.nets import HeterogeneousNets
from tests.methods.own_models import (
    THREE,
    TRANSFER,
    WITH_NORM,
    Flat,
    Wide,
    model_of,
    models_of,
    stepped,
    transfer_data,
)
from tests.methods.stacked import stacked_and_alone
from tests.toys import BatchNormNet, equal, fit, samples, sgd, toy_data, trainer, weights_of


def knfu(**settings):
    return KnFu(**{"net": THREE, "optimizer": sgd(0.1, 0.9), **settings})


def knowledge(n=4, k=6, c=3, seed=0):
    return torch.randn(n, k, c, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).softmax(-1)


# --- the fusion


def fused_by_hand(F_n, beta):
    """Eqs. 5-9 in loops, m = n left out of the maximum."""
    n, k, c = F_n.shape
    p = [[sum(F_n[i][j][x].item() for j in range(k)) / k for x in range(c)] for i in range(n)]
    out = torch.zeros_like(F_n)
    for i in range(n):
        d = [sum(a * math.log(a / b) for a, b in zip(p[i], p[m], strict=True)) for m in range(n)]
        w = [0.0 if m == i else 1 / d[m] ** 2 for m in range(n)]
        w[i] = beta * max(w)
        out[i] = sum(w[m] / sum(w) * F_n[m] for m in range(n))
    return out


def fuse(F_n, beta):
    return fused_knowledge(fusion_weights(distances(estimated_distribution(F_n)), beta), F_n)


@pytest.mark.parametrize("beta", [0.0, 0.5, 10.0])
def test_fusion_is_that_of_loops(beta):
    torch.testing.assert_close(fuse(knowledge(), beta), fused_by_hand(knowledge(), beta))


@pytest.mark.parametrize("beta", [0.3, 10.0])
def test_weights_sum_to_one_and_keep_the_client_s_own_knowledge(beta):
    alike = knowledge(1).expand(5, -1, -1)
    for F_n in (knowledge(5), alike, torch.cat([alike[:2], knowledge(3, seed=1)]), knowledge(1)):
        weights = fusion_weights(distances(estimated_distribution(F_n)), beta)
        torch.testing.assert_close(weights.sum(1), torch.ones(len(F_n), dtype=torch.float64))
        assert weights.min() >= 0
        assert (weights.diagonal() >= beta / (beta + len(F_n) - 1) - 1e-12).all()
        torch.testing.assert_close(fused_knowledge(weights, F_n).sum(-1), torch.ones_like(F_n[..., 0]))
    torch.testing.assert_close(fuse(alike, beta), alike)
    torch.testing.assert_close(fuse(knowledge(1), beta), knowledge(1))


def test_clients_and_classes_may_be_renumbered():
    clients = torch.tensor([2, 0, 3, 1])
    classes = torch.tensor([1, 2, 0])
    torch.testing.assert_close(fuse(knowledge()[clients], 2.0), fuse(knowledge(), 2.0)[clients])
    torch.testing.assert_close(fuse(knowledge()[..., classes], 2.0), fuse(knowledge(), 2.0)[..., classes])


def test_classes_that_nobody_predicts_are_finite():
    F_n = torch.zeros(3, 2, 3, dtype=torch.float64)
    F_n[0, :, 0] = F_n[1, :, 1] = F_n[2, :, 1] = 1
    assert fuse(F_n, 10.0).isfinite().all()


def test_divergence_is_zero_where_both_agree_and_finite_where_logits_are_huge():
    z = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 1e4]])
    for direction in ("forward", "reverse"):
        for logits in (z / 1e4, z):
            own = logits.clone().requires_grad_()
            assert soft_label_divergence(own, soft_labels(logits, 2.0), 2.0, direction).item() == pytest.approx(
                0, abs=1e-6
            )
            value = soft_label_divergence(own, soft_labels(-logits), direction=direction)
            assert value > 0
            assert torch.autograd.grad(value, own)[0].isfinite().all()
    p = torch.tensor([[0.2, 0.8]])
    q = torch.tensor([[0.6, 0.4]])
    assert soft_label_divergence(q.log(), p).item() == pytest.approx((p * (p / q).log()).sum().item())
    assert soft_label_divergence(q.log(), p, direction="reverse").item() == pytest.approx(
        (q * (q / p).log()).sum().item()
    )


# --- whole rounds


def run_by_hand(nets, data, schedule, epochs, finetune_epochs, size, lam, temperature, beta):
    """KnFu in plain PyTorch: every client in turn, then the fusion, then every client again."""
    x_t, y_t = data.split("transfer").all()

    def own(client_id, round_idx):
        view = data.view(client_id, round_idx)
        return [(batch, None) for epoch in range(epochs) for batch in view.batches("train", epoch)]

    def common(client_id, round_idx):
        view = data.view(client_id, round_idx)
        return [pair for e in range(finetune_epochs) for pair in view.batches("transfer", e, size, with_index=True)]

    def ce(net, batch, rows):
        return F.cross_entropy(net(batch[0]), batch[1])

    for round_idx, cohort in enumerate(schedule):
        for client_id in cohort:
            stepped(nets[client_id], own(client_id, round_idx), ce, lr=0.1, momentum=0.9)
        F_n = torch.stack([(nets[c](x_t) / temperature).softmax(-1).detach() for c in cohort])
        fused = fused_by_hand(F_n, beta)
        for place, client_id in enumerate(cohort):

            def loss(net, batch, rows, target=fused[place]):
                log_q = (net(batch[0]) / temperature).log_softmax(-1)
                kl = (target[rows] * (target[rows].log() - log_q)).sum() / len(rows)
                assert torch.equal(batch[1], y_t[rows])
                return ce(net, batch, rows) + lam**2 * kl

            stepped(nets[client_id], common(client_id, round_idx), loss, lr=0.1, momentum=0.9)
    return nets


def test_three_architectures_against_a_loop_by_hand():
    """Client 3 has no data and still fine-tunes, client 4 joins in the last round with the weights of the start."""
    schedule = [[0, 1, 3], [2, 0, 3], [1, 4, 3, 2]]
    sizes = (7, 12, 5, 0, 16)
    data = transfer_data(torch.float64, sizes=sizes, schedule=schedule)
    settings = {"lam": 1.5, "temperature": 2.0, "beta": 3.0, "finetune_epochs": 2}
    loop = fit(knfu(finetune_batch=4, **settings), 3, data, precision="64-true", local_epochs=2)
    nets = [copy.deepcopy(loop.client.net.nets[c % 3]).requires_grad_() for c in range(5)]
    for net, client_id in zip(nets, range(5), strict=True):
        place = f"net.nets.{client_id % 3}."
        initial = {n.removeprefix(place): v for n, v in loop.initial_personal.items() if n.startswith(place)}
        net.load_state_dict(initial)
    wanted = run_by_hand(nets, data, schedule, 2, size=4, **settings)
    for client_id, net in enumerate(wanted):
        torch.testing.assert_close(model_of(loop, client_id), dict(net.state_dict()), rtol=1e-9, atol=1e-12)
    assert loop.server_module.fusion.client_ids == [1, 2, 3, 4]
    assert not any(name.startswith("global/") for name in loop.round_metrics)
    assert 0 <= loop.round_metrics["local/alma"] <= 1


def test_the_module_keeps_the_weights_of_the_start_and_the_store_the_clients():
    begun = fit(knfu(), 0, transfer_data())
    loop = fit(knfu(), 2, transfer_data())
    assert equal(weights_of(begun), weights_of(loop))
    assert equal({f"client.{name}": value for name, value in loop.initial_personal.items()}, weights_of(loop))
    names = [sorted(loop.store.personal(c)) for c in range(5)]
    assert names[0] == names[3] != names[1]
    assert all(name.startswith("net.nets.1.") for name in names[1])


def test_all_clients_of_a_net_start_alike_with_every_method_and_a_net_listed_twice_starts_twice():
    twice = partial(HeterogeneousNets, nets=[Flat, Wide, Flat])
    starts = [models_of(fit(kind(net=twice), 0, transfer_data())) for kind in (KnFu, FedMD, Local)]
    for models in starts:
        assert equal(models[0], models[3])
        assert not equal(models[0], models[2])
        assert all(map(equal, models, starts[0]))


def test_the_order_of_the_cohort_does_not_matter():
    one, other = (fit(knfu(), 2, transfer_data(schedule=s)) for s in ([[0, 1, 2], [2, 3]], [[2, 0, 1], [3, 2]]))
    assert all(map(equal, models_of(one), models_of(other)))


def test_without_distillation_clients_do_not_see_each_other():
    all_of_them = fit(knfu(lam=0.0), 2, transfer_data(schedule=[[0, 1, 2, 3, 4]] * 2))
    alone = fit(knfu(lam=0.0), 2, transfer_data(schedule=[[1]] * 2))
    assert equal(model_of(all_of_them, 1), model_of(alone, 1))
    seen = fit(knfu(), 2, transfer_data(schedule=[[0, 1, 2, 3, 4]] * 2))
    assert not equal(model_of(seen, 1), model_of(alone, 1))


def test_alone_in_its_cohort_a_client_gets_its_own_knowledge_back():
    loop = fit(knfu(), 1, transfer_data(schedule=[[2]]))
    assert loop.server_module.fusion.weights.tolist() == [[1.0]]
    assert list(loop.server_module.fused) == [2]


class Traffic(pl.Callback):
    def __init__(self):
        self.rows = []

    def on_train_epoch_end(self, trainer, loop):
        self.rows.append((loop.round_metrics["comm/bytes_down"], loop.round_metrics["comm/bytes_up"]))


def test_every_participant_sends_and_gets_its_predictions_and_nothing_else():
    watch = Traffic()
    fit(knfu(), 2, transfer_data(sizes=(7, 0, 5, 9, 16), schedule=[[0, 1, 2], [1]]), callbacks=[watch])
    assert watch.rows == [(3 * 4 * TRANSFER * 3,) * 2, (4 * TRANSFER * 3,) * 2]


@pytest.mark.parametrize("norm", [False, True])
def test_resume_with_twenty_personal_models_is_exact(norm, tmp_path):
    def start():
        return knfu(net=WITH_NORM if norm else THREE)

    sizes = tuple(3 + k % 5 for k in range(20))
    schedule = [list(range(15)), [0, 3, 19, 7], list(range(10, 20))]
    whole = fit(start(), 3, transfer_data(sizes=sizes, schedule=schedule))
    half = fit(start(), 1, transfer_data(sizes=sizes, schedule=schedule))
    half.trainer.save_checkpoint(tmp_path / "half.ckpt")
    resumed = fit(start(), 3, transfer_data(sizes=sizes, schedule=schedule), ckpt_path=tmp_path / "half.ckpt")
    assert all(map(equal, models_of(resumed), models_of(whole)))
    assert resumed.round_metrics == whole.round_metrics
    whole.trainer.save_checkpoint(tmp_path / "whole.ckpt")
    other = FederatedLoop(start(), seed=9)
    (tested,) = trainer(0).test(
        other, transfer_data(sizes=sizes, schedule=schedule), ckpt_path=tmp_path / "whole.ckpt", verbose=False
    )
    assert tested == {"local/alma": pytest.approx(whole.round_metrics["local/alma"])}


def test_only_a_net_with_batch_norm_leaves_out_a_last_batch_of_one_sample():
    """Sizes 6 and 6 in batches of 5: the perceptron takes both batches, the net with BatchNorm one."""
    steps = {}

    class Steps(pl.Callback):
        def on_client_end(self, trainer, loop, update):
            steps.setdefault(update.client_id, []).append(update.num_steps)

    loop = fit(knfu(net=WITH_NORM, finetune_epochs=0), 1, transfer_data(sizes=(6, 6, 6)), callbacks=[Steps()])
    assert steps == {0: [2, 0], 1: [2, 0], 2: [1, 0]}
    assert model_of(loop, 2)["body.1.num_batches_tracked"] == 1


def test_one_net_for_all_clients_is_as_many_of_it():
    one = fit(knfu(net=Wide), 2, transfer_data())
    torch.manual_seed(0)
    many = knfu(net=partial(HeterogeneousNets, nets=[Wide, Wide]), num_classes=3, input_shape=(4,))
    for net in many.net.nets:
        net.load_state_dict({name.removeprefix("net."): value for name, value in one.initial_personal.items()})
    start = many.state_dict()
    loop = FederatedLoop(many, seed=3)
    many = fit(None, 2, transfer_data(), loop=loop)
    assert equal(many.client.state_dict(), start)
    assert all(map(equal, models_of(one), models_of(many)))


def test_a_client_that_is_not_finite_is_left_out_of_the_fusion():
    data = transfer_data(sizes=(7, 12, 5))
    clean = transfer_data(sizes=(7, 12, 5), schedule=[[0, 2]])
    data.setup()
    data.split("train").x[8] = torch.nan  # of client 1
    skipped, without = (fit(knfu(), 1, d, nonfinite="skip") for d in (data, clean))
    assert skipped.server_module.fusion.client_ids == [0, 2]
    assert skipped.round_metrics["train/skipped"] == 1
    assert equal(model_of(skipped, 0), model_of(without, 0))
    assert skipped.store.personal(1) is None
    with pytest.raises(RuntimeError, match="client 1 returned NaN"):
        fit(knfu(), 1, data)


@pytest.mark.parametrize("ce_on", ["local", "none"])
def test_cross_entropy_on_other_samples(ce_on):
    """No cross-entropy: alone and with its own knowledge back, a full batch has no gradient at the first step."""
    settings = {"ce_on": ce_on, "finetune_batch": "full", "net": Flat}
    data = transfer_data(sizes=(7, 0), schedule=[[0]])
    loop = fit(knfu(**settings), 1, data, local_epochs=0)
    begun = {name.removeprefix("net."): value for name, value in loop.initial_personal.items()}
    if ce_on == "none":
        torch.testing.assert_close(model_of(loop, 0), begun)
        return
    assert not equal(model_of(loop, 0), begun)
    empty = fit(knfu(**settings), 1, transfer_data(sizes=(7, 0), schedule=[[1]]), local_epochs=0)
    torch.testing.assert_close(model_of(empty, 1), begun)  # a client without data has none to take
    net = Flat(3, (4,))
    net.load_state_dict(begun)
    (x, y), order = data.view(0, 0).all(), data.view(0, 0).generator("pairs")
    order = torch.randperm(7, generator=order)[torch.arange(TRANSFER) % 7]
    F.cross_entropy(net(x[order]), y[order]).backward()
    torch.testing.assert_close(
        model_of(loop, 0), {name: value - 0.1 * value.grad for name, value in net.state_dict(keep_vars=True).items()}
    )


def test_a_fine_tuning_step_can_be_stacked():
    client = knfu(net=BatchNormNet, num_classes=3, input_shape=(4,))
    client.net.body[3].p = 0.0
    x, y = (torch.stack(parts) for parts in zip(*(samples(5, seed=s) for s in range(3)), strict=True))
    rows = torch.tensor([[0, 1, 2, 3, 4], [5, 4, 3, 2, 1], [2, 2, 0, 1, 5]])
    step = client.training_step
    client.training_step = lambda batch, index: step(((batch[0], batch[1][..., 0]), batch[1][..., 1]), index)
    buffers = {"knowledge": knowledge(3).float()}
    torch.testing.assert_close(*stacked_and_alone(client, buffers, x, torch.stack([y, rows], -1)))


# --- what is refused


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"beta": -1}, "beta must be at least 0, got -1"),
        ({"beta": float("nan")}, "beta must be at least 0, got nan"),
        ({"kd_direction": "both"}, "kd_direction must be one of forward, reverse, got 'both'"),
        ({"lam": -0.5}, "lam must be at least 0, got -0.5"),
        ({"temperature": 0}, "temperature must be above 0, got 0"),
        ({"finetune_epochs": -1}, "finetune_epochs must be at least 0, got -1"),
        ({"finetune_batch": 0}, "finetune_batch must be at least 1, got 0; 'full' is the whole split"),
        ({"ce_on": "proxy"}, "ce_on must be one of transfer, local, none, got 'proxy'"),
    ],
)
def test_bad_settings(settings, sentence):
    with pytest.raises(ValueError, match=sentence):
        knfu(**settings)


def test_what_does_not_go_together():
    with pytest.raises(ValueError, match=r"KnFu needs the split 'transfer'.*data\.transfer_size"):
        fit(knfu(), 1, toy_data())
    with pytest.raises(ValueError, match=r"different nets can share no entry, but FedAvg shares 12.*model.personal"):
        fit(FedAvg(net=THREE), 1, transfer_data())
    with pytest.raises(ValueError, match="HeterogeneousNets needs at least one net, got none"):
        knfu(net=partial(HeterogeneousNets, nets=[]), num_classes=3, input_shape=(4,))
    with pytest.raises(ValueError, match="FedMD needs a FedMDServer, got KnFuServer"):
        FederatedLoop(FedMD(net=THREE), server_module=KnFuServer())


def test_fedavg_with_every_entry_personal_may_have_different_nets():
    loop = fit(FedAvg(net=THREE, optimizer=sgd()), 2, transfer_data(), personal=["*"])
    assert loop.round_metrics["comm/bytes_down"] == loop.round_metrics["comm/bytes_up"] == 0
    assert "local/alma" in loop.round_metrics


def test_it_needs_transfer_samples_and_clients_that_send_knowledge():
    empty = TensorSource(tuple(t[:0] for t in samples(2)), samples(2), num_classes=3)
    with pytest.raises(ValueError, match=r"KnFu needs a transfer set with samples, got an empty one"):
        fit(knfu(), 1, toy_data(extra_splits={"transfer": empty}))
    with pytest.raises(ValueError, match="KnFuServer needs a client that sends knowledge, such as KnFu, got FedAvg"):
        fit(FedAvg(net=BatchNormNet), 1, transfer_data(), server_module=KnFuServer())
