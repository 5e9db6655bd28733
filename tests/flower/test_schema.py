"""The parties of a federation read their samples alike, or are refused when they register."""

import pytest
import torch

pytest.importorskip("flwr", reason="pip install 'fl_lightning[flower]'")

from fl_lightning import FederatedLoop
from fl_lightning.data import Elsewhere, FederatedDataModule, Folder, ImageFolder, OwnerPartition, TableSource
from fl_lightning.data.owners import write_set
from fl_lightning.data.splits import TensorSplit
from fl_lightning.data.transforms import Scale
from fl_lightning.federation.identity import shared_settings
from fl_lightning.flower.node import Node
from fl_lightning.flower.nodes import Nodes
from fl_lightning.flower.wire import from_records
from fl_lightning.members.faults import FaultError
from fl_lightning.methods import FedAvg
from fl_lightning.nets import Perceptron
from tests.data.test_folders import write as write_image
from tests.flower.grid import GridHere
from tests.toys import sgd


def loop_of(**settings):
    return FederatedLoop(FedAvg(net=Perceptron, optimizer=sgd()), seed=3, **settings)


def data_of(source, client_id):
    return FederatedDataModule(source, num_clients=2, partition=OwnerPartition(client_id), batch_size=2)


def register(sources, folder, tolerant=False):
    """Let a node of each source register, and return the nodes as the server knows them, and the grid."""
    loop = loop_of()
    made = [Node(loop_of(), data_of(source, i), i, folder / str(i), max_epochs=1) for i, source in enumerate(sources)]
    grid = GridHere({100 + node.client_id: node.answer for node in made})
    shared = shared_settings(loop.parts, data_of(sources[0], 0), "32-true", 1)
    nodes = Nodes(grid, shared, len(sources), 5.0, 0.0, tolerant)
    nodes.look()
    return nodes, grid


def sets(folder, *names, scales=(None, None)):
    """A folder of samples for each list of class names."""
    made = []
    for i, (classes, scale) in enumerate(zip(names, scales, strict=True)):
        split = TensorSplit(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]), scale)
        write_set(folder / f"set-{i}", split, torch.arange(4), 2, classes)
        made.append(Folder(folder / f"set-{i}"))
    return made


def images(folder, *names):
    for i, classes in enumerate(names):
        for name in classes:
            write_image(folder / f"images-{i}" / "train" / name / "0.png")
    return [ImageFolder(str(folder / f"images-{i}"), normalize="half") for i in range(len(names))]


def tables(folder, *texts, **settings):
    made = []
    for i, text in enumerate(texts):
        folder.mkdir(exist_ok=True)
        path = folder / f"{i}.csv"
        path.write_text(text)
        made.append(TableSource(path, "y", path, **settings))
    return made


LEFT = "x,w,y\n1,a,left\n3,b,right\n"
MAKERS = {
    "names of a folder's classes": lambda folder: sets(folder, ["left", "right"], ["left", "bright"]),
    "order of a folder's classes": lambda folder: sets(folder, ["left", "right"], ["right", "left"]),
    "scale of a folder": lambda folder: sets(folder, ["a", "b"], ["a", "b"], scales=(Scale(16), Scale(255))),
    "folders of images": lambda folder: images(folder, ["left", "right"], ["left", "bright"]),
    "classes of a table": lambda folder: tables(folder, LEFT, LEFT.replace("right", "bright")),
    "words of a table": lambda folder: tables(folder, LEFT, LEFT.replace("b,", "c,")),
    "scale of a table": lambda folder: tables(folder, LEFT, LEFT.replace("3", "4")),
    "types of a table": lambda folder: tables(folder, LEFT, LEFT.replace("3", "z9")),
}


@pytest.mark.parametrize("differing", MAKERS)
def test_parties_that_read_their_samples_in_different_ways_are_refused(differing, tmp_path):
    with pytest.raises(
        FaultError, match=r"must be read as those of the other parties, and .* differ; give all parties"
    ):
        register(MAKERS[differing](tmp_path), tmp_path)
    assert len(register(MAKERS[differing](tmp_path / "again"), tmp_path, tolerant=True)[0].sites) == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: sets(folder, ["left", "right"], ["left", "right"]),
        lambda folder: sets(folder, None, ["left", "right"]),
        lambda folder: images(folder, ["left", "right"], ["left", "right"]),
        lambda folder: tables(folder, LEFT, LEFT),
    ],
)
def test_parties_that_read_their_samples_alike_take_part(make, tmp_path):
    nodes, grid = register(make(tmp_path), tmp_path)
    assert len(nodes.sites) == 2
    heads = [from_records(m.content, torch.device("cpu"))["head"] for m in grid.log]
    assert sum(bool(head.get("schema")) for head in heads) == 2  # digests: no name of a class leaves a party
    assert "left" not in str(heads)


def test_a_schema_file_lets_tables_of_other_rows_take_part(tmp_path):
    first, _ = tables(tmp_path, LEFT, LEFT)
    first.read()
    first.schema.table.write(tmp_path / "schema.json")
    other = LEFT.replace("3", "4").replace("a,", "c,")
    nodes, _ = register(tables(tmp_path, LEFT, other, schema_file=tmp_path / "schema.json"), tmp_path)
    assert len(nodes.sites) == 2


def test_the_server_reads_its_samples_as_its_clients(tmp_path):
    nodes, _ = register(sets(tmp_path, ["left", "right"], ["left", "right"]), tmp_path)
    split = TensorSplit(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]))
    for names in (["left", "right"], ["left", "bright"]):
        write_set(tmp_path / names[1] / "test", split, torch.arange(4), 2, names)
        source = Elsewhere(tmp_path / names[1])
        source.read()
        if names[1] == "right":
            nodes.compare_schema(source.schema)
            continue
        with pytest.raises(
            FaultError, match="the samples of the server must be read as those of its clients, and class_n"
        ):
            nodes.compare_schema(source.schema)
