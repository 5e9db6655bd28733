"""FedMD: KnFu's protocol with the plain mean."""

import pytest
import torch

from fl_lightning.methods import FedMD, KnFu
from fl_lightning.methods import knfu as knfu_file
from fl_lightning.methods.fedmd import consensus, mean_absolute_error
from tests.methods.own_models import THREE, TRANSFER, Flat, model_of, models_of, transfer_data
from tests.methods.stacked import stacked_and_alone
from tests.toys import BatchNormNet, equal, fit, samples, sgd


def fedmd(**settings):
    return FedMD(**{"net": THREE, "optimizer": sgd(0.1, 0.9), **settings})


def test_it_is_knfu_with_equal_weights(monkeypatch):
    monkeypatch.setattr(knfu_file, "fusion_weights", lambda d, beta: torch.full_like(d, 1 / len(d)))
    data = {"sizes": (7, 12, 0, 9, 16), "schedule": [[0, 1, 2], [2, 3, 4]], "dtype": torch.float64}
    runs = [
        fit(kind(net=THREE, optimizer=sgd(), lam=2.0), 2, transfer_data(**data), precision="64-true")
        for kind in (FedMD, KnFu)
    ]
    for one, other in zip(*map(models_of, runs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_everyone_gets_the_mean_of_all_participants_the_empty_one_included():
    loop = fit(fedmd(), 1, transfer_data(sizes=(7, 0, 5), schedule=[[0, 1]]))
    fused = loop.server_module.fused
    assert sorted(fused) == [0, 1]
    assert torch.equal(fused[0], fused[1])
    alone = fit(fedmd(), 1, transfer_data(sizes=(7, 0, 5), schedule=[[0]]))
    assert not torch.equal(alone.server_module.fused[0], fused[0])
    torch.testing.assert_close(fused[0].sum(1), torch.ones(TRANSFER))


def test_the_original_exchanges_logits_and_digests_them():
    """Alone, the consensus is the client's own: the absolute error and its gradient are 0."""
    data = transfer_data(sizes=(7,), schedule=[[0]])
    original = {"targets": "logits", "ce_on": "none", "finetune_batch": "full", "net": Flat}
    loop = fit(fedmd(**original), 1, data, local_epochs=0)
    begun = {name.removeprefix("net."): value for name, value in loop.initial_personal.items()}
    assert equal(model_of(loop, 0), begun)
    assert loop.round_metrics["train/distance"] == 0
    x, _ = data.split("transfer").all()
    net = Flat(3, (4,))
    net.load_state_dict(begun)
    torch.testing.assert_close(loop.server_module.fused[0], net(x).detach())
    assert fit(fedmd(**original), 2, transfer_data()).round_metrics["train/distance"] > 0


def test_consensus_and_absolute_error():
    z = torch.tensor([[[1.0, 3.0]], [[2.0, -1.0]]])
    assert consensus(z).tolist() == [[1.5, 1.0]]
    assert mean_absolute_error(z[0], consensus(z)).item() == pytest.approx((0.5 + 2) / 2)
    assert mean_absolute_error(z[0].bfloat16(), consensus(z)).dtype == torch.float32


def test_a_client_s_knowledge_does_not_depend_on_the_other_architectures():
    loop = fit(fedmd(), 1, transfer_data(schedule=[[0, 1, 2]]), local_epochs=0)
    assert {tuple(k.shape) for k in loop.server_module.fused.values()} == {(TRANSFER, 3)}


def test_a_fine_tuning_step_can_be_stacked():
    client = fedmd(net=BatchNormNet, targets="logits", num_classes=3, input_shape=(4,))
    client.net.body[3].p = 0.0
    x, y = (torch.stack(parts) for parts in zip(*(samples(5, seed=s) for s in range(3)), strict=True))
    rows = torch.arange(5).expand(3, 5)
    step = client.training_step
    client.training_step = lambda batch, index: step(((batch[0], batch[1][..., 0]), batch[1][..., 1]), index)
    knowledge = {"knowledge": torch.randn(3, 6, 3, generator=torch.Generator().manual_seed(0))}
    torch.testing.assert_close(*stacked_and_alone(client, knowledge, x, torch.stack([y, rows], -1)))


def test_bad_settings():
    with pytest.raises(ValueError, match="targets must be one of soft, logits, got 'hard'"):
        fedmd(targets="hard")


class Silent(Flat.func):
    """Says zero of every class until it is trained."""

    def __init__(self, num_classes, input_shape):
        super().__init__(num_classes, input_shape, hidden=())
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)


def test_knowledge_that_is_zero_counts_like_any_other():
    data = transfer_data(sizes=(7, 0), schedule=[[0, 1]])
    loop = fit(fedmd(targets="logits", ce_on="none", net=Silent), 1, data)
    fused = loop.server_module.fused
    assert torch.equal(fused[0], fused[1])
    alone = fit(fedmd(targets="logits", ce_on="none", net=Silent), 1, transfer_data(sizes=(7, 0), schedule=[[0]]))
    torch.testing.assert_close(2 * fused[0], alone.server_module.fused[0])
