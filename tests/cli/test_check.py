"""`fl-lightning check`: whatever lies in a folder, each checkpoint gets its line, and the readers agree with it."""

import os
import struct
import zipfile

import pytest
import torch

from fl_lightning import FederatedLoop
from fl_lightning.cli.check import examined
from fl_lightning.client.checkpoint_io import REGISTRY, read_names, read_registry
from fl_lightning.client.store import ClientStore
from fl_lightning.methods import SCAFFOLD
from fl_lightning.runs.folder import CHECKPOINTS, identity_in, newest_first
from fl_lightning.utils.files import read_saved, save_with_digest
from tests.commands import TINY, run_in, say
from tests.toys import toy_data, trainer


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A checkpoint of a fit, and the content without its digest."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert say(f"fit {TINY} --trainer.max_epochs 1 --trainer.callbacks null").code == 0
    path = run_in(folder) / CHECKPOINTS / "last.ckpt"
    content = torch.load(path, weights_only=True)
    del content["digest"]
    return path, content


WRONG = [None, 1, "x", [], {}, 10**30, float("nan"), torch.zeros(2), True]
WHERE = ["", "federated", "federated.store", "federated.store.records", "federated.store.files", "federated.recorder"]
WHERE += ["federated.settings", "federated.transforms", "federated.client", "federated.settings.config", "global_step"]
WHERE += ["federated.recorder.rows", "federated.recorder.pending_round", "state_dict", "federated.initial_personal"]
FITTING = {"federated.settings.config": [{}], "federated.store.records": [{}], "federated.client": [{}]}
FITTING |= {"federated.recorder.rows": [[]], "federated.transforms": [[]], "state_dict": [{}]}
FITTING |= {"federated.initial_personal": [{}], "global_step": [1, 10**30, True]}
FITTING |= {"federated.recorder.pending_round": [None, 1, 10**30, True]}
"""Of the wrong values those that are of the right kind, by place."""


def forged(content, where, value):
    """A copy with another value at a place."""
    if not where:
        return value
    key, _, rest = where.partition(".")
    return {**content, key: forged(content[key], rest, value)}


def test_each_forged_checkpoint_is_broken_with_a_reason_and_checking_goes_on(whole, tmp_path):
    _, content = whole
    names = {}
    right = set()
    for where in WHERE:
        for i, value in enumerate(WRONG):
            name = names[f"{where}-{i}.ckpt"] = tmp_path / f"{where}-{i}.ckpt"
            torch.save(forged(content, where, value), name)
            if any(type(value) is type(fit) and value == fit for fit in FITTING.get(where, [])):
                right.add(name.name)
    said = say(f"check {tmp_path}")
    lines = {line.partition(": ")[0].rpartition("/")[2]: line.partition(": ")[2] for line in said.out.splitlines()}
    assert (said.code, said.err, lines.keys()) == (1, "", names.keys())
    assert {name for name, line in lines.items() if not line.startswith("BROKEN: ")} == right
    assert all(len(line) > len("BROKEN: ") + 10 for line in lines.values())


TABLES = {
    "sparse": torch.zeros(2, 5, dtype=torch.int64).to_sparse(),
    "meta": torch.zeros(2, 5, dtype=torch.int64, device="meta"),
    "endless": torch.zeros(1, 1, dtype=torch.int64).expand(10**12, 5),
    "below 0": -torch.ones(2, 5, dtype=torch.int64),
}


@pytest.mark.parametrize("table", TABLES)
def test_a_forged_table_of_files_is_broken(whole, tmp_path, table):
    torch.save(forged(whole[1], "federated.store.files", TABLES[table]), tmp_path / "a.ckpt")
    said = say(f"check {tmp_path}/a.ckpt")
    assert "BROKEN: the checkpoint's table of client files " in said.out


def deflated(source, target):
    """Write a checkpoint anew, compressed."""
    with zipfile.ZipFile(source) as found, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as new:
        for info in found.infolist():
            new.writestr(info.filename, found.read(info))


def flipped(source, target):
    """Write a checkpoint with one bit of a tensor changed."""
    content = bytearray(source.read_bytes())
    with zipfile.ZipFile(source) as found:
        largest = max(found.infolist(), key=lambda info: info.file_size)
    start = largest.header_offset + 30
    content[start + sum(struct.unpack_from("<2H", content, start - 4)) + largest.file_size // 2] ^= 1
    target.write_bytes(content)


def of_the_old_form(source, target):
    torch.save(torch.load(source, weights_only=True), target, _use_new_zipfile_serialization=False)


@pytest.mark.parametrize("write", [deflated, flipped, of_the_old_form])
@pytest.mark.parametrize("digest", [False, True])
def test_check_says_what_the_reader_does(whole, tmp_path, write, digest):
    source = tmp_path / "source.pt"
    (save_with_digest if digest else torch.save)({**whole[1], **({"digest": "sha256"} if digest else {})}, source)
    path = tmp_path / "a.ckpt"
    write(source, path)
    for mmap in (False, True):
        try:
            read_saved(path, mmap=mmap)
            accepted = True
        except ValueError:
            accepted = False
        assert accepted == (not digest)  # without one a change cannot be told
        assert ("BROKEN" not in say(f"check {path}").out) == accepted


def test_what_is_no_file_is_said_and_not_waited_for(whole, tmp_path, monkeypatch):
    run = tmp_path / "run"
    (run / CHECKPOINTS).mkdir(parents=True)
    for name in ("pipe", "folder", "dangling", "loop"):
        path = run / CHECKPOINTS / f"{name}.ckpt"
        {
            "pipe": os.mkfifo,
            "folder": lambda path: path.mkdir(),
            "dangling": lambda path: path.symlink_to("nowhere"),
            "loop": lambda path: path.symlink_to(path.name),
        }[name](path)
        assert identity_in(path) is None
    save_with_digest({**whole[1], "digest": "sha256"}, run / CHECKPOINTS / "whole.ckpt")
    said = say(f"check {run} {run}/{CHECKPOINTS}/pipe.ckpt {'x' * 5000}")
    assert said.code == 1
    assert [line.partition(": ")[2][:6] == "BROKEN" for line in said.out.splitlines()] == [True] * 4 + [
        False,
        True,
        True,
    ]
    assert [path.name for path in newest_first(run, "*.ckpt")] == ["whole.ckpt"]
    assert read_names(run / CHECKPOINTS / "pipe.ckpt", run / "clients") == frozenset()
    os.mkfifo(run / REGISTRY)
    assert read_registry(run / REGISTRY) is None
    monkeypatch.chdir("/")
    assert "BROKEN: " in say("check no_such.ckpt").out


def test_names_of_files_cannot_speak_to_the_terminal(whole, tmp_path):
    for name in (b"\x1b]0;title\x07\x1b[2J.ckpt", b"two\nlines.ckpt", b"\xff\xfe.ckpt", "\u202egnp.ckpt".encode()):
        (tmp_path / os.fsdecode(name)).write_bytes(b"")
    said = say(f"check {tmp_path}")
    assert len(said.out.splitlines()) == 4
    assert all(letter.isprintable() for letter in said.out if letter != "\n")
    said.out.encode("utf-8")


@pytest.fixture
def with_files(tmp_path):
    """A run folder whose checkpoint names the files of its clients."""
    run = trainer(1, tmp_path)
    loop = FederatedLoop(SCAFFOLD(), store=ClientStore(memory_budget_mb=0, folder=tmp_path / "clients"))
    run.fit(loop, datamodule=toy_data())
    path = tmp_path / CHECKPOINTS / "at.ckpt"
    run.save_checkpoint(path)
    return path, sorted((tmp_path / "clients").glob("*.safetensors"))


def test_files_of_clients_are_checked_with_the_checkpoint(with_files):
    path, files = with_files
    assert len(files) == 5
    assert examined(path) == "whole, 1 round, 5 files of clients whole"


@pytest.mark.parametrize("position", [0, -1])
def test_an_altered_file_of_a_client_is_broken(with_files, position):
    path, files = with_files
    content = bytearray(files[2].read_bytes())
    content[position] ^= 1
    files[2].write_bytes(content)
    said = say(f"check {path}")
    assert said.code == 1
    assert f"BROKEN: the file {files[2]} of client 2 was altered" in said.out


def test_a_missing_file_of_a_client_is_broken(with_files):
    path, files = with_files
    files[4].unlink()
    said = say(f"check {path}")
    assert said.code == 1
    assert f"BROKEN: the file {files[4].name} of client 4 is not in" in said.out
    (path.parent.parent / "clients").rename(path.parent.parent / "elsewhere")
    assert examined(path) == "whole, 1 round, 5 files of clients not beside it, so not checked"
