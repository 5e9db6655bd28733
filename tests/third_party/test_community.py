"""Modules of others that were held out: their clients are evaluated, personalised, stacked and written.

A client has the values that plain Lightning gives for its checkpoint. `test_modules.py` has the other laws, as for
every case: FedAvg is the loop by hand, a resume is exact, the command line and two processes agree.
"""

import copy
import importlib
import logging
import math

import pytest
import pytorch_lightning as pl
import torch

from fl_lightning import FederatedLoop
from fl_lightning.callbacks import ClientCheckpoint
from fl_lightning.engines.deployed import EVALUATION
from fl_lightning.methods import Ditto, FedAvg, FedProx
from fl_lightning.utils.keyed import keyed_seed
from tests.third_party.cases import (
    CASES,
    COMMUNITY,
    SEED,
    divided,
    federate,
    loader_of,
    made,
    quiet_logger,
    same,
    skipped,
)
from tests.toys import trainer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
NAMES = [pytest.param(name, id=name, marks=skipped(name)) for name in COMMUNITY]


def fitted(name, around, tmp_path, **settings):
    """Federate a case, evaluate its clients, and write their models."""
    module, own = made(name)
    data = divided(name, own)
    settings = {"evaluate_clients_every": 1, "seed": SEED, "threads": 1, **settings}
    loop = FederatedLoop(around(module=module), **settings)
    saves = ClientCheckpoint(tmp_path, clients="all")
    found = trainer(2, tmp_path / "run", callbacks=[saves], limit_val_batches=2, **quiet_logger(name))
    found.fit(loop, datamodule=data)
    return loop


def validated(name, data, client_id, path):
    """What a Trainer of the module's own package reports of a client's checkpoint on the client's test samples."""
    module, own = made(name)
    own.prepare_data()
    own.setup("fit")
    own.setup("test")
    loader = own.test_dataloader()
    places = data.client_indices("test", client_id).tolist()
    mine = loader_of(loader, places, data.eval_batch_size)
    own.val_dataloader = lambda: mine
    kind = pl if isinstance(module, pl.LightningModule) else importlib.import_module("lightning.pytorch")
    has_hooks = isinstance(own, kind.LightningDataModule)
    given = {"datamodule": own} if has_hooks else {"dataloaders": mine}
    draws = [seeds(kind, keyed_seed(SEED, EVALUATION, client_id=client_id))]
    settings = {"callbacks": draws, **quiet_logger(name, kind.__name__)}
    alone = trainer(1, path.parent / "plain", kind=kind.Trainer, **settings)
    alone.validate(module, ckpt_path=path, weights_only=False, verbose=False, **given)
    values = alone.callback_metrics
    return {key: float(value) for key, value in values.items() if not is_variant(key, values)}


def seeds(package, seed):
    """A callback with which a module draws in its validation what it draws where the loop tests a client."""

    class Seeds(package.Callback):
        def on_validation_batch_start(self, trainer, pl_module, batch, batch_idx, dataloader_idx=0):
            if batch_idx == 0:
                torch.manual_seed(seed)

    return Seeds()


def is_variant(key, values):
    """Whether a key is one that Lightning adds to a value that is logged by step and by epoch."""
    return any(key == f"{name}{suffix}" for name in values for suffix in ("_step", "_epoch"))


@pytest.mark.parametrize("around", [FedAvg, FedProx, Ditto], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", NAMES)
def test_a_client_has_the_values_of_plain_lightning(name, around, tmp_path):
    if around is not FedAvg and not made(name)[0].automatic_optimization:
        with pytest.raises(ValueError, match="automatic_optimization"):
            fitted(name, around, tmp_path)
        return
    if CASES[name].uncopied:
        with pytest.raises(TypeError):
            copy.deepcopy(made(name)[0])
        pytest.skip(CASES[name].uncopied)
    loop = fitted(name, around, tmp_path)
    assert all(value.isfinite().all() for value in loop.client.module.parameters())
    tested = loop.recorder.client_values
    assert tested.keys() == {0, 1, 2}
    for client_id, values in tested.items():
        path = tmp_path / f"client-{client_id}.ckpt"
        saved = torch.load(path, weights_only=False)["state_dict"]
        assert same(dict(saved), dict(loop.client_model(client_id).state_dict()))
        plain = {f"local/{key}": value for key, value in validated(name, loop.data, client_id, path).items()}
        assert plain.keys() == values.keys()
        for key, value in plain.items():
            found = math.nan if values[key] is None else values[key]
            assert found == pytest.approx(value, rel=1e-5, abs=1e-7, nan_ok=True), key
    personal = around is Ditto
    states = [loop.client_model(client_id).state_dict() for client_id in (0, 1)]
    assert same(*states) != personal


@pytest.mark.parametrize("name", NAMES)
def test_a_stack_or_the_reason_against_it(name, caplog):
    with caplog.at_level(logging.INFO):
        stacked = federate(name, 2, chunk=3)
    said = [record.message for record in caplog.records if "one after the other" in record.message]
    alone = federate(name, 2)
    if said:
        assert same(stacked, alone), said
    else:
        assert stacked.keys() == alone.keys()
        for key, value in stacked.items():
            torch.testing.assert_close(value, alone[key], rtol=1e-3, atol=1e-5, equal_nan=True, msg=key)
    reason = CASES[name].unstacked
    assert bool(said) == bool(reason), said
    assert reason in "".join(said)
