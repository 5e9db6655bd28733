"""Two cells are one run only if every setting is equal, and a stored run stays what it is."""

import importlib
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from fl_lightning.experiments import results
from fl_lightning.experiments.cell import Cell
from fl_lightning.experiments.cell_files import CellFiles, located
from fl_lightning.experiments.cells import Cells, Request
from fl_lightning.experiments.experiment import Experiment, Runs
from fl_lightning.experiments.naming import StoredCells, cell_name, settings_of
from tests.commands import refusal, say, working_in
from tests.experiments.test_compare import BASE
from tests.runs.test_same_run import OWN

USERS = """
trainer: {max_epochs: 2, accelerator: cpu}
model: {client: {class_path: own.Mine}}
data: {source: {class_path: own.Data, init_args: {data_dir: a}}, num_clients: 2}
"""


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A working directory with the base of a grid, a user's module and two folders of samples."""
    (tmp_path / "base.yaml").write_text(BASE, encoding="utf-8")
    (tmp_path / "users.yaml").write_text(USERS, encoding="utf-8")
    generator = np.random.default_rng(0)
    for name, factor in (("a", 1.0), ("bbb", 10.0)):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "x.npy", generator.normal(size=(24, 4)).astype(np.float32) * factor)
    monkeypatch.syspath_prepend(str(tmp_path))
    with working_in(tmp_path, OWN):
        yield tmp_path


@pytest.fixture
def here(base, cells_here, monkeypatch, without_pictures):
    """The same, where cells run in this process; their names, as they are begun."""
    monkeypatch.setattr(results, "write_report", lambda groups, folder, **_: folder / "report.html")
    return cells_here


def compare(words):
    said = say(f"compare {words} --output out")
    assert said.code == 0, said.err
    return said


def cells_of(*settings, method="FedAvg", base="base.yaml"):
    rows = [Runs([method], settings=dict(given), label=str(index)) for index, given in enumerate(settings)]
    return located(Cells(Experiment([base], rows), Request(seeds=[0])).all(), Path("out"))


# --- two cells ---


@pytest.mark.parametrize(
    "name",
    [
        "model.chunk",
        "model.threads",
        "trainer.devices",
        "data.eval_batch_size",
        "trainer.accelerator",
        "model.client.mu",
    ],
)
def test_a_setting_that_differs_makes_two_runs(base, name):
    method = "FedProx" if name.endswith("mu") else "FedAvg"
    values = {"trainer.accelerator": ("cpu", "auto"), "model.client.mu": (0.1, 0.2)}.get(name, (1, 2))
    first, second = cells_of({name: values[0]}, {name: values[1]}, method=method)
    assert first.name != second.name


def test_a_path_of_a_users_class_makes_two_runs(here):
    compare("-c users.yaml --methods own.Mine --seeds 0 --metrics val/loss --set data.source.data_dir=a,bbb")
    rows = (Path("out") / "results.md").read_text()
    assert len(here) == 2, "one run for each folder of samples"
    assert "data_dir=a" in rows
    assert "data_dir=bbb" in rows
    values = set()
    for path in Path("out/runs").rglob("metrics.csv"):
        values.add(path.read_text().splitlines()[-1])
    assert len(values) == 2


@pytest.mark.parametrize("source", ["FEMNIST", "Shakespeare", "ImageFolder", "CelebA"])
def test_a_place_makes_two_runs_unless_the_files_are_the_same(base, source):
    for name, text in (("one/leaf", "x"), ("two/leaf", "x"), ("other/leaf", "xyz"), ("sized/leaf", "y")):
        (base / name / "train").mkdir(parents=True)
        (base / name / "train" / "all.json").write_text(text)

    def settings(root):
        return {"data.source": {"class_path": source, "init_args": {"root": str(root)}}}

    roots = ["one/leaf", "two/leaf", "other/leaf", "sized/leaf", "missing/leaf", "gone/leaf"]
    one, two, *others = cells_of(*map(settings, roots))
    assert one.name == two.name
    assert len({one.name, *(other.name for other in others)}) == 5


def test_a_place_may_be_spelled_in_any_way(base, monkeypatch):
    folder = base / "one" / "train"
    folder.mkdir(parents=True)
    (folder / "1.png").write_text("cat")
    (base / "link").symlink_to(base / "one")
    monkeypatch.setenv("HOME", str(base))
    roots = ["one", "./one", "one/", str(base / "one"), "~/one", "link", "one/../one"]
    settings = [{"data.source": {"class_path": "ImageFolder", "init_args": {"root": root}}} for root in roots]
    assert len({cell.name for cell in cells_of(*settings)}) == 1


def test_a_published_data_set_is_the_same_wherever_it_lies(base):
    def settings(root):
        return {"data.source": {"class_path": "MNIST", "init_args": {"root": root, "download": root == "a"}}}

    first, second = cells_of(settings("a"), settings("b"))
    assert first.name == second.name


def test_equal_cells_are_one_run(base):
    first, second = cells_of({}, {"trainer.max_epochs": 9})
    assert first.name == second.name, "more rounds continue a run"


TYPED = """
from collections.abc import Callable
from datetime import timedelta
from enum import Enum

import torch
from torch import nn
from own import Data
from own import Mine as Plain


class Kind(Enum):
    MEAN = "mean"
    SUM = "sum"


def half(x):
    return x / 2


def double(x):
    return 2 * x


class Typed(Plain):
    def __init__(
        self,
        scale: Callable = half,
        layer: type[nn.Module] = nn.Linear,
        make: Callable[[], nn.Module] = nn.ReLU,
        kind: Kind = Kind.MEAN,
        wait: timedelta = timedelta(0),
        names: set[str] | None = None,
        both: list[Callable] | None = None,
        options: dict[str, Callable] | None = None,
    ):
        super().__init__()
        self.scale = scale
        self.kind = kind
"""


ARGUMENTS = {
    "scale": ("typed.half", "typed.double"),
    "layer": ("torch.nn.Linear", "torch.nn.Bilinear"),
    "make": ("torch.nn.ReLU", "torch.nn.Tanh"),
    "kind": ("MEAN", "SUM"),
    "wait": ("0:00:01", "0:00:02"),
    "names": ("[a]", "[a, b]"),
    "both": ("[typed.half]", "[typed.half, typed.double]"),
    "options": ("{f: typed.half}", "{f: typed.double}"),
}
"""Two values of each argument of `Typed`."""


@pytest.fixture
def typed(base):
    """A module with arguments of many types in the working directory."""
    (base / "typed.py").write_text(TYPED)
    sys.modules.pop("typed", None)
    importlib.invalidate_caches()
    return base


@pytest.mark.parametrize("name", ARGUMENTS)
def test_values_of_every_type_tell_runs_apart(typed, name):
    settings = [{f"model.client.{name}": value} for value in ARGUMENTS[name]]
    first, second = cells_of(*settings, method="typed.Typed", base="users.yaml")
    assert first.name != second.name
    store(first, "anything-seed0-00000000")
    again, _ = cells_of(*settings, method="typed.Typed", base="users.yaml")
    assert again.name == "anything-seed0-00000000"


def test_values_of_every_type_are_run(here, typed):
    given = " ".join(f"--model.client.{name} {json.dumps(values[1])}" for name, values in ARGUMENTS.items())
    words = f"-c users.yaml --methods typed.Typed --seeds 0 --metrics val/loss --trainer.max_epochs 1 {given}"
    compare(words)
    compare(words)
    assert len(here) == 1, "it is done"


def test_a_run_with_values_of_every_type_is_continued(here, typed):
    given = " ".join(f"--model.client.{name} {json.dumps(values[1])}" for name, values in ARGUMENTS.items())
    words = f"fit -c users.yaml --model.client typed.Typed {given} --plots.format none --trainer.max_epochs"
    said = say(f"{words} 1")
    assert said.code == 0, said.err
    sys.modules.pop("typed")  # Another process has other objects of the same names.
    importlib.invalidate_caches()
    said = say(f"{words} 2 --ckpt_path last")
    assert said.code == 0, said.err
    (run,) = Path("runs").glob("*/*")
    assert len((run / "metrics.csv").read_text().splitlines()) == 3


# --- stored cells ---


def store(cell: Cell, name: str, config=None, folder=Path("out")):
    path = folder / "cells" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(dict(config or cell.config)))


def test_a_stored_run_is_found_by_its_settings_whatever_its_name(base):
    (cell,) = cells_of({})
    store(cell, "anything-seed0-00000000")
    assert cells_of({})[0].name == "anything-seed0-00000000"
    assert cells_of({"model.local_epochs": 2})[0].name != "anything-seed0-00000000"


def test_a_stored_run_that_lacks_a_setting_is_the_one_with_its_default(base):
    (cell,) = cells_of({})
    config = json.loads(json.dumps(cell.config))
    del config["model"]["codec"]
    del config["data"]["feature_shift"]
    del config["model"]["client"]["init_args"]["net"]["init_args"]
    store(cell, "older-seed0-00000000", config)
    assert cells_of({})[0].name != "older-seed0-00000000", "hidden is no default"
    config["model"]["client"]["init_args"]["net"]["init_args"] = {"hidden": [8]}
    store(cell, "older-seed0-00000000", config)
    assert cells_of({})[0].name == "older-seed0-00000000"
    assert cells_of({"data.local_work": 0.5})[0].name != "older-seed0-00000000"


def test_a_name_that_another_run_has_is_not_taken(base):
    (cell,) = cells_of({})
    other = {**cell.config, "model": {**cell.config["model"], "local_epochs": 7}}
    store(cell, cell.name, other)
    (now,) = cells_of({})
    assert now.name != cell.name
    assert now.name.startswith("0-seed0-")
    store(now, now.name)
    assert cells_of({})[0].name == now.name, "the same every time"


@pytest.mark.parametrize("content", ["", "[1, 2]", "model: [", "model: {}", "\0"])
def test_a_stored_file_that_is_none_is_no_run(base, content):
    (cell,) = cells_of({})
    store(cell, cell.name)
    (Path("out/cells") / f"{cell.name}.yaml").write_text(content)
    (Path("out/cells") / "junk-seed0-00000000.yaml").write_text(content)
    assert cells_of({})[0].name not in (cell.name, "junk-seed0-00000000")


def test_the_name_tells_every_setting_that_distinguishes(base):
    (cell,) = cells_of({})
    assert cell_name("0", 0, cell.config) == cell.name
    for part, name, value in (("model", "threads", 3), ("data", "seed", 9), ("trainer", "precision", "bf16-mixed")):
        config = {**cell.config, part: {**cell.config[part], name: value}}
        assert cell_name("0", 0, config) != cell.name
    for part, name, value in (("trainer", "max_epochs", 3), ("trainer", "logger", True)):
        config = {**cell.config, part: {**cell.config[part], name: value}}
        assert cell_name("0", 0, config) == cell.name


def test_cells_that_begin_with_other_weights_are_told_apart(base):
    (cell,) = cells_of({})
    stored = StoredCells(Path("out"))
    names = set()
    for start in ("", "seed0-1a {'max_epochs': 3}", "seed0-1a {'max_epochs': 4}"):
        name = cell_name("0", 0, cell.config, start)
        names.add(stored.name_of(name, settings_of(cell.config, start)))
    assert len(names) == 3


# --- runs that are done ---


def test_a_done_run_of_code_that_has_changed_is_named_in_one_line(here, base):
    words = "-c users.yaml --methods own.Mine --seeds 0 --metrics val/loss"
    assert "the source has changed" not in compare(words).out
    (base / "own.py").write_text(OWN.replace("return SCALE *", "return None  #"))
    sys.modules.pop("own")
    importlib.invalidate_caches()
    said = compare(words)
    lines = [line for line in said.out.splitlines() if "own.Mine" in line and "the source has changed" in line]
    assert len(lines) == 1, said.out
    assert here == ["Mine-seed0"], "nothing is run again"


def test_a_done_run_whose_initial_weights_have_changed_is_named_in_one_line(here, base):
    words = "-c users.yaml --methods own.Mine --seeds 0 1 --metrics val/loss --model.initial_weights one.pt"
    for factor, count in ((1.0, 0), (1.0, 0), (2.0, 1)):
        weights = {"layer.weight": factor * torch.ones(2, 4), "layer.bias": torch.zeros(2)}
        torch.save(weights, base / "one.pt")
        said = compare(words)
        lines = [line for line in said.out.splitlines() if "the file has changed" in line]
        assert len(lines) == count, said.out
    assert "model.initial_weights: the file has changed since 2 of the runs that are done were begun" in lines[0]
    (base / "one.pt").unlink()
    assert "the file has changed" not in compare(words).out, "a file that is gone has not changed"
    assert len(here) == 2, "nothing is run again"


def test_rounds_of_a_longer_plan_are_named_in_one_line(here, base):
    asks = "class Asks(Mine):\n    def on_train_start(self):\n        self.rounds = self.trainer.max_epochs\n"
    (base / "own.py").write_text((base / "own.py").read_text() + "\n\n" + asks)
    words = "-c users.yaml --seeds 0 --metrics val/loss --set trainer.max_epochs=1,2 --methods"
    for method, count in (("own.Mine", 0), ("own.Asks", 1), ("own.Asks", 1)):
        said = compare(f"{words} {method}")
        lines = [line for line in said.out.splitlines() if "planned for" in line]
        assert len(lines) == count, said.out
    assert "runs asked for with 1 rounds show the first rounds of runs planned for 2" in lines[0]


KEPT = """
import numpy as np
import torch
from pathlib import Path
from fl_lightning.data import Source, TensorSource


class Kept(Source):
    places = ("root",)

    def __init__(self, root="a", name="x.npy"):
        self.root = root
        self.name = name

    def load(self):
        x = torch.from_numpy(np.load(Path(self.root) / self.name))
        samples = (x, torch.arange(len(x)) % 2)
        return TensorSource(samples, samples).load()


class Named(Kept):
    @classmethod
    def fingerprint(cls, arguments):
        path = Path(arguments["root"]) / arguments["name"]
        return str(path.stat().st_size) if path.is_file() else None
"""


@pytest.fixture
def kept(here, base):
    """The same, with sources of a user's own that say which argument is a place."""
    (base / "kept.py").write_text(KEPT)
    sys.modules.pop("kept", None)
    importlib.invalidate_caches()
    return base


@pytest.mark.parametrize("source", ["Kept", "Named"])
def test_a_done_run_whose_files_have_changed_is_named_in_one_line(here, kept, source):
    words = f"-c users.yaml --methods own.Mine --seeds 0 1 --metrics val/loss --data.source kept.{source}"
    assert "the files have changed" not in compare(words).out
    assert "the files have changed" not in compare(words).out
    np.save(kept / "a" / "x.npy", np.zeros((30, 4), dtype=np.float32))
    said = compare(words)
    (line,) = [line for line in said.out.splitlines() if "the files have changed" in line]
    assert "data.source: the files have changed since 2 of the runs that are done were begun" in line
    assert len(here) == 2, "nothing is run again"


@pytest.mark.parametrize("source", ["Kept", "Named"])
def test_a_place_of_a_users_source_is_one_run_if_its_fingerprint_is(kept, source):
    def settings(root):
        return {"data.source": {"class_path": f"kept.{source}", "init_args": {"root": root}}}

    for name in ("copy", "other"):
        (kept / name).mkdir()
    shutil.copy(kept / "a" / "x.npy", kept / "copy" / "x.npy")
    np.save(kept / "other" / "x.npy", np.zeros((30, 4), dtype=np.float32))
    roots = ("a", "copy", "other", "gone")
    first, copy, other, gone = cells_of(*map(settings, roots), method="own.Mine", base="users.yaml")
    assert first.name == copy.name
    assert len({first.name, other.name, gone.name}) == 3


def test_two_folders_of_other_samples_of_one_size_are_two_runs(kept):
    assert (kept / "a" / "x.npy").stat().st_size == (kept / "bbb" / "x.npy").stat().st_size
    settings = [{"data.source": {"class_path": "kept.Kept", "init_args": {"root": root}}} for root in ("a", "bbb")]
    first, second = cells_of(*settings, method="own.Mine", base="users.yaml")
    assert first.name != second.name


def test_more_rounds_with_checkpoints_elsewhere_delete_no_row(here, base):
    elsewhere = '--trainer.callbacks+ "{class_path: ModelCheckpoint, init_args: {dirpath: kept, save_last: true}}"'
    words = f"-c users.yaml --methods own.Mine --seeds 0 --metrics val/loss {elsewhere} --trainer.max_epochs"
    compare(f"{words} 2")
    (run,) = Path("out/runs").glob("*/0*")
    first = (run / "metrics.csv").read_text().splitlines()
    assert not (run / "checkpoints" / "last.ckpt").exists()
    compare(f"{words} 4")
    (again,) = Path("out/runs").glob("*/*")
    assert again == run
    assert (run / "metrics.csv").read_text().splitlines()[: len(first)] == first
    # Checkpoints that are gone: the rows stay, and a new run begins beside them.
    shutil.rmtree("kept")
    compare(f"{words} 6")
    assert len((run / "metrics.csv").read_text().splitlines()) == 5
    assert len(list(run.parent.iterdir())) == 2


def test_last_of_a_cells_file_is_that_of_the_experiment(here, base):
    compare("-c users.yaml --methods own.Mine --seeds 0 --metrics val/loss --keep_checkpoints last")
    (file,) = Path("out/cells").glob("*.yaml")
    said = say(f"fit -c {file} --ckpt_path last --trainer.max_epochs 3 --plots.format none")
    assert said.code == 0, said.err
    files = CellFiles(Path("out"), file.stem)
    assert files.rounds == 3
    assert not Path("runs").exists()
    assert say(f"fit -c {file} --trainer.max_epochs 1 --plots.format none").code == 0
    assert files.rounds == 3, "a new run is none of the experiment's"
    assert Path("runs").exists()


# --- the same data ---


@pytest.mark.parametrize(
    ("lines", "name"),
    [
        ("data: {feature_shift: {noise: 0.5}}", "data.feature_shift.noise"),
        ("data: {partition: {init_args: {alpha: 0.9}}}", "data.partition.alpha"),
        ("data: {participation: 1.0}", "data.participation"),
    ],
)
def test_a_method_that_sets_other_data_is_refused(here, base, lines, name):
    (base / "other.yaml").write_text(lines)
    said = refusal("compare -c base.yaml --methods FedAvg FedAvg+other.yaml --seeds 0 --output out", 1)
    assert f"but {name} is " in said, said


def test_a_method_that_names_what_stood_already_has_the_same_data(base):
    from fl_lightning.experiments.compare import check_same_data

    first, second = cells_of({"data.sampling_seed": None}, {"data.sampling_seed": 0})
    check_same_data([first, second])
