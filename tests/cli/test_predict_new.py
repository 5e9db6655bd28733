"""`fl-lightning predict --new`: new samples, read by the schema in the checkpoint, and their predictions."""

import csv
import gzip
import shutil
import sys
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from fl_lightning.data import Source, TableSource
from tests.commands import TINY, empty_pictures, refusal, say, working_in
from tests.data.test_hub import rows as hub_rows
from tests.federation.test_evaluated_model import all_classes

pytestmark = pytest.mark.filterwarnings("ignore")

HEADER = "age,city,hospital,risk\n"
CONFIG = """
data:
  source: {class_path: TableSource, init_args: {train: train.csv, label: LABEL, ignored: [hospital]}}
  num_clients: 3
model:
  client: {class_path: FedAvg, init_args: {net: {class_path: Perceptron}}}
  personal: [net.head.*]
"""

TRAINER = "trainer: {max_epochs: 2, accelerator: cpu, enable_progress_bar: false}\n"
OWN = """
import torch
from pytorch_lightning import LightningModule
from torch import nn

class Risk(LightningModule):
    def __init__(self, answer: str = "number"):
        super().__init__()
        self.net = nn.Linear(3, 1)
        self.answer = answer
        nn.init.constant_(self.net.weight, 0.0)
        nn.init.constant_(self.net.bias, 1234.5)

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1]) * 0

    def validation_step(self, batch, batch_idx):
        self.log("val/mse", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def predict_step(self, batch, batch_idx):
        x, y = batch
        assert y.isnan().all()
        found = self.net(x)
        both = torch.cat([found, found + 1], 1)
        answers = {"number": found, "two": both, "dict": {"mean": found[:, 0], "both": both}, "words": ["a", "b"]}
        return answers[self.answer]

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""
BEST = "-c table.yaml --ckpt_path last"


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def training_rows(shift=0.0):
    rng = np.random.default_rng(0)
    ages = rng.normal(50, 10, 40) + shift
    cities = rng.choice(["Bonn", "Köln"], 40)
    lines = []
    for i, (age, city) in enumerate(zip(ages, cities, strict=True)):
        risk = "high" if age > 50 + shift else "low"
        lines.append(f"{age},{city},h{i % 4},{risk}\n")
    return HEADER + "".join(lines)


def write(folder):
    text = training_rows()
    (folder / "train.csv").write_text(text, encoding="utf-8")
    (folder / "table.yaml").write_text(CONFIG.replace("LABEL", "risk") + TRAINER)
    without_target = [",".join(line.split(",")[:2]) + "\n" for line in text.splitlines()]
    (folder / "new.csv").write_text("".join(without_target), encoding="utf-8")


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("table")
    write(folder)
    with chdir(folder), empty_pictures():
        said = say("fit -c table.yaml")
    assert said.code == 0, said.err
    return folder


@pytest.fixture
def here(fitted, tmp_path, monkeypatch):
    """A copy of the folder in which a table was trained."""
    shutil.copytree(fitted, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run_of(folder):
    return folder / "runs" / "table" / "0"


def test_new_rows_are_answered_by_a_table_and_the_outputs_lie_beside_it(here):
    assert say(f"predict {BEST}").code == 0
    of_test = (run_of(here) / "predictions.pt").read_bytes()
    said = say(f"predict {BEST} --new new.csv")
    assert said.code == 0, said.err
    rows = rows_of(run_of(here) / "predictions-new.csv")
    logits = torch.load(run_of(here) / "predictions-new.pt")
    assert [int(row["row"]) for row in rows] == list(range(2, 42))
    assert list(rows[0]) == ["row", "predicted", "p_high", "p_low"]
    found = torch.tensor([[float(row["p_high"]), float(row["p_low"])] for row in rows])
    torch.testing.assert_close(found, logits.softmax(1), atol=1e-5, rtol=0)
    assert [row["predicted"] for row in rows] == [["high", "low"][number] for number in logits.argmax(1).tolist()]
    assert (run_of(here) / "predictions.pt").read_bytes() == of_test
    # The rows of the test split are among them, with the same logits.
    _, test = TableSource("train.csv", "risk", ignored=["hospital"]).read()
    ages = [float(line.split(",")[0]) for line in training_rows().splitlines()[1:]]
    places = [ages.index(age) for age in test.column("age").tolist()]
    torch.testing.assert_close(logits[places], torch.load(run_of(here) / "predictions.pt"))


def test_nothing_is_replaced(here):
    assert say(f"predict {BEST} --new new.csv --output answer.csv").code == 0
    before = (here / "answer.csv").read_bytes()
    sentence = refusal(f"predict {BEST} --new new.csv --output answer.csv", 1)
    assert "answer.csv exists already, and predict does not replace it; name another file by --output" in sentence
    (here / "answer.csv").rename(here / "kept.csv")
    assert "answer.pt exists already" in refusal(f"predict {BEST} --new new.csv --output answer.csv", 1)
    assert (here / "kept.csv").read_bytes() == before
    assert say(f"predict {BEST} --new new.csv").code == 0
    assert "predictions-new.csv exists already" in refusal(f"predict {BEST} --new new.csv", 1)


def test_other_training_rows_do_not_scale_new_ones(here):
    assert say(f"predict {BEST} --new new.csv --output before.csv").code == 0
    (here / "train.csv").write_text(training_rows(shift=1000.0), encoding="utf-8")
    said = say(f"predict {BEST} --new new.csv --output after.csv --allow_changes data")
    assert said.code == 0, said.err
    assert (here / "after.csv").read_bytes() == (here / "before.csv").read_bytes()


def test_a_client_predicts_new_rows_by_its_own_model(here):
    answers = []
    for client in ("", "--client 0", "--client 2"):
        name = f"of{client.replace('--', '').replace(' ', '')}.csv"
        assert say(f"predict {BEST} --new new.csv --output {name} {client}").code == 0
        answers.append(rows_of(here / name))
        assert len(answers[-1]) == 40
    assert answers[0] != answers[1] != answers[2] != answers[0]
    assert "client must be the id of a client in [0, 3), got 3" in refusal(
        f"predict {BEST} --new new.csv --client 3 --output x.csv", 1
    )


def test_what_cannot_be_predicted_is_refused_before_training_rows_are_read(here, monkeypatch):
    def load(self):
        raise AssertionError("the training rows were read")

    monkeypatch.setattr(TableSource, "load", load)
    (here / "lacks.csv").write_text("age\n50\n")
    (here / "gap.csv").write_text("age,city\n,Bonn\n")
    for words, sentence in {
        f"{BEST} --new nowhere.csv": "--new must be a file or a folder of new samples, got nowhere.csv, which does not",
        f"{BEST} --new .": "--new must be a CSV or Parquet file, got the folder .; name a file in it",
        f"{BEST} --new lacks.csv": "lacks.csv must have all columns that the net reads, and lacks city; it has age",
        f"{BEST} --new gap.csv": "got '' in row 2 of the new table (gap.csv); fill in what is missing, or leave out",
        f"{BEST} --new new.csv --output table.yaml/a.csv": "--output must be a file in a folder that can be written",
        f"{BEST} --new new.csv --output answer.txt": "--output must be a file that ends with .csv, got answer.txt",
        "-c table.yaml --new new.csv": "--new needs --ckpt_path, because a checkpoint has the schema that reads new",
    }.items():
        assert sentence in refusal(f"predict {words}", 1)
    checkpoint = torch.load(run_of(here) / "checkpoints/last.ckpt", weights_only=True)
    del checkpoint["federated"]["schema"], checkpoint["digest"]
    torch.save(checkpoint, here / "old.ckpt")
    sentence = refusal("predict -c table.yaml --ckpt_path old.ckpt --new new.csv", 1)
    assert "and has none, as files of older versions; continue the run for a round by fit --ckpt_path" in sentence


@pytest.mark.parametrize("command", ["fit", "test", "validate"])
@pytest.mark.parametrize("option", ["--new", "--output"])
def test_only_predict_has_the_options(command, option, here):
    assert f"unknown option '{option[2:]}'" in refusal(f"{command} -c table.yaml {option} new.csv", 2)


def test_the_checkpoint_is_that_of_the_same_settings(here):
    """The options of an evaluation are no settings of the run, so that `last` names the run that has these settings."""
    with empty_pictures():
        assert say("fit -c table.yaml --model.client FedProx").code == 0
    for words in ("predict --client 1", "predict --new new.csv", "test --client 1"):
        said = say(f"{words} {BEST}")
        assert said.code == 0, said.err
    assert (run_of(here) / "predictions-new.csv").is_file()
    assert not list((here / "runs" / "table").glob("1*/predictions*"))


def test_a_modules_own_answers_are_written_as_they_are(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    lines = [f"{i % 7},{'Bonn' if i % 2 else 'Ulm'},h,{1000.5 + i}\n" for i in range(30)]
    (tmp_path / "train.csv").write_text(HEADER + "".join(lines))
    (tmp_path / "new.csv").write_text("city,age\nUlm,3\nBonn,4\n")
    data, _, _ = CONFIG.replace("LABEL", "risk").partition("model:")
    (tmp_path / "mine.yaml").write_text(f"{data}model: {{client: own.Risk}}\n{TRAINER}")
    with working_in(tmp_path, OWN), empty_pictures():
        said = say("fit -c mine.yaml")
        assert said.code == 0, said.err
        (tmp_path / "train.csv").unlink()
        for answer, columns in {
            "number": {"predicted": "1234.5"},
            "two": {"output_0": "1234.5", "output_1": "1235.5"},
            "dict": {"mean": "1234.5", "both_0": "1234.5", "both_1": "1235.5"},
            "words": None,
        }.items():
            options = f"--output {answer}.csv --model.client.answer {answer}"
            said = say(f"predict -c mine.yaml --ckpt_path last --new new.csv {options}")
            assert said.code == 0, said.err
            assert (tmp_path / f"{answer}.pt").is_file()
            if columns is None:
                assert not (tmp_path / f"{answer}.csv").exists()
                assert "so that there is no words.csv" in caplog.text
            else:
                assert rows_of(tmp_path / f"{answer}.csv") == [{"row": "2", **columns}, {"row": "3", **columns}]


def test_images_are_named_by_their_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    for i in range(24):
        for folder in (f"images/train/{'cat' if i % 2 else 'dog'}", "ward/may"):
            path = tmp_path / folder / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (6, 6, 3), np.uint8)).save(path)
    config = CONFIG
    source = "{class_path: TableSource, init_args: {train: train.csv, label: LABEL, ignored: [hospital]}}"
    config = config.replace(source, "{class_path: ImageFolder, init_args: {root: images}}\n  val_fraction: 0.3")
    (tmp_path / "folder.yaml").write_text(config + TRAINER)
    with empty_pictures():
        said = say("fit -c folder.yaml")
        assert said.code == 0, said.err
    said = say("predict -c folder.yaml --ckpt_path best --new ward")
    assert said.code == 0, said.err
    rows = rows_of(tmp_path / "runs/folder/0/predictions-ward.csv")
    assert [row["file"] for row in rows] == sorted(f"may/{i}.png" for i in range(24))
    assert list(rows[0]) == ["file", "predicted", "p_cat", "p_dog"]


def test_a_source_without_new_samples_says_so(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with empty_pictures():
        assert say(f"fit {TINY} --trainer.max_epochs 1").code == 0
    (tmp_path / "new.csv").write_text("x\n1\n")
    sentence = refusal(f"predict {TINY} --ckpt_path last --new new.csv", 1)
    assert (
        "--new needs a source that reads new samples, such as TableSource, ImageFolder or HuggingFace, got" in sentence
    )


# --- a user who has the run and the new file, and no longer the training data


def write_table(folder, monkeypatch):
    write(folder)
    return "{class_path: TableSource, init_args: {train: train.csv, label: risk, ignored: [hospital]}}", "new.csv"


def write_pictures(folder, monkeypatch, size=6):
    rng = np.random.default_rng(0)
    for i in range(16):
        for place in (f"train/{'cat' if i % 2 else 'dog'}", "new"):
            path = folder / ("." if place == "new" else "images") / place / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (6, size, 3), np.uint8)).save(path)
    return "{class_path: ImageFolder, init_args: {root: images, image_size: 5}}\n  val_fraction: 0.25", "new"


def write_saved(folder, monkeypatch):
    (folder / "saved").mkdir()
    (folder / "new").mkdir()

    def load_from_disk(path):
        if not Path(path).is_dir():
            raise FileNotFoundError(path)
        x = RNG_OF_SAVED.random((12, 3)).tolist()
        return hub_rows(x) if path.endswith("new") else {"train": hub_rows(x), "test": hub_rows(x)}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_from_disk=load_from_disk))
    return "{class_path: HuggingFace, init_args: {data: saved, input: x}}", "new"


def write_pooled(folder, monkeypatch):
    source, new = write_table(folder, monkeypatch)
    return f"{{class_path: PooledSource, init_args: {{source: {source}}}}}", new


WRITTEN = {
    "TableSource": write_table,
    "ImageFolder": write_pictures,
    "HuggingFace": write_saved,
    "PooledSource": write_pooled,
    "TinyImageNet": "100,000 pictures; it reads new ones as ImageFolder",
    "DataModuleSource": "it refuses --new",
}
RNG_OF_SAVED = np.random.default_rng(0)
TRAINING = ("train.csv", "images", "saved")
READERS = [kind for kind in all_classes(Source) if kind.read_new is not Source.read_new]


@pytest.mark.parametrize("kind", READERS, ids=lambda kind: kind.__name__)
def test_no_training_file_is_needed(kind, tmp_path, monkeypatch):
    written = WRITTEN[kind.__name__]
    if isinstance(written, str):
        pytest.skip(f"{kind.__name__}: {written}")
    monkeypatch.chdir(tmp_path)
    source, new = written(tmp_path, monkeypatch)
    (tmp_path / "it.yaml").write_text(
        f"data:\n  source: {source}\n  num_clients: 2\nmodel:\n  client: {{class_path: FedAvg, init_args: "
        f"{{net: {{class_path: Perceptron}}}}}}\n  personal: [net.head.*]\n{TRAINER}"
    )
    with empty_pictures():
        said = say("fit -c it.yaml")
        assert said.code == 0, said.err
    answers = []
    for name in ("with", "without"):
        RNG_OF_SAVED.bit_generator.state = np.random.default_rng(5).bit_generator.state
        if name == "without":
            gone = [file for file in map(Path, TRAINING) if file.exists()]
            assert gone
            for file in gone:
                file.rename(tmp_path / "elsewhere")
        for options in ("", "--client 1", "--client all"):
            output = f"{name}{options.replace('--client ', '-')}.csv"
            said = say(f"predict -c it.yaml --ckpt_path last --new {new} --output {output} {options}")
            assert said.code == 0, said.err
            answers.append((tmp_path / output).read_bytes())
    assert answers[:3] == answers[3:]
    assert len(set(answers)) == 3


@pytest.mark.parametrize("unseen", ["", "  unseen: [h2]\n"])
def test_owners_are_known_without_the_training_file(unseen, tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.chdir(tmp_path)
    source, _ = write_table(tmp_path, monkeypatch)
    (tmp_path / "owners.yaml").write_text(
        f"data:\n  source: {source}\n  by: hospital\n  num_clients: null\n{unseen}model:\n  personal: [net.head.*]\n"
        f"  client: {{class_path: FedAvg, init_args: {{net: {{class_path: Perceptron}}}}}}\n{TRAINER}"
    )
    with empty_pictures():
        said = say("fit -c owners.yaml")
        assert said.code == 0, said.err
    (tmp_path / "train.csv").rename(tmp_path / "gone.csv")
    words = "predict -c owners.yaml --model.initial_weights runs/owners/0/checkpoints/client.ckpt --new new.csv"
    of_run = "predict -c owners.yaml --ckpt_path last --new new.csv"
    for command in (f"{words} --output alone.csv", f"{of_run} --output it.csv"):
        said = say(command)
        assert said.code == 0, said.err
    assert (tmp_path / "alone.csv").read_bytes() == (tmp_path / "it.csv").read_bytes()
    assert "train must be a CSV file, got train.csv" in refusal(f"{words} --client 3 --output x.csv", 1)
    caplog.clear()
    said = say(f"{of_run} --client all --output all.csv")
    assert said.code == 0, said.err
    assert caplog.text.count("Predictions: ") == 1
    rows = rows_of(tmp_path / "all.csv")
    assert list(dict.fromkeys(row["client"] for row in rows)) == ["h0", "h1", "h2", "h3"]
    sentence = refusal(f"{of_run} --client 4 --output x.csv", 1)
    assert "client must be the id of a client in [0, 4) or the name of one (h0, h1, h2, h3), got 4" in sentence


def test_what_reads_training_samples_says_which_file_is_gone(here):
    (here / "train.csv").rename(here / "gone.csv")
    tuned = "--model.fine_tuning.epochs 1 --client 1 --tuned true"
    for words in (f"predict {BEST} --new new.csv {tuned}", f"predict {BEST}", f"test {BEST}"):
        sentence = refusal(words, 1)
        assert "train must be a CSV file, got train.csv, which does not exist" in sentence
    (here / "gone.csv").rename(here / "train.csv")
    answers = []
    for output, options in {"tuned.csv": tuned, "deployed.csv": "--client 1"}.items():
        said = say(f"predict {BEST} --new new.csv --output {output} {options}")
        assert said.code == 0, said.err
        answers.append((here / output).read_bytes())
    assert answers[0] != answers[1]


AS_WRITTEN = {
    "--data.source.sep ';'": lambda text: text.replace(",", ";").encode(),
    "--data.source.decimal ',' --data.source.sep ';'": lambda text: text.replace(",", ";").replace(".", ",").encode(),
    "--data.source.encoding latin-1": lambda text: text.encode("latin-1"),
    "--data.source.compression gzip": lambda text: gzip.compress(text.encode()),
}


@pytest.mark.parametrize("options", AS_WRITTEN)
def test_a_new_file_may_be_written_in_another_way_than_the_training_file(options, here):
    with empty_pictures():
        # A newer run of other settings.
        assert say("fit -c table.yaml --model.client FedProx --model.client.mu 5").code == 0
    assert say(f"predict {BEST} --new new.csv").code == 0
    (here / "other.txt").write_bytes(AS_WRITTEN[options]((here / "new.csv").read_text()))
    said = say(f"predict {BEST} --new other.txt {options}")
    assert said.code == 0, said.err
    expected = (run_of(here) / "predictions-new.csv").read_bytes()
    assert (run_of(here) / "predictions-other.csv").read_bytes() == expected


@pytest.mark.parametrize("name", ["client.ckpt", "client-1.ckpt"])
def test_the_model_alone_predicts_new_rows(name, here):
    """Somebody else may have `client.ckpt` only, which holds the schema, too."""
    with empty_pictures():
        options = "--trainer.callbacks ClientCheckpoint --trainer.callbacks.clients [1]"
        assert say(f"fit -c table.yaml {options}").code == 0
    folder = here / "runs" / "table" / "1"
    shutil.copy(folder / "checkpoints" / name, here / "given.ckpt")
    options = "--output a.csv --client 1" if "1" in name else "--output a.csv"
    said = say(f"predict -c table.yaml --ckpt_path {folder}/checkpoints/last.ckpt --new new.csv {options}")
    assert said.code == 0, said.err
    (here / "train.csv").unlink()
    shutil.rmtree(here / "runs")
    words = "predict -c table.yaml --new new.csv --output b.csv --model.initial_weights"
    assert "initial_weights must be a file, got nowhere.ckpt; give a checkpoint" in refusal(f"{words} nowhere.ckpt", 1)
    torch.save(torch.load(here / "given.ckpt", weights_only=False)["state_dict"], here / "state.pt")
    assert "older versions; name a checkpoint of the run, or its client.ckpt" in refusal(f"{words} state.pt", 1)
    said = say(f"{words} given.ckpt")
    assert said.code == 0, said.err
    assert (here / "a.csv").read_bytes() == (here / "b.csv").read_bytes()
