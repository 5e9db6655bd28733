"""Runs every method in a number of processes: `python methods.py FILE DEVICES` writes what rank 0 sees of each."""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from fl_lightning import FederatedLoop
from tests.processes.cases import digest
from tests.processes.strategies import parallel
from tests.test_contract import NAMES, cohorts_of, data_of, with_net
from tests.toys import trainer


def found(devices):
    """Return a hash of weights and server state and the values of the second round, by method. Other ranks get None."""
    results = {}
    for name in NAMES:
        loop = FederatedLoop(**with_net(name), seed=3, threads=1, evaluate_clients_every=1, local_epochs=2)
        run = trainer(2, **parallel(devices))
        run.fit(loop, datamodule=data_of(**cohorts_of(name, participation=0.8)))
        results[name] = {"hash": digest(loop), "row": loop.round_metrics}
    return results if run.is_global_zero else None


if __name__ == "__main__":
    torch.set_num_threads(1)
    seen = found(int(sys.argv[2]))
    if seen is not None:
        Path(sys.argv[1]).write_text(json.dumps(seen), encoding="utf-8")
