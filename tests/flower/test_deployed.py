"""The example on Flower's own runtimes: SuperLink and SuperNodes with TLS and node authentication, and Ray."""

import re
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest
import torch

pytest.importorskip("flwr", reason="pip install 'fl_lightning[flower]'")

from fl_lightning.__main__ import main
from fl_lightning.utils.files import read_saved
from tests.flower.deployed import CLINICS, EXAMPLE, Deployment
from tests.flower.test_methods import records_here, rows_of

pytestmark = pytest.mark.slow

METHODS = {
    "FedAvg": "-c method/fedavg",
    "FedNTD": "",
    "SCAFFOLD": "-c method/scaffold",
    "FedRep": "-c method/fedrep",
    "KnFu": "-c method/knfu --data.transfer_size 20",
}
TWO = "--trainer.max_epochs 2 --model.evaluate_clients_every 2"


def split(parties, folder, *arguments):
    """Write the parties' folders, in a process of its own."""
    command = [sys.executable, "-m", "fl_lightning", "split", "-c", EXAMPLE / "federation.yaml", *arguments]
    subprocess.run([*map(str, command), "--output", str(parties)], cwd=folder, check=True, timeout=300)


@pytest.fixture(scope="module")
def link(tmp_path_factory):
    """A SuperLink with two SuperNodes, whose clients have folders of their own."""
    with Deployment(tmp_path_factory.mktemp("link")) as deployment:
        split(deployment.folder / "parties", deployment.folder, "--model.client", "KnFu", "--data.transfer_size", "20")
        for i in range(2):
            deployment.register(f"node_{i}")
            deployment.start_node(f"node_{i}", deployment.folder / f"parties/client_{i}/data.yaml")
        yield deployment


@pytest.fixture(scope="module")
def ray(tmp_path_factory):
    """A SuperLink that simulates two nodes by Ray."""
    with Deployment(tmp_path_factory.mktemp("ray"), simulates=2) as deployment:
        yield deployment


def simulated(tmp_path, monkeypatch, arguments):
    """Run the simulation; returns its last checkpoint and its rows."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    main(["fit", "-c", str(EXAMPLE / "federation.yaml"), *arguments.split()])
    return checkpoint_of(tmp_path / "here"), rows_of(tmp_path / "here")


def checkpoint_of(folder):
    (path,) = folder.rglob("last.ckpt")
    return read_saved(path)


def assert_alike(here, rows, folder, records, nodes):
    """Weights, rows and what the clients keep, at the nodes, are the simulation's."""
    there = checkpoint_of(folder)
    personal = {f"client.{name}" for name in there["federated"]["initial_personal"]}
    for name, value in here["state_dict"].items():
        assert name in personal or torch.equal(value, there["state_dict"][name])
    others = rows_of(folder)
    left_out = rows[0].keys() - others[0].keys()
    assert left_out == ({key for key in rows[0] if key.startswith("global/")} if personal else set())
    assert [{k: v for k, v in row.items() if k not in left_out} for row in rows] == others
    contents = {path.read_bytes() for path in nodes.rglob("client_*.safetensors")}
    assert contents >= set(records.values())


@pytest.mark.parametrize("name", METHODS)
def test_over_superlink(name, link, tmp_path, monkeypatch):
    arguments = f"{METHODS[name]} {TWO}"
    if name != "KnFu":
        arguments += " --data.transfer_size 20"  # as the folders were written
    here, rows = simulated(tmp_path, monkeypatch, arguments)
    root = link.folder / "runs" / name
    ours = f"{arguments.replace('--data.transfer_size 20', '')} --trainer.default_root_dir {root}"
    printed = link.run(arguments=ours, server_data=link.folder / "parties/server/data.yaml")
    assert "Stopping" not in printed or root.exists(), printed
    assert_alike(here, rows, root, records_here(tmp_path / "here"), link.folder / "parties")


def test_a_module_and_data_of_ones_own(tmp_path):
    """The second example of docs/deployment.md: a csv at each clinic, and a server without samples."""
    subprocess.run([sys.executable, str(CLINICS / "make_patients.py"), str(tmp_path / "srv")], check=True, timeout=120)
    with Deployment(tmp_path / "link") as deployment:
        for i in range(2):
            data = tmp_path / f"srv/clinic_{i}/data.yaml"
            source = f"{{class_path: patients.Patients, init_args: {{path: {data.with_name('patients.csv')}}}}}"
            partition = f"{{class_path: fl_lightning.data.OwnerPartition, init_args: {{client_id: {i}}}}}"
            data.write_text(f"data:\n  source: {source}\n  partition: {partition}\n")
            deployment.register(f"clinic_{i}")
            deployment.start_node(f"clinic_{i}", data)
        server = tmp_path / "server.yaml"
        deployment.run(CLINICS, server_data=server.with_name("is_not_there.yaml"), timeout=120)
        server.write_text("data: {source: {class_path: fl_lightning.data.Elsewhere}}\n")
        root = tmp_path / "runs"
        arguments = f"--trainer.default_root_dir {root} --trainer.max_epochs 2"
        printed = deployment.run(CLINICS, server_data=server, arguments=arguments)
    rows = rows_of(root)
    assert len(rows) == 2, printed
    assert float(rows[-1]["local/test/mse"]) < float(rows[0]["local/test/mse"])
    assert "Values by round" in printed


@pytest.mark.parametrize("name", METHODS)
def test_by_ray(name, ray, tmp_path, monkeypatch):
    arguments = f"{METHODS[name]} {TWO}"
    here, rows = simulated(tmp_path, monkeypatch, arguments)
    root = ray.folder / "runs" / name
    printed = ray.run(arguments=f"{arguments} --trainer.default_root_dir {root}")
    assert root.exists(), printed
    assert_alike(here, rows, root, records_here(tmp_path / "here"), ray.folder)


def test_what_is_killed_is_continued(link, tmp_path, monkeypatch):
    """Client app, SuperNode and server are killed one after the other: the simulation's bits in the end."""
    arguments = "-c method/scaffold --trainer.max_epochs 4 --model.evaluate_clients_every 4"
    here, rows = simulated(tmp_path, monkeypatch, f"{arguments} --data.transfer_size 20")
    root = link.folder / "runs" / "killed"
    ours = f"{arguments} --trainer.default_root_dir {root}"
    settings = {"server_data": link.folder / "parties/server/data.yaml"}

    def rounds() -> int:
        return len(rows_of(root)) if list(root.rglob("metrics.csv")) and list(root.rglob("last.ckpt")) else 0

    run = link.start("first", "flwr", link.command(arguments=ours, **settings))
    link.until(lambda: rounds() >= 1, 300)

    def ended() -> bool:
        """Kill the app whenever it is at a message, until the run has ended."""
        log = link.log("node_0")
        app = link.app_of("flwr-clientapp", "node_0")
        if app is not None and log.count("Start `flwr-clientapp`") > log.count("Sending: "):
            with suppress(psutil.NoSuchProcess):
                app.kill()
        return run.poll() is not None

    link.until(ended, 420)  # Flower misses two signs of life, 30 seconds apart
    failed = r"client 0 at node \d+ \(key \w+\) failed in round \d: Flower's error 8: ClientApp stopped responding"
    assert re.search(failed, link.log("first"))
    link.kill("node_1", signal.SIGKILL)
    link.restart_node("node_1", link.folder / "parties/client_1/data.yaml")
    before = rounds()
    link.start("second", "flwr", link.command(arguments=f"{ours} --ckpt_path last", **settings))
    link.until(lambda: rounds() > before and link.app_of("flwr-serverapp", "link"), 300)
    link.app_of("flwr-serverapp", "link").kill()
    link.run(arguments=f"{ours} --ckpt_path last", **settings)
    assert_alike(here, rows, root, records_here(tmp_path / "here"), link.folder / "parties")
    secrets = [path.read_bytes() for path in link.folder.glob("node_?") if path.suffix == ""]
    written = [path.read_bytes() for path in (*link.folder.glob("*.log"), *root.rglob("*")) if path.is_file()]
    assert secrets
    assert not any(secret in content for secret in secrets for content in written)
    assert not any(re.search(rb"token[= ]+[\w-]{40}", content) for content in written)


def test_a_late_node_and_a_stranger(link):
    """Without its node a client is skipped, until it comes; a key that is not registered gets nowhere."""
    root = link.folder / "runs" / "late"
    link.kill("node_1", signal.SIGKILL)
    link.start_node("stranger", link.folder / "parties/client_1/data.yaml")
    arguments = f"-c method/fedavg --trainer.max_epochs 8 --model.faults skip --trainer.default_root_dir {root}"
    settings = {"server_data": link.folder / "parties/server/data.yaml", "wait": 40.0, "timeout": 60.0}
    run = link.start("late", "flwr", link.command(arguments=arguments, **settings))
    link.until(lambda: list(root.rglob("last.ckpt")), 300)
    link.restart_node("node_1", link.folder / "parties/client_1/data.yaml")
    run.wait(300)
    skipped = [float(row["train/skipped"]) for row in rows_of(root)]
    assert skipped[0] == 1
    assert skipped[-1] == 0, link.log("late")
    link.kill("stranger")


def test_nothing_is_left(tmp_path):
    with Deployment(tmp_path / "ends") as deployment:
        assert deployment.running()
    assert deployment.running() == []
