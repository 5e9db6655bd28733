"""Which folder a run gets, and which checkpoint a user means."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from fl_lightning.federation.recorder import Recorder
from fl_lightning.runs.checkpoints import INDEX
from fl_lightning.runs.folder import (
    discard,
    find_checkpoint,
    first_round,
    locked,
    new_run,
    parent_of,
    rounds_kept,
    run_of,
    stem_of,
    take,
)
from fl_lightning.utils.files import lock_path

LAST = "checkpoints/last.ckpt"


def checkpoint(run, name="last.ckpt", pending_round=None, config=()):
    path = run / "checkpoints" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    federated = {
        "store": {"records": {}, "files": torch.empty(0, 5, dtype=torch.int64)},
        "initial_personal": {},
        "recorder": Recorder().state_dict() | {"pending_round": pending_round},
        "transforms": [],
        "client": {},
        "settings": {"config": dict(config), "objects": {}},
    }
    torch.save({"global_step": 3, "state_dict": {}, "federated": federated}, path)
    (run / "config.yaml").touch()
    return path


def test_every_run_gets_the_next_number(tmp_path):
    assert [new_run(tmp_path / "a").name for _ in range(3)] == ["0", "1", "2"]
    (tmp_path / "a" / "11").mkdir()
    (tmp_path / "a" / "notes").mkdir()
    assert new_run(tmp_path / "a").name == "12"


def test_runs_at_a_time_get_a_number_each(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: new_run(tmp_path, f"-seed{i}"), range(24)))
    assert sorted(int(run.name.partition("-")[0]) for run in found) == list(range(24))


def test_a_locked_folder_is_waited_for_unless_a_sentence_refuses_it(tmp_path):
    order = []

    def second():
        with locked(tmp_path):
            order.append("second")

    with ThreadPoolExecutor(1) as pool:
        with locked(tmp_path):
            waiting = pool.submit(second)
            time.sleep(0.2)
            assert not waiting.done()
            order.append("first")
            with pytest.raises(ValueError, match="somebody writes here"), locked(tmp_path, "somebody writes here"):
                pass
        waiting.result(timeout=10)
    assert order == ["first", "second"]


def test_a_folder_has_one_writer(tmp_path):
    held = take(tmp_path)
    with pytest.raises(ValueError, match=r"has one writer, and .* is in use by another process; wait"):
        take(tmp_path)
    os.close(held)
    os.close(take(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_killed_process_leaves_no_lock(tmp_path):
    held, told = os.pipe()
    child = os.fork()
    if not child:
        lock_path(tmp_path)
        os.write(told, b"held")
        signal.pause()
    assert os.read(held, 4) == b"held"
    try:
        with pytest.raises(ValueError, match="one writer"):
            take(tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    os.close(held)
    os.close(told)
    os.close(take(tmp_path))


@pytest.mark.parametrize("name", ["clients", "CHANGES", "checkpoints"])
def test_a_link_that_leads_out_of_a_run_is_refused(tmp_path, name):
    run = new_run(tmp_path / "runs")
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "client_0_round_0_0123456789ab.safetensors").touch()
    (run / name).symlink_to(mine)
    with pytest.raises(ValueError, match=rf"{name} leads to .*mine; remove that link"):
        take(run)
    assert len(list(mine.iterdir())) == 1
    (run / name).unlink()
    (run / "a").mkdir()
    (run / name).symlink_to(run / "a")
    os.close(take(run))


def test_what_a_killed_run_left_is_collected(tmp_path):
    for name in ("metrics.csv", "metrics.csv.7.part", "checkpoints/last.ckpt.7.part", "clients/notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    orphan = tmp_path / "clients/client_9_round_1_0123456789ab.safetensors"
    orphan.touch()
    checkpoint(tmp_path)
    os.close(take(tmp_path))
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"metrics.csv", "checkpoints/last.ckpt", "clients/notes.txt", "config.yaml"}
    orphan.touch()
    (tmp_path / LAST).write_bytes(b"broken: it may need any of them")
    os.close(take(tmp_path))
    assert orphan.exists()


def test_only_the_first_process_of_a_run_makes_or_removes_folders(tmp_path, monkeypatch):
    monkeypatch.setattr("pytorch_lightning.utilities.rank_zero_only.rank", 1)
    run = new_run(tmp_path)
    assert run == tmp_path
    discard(run)
    assert list(tmp_path.iterdir()) == []
    assert tmp_path.is_dir()


def test_discard_removes_the_run_and_nothing_else(tmp_path):
    first = new_run(tmp_path / "a")
    second = new_run(tmp_path / "a")
    discard(second)
    assert first.is_dir()
    assert not second.exists()
    discard(first)
    assert list(tmp_path.iterdir()) == []


def test_last_is_that_of_the_newest_run_that_has_one(tmp_path):
    runs = [new_run(tmp_path) for _ in range(11)]
    checkpoint(runs[2])
    wanted = checkpoint(runs[9])
    assert find_checkpoint("last", tmp_path, {}) == wanted


def test_last_is_that_of_the_newest_run_with_the_same_settings(tmp_path):
    for lr in (0.1, 0.2, 0.1, 0.3):
        checkpoint(new_run(tmp_path, f"-lr={lr}"), config={"model.lr": lr, "model.x": 1})
    for lr, number in ((0.1, 2), (0.2, 1), (0.3, 3), (0.4, 3)):
        found = find_checkpoint("last", tmp_path, {"model": {"lr": lr, "threads": 4}})
        assert found.parent.parent.name.startswith(f"{number}-"), lr


def test_best_is_the_newest_of_its_run(tmp_path):
    run = new_run(tmp_path)
    old = checkpoint(run, "best-v1.ckpt")
    new = checkpoint(run, "best-on-test.ckpt")
    os.utime(old, (1, 1))
    checkpoint(run)
    assert find_checkpoint("best", tmp_path, {}) == new


@pytest.mark.parametrize("content", [b"", b"broken off"])
def test_a_last_that_cannot_be_read_is_replaced_by_the_newest_that_can(tmp_path, content, caplog):
    run = new_run(tmp_path)
    last, best, older = (checkpoint(run, f"{name}.ckpt") for name in ("last", "best", "older"))
    os.utime(older, (1, 1))
    last.write_bytes(content)
    with caplog.at_level("INFO"):
        assert find_checkpoint("last", tmp_path, {}) == best
    assert f"{last} cannot be read; the run continues from {best}" in caplog.text
    best.write_bytes(content)
    older.write_bytes(content)
    with pytest.raises(ValueError, match=r"no checkpoint in .* can be read"):
        find_checkpoint("last", tmp_path, {})


@pytest.mark.parametrize("asked", ["last", "best"])
def test_without_a_run_there_is_no_last(tmp_path, asked):
    new_run(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"--ckpt_path {asked} needs a run in .* there is none; leave"):
        find_checkpoint(asked, tmp_path, {})


def test_a_file_is_taken_as_it_is(tmp_path):
    path = checkpoint(tmp_path / "elsewhere")
    assert find_checkpoint(str(path), tmp_path, {}) == path
    with pytest.raises(FileNotFoundError, match=r"must be last, best or a checkpoint file, got no\.ckpt"):
        find_checkpoint("no.ckpt", tmp_path, {})


def test_a_checkpoint_belongs_to_the_run_around_it(tmp_path):
    path = checkpoint(tmp_path / "a" / "3")
    parent = tmp_path / "a"
    assert run_of(path, parent) == (parent / "3").resolve()
    loose = tmp_path / "loose.ckpt"
    loose.touch()
    assert run_of(loose, parent) is None
    (parent / "3" / INDEX).write_text(json.dumps({"last": str(loose)}))
    assert run_of(loose, parent) == parent / "3"


@pytest.mark.parametrize(("pending_round", "first"), [(None, 3), (2, 2)])
def test_the_first_round_is_the_one_whose_row_is_not_written(tmp_path, pending_round, first):
    assert first_round(checkpoint(tmp_path, pending_round=pending_round)) == first


def test_a_damaged_checkpoint_and_a_foreign_one_are_refused(tmp_path):
    path = checkpoint(tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"last.ckpt cannot be read as a checkpoint .* give another one"):
        first_round(path)
    torch.save({"state_dict": {}}, path)
    with pytest.raises(ValueError, match=r"must be a checkpoint of a federation, .* set model.initial_weights"):
        first_round(path)


def test_a_run_is_called_after_its_experiment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "digits" / "4"
    checkpoint(run)
    assert stem_of([run / "config.yaml"]) == "digits"
    monkeypatch.chdir(run)
    assert stem_of(["config.yaml"]) == "digits"
    assert stem_of(["../../../mine.yaml"]) == "mine"


# --- where the runs of a file lie ---


@pytest.fixture
def experiment(tmp_path, monkeypatch):
    """The folder of an experiment with one cell and its run, beside the working folder."""
    cell = tmp_path / "grid" / "cells" / "FedAvg-seed0.yaml"
    cell.parent.mkdir(parents=True)
    cell.write_text("{}")
    written = tmp_path / "grid" / "runs" / "FedAvg-seed0" / "0" / "config.yaml"
    written.parent.mkdir(parents=True)
    written.write_text("{}")
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return cell, written


@pytest.mark.parametrize("root", [None, "elsewhere"])
@pytest.mark.parametrize("others", [[], ["more.yaml"], ["trainer/cpu.yaml", "more.yaml"]])
def test_a_file_of_a_run_is_known_in_any_folder_and_with_further_files(experiment, root, others):
    for path in experiment:
        for place in range(len(others) + 1):
            configs = [*others[:place], os.path.relpath(path), *others[place:]]
            assert parent_of(configs, root, begins=False) == experiment[1].parent.parent
            begun = parent_of(configs, root, begins=True)
            assert begun.parent == Path(root or "runs")
            if others or path == experiment[1]:
                begun.mkdir(parents=True, exist_ok=True)
                assert parent_of(configs, root, begins=False) == begun, "a new run of these files is here"
                begun.rmdir()


def test_files_of_two_runs_belong_to_none_of_them(experiment):
    other = experiment[0].with_name("FedProx-seed0.yaml")
    (experiment[1].parents[2] / other.stem).mkdir()
    assert parent_of([experiment[0], other], None, begins=False).parent == Path("runs")


def test_the_rounds_that_a_run_keeps_are_those_of_a_checkpoint_else_of_its_table(tmp_path):
    run = new_run(tmp_path)
    assert rounds_kept(run) == 0
    (run / "metrics.csv").write_text("round,global/acc\n0,0.5\n1,0.6\n")
    assert rounds_kept(run) == 2
    path = checkpoint(run)
    assert rounds_kept(run) == first_round(path) == 3
    path.write_bytes(b"broken off")
    assert rounds_kept(run) == 2
