"""Predictions of all clients are the same with one process and with two, which end with the pass of each client."""

from pathlib import Path

import pytest
import torch

from tests.processes.forked import run_script

SCRIPT = Path(__file__).with_name("predictions.py")


@pytest.mark.slow
def test_two_processes_write_the_predictions_of_one(tmp_path):
    for number in (1, 2):
        done = run_script(SCRIPT, str(number), str(tmp_path / str(number)), cwd=tmp_path, timeout=300)
        assert done.returncode == 0, done.stderr
    one, two = (tmp_path / str(number) for number in (1, 2))
    assert (one / "predictions.csv").read_text() == (two / "predictions.csv").read_text()
    outputs = [torch.load(folder / "predictions.pt") for folder in (one, two)]
    assert list(outputs[0]) == list(outputs[1]) == ["0", "1", "2"]
    assert all(torch.allclose(outputs[0][name], outputs[1][name]) for name in outputs[0])
