"""One evaluated model: all places that evaluate, export or deploy the global model use the same entries.

The reference is `client.ckpt`, read into a client without a federation. Every other place must give the values of this
client. The methods and rules that evaluate other weights than the global ones are found by their classes.
"""

import ast
import inspect
from functools import partial
from pathlib import Path
from pkgutil import resolve_name, walk_packages
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.callbacks.weight_averaging import EMAWeightAveraging, WeightAveraging
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torchmetrics.classification import MulticlassAccuracy

import fl_lightning
from fl_lightning import Aggregator, ClientModule, FederatedLoop
from fl_lightning.aggregation import QSGD, ServerModule
from fl_lightning.aggregation.server_parts import ServerPart
from fl_lightning.callbacks import ClasswiseReport, ClientCheckpoint, SavePredictions
from fl_lightning.client.hooks import overridden
from fl_lightning.methods import FedAvg, FedDyn, FedEXPAggregator, FedRep
from fl_lightning.monitors import FeatureProbe, GroupMetrics, LossLandscape, NeuronActivations
from tests.hooks.test_aggregators import LastTwo
from tests.toys import BatchNormNet, equal, sgd, toy_data, trainer, weights_of

pytestmark = pytest.mark.filterwarnings("ignore")
GROUPS = {"first": [0], "others": [1, 2, 3], "all": [0, 1, 2, 3]}
ROUNDS = 3
EVERY_ROUND = {"CCVRServer": {"every": 1}}
"""Settings with which a server module evaluates other weights in every round."""


def all_classes(base: type) -> list[type]:
    """Return the classes of the package that derive from a base, without abstract ones."""
    for module in walk_packages(fl_lightning.__path__, "fl_lightning."):
        if not module.name.startswith(("fl_lightning.flower", "fl_lightning.experiments")):
            resolve_name(module.name)
    found: list[type] = []
    remaining = [base]
    while remaining:
        kind = remaining.pop()
        remaining += kind.__subclasses__()
        if kind.__module__.startswith("fl_lightning.") and not inspect.isabstract(kind) and kind not in found:
            found.append(kind)
    return sorted(found, key=lambda kind: kind.__name__)


def choices(kind: type) -> list[dict[str, object]]:
    """Return no arguments, and then each other value of each argument that is a choice or a truth value."""
    found: list[dict[str, object]] = [{}]
    hints = get_type_hints(kind.__init__)
    for name in inspect.signature(kind.__init__).parameters:
        hint = hints.get(name)
        values = get_args(hint) if get_origin(hint) is Literal else ()
        found += [{name: value} for value in ((True, False) if hint is bool else values)]
    return found


def client_of(**settings: object) -> ClientModule:
    return FedAvg(net=BatchNormNet, optimizer=sgd(), **settings)


def averaging_loops() -> dict[str, object]:
    """Return by name a function that makes a loop, for every part that may evaluate other weights."""
    made: dict[str, object] = {"LastTwo": lambda **more: FederatedLoop(client_of(), LastTwo(), seed=3, **more)}
    for rule in all_classes(Aggregator):
        if not overridden(rule, "evaluation_weights", ServerPart):
            continue
        settings = next(chosen for chosen in choices(rule) if rule(**chosen).averages)
        made[rule.__name__] = lambda rule=rule, chosen=settings, **more: FederatedLoop(
            client_of(), rule(**chosen), seed=3, **more
        )
    for client in all_classes(ClientModule):
        if not overridden(client.server_class, "evaluation_weights", ServerPart):
            continue
        for chosen in choices(client):

            def make(client=client, chosen=chosen, **more):
                return FederatedLoop(client(net=BatchNormNet, optimizer=sgd(), **chosen), seed=3, **more)

            loop = make()
            trainer(0).fit(loop, datamodule=data_of())
            if loop.server_module.averages:
                made[client.__name__] = make
                break
        else:
            raise AssertionError(f"no setting of {client.__name__} evaluates other weights")
    for part in parts_around_any_client():
        made[part.__name__] = lambda part=part, **more: FederatedLoop(
            client_of(), server_module=part(**EVERY_ROUND[part.__name__]), seed=3, **more
        )
    return made


def parts_around_any_client() -> list[type]:
    """Return the server modules that may evaluate other weights, and are no side of a method's clients."""
    own_sides = {client.server_class for client in all_classes(ClientModule)}
    parts = all_classes(ServerModule)
    return [part for part in parts if part not in own_sides and overridden(part, "evaluation_weights", ServerPart)]


def without_pictures(monkeypatch) -> None:
    """Draw no picture of the landscape, which takes most of the time."""
    for name in ("save", "plot_landscape"):
        monkeypatch.setattr(f"fl_lightning.monitors.landscape.{name}", lambda *_, **__: None)


def data_of():
    return toy_data((8, 12, 5, 9))


LOOPS = averaging_loops()
CASES = {name: (make, []) for name, make in LOOPS.items()}
CASES["FedAvg"] = (lambda **more: FederatedLoop(client_of(), seed=3, **more), [])


class BySteps(WeightAveraging):
    """Averages all rounds from the second on, as Lightning's documentation shows for steps."""

    def should_update(self, step_idx=None, epoch_idx=None):
        return step_idx is not None and step_idx >= 1


class ByEpochs(WeightAveraging):
    """Averages all rounds from the second on, as Lightning's documentation shows for epochs."""

    def should_update(self, step_idx=None, epoch_idx=None):
        return epoch_idx is not None and epoch_idx >= 1


class AtItsEnd(ByEpochs):
    """Does something of its own at the end of an epoch."""

    def __init__(self):
        super().__init__()
        self.epochs = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.epochs.append(trainer.current_epoch)
        super().on_train_epoch_end(trainer, pl_module)


def ema(**settings):
    return partial(EMAWeightAveraging, decay=0.5, **settings)


AVERAGES = {
    "EMA": ema(),
    "EMA, every second step": ema(update_every_n_steps=2),
    "EMA, from a step": ema(update_starting_at_step=1),
    "EMA, from an epoch": ema(update_starting_at_epoch=1),
    "EMA, by epochs": ema(update_every_n_steps=0, update_starting_at_epoch=0),
    "EMA, by steps": BySteps,
    "EMA, by epochs of a user": ByEpochs,
    "EMA, at its own end": AtItsEnd,
}
for name, average in AVERAGES.items():
    CASES[name] = (CASES["FedAvg"][0], [average])
CASES["EMA, personal"] = (
    lambda **more: FederatedLoop(FedRep(net=BatchNormNet, optimizer=sgd()), seed=3, **more),
    [ema()],
)


def test_the_parts_that_average_are_found():
    assert {"FedEXPAggregator", "FedDyn", "CCVRServer"} <= LOOPS.keys()
    for part in all_classes(ServerModule):
        if overridden(part, "evaluation_weights", ServerPart) and part not in parts_around_any_client():
            assert any(client.server_class is part for client in all_classes(ClientModule)), part


class Reference:
    """The model of `client.ckpt`, evaluated by hand.

    Args:
        path: The file.
        loop: A loop with a client of the same kind.
        data: The data.
    """

    def __init__(self, path: Path, loop: FederatedLoop, data) -> None:
        self.client = type(loop.client)(net=BatchNormNet, optimizer=sgd())
        self.client.build(3, (4,))
        self.state = torch.load(path, weights_only=False)["state_dict"]
        self.client.load_state_dict(self.state)
        self.client.eval()
        self.x, self.y = data.split("test").all()
        with torch.no_grad():
            self.logits = self.client(self.x)

    def acc(self, positions=slice(None)) -> float:
        return float((self.logits[positions].argmax(1) == self.y[positions]).double().mean())

    @property
    def loss(self) -> float:
        return float(F.cross_entropy(self.logits, self.y))


def fitted(name: str, folder: Path, rounds: int = ROUNDS, **settings):
    """Fit a case with everything that exports or measures the global model."""
    make, averaging = CASES[name]
    loop = make(evaluate_clients_every=1, **settings)
    callbacks = [average() for average in averaging]
    monitors = [
        GroupMetrics(GROUPS, {"accuracy": MulticlassAccuracy(3, average="micro")}, dirpath=folder),
        LossLandscape(samples=None, every=1, iterations=2, grid=3, repeats=1, dirpath=folder),
        FeatureProbe(samples=None, every=1, plot=False, dirpath=folder),
        NeuronActivations(dirpath=folder),
        ClientCheckpoint(folder),
        ClasswiseReport(folder),
        SavePredictions(folder),
        ModelCheckpoint(folder, filename="last", enable_version_counter=False),
    ]
    run = trainer(rounds, callbacks=[*callbacks, *monitors], enable_checkpointing=True, default_root_dir=folder)
    data = data_of()
    run.fit(loop, datamodule=data)
    return loop, data


def passes(loop, data, folder: Path, *, ckpt_path=None, run=None) -> dict[str, float]:
    """Return the values of validate and test, and of the logits that predict gives and writes."""
    found = {}
    run = run or trainer(0, callbacks=[SavePredictions(folder)])
    found |= run.validate(loop, datamodule=data, ckpt_path=ckpt_path, verbose=False)[0]
    found |= run.test(loop, datamodule=data, ckpt_path=ckpt_path, verbose=False)[0]
    logits = torch.cat(run.predict(loop, datamodule=data, ckpt_path=ckpt_path))
    assert torch.equal(torch.load(folder / "predictions.pt", weights_only=False), logits)
    y = data.split("test").all()[1]
    found["predict/acc"] = float((logits.argmax(1) == y).double().mean())
    found["predict/loss"] = float(F.cross_entropy(logits, y))
    return found


@pytest.mark.parametrize("name", CASES)
def test_all_places_evaluate_one_model(name, tmp_path, monkeypatch):
    without_pictures(monkeypatch)
    loop, data = fitted(name, tmp_path)
    reference = Reference(tmp_path / "client.ckpt", loop, data)
    row = loop.round_metrics
    averages = name != "FedAvg"
    if averages and "EMA" not in name:  # after a fit the averages of a callback are the model
        raw = {name.removeprefix("client."): value for name, value in weights_of(loop).items()}
        assert any(not torch.equal(raw[name], value) for name, value in reference.state.items())

    assert row["global/acc"] == pytest.approx(reference.acc(), abs=1e-9)
    assert row["global/loss"] == pytest.approx(reference.loss, rel=1e-5)
    indices = [data.client_indices("test", client_id) for client_id in range(4)]
    for group, clients in GROUPS.items():
        positions = torch.cat([torch.as_tensor(indices[client_id]) for client_id in clients])
        assert row[f"global/accuracy/{group}"] == pytest.approx(reference.acc(positions), abs=1e-6)
    if not loop.global_weights.personal:
        own = [reference.acc(torch.as_tensor(positions)) for positions in indices if len(positions)]
        assert row["local/alma"] == pytest.approx(np.mean(own), abs=1e-9)

    at = f"{ROUNDS - 1:05d}"
    landscape = np.load(tmp_path / f"landscape-{at}-global.npz")
    assert landscape["noise_loss"][0, 0] == pytest.approx(reference.loss, rel=1e-5)
    features = np.load(tmp_path / f"features-{at}.npz")
    with torch.no_grad():
        expected = reference.client.features(reference.x)
    aggregate = features["features"][list(features["models"]).index("aggregate")]
    np.testing.assert_allclose(aggregate, expected.numpy(), rtol=1e-4, atol=1e-5)

    def check(found):
        assert len({round(value, 6) for key, value in found.items() if key.endswith("/acc")}) == 1
        for key in ("global/acc", "test/acc", "predict/acc"):
            assert found[key] == pytest.approx(reference.acc(), abs=1e-6)
        for key in ("global/loss", "test/loss", "predict/loss"):
            assert found[key] == pytest.approx(reference.loss, rel=1e-5)

    # First with the Trainer of the fit, whose callbacks may have averages of their own.
    check(passes(loop, data, tmp_path, run=loop.trainer))
    for _ in range(2):
        check(passes(loop, data, tmp_path, ckpt_path=tmp_path / "last.ckpt", run=loop.trainer))
    check(passes(loop, data, tmp_path))
    fresh = CASES[name][0]()
    check(passes(fresh, data_of(), tmp_path, ckpt_path=tmp_path / "last.ckpt"))


@pytest.mark.parametrize("name", LOOPS)
def test_the_training_does_not_depend_on_what_is_looked_at(name, tmp_path, monkeypatch):
    without_pictures(monkeypatch)
    watched, _ = fitted(name, tmp_path)
    plain = CASES[name][0]()
    trainer(ROUNDS).fit(plain, datamodule=data_of())
    assert equal(weights_of(watched), weights_of(plain))


@pytest.mark.parametrize("name", AVERAGES)
def test_averaged_training_is_not_disturbed_by_what_is_looked_at(name, tmp_path, monkeypatch):
    without_pictures(monkeypatch)
    watched, _ = fitted(name, tmp_path)
    plain = CASES[name][0]()
    trainer(ROUNDS, callbacks=[AVERAGES[name]()]).fit(plain, datamodule=data_of())
    assert equal(weights_of(watched), weights_of(plain))


@pytest.mark.parametrize("name", AVERAGES)
def test_the_averages_are_those_of_the_rounds(name):
    """A part of Lightning's own average is fed with the same weights, at the same steps and epochs."""
    models = []

    class Models(pl.Callback):
        def on_train_batch_end(self, trainer, loop, *_):
            models.append({key: value.clone() for key, value in loop.client.state_dict().items()})

    watched = CASES[name][0]()
    trainer(ROUNDS, callbacks=[AVERAGES[name](), Models()]).fit(watched, datamodule=data_of())
    chosen = AVERAGES[name]()
    average = CASES[name][0]()
    trainer(0).fit(average, datamodule=data_of())
    averaged = AveragedModel(average.client, use_buffers=True, **chosen._kwargs)
    for round_idx, state in enumerate(models):
        average.client.load_state_dict(state)
        if chosen.should_update(step_idx=round_idx):
            averaged.update_parameters(average.client)
        if chosen.should_update(epoch_idx=round_idx):
            averaged.update_parameters(average.client)
    assert equal(dict(watched.client.state_dict()), dict(averaged.module.state_dict()))


HOOKS = (
    "on_train_batch_end",
    "on_validation_start",
    "on_validation_epoch_end",
    "on_validation_end",
    "on_train_epoch_end",
)


class SavedIn(pl.Callback):
    """Saves a checkpoint of the second round in each of `HOOKS`."""

    def __init__(self, folder):
        for hook in HOOKS:
            setattr(self, hook, partial(self.save, folder / f"{hook}.ckpt"))

    @staticmethod
    def save(path, trainer, loop, *_):
        if trainer.current_epoch == 1:
            trainer.save_checkpoint(path)


@pytest.mark.parametrize("name", AVERAGES)
def test_a_resumed_run_averages_each_round_once(name, tmp_path):
    make = CASES[name][0]
    whole = make()
    trainer(ROUNDS, callbacks=[AVERAGES[name](), SavedIn(tmp_path)]).fit(whole, datamodule=data_of())
    for hook in HOOKS:
        resumed = make()
        run = trainer(ROUNDS, callbacks=[AVERAGES[name]()])
        run.fit(resumed, datamodule=data_of(), ckpt_path=tmp_path / f"{hook}.ckpt")
        assert equal(weights_of(resumed), weights_of(whole)), hook
        assert resumed.round_metrics["global/loss"] == whole.round_metrics["global/loss"], hook


def test_a_users_end_of_an_epoch_is_called_once():
    average = AtItsEnd()
    trainer(ROUNDS, callbacks=[average]).fit(CASES["FedAvg"][0](), datamodule=data_of())
    assert average.epochs == [*range(ROUNDS)]
    assert average.should_update(epoch_idx=1)  # the callback has its own answer again


class InThePass(pl.Callback):
    """Enters the context in every hook of a validation, and keeps the entries that it finds."""

    def __init__(self):
        self.found = {}

    def look(self, hook, loop):
        with loop.evaluation.evaluated_entries():
            state = {name: value.clone() for name, value in loop.client.state_dict().items()}
        self.found[hook] = state

    def on_validation_batch_end(self, trainer, loop, *_):
        self.look("batch", loop)

    def on_validation_end(self, trainer, loop):
        self.look("end", loop)

    def on_train_epoch_end(self, trainer, loop):
        self.look("epoch", loop)


@pytest.mark.parametrize("name", CASES)
def test_the_context_may_be_entered_within_a_pass(name):
    look = InThePass()
    callbacks = [average() for average in CASES[name][1]]
    trainer(ROUNDS, callbacks=[*callbacks, look]).fit(CASES[name][0](), datamodule=data_of())
    assert equal(look.found["batch"], look.found["end"])
    assert equal(look.found["batch"], look.found["epoch"])


def test_with_a_coarse_broadcast_the_last_exact_models_are_averaged():
    class Exact(pl.Callback):
        def __init__(self):
            self.found = []

        def on_train_batch_end(self, trainer, loop, *_):
            weights = loop.global_weights
            self.found.append(weights.snapshot(weights.shared))

    watch = Exact()
    loop = FederatedLoop(client_of(), FedEXPAggregator(), codec=QSGD(bits=4, down=True), seed=3)
    trainer(ROUNDS, callbacks=[watch]).fit(loop, datamodule=data_of())
    previous = dict(loop.aggregator.previous)
    assert equal(previous, dict(watch.found[-2]))


# --- what is refused


class OwnAveraging(WeightAveraging):
    """Derives from Lightning's."""


def test_one_place_asks_which_weights_are_evaluated():
    """Whoever needs the evaluated model enters `Evaluation.evaluated_entries`."""
    package = Path(fl_lightning.__file__).parent
    callers = []
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "evaluation_weights":
                callers.append(path.relative_to(package).as_posix())
    assert set(callers) == {"federation/evaluation.py"}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("kind", [EMAWeightAveraging, OwnAveraging])
def test_two_averages_are_refused(name, kind):
    words = f"one part of a federation may average .* got {kind.__name__} and .*remove {kind.__name__}"
    with pytest.raises(ValueError, match=words):
        trainer(1, callbacks=[kind()]).fit(LOOPS[name](), datamodule=data_of())


def test_an_average_of_the_other_lightning_is_refused():
    other = pytest.importorskip("lightning.pytorch.callbacks.weight_averaging")

    class Own(other.WeightAveraging):
        pass

    for callback in (other.EMAWeightAveraging(), Own()):
        with pytest.raises(ValueError, match="import the callback from pytorch_lightning"):
            trainer(1, callbacks=[callback]).fit(CASES["FedAvg"][0](), datamodule=data_of())


def test_two_averaging_callbacks_are_refused():
    with pytest.raises(ValueError, match="got EMAWeightAveraging and OwnAveraging"):
        trainer(1, callbacks=[EMAWeightAveraging(), OwnAveraging()]).fit(CASES["FedAvg"][0](), datamodule=data_of())


@pytest.mark.parametrize(
    "make",
    [
        lambda: FederatedLoop(client_of(), FedEXPAggregator(average_last=False), seed=3),
        lambda: FederatedLoop(FedDyn(net=BatchNormNet, optimizer=sgd()), seed=3),
    ],
)
def test_a_rule_that_averages_nothing_goes_with_a_callback(make):
    trainer(1, callbacks=[EMAWeightAveraging(decay=0.5)]).fit(make(), datamodule=data_of())


def test_validating_and_testing_with_a_callback_is_not_refused():
    loop = CASES["FedEXPAggregator"][0]()
    trainer(1).fit(loop, datamodule=data_of())
    trainer(0, callbacks=[EMAWeightAveraging()]).test(loop, datamodule=data_of(), verbose=False)
