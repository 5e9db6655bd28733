"""The parties' folders, and a server that has no samples of its own."""

import shutil
import subprocess
import sys
from contextlib import redirect_stderr

import pytest
import torch

pytest.importorskip("flwr", reason="pip install 'fl_lightning[flower]'")

from fl_lightning.__main__ import main
from fl_lightning.cli import split
from fl_lightning.cli.parser_only import parts_of
from fl_lightning.data import Elsewhere, FederatedDataModule, Folder
from fl_lightning.data.owners import described_transform, transform_of, write_set
from fl_lightning.data.splits import TensorSplit
from fl_lightning.data.transforms import Compose, CropFlip, Normalize
from fl_lightning.flower.apps import refusals_as_errors
from tests.flower.grid import Nodes, owners, serve
from tests.flower.test_methods import last_of, rows_of, run  # noqa: F401 - a fixture
from tests.toys import samples


@pytest.mark.parametrize("run", ["SCAFFOLD"], indirect=True)
def test_a_run_is_continued(run, tmp_path):  # noqa: F811
    """The names of the nodes' files come from the checkpoint."""
    arguments = ["fit", *run.files]
    nodes = Nodes(arguments, tmp_path / "nodes")
    serve([*arguments, "--trainer.max_epochs", "1"], nodes.grid())
    more = Nodes(arguments, tmp_path / "nodes")  # other processes
    serve([*arguments, "--ckpt_path", "last"], more.grid())
    here = last_of(tmp_path / "here")
    there = last_of(tmp_path / "there")
    assert all(torch.equal(value, there["state_dict"][name]) for name, value in here["state_dict"].items())
    assert rows_of(tmp_path / "here") == rows_of(tmp_path / "there")


@pytest.mark.parametrize("run", ["FedNTD"], indirect=True)
def test_a_server_without_samples(run, tmp_path):  # noqa: F811
    split.run([*run.files, "--output", str(tmp_path / "nodes")])
    shutil.rmtree(tmp_path / "nodes/server/test")
    server = serve(
        ["fit", *run.files, "-c", str(tmp_path / "nodes/server/data.yaml")], owners(run.files, tmp_path / "nodes")
    )
    assert isinstance(server.datamodule.source, Elsewhere)
    here = rows_of(tmp_path / "here")
    there = rows_of(tmp_path / "there")
    assert there == [{k: v for k, v in row.items() if not k.startswith("global/")} for row in here]
    assert "local/alma" in there[0]


@pytest.mark.parametrize("run", ["FedAvg"], indirect=True)
def test_a_monitor_of_trained_clients_is_refused_at_start(run, tmp_path):  # noqa: F811
    arguments = ["fit", *run.files, "--trainer.callbacks", "fl_lightning.monitors.PersonalisedAccuracy"]
    grid = Nodes(arguments, tmp_path / "nodes").grid()
    with pytest.raises(ValueError, match="PersonalisedAccuracy looks at clients while they are trained"):
        serve(arguments, grid)
    assert {message.metadata.message_type for message in grid.log} == {"query"}


def test_split_refuses(tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for words, sentence in ((["--output", str(tmp_path / "full")], "an empty folder"), ([], "add --output DIR")):
        with pytest.raises(SystemExit):
            main(["split", "-c", "experiment/digits_fedavg", *words])
        assert sentence in capsys.readouterr().err


def test_a_set_is_read_as_it_was(tmp_path):
    x = torch.randint(256, (6, 3, 8, 8), dtype=torch.uint8)
    y = torch.arange(6) % 3
    transform = Compose(CropFlip(padding=1), Normalize((0.1, 0.2, 0.3), (1.0, 2.0, 3.0)))
    write_set(tmp_path / "set", TensorSplit(x, y, transform), torch.tensor([4, 1]), 3, ["a", "b", "c"])
    source = Folder(tmp_path / "set")
    train, test = source.load()
    assert (test, source.num_classes, source.class_names) == (None, 3, ("a", "b", "c"))
    assert torch.equal(train.x, x[[4, 1]])
    assert torch.equal(train.y, y[[4, 1]])
    assert repr(transform_of(described_transform(transform))) == repr(transform)
    draw = torch.Generator().manual_seed(1)
    again = torch.Generator().manual_seed(1)
    assert torch.equal(train.transform(train.x, draw), transform(x[[4, 1]], again))


def test_what_a_folder_cannot_hold(tmp_path):
    with pytest.raises(ValueError, match="code of their own"):
        write_set(tmp_path / "set", TensorSplit(*samples(4), lambda x, generator: x), torch.arange(2), 3, None)
    with pytest.raises(FileNotFoundError, match=r"must have a meta\.json"):
        Folder(tmp_path).load()


def test_a_server_may_have_no_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_set(tmp_path / "test", TensorSplit(*samples(4)), torch.arange(4), 3, None)
    (tmp_path / "meta.json").write_text((tmp_path / "test/meta.json").read_text())
    source = Elsewhere()
    _, test = source.load()
    assert test is None
    assert source.validation is None
    assert source.num_classes is None
    assert Elsewhere.fingerprint({"root": None}) is None
    assert Elsewhere.fingerprint({"root": str(tmp_path)})


def exits_with_a_text():
    with refusals_as_errors("a node"):
        print("a warning", file=sys.stderr)
        sys.exit("my module is too old")


def test_what_the_command_line_refuses_is_an_error_of_the_app(capsys):
    with pytest.raises(ValueError, match=r"the server cannot take its YAML and arguments: .*unknown option 'nonsense'"):
        with refusals_as_errors("the server"):
            parts_of(["fit", "--nonsense", "3"])
    assert "unknown option" in capsys.readouterr().err
    with pytest.raises(SystemExit), refusals_as_errors("the server"):
        sys.exit(0)
    with pytest.raises(ValueError, match=r"a node cannot take its YAML and arguments: my module is too old$"):
        exits_with_a_text()


def test_programs_within_an_app_find_a_standard_error_like_their_own(tmp_path):
    path = tmp_path / "errors"
    with path.open("w", encoding="utf-8") as file, redirect_stderr(file), refusals_as_errors("a node"):
        subprocess.run([sys.executable, "-c", "import sys; print(1, file=sys.stderr)"], stderr=sys.stderr, check=True)
        assert sys.stderr.encoding == "utf-8"
        assert not sys.stderr.isatty()
    assert path.read_text() == "1\n"


def test_nothing_at_the_server_reads_the_clients_samples(tmp_path):
    data = FederatedDataModule(Elsewhere(tmp_path), num_clients=2, num_classes=3, input_shape=(4,))
    data.setup("fit")
    data.source.sizes = {1: {"train": 7, "test": 2}}
    assert [data.size(client_id, 0) for client_id in range(2)] == [0, 7]
    view = data.view(1, 0)
    assert (view.num_samples, view.size("test")) == (7, 2)
    for read in (lambda: view.label_counts, view.all, lambda: list(view.batches("test")), lambda: data.label_counts):
        with pytest.raises(ValueError, match=r"are with their owners|with integer labels"):
            read()
