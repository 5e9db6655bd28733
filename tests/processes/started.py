"""Checks what comes back of two processes that this one starts (spawn, fork): `python started.py METHOD`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.methods import FedAvg, FedNTD
from tests.processes.strategies import parallel
from tests.toys import BatchNormNet, equal, sgd, toy_data, trainer
from tests.user_data import Pairs
from tests.user_modules import Lazy


def cases():
    """Yield a name, a loop and data: of a net whose size the data tell, and of a module with `configure_model`."""
    yield "net", FederatedLoop(FedNTD(net=BatchNormNet, optimizer=sgd()), seed=5, threads=1), toy_data()
    module = FederatedLoop(FedAvg(module=Lazy()), seed=5, threads=1)
    yield "module", module, FederatedDataModule.from_datamodule(Pairs(), num_clients=3)


def main(method):
    together = parallel(2, f"client_parallel_{method}")
    for (name, here, data), (_, there, other) in zip(cases(), cases(), strict=True):
        trainer(2).fit(here, datamodule=data)
        run = trainer(2, **together)
        run.fit(there, datamodule=other)
        assert equal(dict(there.client.state_dict()), dict(here.client.state_dict())), name
        assert run.callback_metrics.keys() >= {"comm/bytes_up"}, name
        if name == "net":
            again = trainer(2, **together)
            again.validate(there, datamodule=toy_data(), verbose=False)
            assert torch.equal(again.callback_metrics["global/acc"], accuracy_of(here)), name
        print(name, "came back")


def accuracy_of(loop):
    run = trainer(2)
    run.validate(loop, datamodule=toy_data(), verbose=False)
    return run.callback_metrics["global/acc"]


if __name__ == "__main__":
    main(sys.argv[1])
