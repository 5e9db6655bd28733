"""Predicts by the models of all clients in a number of processes, into a folder, for test_predictions.py."""

import sys
from pathlib import Path

from pytorch_lightning import Trainer

from fl_lightning import FederatedLoop
from fl_lightning.callbacks import SavePredictions
from fl_lightning.methods import FedBN
from tests.federation.test_clients_by_own_steps import QUIET
from tests.processes.strategies import forked
from tests.toys import BatchNormNet, sgd, toy_data


def run(num_processes, folder):
    folder.mkdir()
    (folder / "predictions.csv").write_text("client,row\nof an earlier command,0\n")
    loop = FederatedLoop(FedBN(net=BatchNormNet, optimizer=sgd()), seed=1)
    Trainer(max_epochs=1, **QUIET).fit(loop, datamodule=toy_data((8, 8, 8)))
    runner = Trainer(callbacks=[SavePredictions(folder, by_client=True)], **QUIET, **forked(num_processes))
    for client_id in range(3):
        loop.deploy(client_id)
        runner.predict(loop, datamodule=toy_data((8, 8, 8), eval_batch_size=4), return_predictions=False)


if __name__ == "__main__":
    run(int(sys.argv[1]), Path(sys.argv[2]))
