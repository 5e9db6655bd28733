"""Runs two processes (fork) that repeat rounds without a client that fails: `python skips.py FOLDER`."""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from fl_lightning import FaultPolicy, FederatedLoop, methods
from tests.federation.test_skip_law import Rows, data, failing
from tests.processes.cases import digest
from tests.processes.strategies import forked
from tests.toys import trainer

CASES = {
    "later exchange": (methods.KnFu, "raise"),
    "NaN in a later exchange": (methods.FedPAC, "NaN"),
    "state of a server module": (methods.SCAFFOLD, "NaN"),
    "late error": (methods.FedCurv, "raise"),
}


class Writes(Rows):
    """Writes a digest of weights and records and the rows, as rank 0 sees them at the end."""

    def __init__(self, path):
        super().__init__()
        self.path = path

    def on_train_end(self, trainer, loop):
        found = digest(loop)
        if trainer.is_global_zero:
            self.path.write_text(json.dumps({"hash": found, "rows": self.rows, "skipped": self.skipped}))


def run(folder, name, **settings):
    """Fit three rounds of a case, and return what was written."""
    kind, how = CASES[name]
    loop = FederatedLoop(failing(kind, how), seed=3, threads=1, faults=FaultPolicy(nonfinite="skip", on_error="skip"))
    path = folder / f"{name}-{settings.get('devices', 1)}.json"
    fitting = trainer(3, folder, callbacks=[Writes(path)], **settings)
    fitting.fit(loop, datamodule=data())
    return json.loads(path.read_text())


if __name__ == "__main__":
    for case in CASES:
        run(Path(sys.argv[1]), case, **forked(2))
