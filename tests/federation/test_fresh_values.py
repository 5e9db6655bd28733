"""EarlyStopping looks at every value once, ModelCheckpoint in its own round, whichever rounds measure it."""

import re

import pytest
from pytorch_lightning.callbacks import EarlyStopping, ModelCheckpoint
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from fl_lightning import FederatedLoop
from fl_lightning.methods import DPFedAvg, FedAvg
from fl_lightning.monitors import CostMonitor, DriftMonitor
from fl_lightning.runs.best import BestCheckpoint
from fl_lightning.runs.loggers import RoundCSVLogger
from tests.toys import BatchNormNet, sgd, toy_data, trainer

pytestmark = pytest.mark.filterwarnings("ignore")
KEYS = {
    "local/alma": {"evaluate_clients_every": 2},
    "global/acc": {"check_val_every_n_epoch": 2},
    "train/ce": {},
    "local/drift": {"monitor": DriftMonitor(every=3)},
    "cost/memory": {"monitor": CostMonitor(every=2)},
}


class Watch(EarlyStopping):
    """Keeps the values that it looks at."""

    def __init__(self, monitor, **settings):
        super().__init__(monitor, mode="max", min_delta=1e12, **settings)
        self.seen = []

    def _evaluate_stopping_criteria(self, current):
        self.seen.append(float(current))
        return super()._evaluate_stopping_criteria(current)


def run(key, watch, folder, rounds=7, ckpt_path=None, first=False):
    settings = dict(KEYS[key])
    monitor = [settings.pop("monitor")] if "monitor" in settings else []
    every = settings.pop("evaluate_clients_every", None)
    loop = FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), seed=3, evaluate_clients_every=every)
    callbacks = [watch, *monitor] if first else [*monitor, watch]
    callbacks.append(ModelCheckpoint(folder, filename="last", enable_version_counter=False))
    fitted = trainer(
        rounds,
        callbacks=callbacks,
        enable_checkpointing=True,
        logger=RoundCSVLogger(folder),
        log_every_n_steps=1,
        **settings,
    )
    fitted.fit(loop, datamodule=toy_data((8, 12, 5)), ckpt_path=ckpt_path)
    return loop


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("first", [True, False])
def test_every_value_is_looked_at_once(key, first, tmp_path):
    watch = Watch(key, patience=99)
    loop = run(key, watch, tmp_path, first=first)
    curve = list(loop.recorder.history.curve(key).values())
    if key == "cost/memory":  # may be the same in every round
        assert len(watch.seen) == len(curve) - first * (7 % 2 == 0)
        return
    assert watch.seen == pytest.approx(curve)
    assert "on_train_epoch_end" not in vars(watch)


@pytest.mark.parametrize(("key", "rounds"), [("local/alma", 4), ("global/acc", 4), ("train/ce", 2), ("local/drift", 6)])
def test_patience_counts_values(key, rounds, tmp_path):
    loop = run(key, Watch(key, patience=1), tmp_path)
    assert loop.recorder.trained_rounds == rounds


@pytest.mark.parametrize("cut", [2, 3])
def test_a_run_that_goes_on_counts_as_one_that_was_not_stopped(cut, tmp_path):
    whole = Watch("local/alma", patience=99)
    run("local/alma", whole, tmp_path / "whole")
    parts = [Watch("local/alma", patience=99) for _ in range(2)]
    run("local/alma", parts[0], tmp_path / "part", rounds=cut)
    run("local/alma", parts[1], tmp_path / "part", ckpt_path=tmp_path / "part" / "last.ckpt")
    assert parts[0].seen + parts[1].seen == whole.seen
    assert parts[1].wait_count == whole.wait_count


class Saved(ModelCheckpoint):
    """Keeps the checkpoints of the rounds that it looks at, by their values."""

    def __init__(self, folder, monitor, **settings):
        super().__init__(folder, filename="{epoch}-of", monitor=monitor, mode="max", **settings)

    @property
    def rounds(self):
        """The saved rounds, with their values."""
        found = {}
        for path, value in self.best_k_models.items():
            found[int(re.search(r"epoch=(\d+)", path)[1])] = float(value)
        return dict(sorted(found.items()))


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("at_the_end", [None, True, False])
def test_a_checkpoint_is_saved_by_a_value_of_its_own_round(key, at_the_end, tmp_path):
    saved = Saved(tmp_path, key, save_top_k=99, save_on_train_epoch_end=at_the_end)
    loop = run(key, saved, tmp_path)
    assert saved.rounds == pytest.approx(loop.recorder.history.curve(key), rel=1e-6)
    assert "on_train_epoch_end" not in vars(saved)


@pytest.mark.parametrize("key", ["local/alma", "global/acc", "local/drift"])
def test_the_best_two_are_rounds_with_values(key, tmp_path):
    saved = Saved(tmp_path, key, save_top_k=2)
    curve = run(key, saved, tmp_path).recorder.history.curve(key)
    assert saved.rounds.keys() <= curve.keys()
    best = sorted(curve.values())[-min(2, len(curve)) :]
    assert sorted(saved.rounds.values()) == pytest.approx(best, rel=1e-6)
    assert {f"epoch={round_idx}-of.ckpt" for round_idx in saved.rounds} == {p.name for p in tmp_path.glob("epoch=*")}


@pytest.mark.parametrize("cut", [2, 3])
def test_a_run_that_goes_on_saves_as_one_that_was_not_stopped(cut, tmp_path):
    whole = Saved(tmp_path / "whole", "local/alma", save_top_k=99)
    run("local/alma", whole, tmp_path / "whole")
    parts = [Saved(tmp_path / "part", "local/alma", save_top_k=99) for _ in range(2)]
    run("local/alma", parts[0], tmp_path / "part", rounds=cut)
    run("local/alma", parts[1], tmp_path / "part", ckpt_path=tmp_path / "part" / "last.ckpt")
    assert parts[1].rounds == whole.rounds


@pytest.mark.parametrize("key", ["epoch", "step", None])
def test_what_is_no_value_of_a_round_is_saved_every_round(key, tmp_path):
    saved = Saved(tmp_path, key, save_top_k=-1)
    run("local/alma", saved, tmp_path, rounds=3)
    assert len(list(tmp_path.glob("epoch=*"))) == 3


def test_a_checkpoint_without_a_value_is_refused_by_lightning(tmp_path, monkeypatch):
    monkeypatch.setitem(KEYS, "local/alam", KEYS["local/alma"])
    with pytest.raises(MisconfigurationException, match="could not find the monitored key"):
        run("local/alam", Saved(tmp_path, "local/alam"), tmp_path)


def test_a_value_that_nobody_logs_is_refused_by_lightning(tmp_path, monkeypatch):
    monkeypatch.setitem(KEYS, "local/alam", KEYS["local/alma"])
    with pytest.raises(RuntimeError, match="conditioned on metric `local/alam` which is not available"):
        run("local/alam", Watch("local/alam"), tmp_path)


def test_a_callback_of_a_fit_that_failed_watches_the_next_fit(tmp_path):
    """Nothing ends a fit that fails, so the next one gives the callback its hooks back."""

    class Fails(FedAvg):
        def training_step(self, batch, batch_idx):
            if self.current_epoch == 1:
                raise RuntimeError("planned")
            return super().training_step(batch, batch_idx)

    watch = Watch("global/acc", patience=99)
    with pytest.raises(RuntimeError, match="planned"):
        trainer(2, callbacks=[watch]).fit(
            FederatedLoop(Fails(net=BatchNormNet, optimizer=sgd()), seed=3), datamodule=toy_data((8, 12, 5))
        )
    trainer(3, callbacks=[watch]).fit(
        FederatedLoop(FedAvg(net=BatchNormNet, optimizer=sgd()), seed=3), datamodule=toy_data((8, 12, 5))
    )
    assert len(watch.seen) == 1 + 3


@pytest.mark.parametrize("mark", ["", "unprotected/"])
@pytest.mark.parametrize("name", ["EarlyStopping", "ModelCheckpoint", "BestCheckpoint"])
def test_a_value_of_a_private_run_is_watched_under_its_plain_name(name, mark, tmp_path):
    """One place gives the values of a private run both names, so that every callback finds them."""
    key = f"{mark}local/alma"
    watch = {
        "EarlyStopping": Watch(key, patience=99),
        "ModelCheckpoint": ModelCheckpoint(
            tmp_path, filename="mine", monitor=key, mode="max", save_on_train_epoch_end=True
        ),
        "BestCheckpoint": BestCheckpoint(tmp_path, filename="mine", monitor=key),
    }[name]
    private = DPFedAvg(noise_multiplier=1.0, delta=0.01, clip=0.5)
    client = FedAvg(net=BatchNormNet, optimizer=sgd())
    loop = FederatedLoop(client, aggregator=private, seed=3, evaluate_clients_every=1)
    fitted = trainer(3, tmp_path, callbacks=[watch], enable_checkpointing=True)
    fitted.fit(loop, datamodule=toy_data((8, 12, 5), sampling="poisson", participation=0.9))
    curve = list(loop.recorder.history.curve("local/alma").values())
    assert loop.recorder.history.names.count("unprotected/local/alma") == 1
    assert "local/alma" not in loop.recorder.history.names
    if name == "EarlyStopping":
        assert watch.seen == pytest.approx(curve)
    else:
        assert float(watch.best_model_score) == pytest.approx(max(curve))
