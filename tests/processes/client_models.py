"""Run by test_client_models.py: fits one federation in a number of processes, in a folder."""

import json
import sys
from functools import partial
from pathlib import Path

from pytorch_lightning import Callback, Trainer

from fl_lightning import FederatedLoop, FineTuning, methods
from fl_lightning.callbacks import ClientCheckpoint
from tests.federation.test_client_model import Normalises
from tests.federation.test_clients_by_own_steps import QUIET, regression_data


class Directions(Callback):
    """Writes what each process knows of the values and their directions, and of a client's fine-tuned model."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_end(self, trainer, loop):
        path = self.folder / f"directions-{trainer.global_rank}.json"
        path.write_text(json.dumps(loop.recorder.directions, sort_keys=True))
        row = {name: value for name, value in loop.round_metrics.items() if name.startswith(("local/", "unseen/"))}
        tuned = {name: value.tolist() for name, value in loop.client_model(2, tuned=True).state_dict().items()}
        (self.folder / f"row-{trainer.global_rank}.json").write_text(json.dumps([row, tuned]))


def run(method, num_processes, folder):
    settings = {} if method == "Local" else {"evaluate_training_every": 1}
    client = getattr(methods, method)(module=Normalises())
    loop = FederatedLoop(client, seed=1, evaluate_clients_every=1, fine_tuning=FineTuning(epochs=2), **settings)
    loop.run_folder = folder
    folder.mkdir()
    callbacks = [ClientCheckpoint(folder, clients="all"), Directions(folder)]
    strategy = {"strategy": "client_parallel_fork", "devices": 2} if num_processes == 2 else {}
    fit = Trainer(max_epochs=2, callbacks=callbacks, **QUIET, **strategy)
    fit.fit(loop, datamodule=regression_data(unseen=[1]))


if __name__ == "__main__":
    chosen = partial(run, sys.argv[1], int(sys.argv[2]))
    chosen(Path(sys.argv[3]))
