"""Schedules and counts of a client do not depend on the process in which it is trained."""

import json
from pathlib import Path

import pytest
import torch

from tests.processes.forked import run_script

SCRIPT = Path(__file__).with_name("clocks.py")


@pytest.mark.slow
def test_two_processes_have_the_rows_and_weights_of_one(tmp_path):
    for number in (1, 2):
        done = run_script(SCRIPT, str(number), str(tmp_path / str(number)), cwd=tmp_path, timeout=300)
        assert done.returncode == 0, done.stderr
    one, two = (tmp_path / str(number) for number in (1, 2))
    rows = [json.loads((folder / "rows.json").read_text()) for folder in (one, two)]
    assert rows[0] == rows[1]
    assert rows[0][3]["at/epoch"] >= 3 * 2
    states = [torch.load(folder / "weights.pt", weights_only=True) for folder in (one, two)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
