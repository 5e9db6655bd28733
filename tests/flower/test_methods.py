"""A federation over a grid gives the simulation's weights, records and rows, with every method."""

import csv
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch

pytest.importorskip("flwr", reason="pip install 'fl_lightning[flower]'")

import fl_lightning.cli.run_callbacks
from fl_lightning.cli import split
from fl_lightning.utils.files import read_saved
from tests.flower.grid import Nodes, owners, serve
from tests.test_contract import NAMES, Run


def rows_of(folder: Path) -> list[dict[str, str]]:
    """Rows of a run's only metrics.csv."""
    (path,) = folder.rglob("metrics.csv")
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def last_of(folder: Path) -> dict:
    (path,) = folder.rglob("last.ckpt")
    return read_saved(path)


def also(name):
    """A further method; what crosses the grid for it does so for another one, too."""
    return pytest.param(name, marks=pytest.mark.slow)


ACROSS = {
    "FedAvg",  # weights
    "FedDyn",  # weights that the server corrects, a memory
    "SCAFFOLD",  # more than weights, both ways
    "FedCurv",  # that of all clients comes back
    "Ditto",  # a personal model, which stays
    "FedDF",  # a server that trains, and clients one by one
    "FedAvgM",  # the state of a server optimizer
    "DPFedAvg",  # updates that are cut, and a noisy sum
}
"""A method for each kind of what crosses the grid by default; the four with owners are tried below."""


@pytest.fixture
def run(request, tmp_path, monkeypatch):
    """The simulation of a method, in the folder `here`; afterwards in the folder `there`."""
    monkeypatch.setattr(
        fl_lightning.cli.run_callbacks, "RunPlots", lambda *_, **__: pl.Callback()
    )  # slow, and tried elsewhere
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    ran = Run(tmp_path / "here", request.param).fit()
    monkeypatch.chdir(tmp_path / "there")
    return ran


@pytest.mark.parametrize("run", [name if name in ACROSS else also(name) for name in NAMES], indirect=True)
def test_every_method(run, tmp_path):
    arguments = ["fit", *run.files]
    assert_alike(tmp_path, serve(arguments, Nodes(arguments, tmp_path / "nodes").grid()))


@pytest.mark.parametrize(
    "run",
    ["FedNTD", "FedCL", "FedRep", "KnFu", *map(also, ("FedDF", "FedKA", "FedMD", "SelectiveFD", "FedFOMO"))],
    indirect=True,
)
def test_with_owners_that_have_a_folder_each(run, tmp_path):
    """Every party reads its own folder: the server's is emptied of the clients' samples before anybody trains."""
    split.run([*run.files, "--output", str(tmp_path / "nodes")])
    grid = owners(run.files, tmp_path / "nodes")
    server = serve(["fit", *run.files, "-c", str(tmp_path / "nodes/server/data.yaml")], grid)
    assert_alike(tmp_path, server)
    with pytest.raises(ValueError, match="are with their owners"):
        server.datamodule.view(0, 0).all()


def assert_alike(tmp_path, server):
    """Weights, rows and records are those of the simulation."""
    here = last_of(tmp_path / "here")
    there = last_of(tmp_path / "there")
    assert here["state_dict"].keys() == there["state_dict"].keys()
    personal = {f"client.{name}" for name in server.model.global_weights.personal}
    for entry, value in here["state_dict"].items():
        assert entry in personal or torch.equal(value, there["state_dict"][entry])
    rows = rows_of(tmp_path / "here")
    others = rows_of(tmp_path / "there")
    left_out = {key for key in rows[0] if key.startswith("global/")} if personal else set()
    assert [{k: v for k, v in row.items() if k not in left_out} for row in rows] == others
    assert records_here(tmp_path / "here") == records_there(server, tmp_path / "nodes")


def records_here(folder):
    """What the simulation's store has of its clients after the last round, as bytes."""
    files = sorted(folder.rglob("client_*.safetensors"), key=lambda path: int(path.name.split("_")[3]))
    return {int(path.name.split("_")[1]): path.read_bytes() for path in files}


def records_there(server, folder):
    """What the files hold that the server names: the records of the clients are where the clients are."""
    store = server.model.store
    names = {client_id: store.record(client_id) for client_id in sorted(store.clients)}
    assert all(memory.keys() == {"file"} and personal is None for memory, personal in names.values())
    return {c: next(folder.rglob(memory["file"])).read_bytes() for c, (memory, _) in names.items()}
