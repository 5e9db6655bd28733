"""Whether a continued run is the same run: its settings, samples and code, its folder, its seed, its checkpoints."""

import importlib
import sys
from pathlib import Path

import pytest
import torch
from pytorch_lightning import LightningModule, Trainer, seed_everything
from pytorch_lightning.callbacks import Callback
from torch.utils.data import TensorDataset

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.data import TensorSource
from fl_lightning.runs.checkpoints import INDEX, indexed
from tests.commands import EXPERIMENT, refusal, say, working_in

FIT = (
    f"fit {EXPERIMENT} --model.local_epochs 1 --model.max_local_steps 1 --data.num_clients 4 "
    f"--data.partition.min_samples 1 --plots.format none --trainer.enable_progress_bar false"
)

OWN = '''
"""A user's project: a module with a group of settings, and a data module that reads a file."""

import numpy as np
import pytorch_lightning as pl
import torch
from pathlib import Path
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Mine(pl.LightningModule):
    def __init__(self, config: dict | None = None, notes: str = "none"):
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return SCALE * nn.functional.cross_entropy(self.layer(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val/loss", nn.functional.cross_entropy(self.layer(x), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(pl.LightningDataModule):
    def __init__(self, data_dir: str = "a"):
        super().__init__()
        self.data_dir = data_dir

    def setup(self, stage):
        x = torch.from_numpy(np.load(Path(self.data_dir) / "x.npy"))
        self.set = TensorDataset(x, (torch.arange(len(x)) % 2))

    def train_dataloader(self):
        return DataLoader(self.set, batch_size=4, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.set, batch_size=4)


SCALE = 1.0
'''
MINE = (
    "fit --model.client own.Mine --data.source own.Data --data.num_clients 2 --trainer.accelerator cpu "
    "--plots.format none --trainer.enable_progress_bar false --trainer.max_epochs"
)


@pytest.fixture
def project(tmp_path, monkeypatch, without_pictures):
    """A user's project with two folders of samples, as a working directory."""
    import numpy as np

    generator = np.random.default_rng(0)
    for name, factor in (("a", 1.0), ("b", 10.0)):
        (tmp_path / name).mkdir()
        samples = generator.normal(size=(24, 4)).astype(np.float32)
        np.save(tmp_path / name / "x.npy", samples * factor)
    monkeypatch.syspath_prepend(str(tmp_path))
    with working_in(tmp_path, OWN):
        yield tmp_path


def fit(words, rounds=1):
    said = say(f"{MINE} {rounds} {words}")
    assert said.code == 0, said.err
    return said


@pytest.mark.parametrize(
    ("begun", "continued", "name"),
    [
        ('--model.client.config "{a: 1}"', '--model.client.config "{a: 1, l2: 9.0}"', "config.l2 was unset, is 9.0"),
        ('--model.client.config "{a: 1, l2: 9.0}"', '--model.client.config "{a: 1}"', "config.l2 was 9.0, is unset"),
        ("", "--model.client.notes other", "notes was none, is other"),
        ("--data.source.data_dir a", "--data.source.data_dir b", "data.source.data_dir was a, is b"),
        ("", "--data.sampling_seed 3", "data.sampling_seed was 0, is 3"),
    ],
)
def test_every_setting_is_compared(project, begun, continued, name):
    fit(begun)
    said = refusal(f"{MINE} 2 {continued} --ckpt_path last", 1)
    assert name in said, said


def test_a_seed_that_is_named_is_the_one_that_stood_for_it(project):
    fit("")
    fit("--data.sampling_seed 0 --model.seed 0 --ckpt_path last", 2)


@pytest.mark.parametrize("factor", [10.0, 1.001])
def test_samples_that_changed_are_refused(project, factor):
    import numpy as np

    fit("")
    path = project / "a" / "x.npy"
    np.save(path, np.load(path) * np.float32(factor))
    assert "data.inputs was " in refusal(f"{MINE} 2 --ckpt_path last", 1)
    fit("--ckpt_path last --allow_changes data.inputs", 2)


FURTHER = """
import numpy as np
import torch
from pathlib import Path
from fl_lightning.data import Source, TensorSource
from torch.utils.data import DataLoader, Dataset, TensorDataset
from own import Data


class Lazy(Dataset):
    def __init__(self, x):
        self.x = x

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], index % 2


class Further(Data):
    lazy = False

    def samples(self, name):
        x = torch.from_numpy(np.load(Path(name) / "x.npy"))
        return Lazy(x) if self.lazy else TensorDataset(x, torch.arange(len(x)) % 2)

    def val_dataloader(self):
        return [DataLoader(self.samples(name), batch_size=4) for name in ("val", "more")]


class LazyFurther(Further):
    lazy = True


class Tested(Data):
    def val_dataloader(self):
        return None

    def test_dataloader(self):
        return DataLoader(Further().samples("val"), batch_size=4)


class Proxy(Source):
    def load(self):
        x = torch.from_numpy(np.load(Path("more") / "x.npy"))
        samples = (x, torch.arange(len(x)) % 2)
        return TensorSource(samples, samples).load()
"""


@pytest.mark.parametrize(
    ("words", "folder", "split"),
    [
        ("--data.source further.Further", "val", "val"),
        ("--data.source further.Further", "more", "val/dataloader_idx_1"),
        ("--data.source further.LazyFurther", "val", "val"),
        ("--data.source further.Tested", "val", "test"),
        ("--data.source further.Tested --data.extra_splits.proxy further.Proxy", "more", "proxy"),
    ],
)
def test_samples_of_every_split_that_changed_are_refused(project, words, folder, split):
    import numpy as np

    (project / "further.py").write_text(FURTHER)
    sys.modules.pop("further", None)
    importlib.invalidate_caches()
    for name in ("val", "more"):
        (project / name).mkdir()
        np.save(project / name / "x.npy", np.load(project / "a" / "x.npy"))
    begin = MINE.replace("--data.source own.Data", words)
    assert say(f"{begin} 1").code == 0
    assert say(f"{begin} 2 --ckpt_path last").code == 0, "nothing has changed"
    np.save(project / folder / "x.npy", np.load(project / folder / "x.npy") * np.float32(10))
    assert f"data.inputs.{split} was " in refusal(f"{begin} 3 --ckpt_path last", 1)
    assert say(f"{begin} 3 --ckpt_path last --allow_changes data.inputs").code == 0


def told(caplog):
    """The lines that name changed code."""
    return [record.getMessage() for record in caplog.records if "the source has changed" in record.getMessage()]


def test_code_that_changed_is_named_in_one_line(project, caplog):
    caplog.set_level("INFO")
    fit("")
    changed = OWN.replace("return SCALE *", "return 2 * SCALE *")
    (project / "own.py").write_text(changed)
    sys.modules.pop("own")
    importlib.invalidate_caches()
    fit("--ckpt_path last", 2)
    (line,) = told(caplog)
    assert line.startswith("own.Mine: ")
    caplog.clear()
    fit("--ckpt_path last", 3)
    assert told(caplog) == [], "the run has this code now"


SEEN = """
import numpy as np
import torch
from functools import partial
from torch.utils.data import DataLoader, Dataset, Subset
from own import Data


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor


def joined(items, extra=None):
    return torch.utils.data.default_collate(items)


class Several:
    def __init__(self, parts):
        self.parts = parts

    def __call__(self, x):
        for part in self.parts:
            x = part(x)
        return x


class Seen(Dataset):
    def __init__(self, x, transform):
        self.x = x
        self.transform = transform

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.transform(self.x[index]), index % 2


class SeenData(Data):
    def setup(self, stage):
        x = torch.from_numpy(np.load("a/x.npy"))
        self.set = Seen(x, Several([Scaled(1.0)]))

    def train_dataloader(self):
        return DataLoader(self.set, batch_size=4, shuffle=True, collate_fn=partial(joined, extra=1))

    def val_dataloader(self):
        return DataLoader(Subset(self.set, range(8)), batch_size=4)
"""

LINES = {
    "Seen": ("return len(self.x)", "return len(self.x) * 1"),
    "Scaled": ("return x * self.factor", "return self.factor * x"),
    "Several": ("for part in self.parts", "for part in tuple(self.parts)"),
    "joined": ("torch.utils.data.default_collate", "torch.utils.data.dataloader.default_collate"),
}
"""A line of each class and function by which the samples of `SeenData` are read, and another one."""


@pytest.mark.parametrize("name", LINES)
def test_code_that_reads_samples_is_named_in_one_line(project, caplog, name):
    caplog.set_level("INFO")
    (project / "seen.py").write_text(SEEN)
    words = MINE.replace("own.Data", "seen.SeenData")
    for rounds, text in ((1, SEEN), (2, SEEN), (3, SEEN.replace(*LINES[name]))):
        (project / "seen.py").write_text(text)
        sys.modules.pop("seen", None)
        importlib.invalidate_caches()
        assert say(f"{words} {rounds} {'--ckpt_path last' if rounds > 1 else ''}").code == 0
        lines = told(caplog)
        assert len(lines) == (rounds == 3)
    assert lines[0].startswith(f"seen.{name}: ")
    sys.modules.pop("seen")


KEPT = """
from fl_lightning.data import Source, TensorSource
from further import Proxy


class Kept(Proxy):
    places = ("root",)

    def __init__(self, root: str = "more"):
        self.root = root
"""


@pytest.mark.parametrize("words", ["--data.source kept.Kept", "--data.extra_splits.proxy kept.Kept"])
def test_files_that_changed_are_named_in_one_line(project, caplog, words):
    import numpy as np

    (project / "further.py").write_text(FURTHER)
    (project / "kept.py").write_text(KEPT)
    for name in ("further", "kept"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    (project / "more").mkdir()
    np.save(project / "more" / "x.npy", np.load(project / "a" / "x.npy"))
    caplog.set_level("INFO")
    fit(words)
    fit(f"{words} --ckpt_path last", 2)
    assert "the files have changed" not in caplog.text
    (project / "more" / "notes.txt").write_text("other files, the same samples")
    fit(f"{words} --ckpt_path last", 3)
    name = words.removeprefix("--").partition(" ")[0]
    assert caplog.text.count(f"{name}: the files have changed since the run was begun") == 1
    caplog.clear()
    fit(f"{words} --ckpt_path last", 4)
    assert "the files have changed" not in caplog.text, "the run has these files now"


# --- last ---


def test_two_runs_with_other_initial_weights_have_two_lasts(project, caplog):
    caplog.set_level("INFO")
    for name in ("one", "two"):
        torch.save({"layer.weight": torch.randn(2, 4), "layer.bias": torch.zeros(2)}, project / f"{name}.pt")
        fit(f"--model.initial_weights {name}.pt")
    caplog.clear()
    fit("--model.initial_weights one.pt --ckpt_path last", 2)
    assert "initial_weights=one.pt, continued from round 1" in caplog.text
    (last,) = Path("runs/fit").glob("1-*/checkpoints/last.ckpt")
    assert "model.initial_weights was two.pt, is None" in refusal(f"{MINE} 2 --ckpt_path {last}", 1)


def write_weights(path, factor):
    torch.save({"layer.weight": factor * torch.ones(2, 4), "layer.bias": torch.zeros(2)}, path)


def test_initial_weights_that_changed_are_named_in_one_line(project, caplog):
    caplog.set_level("INFO")
    sentence = "model.initial_weights: the file has changed since the run was begun"
    write_weights(project / "one.pt", 1.0)
    fit("--model.initial_weights one.pt")
    fit("--model.initial_weights one.pt --ckpt_path last", 2)
    assert sentence not in caplog.text
    write_weights(project / "one.pt", 2.0)
    for rounds in (3, 4):
        fit("--model.initial_weights one.pt --ckpt_path last", rounds)
        assert caplog.text.count(sentence) == 1, "the run is still that of the first weights"
        caplog.clear()


class Linear(LightningModule):
    """A module of one layer."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.cross_entropy(self.layer(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_new_fit_of_a_loop_forgets_the_weights_of_the_run_before(tmp_path):
    def digest(loop):
        return loop.identity.state_dict()["files"]["model.initial_weights"]

    def trainer(rounds):
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        return Trainer(max_epochs=rounds, accelerator="cpu", **quiet)

    write_weights(tmp_path / "one.pt", 1.0)
    samples = (torch.ones(8, 4), torch.arange(8) % 2)
    data = FederatedDataModule(TensorSource(samples, samples), num_clients=2)
    loop = FederatedLoop(Linear(), initial_weights=tmp_path / "one.pt")
    first = trainer(1)
    first.fit(loop, datamodule=data)
    first.save_checkpoint(tmp_path / "1.ckpt")
    was = digest(loop)
    write_weights(tmp_path / "one.pt", 2.0)
    trainer(2).fit(loop, datamodule=data, ckpt_path=tmp_path / "1.ckpt")
    assert digest(loop) == was
    other = FederatedLoop(Linear(), initial_weights=tmp_path / "two.pt")
    write_weights(tmp_path / "two.pt", 1.0)
    with pytest.raises(ValueError, match=r"model\.initial_weights was \S*one\.pt, is \S*two\.pt"):
        trainer(2).fit(other, datamodule=data, ckpt_path=tmp_path / "1.ckpt")
    trainer(1).fit(loop, datamodule=data)
    assert digest(loop) != was


def test_initial_weights_are_compared_by_their_file_not_by_its_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "accelerator": "cpu"}
    samples = (torch.ones(8, 4), torch.arange(8) % 2)
    data = FederatedDataModule(TensorSource(samples, samples), num_clients=2)
    write_weights(Path("one.pt"), 1.0)
    first = Trainer(max_epochs=1, **quiet)
    first.fit(FederatedLoop(Linear(), initial_weights="one.pt"), datamodule=data)
    first.save_checkpoint("1.ckpt")
    copy = tmp_path / "copy.pt"
    copy.write_bytes(Path("one.pt").read_bytes())
    for rounds, path in enumerate([tmp_path / "one.pt", "./one.pt", copy], 2):
        continued = Trainer(max_epochs=rounds, **quiet)
        continued.fit(FederatedLoop(Linear(), initial_weights=path), datamodule=data, ckpt_path="1.ckpt")
        assert continued.current_epoch == rounds
    with pytest.raises(ValueError, match=r"model\.initial_weights was one\.pt, is unset"):
        Trainer(max_epochs=2, **quiet).fit(FederatedLoop(Linear()), datamodule=data, ckpt_path="1.ckpt")


def test_the_command_line_takes_a_copy_of_the_initial_weights(project, caplog):
    caplog.set_level("INFO")
    write_weights(project / "one.pt", 1.0)
    write_weights(project / "other.pt", 2.0)
    fit("--model.initial_weights one.pt")
    (project / "copy.pt").write_bytes((project / "one.pt").read_bytes())
    fit("--model.initial_weights copy.pt --ckpt_path last", 2)
    assert "initial_weights=one.pt, continued from round 1" in caplog.text
    (last,) = Path("runs/fit").glob("0-*/checkpoints/last.ckpt")
    other = f"{MINE} 3 --model.initial_weights other.pt --ckpt_path {last}"
    assert "model.initial_weights was copy.pt, is other.pt" in refusal(other, 1)


SAVED_ELSEWHERE = (
    "--trainer.callbacks ModelCheckpoint --trainer.callbacks.dirpath elsewhere --trainer.callbacks.save_last true "
    "--trainer.callbacks.monitor val/loss"
)


def test_checkpoints_in_a_folder_of_the_user_are_found(project):
    fit(SAVED_ELSEWHERE)
    (run,) = Path("runs/fit").iterdir()
    assert indexed(run, "last").name == "last.ckpt"
    assert indexed(run, "best").parent.name == "elsewhere"
    fit(f"{SAVED_ELSEWHERE} --ckpt_path last", 3)
    assert len((run / "metrics.csv").read_text().splitlines()) == 4
    (other,) = Path("runs/fit").iterdir()
    assert other == run
    assert say(f"validate {MINE.removeprefix('fit ')} 3 --ckpt_path best".replace("--plots.format none", "")).code == 0


ELSEWHERE = "--trainer.callbacks ModelCheckpoint --trainer.callbacks.dirpath elsewhere"
WRITTEN = {
    "the last one alone": "--trainer.callbacks.save_last true --trainer.callbacks.save_top_k 0",
    "the last one, at the end": (
        "--trainer.callbacks.save_last true --trainer.callbacks.monitor val/loss --trainer.callbacks.every_n_epochs 3"
    ),
    "every round": "--trainer.callbacks.save_top_k -1",
    "on an error": "--trainer.callbacks.save_last true --trainer.callbacks.save_on_exception true",
}
"""When a ModelCheckpoint of the user writes the last checkpoint."""


@pytest.mark.parametrize("written", WRITTEN)
def test_the_last_checkpoint_is_found_whenever_it_was_written(project, written):
    words = f"{ELSEWHERE} {WRITTEN[written]}"
    fit(words, 2)
    (run,) = Path("runs/fit").iterdir()
    fit(f"{words} --ckpt_path last", 3)
    assert list(Path("runs/fit").iterdir()) == [run]
    assert len((run / "metrics.csv").read_text().splitlines()) == 4


def test_an_index_keeps_what_a_continued_run_does_not_write(project):
    fit(f"{ELSEWHERE} --trainer.callbacks.save_last true --trainer.callbacks.monitor val/loss", 2)
    (run,) = Path("runs/fit").iterdir()
    best = indexed(run, "best")
    fit(f"{ELSEWHERE} --trainer.callbacks.save_last true --trainer.callbacks.save_top_k 0 --ckpt_path last", 3)
    assert indexed(run, "best") == best


def test_a_run_whose_folder_has_its_checkpoints_needs_no_index(project):
    fit("")
    assert not list(Path("runs").rglob(INDEX))


@pytest.mark.parametrize("content", ["", "[]", '{"last": 3}', '{"last": "gone.ckpt"}', "\0"])
def test_an_index_that_cannot_be_read_names_nothing(tmp_path, content):
    (tmp_path / INDEX).write_text(content)
    assert indexed(tmp_path, "last") is None


# --- the folder ---


@pytest.mark.parametrize("logger", ["CSVLogger", "TensorBoardLogger"])
def test_all_files_of_a_run_lie_in_its_folder_whatever_logs_it(project, logger):
    words = f"--trainer.logger {logger} --trainer.logger.save_dir logs --trainer.callbacks ClientTable"
    said = say(f"{FIT} --trainer.max_epochs 1 --model.evaluate_clients_every 1 {words}")
    assert said.code == 0, said.err
    (run,) = Path("runs/digits_fedntd").iterdir()
    assert {"clients.csv", "metrics.csv", "partition.csv"} <= {path.name for path in run.iterdir()}
    logged = [path.name for path in Path("logs").rglob("*.csv")]
    assert set(logged) <= {"metrics.csv"}, "what the user's own logger writes"


# --- the seed ---


class Reseeds(Callback):
    """Sets another seed when the fit begins."""

    def on_fit_start(self, trainer, pl_module):
        seed_everything(5)


def test_the_seed_is_read_once_when_the_run_begins(tmp_path, monkeypatch):
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    x = torch.rand(20, 64)
    dataset = TensorDataset(x, torch.arange(20) % 2)
    weights = []
    for callbacks in ([], [Reseeds()]):
        monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
        data = FederatedDataModule.from_datasets(dataset, dataset, num_clients=2, num_classes=2)
        loop = FederatedLoop(net_client())
        trainer = Trainer(
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            accelerator="cpu",
            callbacks=callbacks,
        )
        trainer.fit(loop, datamodule=data)
        weights.append(torch.cat([value.flatten() for value in loop.client.state_dict().values()]))
        assert loop.parts.seed == 0
        assert loop.identity.objects["model.seed"] == 0
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)
    assert torch.equal(*weights)


def net_client():
    from functools import partial

    from fl_lightning.methods import FedAvg
    from fl_lightning.nets import Perceptron

    return FedAvg(net=partial(Perceptron, hidden=[4]), optimizer=partial(torch.optim.SGD, lr=0.1))
