"""Fits one federation in a number of processes, in a folder, for test_client_models.py."""

import json
import sys
from pathlib import Path

from pytorch_lightning import Callback, Trainer

from fl_lightning import FederatedLoop, FineTuning, methods
from fl_lightning.callbacks import ClientCheckpoint
from tests.federation.test_client_model import Normalises
from tests.federation.test_clients_by_own_steps import QUIET, regression_data
from tests.processes.strategies import forked


class Directions(Callback):
    """Writes the values and their directions in each process, and a client's fine-tuned model."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_end(self, trainer, loop):
        path = self.folder / f"directions-{trainer.global_rank}.json"
        path.write_text(json.dumps(loop.recorder.directions, sort_keys=True))
        row = {name: value for name, value in loop.round_metrics.items() if name.startswith(("local/", "unseen/"))}
        state = loop.client_model(2, tuned=True).state_dict()
        tuned = {name: value.tolist() for name, value in state.items()}
        (self.folder / f"row-{trainer.global_rank}.json").write_text(json.dumps([row, tuned]))


def run(method, num_processes, folder):
    client = getattr(methods, method)(module=Normalises())
    loop = FederatedLoop(
        client,
        seed=1,
        evaluate_clients_every=1,
        evaluate_training_every=None if method == "Local" else 1,
        fine_tuning=FineTuning(epochs=2),
    )
    loop.run_folder = folder
    folder.mkdir()
    callbacks = [ClientCheckpoint(folder, clients="all"), Directions(folder)]
    fit = Trainer(max_epochs=2, callbacks=callbacks, **QUIET, **forked(num_processes))
    fit.fit(loop, datamodule=regression_data(unseen=[1]))


if __name__ == "__main__":
    run(method=sys.argv[1], num_processes=int(sys.argv[2]), folder=Path(sys.argv[3]))
