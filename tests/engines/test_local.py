"""An engine without a Trainer trains clients as a federation does."""

from functools import partial

import pytest
import torch
from pytorch_lightning import LightningModule
from pytorch_lightning.plugins import DoublePrecision, Precision

from fl_lightning.client import ClientModule
from fl_lightning.engines import LocalSettings, local_engine
from fl_lightning.functional.state import clone
from fl_lightning.methods import Ditto, FedAvg, FedProx
from fl_lightning.types import Broadcast, ClientJob
from tests.hooks.toy import Updates
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data


class Late(LightningModule):
    """A module of somebody's that builds its layer when Lightning asks for it."""

    def configure_model(self):
        self.layer = torch.nn.Linear(4, 3)

    def on_fit_start(self):
        self.scale = 2.0

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = self.scale * torch.nn.functional.cross_entropy(self.layer(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


CLIENTS = {
    "a net": lambda: FedProx(mu=0.5, net=BatchNormNet, optimizer=sgd()),
    "own models": lambda: Ditto(lam=0.1, net=BatchNormNet, optimizer=sgd()),
    "a module": lambda: ClientModule(module=Late()),
}


@pytest.mark.parametrize("chunk", [1, 2])
@pytest.mark.parametrize("make", CLIENTS.values(), ids=CLIENTS)
@pytest.mark.parametrize(("name", "plugin"), [("32-true", Precision), ("64-true", DoublePrecision)])
def test_clients_get_every_bit_that_a_federation_gives_them(name, plugin, make, chunk):
    watch = Updates()
    more = {"local_epochs": 2, "lr_decay": {"cosine": 0.01}}
    fit(make(), 1, toy_data((7, 12)), callbacks=[watch], precision=name, chunk=chunk, **more)
    engine = local_engine(
        make(),
        data := toy_data((7, 12)),
        precision=plugin(),
        max_epochs=1,
        settings=LocalSettings(seed=3, **more),
        chunk=chunk,
    )
    global_weights = engine.global_weights
    sent = Broadcast(0, "train", global_weights.snapshot(global_weights.shared))
    jobs = [ClientJob(i, sent, data.view(i, 0), {}, global_weights.snapshot(global_weights.personal)) for i in range(2)]
    for result in engine.run("train", jobs):
        wanted = watch.rounds[0][result.update.client_id]
        assert equal(clone(result.update.weights or {}), wanted.weights or {})
        assert (result.update.num_steps, result.update.accumulated_lr) == (wanted.num_steps, wanted.accumulated_lr)


def test_it_takes_what_stays_with_a_client():
    engine = local_engine(FedAvg(net=partial(BatchNormNet)), toy_data((7, 12)), personal=("net.head.*",))
    assert engine.global_weights.personal == ["net.head.weight", "net.head.bias"]
    with pytest.raises(ValueError, match=r"lr_decay=.* needs the number of rounds"):
        local_engine(FedAvg(), toy_data(), settings=LocalSettings(lr_decay={"cosine": 0.1}))
