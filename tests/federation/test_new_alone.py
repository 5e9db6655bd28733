"""Predictions of new samples read a checkpoint and these samples, and nothing of the training data."""

import copy

import pytest
import torch
from pytorch_lightning import Callback, Trainer
from pytorch_lightning.callbacks import ProgressBar

from fl_lightning import FederatedLoop, methods
from fl_lightning.client import ClientModule
from fl_lightning.client.hooks import overridden
from fl_lightning.data import TensorSource
from fl_lightning.data.new_samples import NewSamples
from fl_lightning.methods import FedAvg
from tests.federation.test_clients_by_own_steps import QUIET
from tests.federation.test_evaluated_model import all_classes
from tests.toys import BatchNormNet, samples, sgd, toy_data

pytestmark = pytest.mark.filterwarnings("ignore")

METHODS = [kind for kind in all_classes(ClientModule) if kind.__name__ in methods.__all__]
SIZES = (8, 6, 9)
ROOMS = ("callbacks", "monitors", "runs")
"""Where the callbacks are that users give to a Trainer."""


class Lost(TensorSource):
    """Its samples may be gone, and then nobody may ask for them."""

    is_gone = False

    def load(self):
        if self.is_gone:
            raise AssertionError("the training samples were asked for")
        return super().load()

    def prepare(self):
        if self.is_gone:
            raise AssertionError("the training samples were fetched")

    def read_new(self, path, schema):
        return NewSamples.of(torch.load(path), names=range(7), column="row", schema=schema)


def data_of(is_gone=False, **settings):
    data = toy_data(SIZES, transfer_size=9, proxy_size=6, partition=None, **settings)
    data.source.__class__ = Lost
    data.source.is_gone = is_gone
    return data


def client_of(kind):
    try:
        return kind(net=BatchNormNet, optimizer=sgd())
    except (TypeError, ValueError) as error:
        pytest.skip(f"{kind.__name__} has arguments that must be given: {error}")


def predicted(client, data, checkpoint, folder, client_id, callbacks=()):
    """The outputs for new samples."""
    torch.save(samples(7, seed=5)[0], folder / "new.pt")
    loop = FederatedLoop(client, seed=1)
    loop.deploy(client_id)
    data.rely_on(checkpoint)
    data.predict_new(folder / "new.pt")
    runner = Trainer(**QUIET | {"enable_checkpointing": True}, callbacks=list(callbacks))
    return torch.cat(runner.predict(loop, datamodule=data, ckpt_path=checkpoint))


@pytest.mark.parametrize("kind", METHODS, ids=lambda kind: kind.__name__)
def test_every_method_predicts_without_the_training_samples(kind, tmp_path):
    client = client_of(kind)
    loop = FederatedLoop(copy.deepcopy(client), seed=1)
    fit = Trainer(max_epochs=1, **QUIET)
    fit.fit(loop, datamodule=data_of())
    checkpoint = tmp_path / "last.ckpt"
    fit.save_checkpoint(checkpoint)
    has_global = bool(loop.global_weights.shared)
    chooses = overridden(client, "receive_deployment", ClientModule) and "batches" in client.reads
    for client_id in ([None] if has_global else []) + [1]:
        # A client that chooses what it deploys by its training samples needs them.
        ways = (False,) if chooses and client_id is not None else (False, True)
        answers = [
            predicted(copy.deepcopy(client), data_of(is_gone), checkpoint, tmp_path, client_id) for is_gone in ways
        ]
        assert torch.equal(answers[0], answers[-1])
        x, _ = samples(7, seed=5)
        with torch.no_grad():
            expected = loop.client_model(client_id).eval()(x)
        torch.testing.assert_close(answers[-1], expected)


def made(kind, folder):
    """A callback of a class, None if its arguments must be given."""
    for arguments in ((), (folder,), (folder, "name")):
        try:
            return kind(*arguments)
        except (TypeError, ValueError, AttributeError):
            continue
    return None


def test_no_callback_of_the_package_reads_training_samples_in_a_prediction(tmp_path):
    found = [kind for kind in all_classes(Callback) if not issubclass(kind, ProgressBar)]
    kinds = [kind for kind in found if kind.__module__.split(".")[1] in ROOMS]
    callbacks = [callback for callback in (made(kind, tmp_path / kind.__name__) for kind in kinds) if callback]
    assert len(callbacks) > len(kinds) // 2
    loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), seed=1)
    fit = Trainer(max_epochs=1, **QUIET)
    fit.fit(loop, datamodule=data_of())
    fit.save_checkpoint(tmp_path / "last.ckpt")
    client = FedAvg(net=BatchNormNet, optimizer=sgd())
    data = data_of(is_gone=True)
    assert len(predicted(client, data, tmp_path / "last.ckpt", tmp_path, None, callbacks)) == 7
    assert data.is_unread
