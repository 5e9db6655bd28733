"""Checks in two processes that unchanged entries keep their bits and integers are exact: `python kept.py`."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from fl_lightning import Aggregator, FaultPolicy
from tests.federation.test_kept_bits import Fractional, OnDevice, check_kept, run


def cases():
    """Yield names with settings. No rule gathers rows, because torch cannot pickle uint16 and up."""
    yield "samples", {}
    yield "fractions", {"aggregator": Fractional()}
    yield "tensors", {"aggregator": OnDevice()}
    yield "uniform", {"aggregator": Aggregator(weighting="uniform")}
    yield "skip", {"faults": FaultPolicy(nonfinite="skip"), "aggregator": Fractional()}


def main():
    for (name, alone), (_, together) in zip(cases(), cases(), strict=True):
        here = run(**alone)
        there = run(processes=2, **together)
        check_kept(there)
        assert torch.equal(there.client.net.counter, here.client.net.counter), name
        print(name, "kept")


if __name__ == "__main__":
    main()
