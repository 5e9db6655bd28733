"""FedBN: norm layers by type stay with the client."""

import pytest
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchvision.models import mobilenet_v2

from fl_lightning.methods import FedAvg, FedBN
from tests.methods.test_local import Regression
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data, weights_of


class ForeignNorm(_BatchNorm):
    """A batch norm as other packages write it: it derives from none of torch's public classes."""

    def _check_input_dim(self, input):
        pass


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d, nn.InstanceNorm1d, nn.LayerNorm, lambda d: nn.GroupNorm(2, d), ForeignNorm]
)
def test_every_norm_layer_stays_whatever_its_name(norm):
    client = FedBN(net=BatchNormNet, num_classes=3, input_shape=(4,))
    client.net.body[1] = norm(8)
    loop = fit(client, 0)
    kept = {name for name in client.state_dict() if name.startswith("net.body.1.")}
    assert set(loop.global_weights.personal) == kept
    assert not {"net.body.0.weight", "net.head.bias"} & kept


def test_torchvision_s_mobilenet_has_52_that_no_name_tells():
    net = mobilenet_v2()
    found = [name for name, part in net.named_modules() if FedBN().is_personal(name, part)]
    assert len(found) == 52
    assert not any("bn" in name for name in net.state_dict())


def test_norms_begin_as_the_initial_model_s_and_then_stay():
    settings = {"schedule": [[0, 1], [2, 0]]}
    loop = fit(FedBN(net=BatchNormNet, optimizer=sgd()), 2, toy_data(**settings))
    once = fit(FedBN(net=BatchNormNet, optimizer=sgd()), 1, toy_data(**settings))
    assert equal(loop.store.personal(1), once.store.personal(1))
    assert loop.store.personal(2)["net.body.1.num_batches_tracked"] == 1  # 5 samples: one batch, from zero
    assert not any("body.1." in name for name in loop.server.weights)


def test_the_global_model_has_the_participants_mean_of_them_free_of_charge():
    loops = [fit(kind(net=BatchNormNet, optimizer=sgd()), 1) for kind in (FedAvg, FedBN)]
    rows = [loop.round_metrics for loop in loops]
    assert rows[0]["comm/bytes_down"] - rows[1]["comm/bytes_down"] == 5 * (4 * (2 * 8 + 2 * 8) + 8)
    for name, value in weights_of(loops[0]).items():
        torch.testing.assert_close(weights_of(loops[1])[name], value)  # after one round from one start


def test_around_a_module_without_norms_it_is_fedavg():
    torch.manual_seed(0)
    start = Regression().state_dict()
    runs = []
    for kind in (FedAvg, FedBN):
        module = Regression()
        module.load_state_dict(start)
        runs.append(weights_of(fit(kind(module=module), 2)))
    assert equal(*runs)
