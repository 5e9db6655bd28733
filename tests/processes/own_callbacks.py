"""Fits a module with callbacks and several test loaders in a number of processes, for test_client_models.py."""

import json
import sys
from pathlib import Path

from pytorch_lightning import Trainer

from fl_lightning import FederatedLoop
from tests.federation.test_callbacks_of_modules import LogsByItself, SetsUp
from tests.federation.test_clients_by_own_steps import QUIET
from tests.federation.test_several_test_loaders import LogsByLoader, data_of
from tests.processes.strategies import forked


class Makes(LogsByLoader):
    def configure_callbacks(self):
        return [SetsUp(), LogsByItself()]


if __name__ == "__main__":
    num_processes = int(sys.argv[1])
    folder = Path(sys.argv[2])
    folder.mkdir()
    loop = FederatedLoop(Makes(), seed=1, evaluate_clients_every=1, evaluate_training_every=1)
    loop.run_folder = folder
    fit = Trainer(max_epochs=2, **QUIET, **forked(num_processes))
    fit.fit(loop, datamodule=data_of())
    row = {name: value for name, value in loop.round_metrics.items() if name.startswith(("local/", "global/train/"))}
    (folder / f"row-{fit.global_rank}.json").write_text(json.dumps(row, sort_keys=True))
