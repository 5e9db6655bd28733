"""A run is continued with the settings that it was begun with; damaged checkpoints load nowhere."""

import contextlib
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from pytorch_lightning.callbacks import ModelCheckpoint

from fl_lightning import FederatedDataModule, FederatedLoop
from fl_lightning.data import Digits, DirichletPartition, IIDPartition
from fl_lightning.methods import FedAvg, FedNTD, FedProx
from fl_lightning.nets import Perceptron
from fl_lightning.utils.files import save_with_digest
from tests.callbacks.toy import At
from tests.commands import TINY, empty_pictures, refusal, run_in, say
from tests.toys import BatchNormNet, folded, sgd, toy_data, trainer

FIT = f"fit {TINY} --trainer.max_epochs"
CHANGES = {
    "--model.client FedAvg": "model.client",
    "--model.client.beta 0.5": "model.client.beta",
    "--model.client.net.hidden [8]": "model.client.net.hidden",
    "--model.client.optimizer.lr 0.01": "model.client.optimizer.lr",
    "--data.num_clients 5": "data.num_clients",
    "--data.partition.alpha 0.7": "data.partition.alpha",
    "--data.partition fl_lightning.data.IIDPartition": "data.partition",
    "--data.seed 3": "data.seed",
    "--data.val_fraction 0.1": "data.val_fraction",
    "--data.batch_size 7": "data.batch_size",
    "--data.participation 1.0": "data.participation",
    "--seed_everything 3": "seed_everything",
    "--trainer.precision 64-true": "trainer.precision",
    "--model.local_epochs 2": "model.local_epochs",
    "--model.lr_decay 0.9": "model.lr_decay",
    "--model.personal *head*": "model.personal",
    "--model.faults.nonfinite skip": "model.faults.nonfinite",
    "--model.server_optimizer SGD --model.server_optimizer.lr 1.0": "model.server_optimizer",
    "--model.aggregator fl_lightning.methods.FedEXPAggregator": "model.aggregator",
}


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A working directory with one round. Only to be read."""
    folder = tmp_path_factory.mktemp("begun")
    with contextlib.chdir(folder), empty_pictures():
        assert say(f"{FIT} 1").code == 0
    return folder


@pytest.fixture
def here(begun, tmp_path, monkeypatch, without_pictures):
    shutil.copytree(begun, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    return tmp_path / "copy"


def content(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


APART = ("--model.client FedAvg", "--data.partition.alpha 0.7")
"""Changes whose place others take."""


def change_alone(change: str):
    """A row for a change, slow but for two: below nearly all are one command."""
    marks = [] if change in APART else [pytest.mark.slow]
    return pytest.param(change, CHANGES[change], marks=marks)


@pytest.mark.parametrize(("change", "name"), [*map(change_alone, CHANGES)])
def test_a_change_of_what_the_rounds_mean_is_refused_by_name(begun, monkeypatch, change, name):
    monkeypatch.chdir(begun)
    before = content(begun)
    said = refusal(f"{FIT} 2 --ckpt_path last {change}", 1)
    assert f"{name} was " in said
    assert "--allow_changes" in said
    assert content(begun) == before


def test_every_difference_is_named(begun, monkeypatch):
    monkeypatch.chdir(begun)
    together = {change: name for change, name in CHANGES.items() if change not in APART}
    said = refusal(f"{FIT} 2 --ckpt_path last {' '.join(together)}", 1)
    assert all(f"{name} was " in said for name in together.values()), said
    for words in (
        "model.client.beta was 1.0, is 0.5",
        "model.lr_decay was 1.0, is 0.9",
        "data.num_clients was 4, is 5",
    ):
        assert words in said


def test_free_settings_may_change(here):
    free = "--model.threads 1 --model.evaluate_clients_every 2 --trainer.enable_progress_bar false"
    free += " --trainer.callbacks Timer --model.chunk 2 --trainer.accelerator auto"
    said = say(f"{FIT} 2 --ckpt_path last {free} --model.store.memory_budget_mb 0")
    assert said.code == 0, said.err
    assert not (run_in(here) / "CHANGES").exists()


def test_an_allowed_change_is_recorded(here):
    change = "--model.client.optimizer.lr 0.01 --allow_changes model.client.optimizer.lr"
    said = say(f"{FIT} 2 --ckpt_path last {change}")
    assert said.code == 0, said.err
    run = run_in(here)
    assert (run / "CHANGES").read_text() == "round 1: model.client.optimizer.lr was 0.05, is 0.01\n"
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["model"]["client"]["init_args"]["optimizer"]["init_args"]["lr"] == 0.01
    assert config["allow_changes"] == ["model.client.optimizer.lr"]


@pytest.mark.parametrize("lr", [1.0, pytest.param(0.25, marks=pytest.mark.slow)])
def test_a_server_optimizer_that_is_allowed_to_change_begins_anew(here, lr):
    """Neither torch's words about the groups of another optimizer, nor the old one's learning rate."""
    server = f"--model.server_optimizer SGD --model.server_optimizer.lr {lr}"
    said = say(f"{FIT} 2 --ckpt_path last {server} --allow_changes model.server_optimizer")
    assert said.code == 0, said.err
    [saved] = here.rglob("last.ckpt")
    [state] = torch.load(saved, weights_only=True)["optimizer_states"]
    assert state["param_groups"][0]["lr"] == lr
    said = say(f"{FIT} 3 --ckpt_path last {server.replace(str(lr), '0.125')} --allow_changes model.server_optimizer")
    assert said.code == 0, said.err
    [state] = torch.load(saved, weights_only=True)["optimizer_states"]
    assert state["param_groups"][0]["lr"] == 0.125


def test_an_evaluation_compares_data_and_net_only(begun, monkeypatch):
    monkeypatch.chdir(begun)
    assert say(f"test {TINY} --ckpt_path last --model.local_epochs 9 --model.client.beta 0.1").code == 0
    assert "model.client.net.hidden was" in refusal(f"test {TINY} --ckpt_path last --model.client.net.hidden [3]", 1)
    other = "--data.source fl_lightning.data.FashionMNIST"
    assert "data.source was" in refusal(f"test {TINY} --ckpt_path last {other}", 1)


def loop(client=FedNTD, lr=0.1, hidden=8, **settings):
    optimizer = partial(torch.optim.SGD, lr=lr)
    return FederatedLoop(
        client(net=partial(Perceptron, hidden=[hidden]), optimizer=optimizer), seed=1, **folded(settings)
    )


def data(alpha=1.0, num_clients=3, **settings):
    return FederatedDataModule(Digits(), num_clients, DirichletPartition(alpha), **settings)


FROM_PYTHON = {
    "model.client was": (partial(loop, FedProx), data),
    "model.client.optimizer.lr was 0.1, is 0.2": (partial(loop, lr=0.2), data),
    "model.lr_decay was 1.0, is 0.5": (partial(loop, lr_decay=0.5), data),
    "model.personal was": (partial(loop, personal="*head*"), data),
    "model.server_optimizer was None, is": (partial(loop, server_optimizer=partial(torch.optim.SGD, lr=1.0)), data),
    "data.partition.alpha was 1.0, is 2.0": (loop, partial(data, 2.0)),
    "data.partition was": (loop, lambda: FederatedDataModule(Digits(), 3, IIDPartition())),
    "data.num_clients was 3, is 4": (loop, partial(data, num_clients=4)),
    "data.participation was 1.0, is": (loop, partial(data, participation=0.4)),
    "data.batch_size was 32, is 5": (loop, partial(data, batch_size=5)),
    "data.seed was 0, is 5": (loop, partial(data, seed=5)),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "at.ckpt"
    run = trainer(1, limit_val_batches=0)
    run.fit(loop(), datamodule=data())
    run.save_checkpoint(path)
    return path


@pytest.mark.parametrize(("words", "made"), FROM_PYTHON.items())
def test_from_python_objects_are_compared(saved, words, made):
    with pytest.raises(ValueError, match=words):
        trainer(2, limit_val_batches=0).fit(made[0](), datamodule=made[1](), ckpt_path=saved)


def test_from_python_a_change_is_let_through_by_name(saved):
    changed = loop(lr=0.2)
    changed.identity.allow(["model.client.optimizer.lr"])
    trainer(2, limit_val_batches=0).fit(changed, datamodule=data(), ckpt_path=saved)
    assert [str(one) for one in changed.identity.changed] == ["model.client.optimizer.lr was 0.1, is 0.2"]


# --- damaged checkpoints


def damaged(path: Path, to: Path, at: float) -> Path:
    raw = bytearray(path.read_bytes())
    raw[int(at * len(raw))] ^= 4
    to.write_bytes(raw)
    return to


def toy_loop(**settings):
    return FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), seed=2, **folded(settings))


LOADS = {
    "fit": lambda path: trainer(2).fit(toy_loop(), toy_data(), ckpt_path=path),
    "validate": lambda path: trainer(1).validate(toy_loop(), toy_data(), ckpt_path=path),
    "test": lambda path: trainer(1).test(toy_loop(), toy_data(), ckpt_path=path),
    "predict": lambda path: trainer(1).predict(toy_loop(), toy_data(), ckpt_path=path),
    "load": lambda path: FederatedLoop.load_from_checkpoint(path, client=FedAvg(net=BatchNormNet, optimizer=sgd())),
    "initial_weights": lambda path: trainer(1).fit(toy_loop(initial_weights=path), toy_data()),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole") / "at.ckpt"
    run = trainer(1)
    run.fit(toy_loop(), toy_data())
    run.save_checkpoint(path)
    return path


@pytest.mark.parametrize("load", LOADS)
def test_a_damaged_checkpoint_loads_nowhere(whole, tmp_path, load):
    LOADS[load](whole)
    for at in (0.1, 0.4, 0.6, 0.9):
        with pytest.raises(ValueError, match="is damaged: its content is not what was written"):
            LOADS[load](damaged(whole, tmp_path / "bad.ckpt", at))


@pytest.mark.parametrize("load", LOADS)
def test_a_checkpoint_that_another_program_wrote_anew_is_refused_with_what_to_do(whole, tmp_path, load):
    content = torch.load(whole, weights_only=True)
    torch.save(content, tmp_path / "again.ckpt")
    with pytest.raises(ValueError, match="remove its entry 'digest' if the change was yours"):
        LOADS[load](tmp_path / "again.ckpt")
    del content["digest"]
    torch.save(content, tmp_path / "mine.ckpt")
    LOADS[load](tmp_path / "mine.ckpt")


def test_a_file_without_a_digest_says_so(whole, tmp_path, caplog):
    content = torch.load(whole, weights_only=True)
    torch.save(content["state_dict"], tmp_path / "weights.pt")
    with caplog.at_level("INFO"):
        LOADS["initial_weights"](tmp_path / "weights.pt")
    assert f"{tmp_path / 'weights.pt'} has no digest" in caplog.text


@pytest.mark.parametrize("key", ["loops", "optimizer_states"])
def test_a_checkpoint_of_weights_only_is_not_continued(whole, tmp_path, key):
    content = torch.load(whole, weights_only=True)
    del content["digest"], content[key]
    torch.save(content, tmp_path / "part.ckpt")
    with pytest.raises(ValueError, match=rf"has no '{key}' \(save_weights_only\); to start from its weights set"):
        LOADS["fit"](tmp_path / "part.ckpt")


@pytest.mark.parametrize("key", ["store", "recorder", "settings"])
def test_a_checkpoint_of_another_version_is_refused(whole, tmp_path, key):
    content = torch.load(whole, weights_only=True)
    del content["digest"], content["federated"][key]
    torch.save(content, tmp_path / "old.ckpt")
    with pytest.raises(ValueError, match=rf"was written by another version \(it has no '{key}'\)"):
        LOADS["fit"](tmp_path / "old.ckpt")


@pytest.mark.parametrize("load", ["fit", "test", "load"])
@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("federated.store", [], "'store'"),
        ("federated.recorder", {"peak": None}, "'recorder.round_metrics'"),
        ("federated.settings", {"config": 3, "objects": {}}, "'settings.config'"),
        ("federated.transforms", 7, "'transforms'"),
        ("federated.client", None, "'client'"),
        ("global_step", None, "'global_step'"),
        ("state_dict", [1], "'state_dict'"),
    ],
)
def test_a_forged_checkpoint_is_refused_by_the_key_that_is_wrong(whole, tmp_path, load, key, value, says):
    content = torch.load(whole, weights_only=True)
    outer, _, inner = key.rpartition(".")
    (content[outer] if outer else content)[inner] = value
    save_with_digest(content, tmp_path / "forged.ckpt")
    with pytest.raises(ValueError, match=rf"is no checkpoint as a federation writes it \(its {says} is missing, or"):
        LOADS[load](tmp_path / "forged.ckpt")


@pytest.mark.parametrize("victim", ["precious", "precious/notes.txt", "runs/notes.txt", "runs/a/checkpoints/notes.txt"])
def test_a_forged_checkpoint_deletes_nothing(tmp_path, monkeypatch, victim):
    """The paths that Lightning's ModelCheckpoint keeps in it lead wherever its writer liked."""
    monkeypatch.chdir(tmp_path)
    saved = Path("runs/a/checkpoints")

    def fit(rounds, ckpt_path=None):
        best = ModelCheckpoint(saved, "{epoch}", monitor="global/acc", mode="max")
        last = ModelCheckpoint(saved, "last", enable_version_counter=False)
        run = trainer(rounds, callbacks=[best, last], enable_checkpointing=True)
        run.fit(toy_loop(), toy_data(), ckpt_path=ckpt_path)

    fit(1)
    content = torch.load(saved / "last.ckpt", weights_only=True)
    for folder, name in ((Path("precious"), "notes.txt"), (Path("runs"), "notes.txt"), (saved, "notes.txt")):
        folder.mkdir(exist_ok=True)
        (folder / name).write_text("mine")
    path = f"{saved}/../../../{victim}"
    for state in content["callbacks"].values():
        state.pop("dirpath")  # then Lightning takes its own
        state["best_k_models"] = {path: torch.tensor(-1.0)}
        state["kth_value"] = torch.tensor(-1.0)
        state["kth_best_model_path"] = state["best_model_path"] = state["last_model_path"] = path
    save_with_digest(content, saved / "last.ckpt")
    fit(3, saved / "last.ckpt")
    assert len(list(Path().rglob("notes.txt"))) == 3


def test_the_best_of_the_rounds_before_is_replaced(tmp_path):
    """A run that is continued by another process removes what it has no use for any more."""

    def fit(rounds, ckpt_path=None):
        newest = ModelCheckpoint(tmp_path, "{epoch}", monitor="epoch", mode="max")
        run = trainer(rounds, callbacks=[newest], enable_checkpointing=True)
        run.fit(toy_loop(), toy_data(), ckpt_path=ckpt_path)
        return sorted(path.name for path in tmp_path.glob("*.ckpt"))

    assert fit(2) == ["epoch=1.ckpt"]
    (tmp_path / "epoch=1.ckpt").rename(tmp_path / "from.ckpt")
    shutil.copy(tmp_path / "from.ckpt", tmp_path / "epoch=1.ckpt")
    assert fit(3, tmp_path / "from.ckpt") == ["epoch=2.ckpt", "from.ckpt"]


def test_our_methods_check_what_they_load(begun, tmp_path):
    path = next(begun.rglob("client.ckpt"))
    net = partial(Perceptron, hidden=[64])
    assert FedNTD.load_from_checkpoint(path, net=net).beta == 1.0
    with pytest.raises(ValueError, match="is damaged"):
        FedNTD.load_from_checkpoint(damaged(path, tmp_path / "client.ckpt", 0.5), net=net)


# --- a cosine learning rate


def cosine(rounds, lr_decay, path=None, ckpt_path=None, **limits):
    loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), seed=3, lr_decay=lr_decay)
    keep = At(rounds - 1, lambda run: path and run.save_checkpoint(path))
    trainer(rounds, callbacks=[keep], **limits).fit(loop, datamodule=toy_data(), ckpt_path=ckpt_path)
    return {name: value.clone() for name, value in loop.client.state_dict().items()}


@pytest.mark.parametrize("limits", [{}, {"max_steps": 5}], ids=str)
def test_a_cosine_of_its_own_rounds_is_continued_exactly(tmp_path, limits):
    """Also beyond its rounds, and where the run has no number of rounds."""
    at = tmp_path / "at.ckpt"
    decay = {"cosine": 0.001, "rounds": 3}
    cosine(2, decay, at)
    rounds = -1 if limits else 5
    again, whole = (cosine(rounds, decay, ckpt_path=path, **limits) for path in (at, None))
    assert all(torch.equal(again[name], value) for name, value in whole.items())


def test_a_cosine_over_max_epochs_is_not_continued_with_others(tmp_path):
    """Rounds that are done would have had other rates; with the rounds that it had it goes on."""
    at = tmp_path / "at.ckpt"
    cosine(3, {"cosine": 0.001}, at)
    for rounds in (2, 5):
        with pytest.raises(
            ValueError, match=rf"model.lr_decay.rounds was 3, is {rounds} \(a cosine falls over trainer"
        ):
            cosine(rounds, {"cosine": 0.001}, ckpt_path=at)
    with pytest.raises(
        ValueError, match=r"model.lr_decay.rounds was 3, is 4 .*\{cosine: FINAL_LR, rounds: 3\} goes on"
    ):
        cosine(5, {"cosine": 0.001, "rounds": 4}, ckpt_path=at)
    with pytest.raises(ValueError, match=r"model\.lr_decay was cosine, is 0\.9"):
        cosine(5, 0.9, ckpt_path=at)
    given = {"cosine": 0.001, "rounds": 3}
    again, whole = (cosine(5, given, ckpt_path=path) for path in (at, None))
    assert all(torch.equal(again[name], value) for name, value in whole.items())


def test_the_command_line_refuses_it_in_one_sentence_that_says_what_to_do(tmp_path, monkeypatch, without_pictures):
    monkeypatch.chdir(tmp_path)
    decay = "--model.lr_decay"
    assert say(f"{FIT} 2 {decay} '{{cosine: 0.001}}'").code == 0
    before = content(tmp_path)
    said = refusal(f"{FIT} 3 {decay} '{{cosine: 0.001}}' --ckpt_path last", 1)
    assert "model.lr_decay.rounds was 2, is 3" in said
    assert "rounds: 2} goes on after round 2" in said
    assert "--allow_changes model.lr_decay.rounds" in said
    assert content(tmp_path) == before
    assert say(f"{FIT} 3 {decay} '{{cosine: 0.001, rounds: 2}}' --ckpt_path last").code == 0
    assert say(f"test {TINY} {decay} '{{cosine: 0.001}}' --trainer.max_epochs 9 --ckpt_path last").code == 0
