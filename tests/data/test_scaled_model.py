"""`ScaledModel`: a model that takes samples as files hold them."""

import csv

import pytest
import torch
from pytorch_lightning import Trainer
from torch import nn

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.callbacks import ClientCheckpoint
from fl_lightning.data import Digits, Normalize, Scale, ScaledModel, TensorSource, read_schema
from fl_lightning.data.schema import Inputs, Schema
from fl_lightning.data.transforms import AsLong
from fl_lightning.methods import FedAvg
from fl_lightning.nets import Perceptron
from tests.data.test_new_samples import folder_case, inputs, table_case

pytestmark = pytest.mark.filterwarnings("ignore")


def raw_rows(path, columns):
    """The rows of a file as a user would give them to an exported model."""
    with path.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    values = []
    for row in rows:
        of_row = []
        for column in columns:
            name, is_word, word = column.partition("=")
            of_row.append(float(row[name] == word) if is_word else float(row[name]))
        values.append(of_row)
    return torch.tensor(values, dtype=torch.float64)


def digits_case(folder):
    source = Digits()
    _, test = source.read()
    return source, test.x, inputs(test)


def images_case(folder):
    source, *_ = folder_case(folder)
    _, test = source.read()
    return source, test.x, inputs(test)


def rows_case(folder):
    source, path, *_ = table_case(folder)
    source.read()
    columns = ScaledModel(nn.Identity(), source.schema).columns
    assert columns == ["age", "city=Bonn", "city=Köln", "smokes=no", "smokes=yes"]
    return source, raw_rows(path, columns), inputs(source.read_new(path, source.schema).split)


def plain_case(folder):
    """Samples that are the inputs already."""
    x = torch.rand(4, 3)
    source = TensorSource((x, torch.tensor([0, 1, 0, 1])), (x, torch.tensor([0, 1, 0, 1])))
    source.read()
    return source, x, x


@pytest.mark.parametrize("case", [digits_case, images_case, rows_case, plain_case])
def test_it_contains_the_scaling_as_it_is_and_exported(case, tmp_path):
    source, stored, expected = case(tmp_path)
    net = nn.Sequential(nn.Flatten(), nn.Linear(expected[0].numel(), 3))
    model = ScaledModel(net, source.schema).eval()
    torch.testing.assert_close(model(stored), net(expected))
    dynamic = ({0: torch.export.Dim("n")},)
    exported = torch.export.export(model, (stored[:2],), dynamic_shapes=dynamic).module()
    assert torch.equal(exported(stored), model(stored))
    assert torch.equal(torch.jit.trace(model, stored)(stored), model(stored))


def test_transforms_follow_each_other():
    inputs = Inputs(dtype="float32", shape=(2, 1, 1), num_dims=3, level=None, target_shape=None)
    parts = (Scale(4.0), Normalize((0.5, 1.0), (2.0, 0.5), divisor=1.0))
    x = torch.tensor([8.0, 4.0]).view(1, 2, 1, 1)
    expected = parts[1](parts[0](x))
    torch.testing.assert_close(ScaledModel(nn.Identity(), Schema(scale=parts, inputs=inputs))(x), expected)


def test_scaling_by_code_of_the_users_is_refused():
    with pytest.raises(ValueError, match="ScaledModel needs samples that Scale or Normalize scales, got code of"):
        ScaledModel(nn.Identity(), Schema())
    with pytest.raises(ValueError, match=r"Normalize scales, got AsLong\(\); export the model alone"):
        ScaledModel(nn.Identity(), Schema(scale=(AsLong(),)))


def test_it_says_what_it_expects(tmp_path):
    source, *_ = rows_case(tmp_path)
    said = ScaledModel(nn.Identity(), source.schema).expects
    assert said.startswith(
        "rows (n, 5) of age, city=Bonn, city=Köln, smokes=no, smokes=yes; numbers as files hold them"
    )
    source, *_ = digits_case(tmp_path)
    assert ScaledModel(nn.Identity(), source.schema).expects == "samples (n, 1, 8, 8) as they are stored"


def test_the_files_of_a_run_hold_the_schema(tmp_path):
    data = FederatedDataModule(Digits(limit=60), num_clients=2)
    callback = ClientCheckpoint(tmp_path, clients=[1])
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    run = Trainer(max_epochs=1, callbacks=[callback], enable_model_summary=False, **quiet)
    loop = FederatedLoop(FedAvg(net=Perceptron))
    run.fit(loop, datamodule=data)
    run.save_checkpoint(tmp_path / "last.ckpt")
    for name in ("client.ckpt", "client-1.ckpt", "last.ckpt"):
        assert read_schema(tmp_path / name) == data.source.schema
    client = FedAvg.load_from_checkpoint(tmp_path / "client-1.ckpt", net=Perceptron, map_location="cpu").eval()
    stored = data.split("test").x
    scaled = ScaledModel(client, read_schema(tmp_path / "client-1.ckpt")).eval()
    torch.testing.assert_close(scaled(stored), loop.client_model(1).eval()(inputs(data.split("test"))))
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    with pytest.raises(ValueError, match=r"other.ckpt must hold the schema of the training samples, and has none"):
        read_schema(tmp_path / "other.ckpt")
    torch.save({"schema": {"class_names": None}}, tmp_path / "newer.ckpt")
    with pytest.raises(ValueError, match=r"newer.ckpt must hold the schema .* as this version writes it, and does not"):
        read_schema(tmp_path / "newer.ckpt")
