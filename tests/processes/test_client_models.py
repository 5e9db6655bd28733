"""Values and models of clients are the same bytes with one process and with two."""

from pathlib import Path

import pytest
import torch

from tests.processes.forked import run_script

SCRIPT = Path(__file__).with_name("client_models.py")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["FedAvg", "Local", "Ditto", "FedBN", "IFCA"])
def test_two_processes_give_the_tables_and_models_of_one(tmp_path, method):
    for number in (1, 2):
        done = run_script(SCRIPT, method, str(number), str(tmp_path / str(number)), cwd=tmp_path, timeout=300)
        assert done.returncode == 0, done.stderr
    one, two = (tmp_path / str(number) for number in (1, 2))
    assert (one / "clients.csv").read_text() == (two / "clients.csv").read_text()
    known = [(folder / f"directions-{rank}.json").read_text() for folder, rank in ((one, 0), (two, 0), (two, 1))]
    assert "local/val/mae" in known[0]
    assert known[0] == known[1] == known[2]
    rows = [(folder / f"row-{rank}.json").read_text() for folder, rank in ((one, 0), (two, 0), (two, 1))]
    assert "unseen/tuned/val/mae" in rows[0]
    assert rows[0] == rows[1] == rows[2]
    for path in one.glob("client*.ckpt"):
        states = [torch.load(folder / path.name, weights_only=True)["state_dict"] for folder in (one, two)]
        assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.slow
def test_callbacks_of_a_module_and_several_test_loaders_are_those_of_one_process(tmp_path):
    for number in (1, 2):
        script = SCRIPT.with_name("own_callbacks.py")
        done = run_script(script, str(number), str(tmp_path / str(number)), cwd=tmp_path, timeout=300)
        assert done.returncode == 0, done.stderr
    one, two = (tmp_path / str(number) for number in (1, 2))
    table = (one / "clients.csv").read_text()
    assert {"local/own_mae/dataloader_idx_1", "local/seen", "local/top"} <= set(table.splitlines()[0].split(","))
    assert table == (two / "clients.csv").read_text()
