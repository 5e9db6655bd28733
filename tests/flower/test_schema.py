"""The parties of a federation read their samples alike, or are refused when they register."""

import pytest
import torch
from pytorch_lightning import LightningModule
from torch.utils.data import TensorDataset

pytest.importorskip("flwr", reason="pip install 'fl_lightning[flower]'")

from fl_lightning import FederatedLoop
from fl_lightning.data import (
    DatasetSource,
    Elsewhere,
    FederatedDataModule,
    Folder,
    ImageFolder,
    OwnerPartition,
    TableSource,
    TensorSource,
)
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


class Own(LightningModule):
    """A module whose number of outputs does not depend on the data."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(16, 5)

    def training_step(self, batch):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.net(x.flatten(1)), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loop_of(own=False):
    client = FedAvg(module=Own()) if own else FedAvg(net=Perceptron, optimizer=sgd())
    return FederatedLoop(client, seed=3)


def data_of(source, client_id):
    return FederatedDataModule(source, num_clients=2, partition=OwnerPartition(client_id), batch_size=2)


def register(sources, folder, tolerant=False, own=False):
    """Let a node of each source register, and return the nodes as the server knows them, and the grid."""
    loop = loop_of(own)
    made = [
        Node(loop_of(own), data_of(source, i), i, folder / str(i), max_epochs=1) for i, source in enumerate(sources)
    ]
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


UNIT = torch.linspace(0, 1, 64).view(4, 1, 4, 4)
SIDES = torch.tensor([0, 1, 0, 1])


def tensors(*pairs, **settings):
    """A source in memory for each pair of samples and targets."""
    return [TensorSource(pair, pair, **settings) for pair in pairs]


def datasets(*pairs):
    return [DatasetSource(TensorDataset(*pair)) for pair in pairs]


def stated(*counts):
    return [TensorSource((UNIT, SIDES), (UNIT, SIDES), num_classes=count) for count in counts]


LEFT = "x,w,y\n1,a,left\n3,b,right\n"
MAKERS = {
    "names of a folder's classes": lambda folder: sets(folder, ["left", "right"], ["left", "bright"]),
    "order of a folder's classes": lambda folder: sets(folder, ["left", "right"], ["right", "left"]),
    "scale of a folder": lambda folder: sets(folder, ["a", "b"], ["a", "b"], scales=(Scale(16), Scale(255))),
    "folders of images": lambda folder: images(folder, ["left", "right"], ["left", "bright"]),
    "classes of a table": lambda folder: tables(folder, LEFT, LEFT.replace("right", "bright")),
    "words of a table": lambda folder: tables(folder, LEFT, LEFT.replace("b,", "c,")),
    "scale of a table": lambda folder: tables(folder, LEFT, LEFT.replace("3", "4")),
    "order of the columns": lambda folder: tables(folder, LEFT, "w,x,y\na,1,left\nb,3,right\n"),
    "more classes": lambda folder: tensors((UNIT, SIDES), (UNIT, SIDES + 1)),
    "more stated classes": lambda folder: stated(2, 3),
    "size": lambda folder: tensors((UNIT, SIDES), (UNIT[..., :2], SIDES)),
    "channels": lambda folder: tensors((UNIT, SIDES), (UNIT.expand(4, 3, 4, 4), SIDES)),
    "scale of pictures": lambda folder: tensors((UNIT, SIDES), ((255 * UNIT).round(), SIDES)),
    "type": lambda folder: tensors((UNIT, SIDES), (UNIT.double(), SIDES)),
    "targets": lambda folder: tensors((UNIT, SIDES), (UNIT, SIDES.float())),
    "classes of datasets": lambda folder: datasets((UNIT, SIDES), (UNIT, SIDES + 1)),
    "scale of datasets": lambda folder: datasets((UNIT, SIDES), ((255 * UNIT).round(), SIDES)),
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


def test_a_party_may_lack_the_last_class_if_the_net_does_not_depend_on_it(tmp_path):
    nodes, _ = register(tensors((UNIT, SIDES), (UNIT, SIDES + 1)), tmp_path, own=True)
    assert len(nodes.sites) == 2
    with pytest.raises(FaultError, match="num_classes differ"):
        register(stated(3, 4), tmp_path, own=True)
