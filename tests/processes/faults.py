"""Runs two processes (fork) with each fault, in every mode: `python faults.py FOLDER KIND...`."""

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytorch_lightning as pl

from tests.federation.faulty import faulty
from tests.processes.cases import digest
from tests.processes.strategies import forked
from tests.toys import toy_data, trainer


class Writes(pl.Callback):
    """Writes what rank 0 sees of every round."""

    def __init__(self, path):
        self.path = path
        self.skipped = []
        self.counts = []

    def on_train_epoch_end(self, trainer, loop):
        self.skipped.append([fault.client_id for fault in loop.skipped])
        self.counts.append(loop.round_metrics.get("train/skipped"))
        if trainer.is_global_zero:
            found = {"skipped": self.skipped, "counts": self.counts, "hash": digest(loop)}
            self.path.write_text(json.dumps(found))


def run(folder, mode, how, **settings):
    """Fit three rounds, and return the text of the error, which is empty if there is none."""
    writes = Writes(folder / f"{mode}-{how.replace(' ', '_')}-{settings.get('devices', 1)}.json")
    fitting = trainer(3, folder, callbacks=[writes], **settings)
    try:
        fitting.fit(faulty(how, mode), datamodule=toy_data())
    except Exception as error:
        return str(error)
    return ""


if __name__ == "__main__":
    where, *kinds = sys.argv[1:]
    said = {}
    for mode in ("error", "skip"):
        said[mode] = {kind: run(Path(where), mode, kind, **forked(2)) for kind in kinds}
    (Path(where) / "said.json").write_text(json.dumps(said))
