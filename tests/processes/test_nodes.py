"""Two nodes on one machine: two groups of torchrun that find each other over loopback give the run of one process."""

import socket
import subprocess
import sys

import pytest
import torch

from tests.commands import CONFIGS

RUN = f"""fit -c {CONFIGS}/experiment/digits_fedntd.yaml --trainer.max_epochs 2 --model.threads 1 --model.local_epochs 1
    --trainer.enable_progress_bar false --trainer.accelerator cpu""".split()


def on_nodes(folder, nodes: int) -> None:
    """Run the command once on each node, of one process each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(nodes):
        words = f"""-m torch.distributed.run --nnodes {nodes} --nproc-per-node 1 --node-rank {rank}
            --master-addr 127.0.0.1 --master-port {port} -m fl_lightning""".split()
        words += [*RUN, *f"--trainer.strategy client_parallel --trainer.devices 1 --trainer.num_nodes {nodes}".split()]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        started.append(subprocess.Popen([sys.executable, *words], cwd=folder, text=True, **streams))
    for process in started:
        said, _ = process.communicate(timeout=240)
        assert process.returncode == 0, said


@pytest.mark.slow
def test_two_nodes_by_torchrun_give_the_run_of_one(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for nodes in (2, 1):
        on_nodes(tmp_path, nodes)
    two, one = sorted((tmp_path / "runs" / "digits_fedntd").iterdir())  # their names begin with 0 and 1
    assert (two / "metrics.csv").read_text() == (one / "metrics.csv").read_text()
    weights = [torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"] for run in (two, one)]
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
    names = [sorted(path.name.split(".")[0] for path in run.iterdir()) for run in (two, one)]
    assert names[0] == names[1]
