"""Names of cells, and what a stored run tells of itself: the run that it begins with, and the files that it read."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
import yaml

from fl_lightning.data import ImageFolder
from fl_lightning.experiments.naming import StoredCells, cell_name, settings_of, start_identity
from fl_lightning.runs.checkpoints import CHECKPOINTS

CONFIG = {
    "seed_everything": 0,
    "trainer": {"max_epochs": 3, "precision": "32-true", "devices": 1, "logger": True},
    "model": {
        "client": {"class_path": "fl_lightning.methods.FedNTD", "init_args": {"beta": 0.3, "net": None}},
        "initial_weights": None,
        "threads": 1,
    },
    "data": {
        "source": {"class_path": "fl_lightning.data.MNIST", "init_args": {"root": "/data"}},
        "num_clients": 10,
        "participation": 0.5,
    },
}


def with_weights(path):
    return {**CONFIG, "model": {**CONFIG["model"], "initial_weights": str(path)}}


def with_source(root):
    source = {"class_path": "fl_lightning.data.ImageFolder", "init_args": {"root": str(root)}}
    return {**CONFIG, "data": {**CONFIG["data"], "source": source}}


# --- names ---


def test_the_name_of_a_cell_is_pinned():
    """A stored run is found by its settings, too, but its name must not change from release to release."""
    assert cell_name("FedNTD", 0, CONFIG) == "FedNTD-seed0-cb7310b8"
    assert cell_name("FedNTD", 3, CONFIG) == "FedNTD-seed3-cb7310b8"
    assert cell_name("FedNTD", 0, CONFIG, "seed0-1a2b3c4d {'max_epochs': 3}") == "FedNTD-seed0-cf3b091c"


def test_a_name_is_the_digest_of_the_settings_by_an_independent_computation():
    settings = [
        ["data.num_clients", 10],
        ["data.participation", 0.5],
        ["data.source", "fl_lightning.data.vision.MNIST"],
        ["data.source.root", "published"],
        ["model.client", "fl_lightning.methods.fedntd.FedNTD"],
        ["model.client.beta", 0.3],
        ["model.client.net", None],
        ["model.initial_weights", None],
        ["model.threads", 1],
        ["seed_everything", 0],
        ["trainer.devices", 1],
        ["trainer.precision", "32-true"],
    ]
    digest = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:8]
    assert cell_name("FedNTD", 0, CONFIG) == f"FedNTD-seed0-{digest}"


@pytest.mark.parametrize(("stem", "short"), [("ä" * 100, 40), ("a" * 100, 80), ("short", 5)])
def test_a_long_stem_is_cut(stem, short):
    assert len(cell_name(stem, 0, CONFIG).rpartition("-seed")[0]) == short


# --- the start ---


@pytest.fixture(params=["", "elsewhere/out", "."])
def stored(tmp_path, request):
    """A folder with a run that others begin with, and one that began with it, by an absolute or a relative path."""
    folder = tmp_path / "out"
    run = Path(request.param or folder) / "runs" / "FedAvg-seed0-1a2b3c4d" / "0"
    begun = with_weights(run / CHECKPOINTS / "last.ckpt")
    write(folder, "FedAvg-seed0-1a2b3c4d", CONFIG)
    write(folder, "Begun-seed0-00000000", begun)
    return folder


def write(folder, name, config):
    path = folder / "cells" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(config))


def name_in(folder, config, start=""):
    name = cell_name("now", 0, config, start)
    return StoredCells(folder).name_of(name, settings_of(config, start))


def test_a_stored_run_is_of_the_start_whose_weights_it_has(stored):
    weights = Path("elsewhere/out/runs/FedAvg-seed0-1a2b3c4d/0") / CHECKPOINTS / "last.ckpt"
    same = start_identity("FedAvg-seed0-1a2b3c4d", {"max_epochs": 3})
    assert name_in(stored, with_weights(weights), same) == "Begun-seed0-00000000", "the folder may be moved"
    for name, limits in (("FedAvg-seed0-1a2b3c4d", {"max_epochs": 4}), ("FedAvg-seed0-ffffffff", {"max_epochs": 3})):
        other = start_identity(name, limits)
        assert name_in(stored, with_weights(weights), other) != "Begun-seed0-00000000"
    assert name_in(stored, with_weights(weights)) != "Begun-seed0-00000000", "it has no start"


@pytest.mark.parametrize(
    "weights",
    [
        "last.ckpt",
        "runs/FedAvg-seed0-1a2b3c4d/0/checkpoints/best.ckpt",
        "runs/FedAvg-seed0-1a2b3c4d/0/other/last.ckpt",
        "out/other/FedAvg-seed0-1a2b3c4d/0/checkpoints/last.ckpt",
        "weights.pt",
    ],
)
def test_weights_of_the_users_are_no_start(stored, weights):
    write(stored, "Own-seed0-00000001", with_weights(weights))
    assert name_in(stored, with_weights(weights)) == "Own-seed0-00000001"
    assert name_in(stored, with_weights("others.pt")) != "Own-seed0-00000001"


# --- files ---


def leave_checkpoint(folder, name, number, files):
    path = folder / "runs" / name / str(number) / CHECKPOINTS / "last.ckpt"
    path.parent.mkdir(parents=True)
    torch.save({"federated": {"settings": {"config": {}, "files": files}}}, path)


def image_folder(path, text):
    (path / "train" / "a").mkdir(parents=True)
    (path / "train" / "a" / "1.png").write_text(text)
    return path


@pytest.mark.parametrize(
    ("left", "is_found"),
    [
        ([{"data.source": "same"}], True),
        ([{"data.source": "other"}], False),
        ([{"data.extra_splits.proxy": "same"}], False),
        ([{}], False),
        ([], False),
        ([{"data.source": "other"}, {"data.source": "same"}], True),
        ([{"data.source": "same"}, {"data.source": "other"}], False),
        ([{"data.source": "same"}, {}], True),
    ],
    ids=str,
)
def test_the_files_that_a_stored_run_has_read_are_told_by_its_checkpoint(tmp_path, left, is_found):
    """The folder that the run has read is gone."""
    here = image_folder(tmp_path / "here", "cat")
    fingerprint = ImageFolder.fingerprint({"root": here})
    write(tmp_path, "Stored-seed0-00000000", with_source(tmp_path / "gone"))
    for number, files in enumerate(left):
        told = {name: fingerprint if text == "same" else text for name, text in files.items()}
        leave_checkpoint(tmp_path, "Stored-seed0-00000000", number, told)
    assert (name_in(tmp_path, with_source(here)) == "Stored-seed0-00000000") == is_found


def test_a_place_that_nothing_tells_of_is_another_run(tmp_path):
    write(tmp_path, "Stored-seed0-00000000", with_source(tmp_path / "gone"))
    leave_checkpoint(tmp_path, "Stored-seed0-00000000", 0, {"data.source": "None"})
    assert name_in(tmp_path, with_source(tmp_path / "missing")) != "Stored-seed0-00000000"
    assert name_in(tmp_path, with_source(tmp_path / "gone")) == "Stored-seed0-00000000"
