"""A user's module and data see a world of one process, so that the clients do not depend on the number of processes."""

import copy
import json
import pickle
from pathlib import Path

import pytest
import pytorch_lightning as pl

from fl_lightning.utils.trainer_view import ALONE, TrainerView, view_of
from tests.processes.alone import DEVICES
from tests.processes.forked import run_script
from tests.toys import trainer

SCRIPT = Path(__file__).with_name("alone.py")
ONE = [1, 0, 1, 1]
TOGETHER = ("on_validation", "validation_step", "on_test", "test_step", "on_predict", "predict_step")
ENDS = ("on_train_end", "on_fit_end", "teardown")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What every rank has seen, by (processes, rank)."""
    folder = tmp_path_factory.mktemp("alone")
    seen = {}
    for devices in (1, DEVICES):
        done = run_script(SCRIPT, str(folder), str(devices), cwd=folder, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        for rank in range(devices):
            seen[devices, rank] = json.loads((folder / f"{devices}-{rank}.json").read_text())
    return seen


@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning.pytorch"])
def test_what_clients_are_made_by_does_not_depend_on_the_processes(found, package):
    alone = found[1, 0][package]
    for rank in range(DEVICES):
        assert found[DEVICES, rank][package]["weights"] == alone["weights"]
        # Metric objects have float32 states, whose sums depend on their order.
        row = found[DEVICES, rank][package]["row"]
        assert {"train/mae", "train/f1"} <= row.keys()
        assert row == alone["row"]


@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning.pytorch"])
@pytest.mark.parametrize("rank", range(DEVICES))
def test_every_hook_sees_one_process_unless_all_processes_act_together(found, package, rank):
    alone = found[1, 0][package]
    seen = found[DEVICES, rank][package]
    assert {"setup", "configure_model", "training_step", "on_train_epoch_start", "on_fit_start"} <= seen[
        "module"
    ].keys()
    for name, worlds in seen["module"].items():
        together = name.startswith((*TOGETHER, *ENDS))
        assert all(world == ([DEVICES, rank, 1, DEVICES] if together else ONE) for world in worlds), (name, worlds)
    for name, worlds in seen["data"].items():
        assert all(world == ONE for world in worlds), name
    for name, worlds in {**alone["module"], **alone["data"]}.items():
        assert all(world == ONE for world in worlds), name


# --- the view itself ---


def test_a_view_is_the_trainer_in_everything_else():
    run = trainer(3, devices=2, strategy="client_parallel_spawn")
    view = view_of(run)
    assert isinstance(view, pl.Trainer)
    assert {name: getattr(view, name) for name in ALONE} == ALONE
    assert view.max_epochs == 3
    assert view.strategy is run.strategy
    view.should_stop = True
    assert run.should_stop
    with pytest.raises(AttributeError, match="cannot be set by a module"):
        view.world_size = 3
    copied = copy.deepcopy(view, {id(run): run})
    assert isinstance(copied, TrainerView)
    assert copied.strategy is run.strategy


def test_a_view_can_be_pickled():
    view = pickle.loads(pickle.dumps(TrainerView(ALONE, {"world_size": 7})))
    assert view.world_size == 7


def test_a_run_of_one_process_has_no_view():
    run = trainer(1)
    assert view_of(run) is run
    assert view_of(None) is None
