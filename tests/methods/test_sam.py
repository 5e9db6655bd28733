"""SAM: one step by hand, what both passes share, and how it is driven as a client's optimizer."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fl_lightning import FederatedLoop
from fl_lightning.methods import SAM, FedAvg
from fl_lightning.methods.sam import perturbation
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, trainer, weights_of

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 0, 1, 1])


def closure_of(net, optimizer, passes=None):
    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(net(X), Y)
        loss.backward()
        if passes is not None:
            passes.append([parameter.detach().clone() for parameter in net.parameters()])
        return loss

    return closure


def test_the_perturbation_has_one_norm_over_all_tensors():
    gradients = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    away = perturbation(gradients, 0.5)
    torch.testing.assert_close(away, {"a": torch.tensor([0.3, 0.0]), "b": torch.tensor([[0.4]])})
    zero = perturbation({"a": torch.zeros(3)}, 0.5)["a"]
    assert torch.equal(zero, torch.zeros(3))


def test_a_step_takes_the_gradient_nearby_and_the_base_step_from_here():
    """Weight decay and momentum act on θ itself; θ is restored exactly."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    other = nn.Linear(4, 3)
    other.load_state_dict(net.state_dict())
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}
    sam = SAM(net.parameters(), partial(torch.optim.SGD, **settings), 0.3)
    base = torch.optim.SGD(other.parameters(), **settings)
    for _ in range(3):
        passes = []
        sam.step(closure_of(net, sam, passes))
        start, away = passes
        by_hand = torch.autograd.grad(F.cross_entropy(other(X), Y), list(other.parameters()))
        norm = torch.cat([gradient.flatten() for gradient in by_hand]).norm()
        for a, b, gradient in zip(start, away, by_hand, strict=True):
            torch.testing.assert_close(b, a + 0.3 * gradient / norm)
        with torch.no_grad():
            for parameter, value in zip(other.parameters(), away, strict=True):
                parameter.copy_(value)
        base.zero_grad()
        F.cross_entropy(other(X), Y).backward()
        with torch.no_grad():
            for parameter, value in zip(other.parameters(), start, strict=True):
                parameter.copy_(value)
        base.step()
        for a, b in zip(net.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("bn_second_pass", [False, True])
def test_running_statistics_move_in_the_first_pass_only_unless_asked(bn_second_pass):
    torch.manual_seed(0)
    net = BatchNormNet(3, (4,))
    sam = SAM(net.parameters(), sgd(), 0.3, bn_second_pass, module=net)
    sam.step(closure_of(net, sam))
    assert net.body[1].num_batches_tracked == 1 + bn_second_pass
    assert net.body[1].track_running_stats
    net.eval()
    sam.step(closure_of(net, sam))
    assert net.body[1].num_batches_tracked == 1 + bn_second_pass


def test_a_client_gives_its_batchnorm_layers_and_counts_one_step_for_two_passes():
    loop = fit(FedAvg(net=BatchNormNet, optimizer=partial(SAM, base=sgd())), 1, toy_data((10, 10)), local_epochs=2)
    assert loop.client.net.body[1].num_batches_tracked == 2 * 2
    assert loop.client.num_steps == 2 * 2


def test_no_perturbation_is_the_base_optimizer_bit_for_bit():
    """With dropout too: there is no second pass."""
    runs = [
        weights_of(fit(FedAvg(net=BatchNormNet, optimizer=optimizer), 2, lr_decay=0.5))
        for optimizer in (sgd(), partial(SAM, base=sgd(), sam_rho=0.0), partial(SAM, base=sgd(), sam_rho=0.1))
    ]
    assert equal(runs[0], runs[1])
    assert not equal(runs[0], runs[2])


def test_the_lr_of_the_loop_reaches_the_step():
    decayed = fit(FedAvg(net=BatchNormNet, optimizer=partial(SAM, base=sgd(0.1))), 1, lr_decay=0.5)
    optimizer = decayed.parts.services.optimizers(use_pl_optimizer=False)
    assert optimizer.param_groups is optimizer.base.param_groups
    a = fit(FedAvg(net=BatchNormNet, optimizer=partial(SAM, base=sgd(0.1, 0.0))), 2, lr_decay=1e-12)
    b = fit(FedAvg(net=BatchNormNet, optimizer=partial(SAM, base=sgd(0.1, 0.0))), 1)
    for name, value in b.client.named_parameters():
        torch.testing.assert_close(dict(a.client.named_parameters())[name], value)


def test_it_trains():
    loop = fit(FedAvg(net=partial(BatchNormNet, dropout=0.0), optimizer=partial(SAM, base=sgd())), 8, local_epochs=2)
    assert loop.round_metrics["global/acc"] > 0.6  # chance: a third


def test_what_it_cannot_do_is_refused():
    client = FedAvg(net=BatchNormNet, optimizer=partial(SAM, base=sgd()))
    with pytest.raises(ValueError, match=r"SAM computes its gradient more than once.*model\.accumulate_grad_batches=1"):
        trainer(1).fit(FederatedLoop(client, accumulate_grad_batches=2), datamodule=toy_data())
    with pytest.raises(ValueError, match="sam_rho must be at least 0, got -1"):
        SAM(nn.Linear(1, 1).parameters(), sgd(), sam_rho=-1)
