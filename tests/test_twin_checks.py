"""No check of the package knows one of Lightning's two packages only."""

import ast
import inspect
import typing
from pathlib import Path

import lightning.pytorch as twin
import pytest
import pytorch_lightning as pl
import torch
from torch import nn

import fl_lightning
from fl_lightning import FederatedLoop, attacks, methods
from fl_lightning.client.checks import are_foreign
from fl_lightning.data.checks import check_fitted
from fl_lightning.federation.run import CHANGING
from fl_lightning.methods import FedAvg
from fl_lightning.types import TrainableModule
from fl_lightning.utils.packages import is_of_lightning
from tests.toys import equal, toy_data, trainer, weights_of

BOTH = pytest.mark.parametrize("package", [pl, twin], ids=["pytorch_lightning", "lightning.pytorch"])
FOLDER = Path(fl_lightning.__file__).parent
SOURCES = sorted(FOLDER.rglob("*.py"))
TWINS = {"pytorch_lightning": "lightning.", "lightning_fabric": "lightning."}

ALLOWED = {
    ("cli/classes.py", "issubclass(kind, base)"): "the classes that are offered by their short names",
    ("client/checkpoint_io.py", "type(self.inner) is TorchCheckpointIO"): "of the Trainer, which is our package's",
}
"""Checks against classes of one package, with the reason."""


def names_of_lightning(tree):
    """The names of a file that stand for classes or modules of one of Lightning's packages."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith((*TWINS, "lightning")):
            names.update(alias.asname or alias.name for alias in node.names)
        if isinstance(node, ast.Import):
            found = [alias for alias in node.names if alias.name.startswith((*TWINS, "lightning."))]
            names.update((alias.asname or alias.name).partition(".")[0] for alias in found)
    for node in ast.walk(tree):  # a tuple of such classes
        if (
            isinstance(node, ast.Assign)
            and {each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)} & names
        ):
            names.update(each.id for each in node.targets if isinstance(each, ast.Name) and each.id.isupper())
    return names - {"lightning_utilities"}


def checks_in(tree):
    """The comparisons of an object's or a class's kind, with what they are compared with."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("isinstance", "issubclass")
        ):
            yield node, node.args[1]
        if isinstance(node, ast.Compare) and "type(" in ast.unparse(node) and not isinstance(node.ops[0], ast.In):
            yield node, node
        if isinstance(node, ast.MatchClass):
            yield node, node.cls
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("overridden", "is_overridden"):
            yield node, node


def one_sided_checks(source):
    tree = ast.parse(source)
    known = names_of_lightning(tree)
    for node, compared in checks_in(tree):
        used = {each.id for each in ast.walk(compared) if isinstance(each, ast.Name)}
        if used & known:
            yield ast.unparse(node)


def one_sided_texts(source):
    """Collections and calls with the name of one package, but not of the other."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            texts = [each.value for each in node.elts if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("startswith", "partition", "split"):
            texts = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        else:
            continue
        ours = any(text.startswith(tuple(TWINS)) for text in texts)
        theirs = any(text == "lightning" or text.startswith("lightning.") for text in texts)
        are_names = all(text.replace(".", "").replace("_", "").isalnum() for text in texts)
        if ours != theirs and are_names and len(texts) > 1:
            yield ast.unparse(node)


def test_the_search_finds_such_checks():
    found = """
import pytorch_lightning as pl
from pytorch_lightning.callbacks import EarlyStopping as Stop, Timer
KINDS = (Stop, Timer)
isinstance(x, Stop); isinstance(x, int | pl.Callback); issubclass(k, KINDS); type(x) is Timer; isinstance(x, int)
"""
    assert len([*one_sided_checks(found)]) == 4
    assert [*one_sided_texts("A = {'torch', 'pytorch_lightning'}")]
    assert [*one_sided_texts("k.startswith(('lightning.pytorch.', 'torch.'))")]
    assert not [*one_sided_texts("A = ('lightning.pytorch', 'pytorch_lightning', 'lightning_fabric')")]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_no_check_is_against_one_package(path):
    name = str(path.relative_to(FOLDER))
    source = path.read_text()
    found = [check for check in one_sided_checks(source) if (name, check) not in ALLOWED]
    assert [*found, *one_sided_texts(source)] == []


def test_what_is_allowed_is_there():
    for name, check in ALLOWED:
        assert check in (FOLDER / name).read_text()


WRAPPERS = {
    f"{room.__name__}.{name}": value
    for room in (attacks, methods)
    for name in dir(room)
    if inspect.isfunction(value := getattr(room, name)) and "client" in inspect.signature(value).parameters
}
"""Functions that put something around a client, found by their argument."""


@pytest.mark.parametrize("name", WRAPPERS)
def test_what_goes_around_a_client_takes_modules_of_both_packages(name):
    """The command line checks the types of arguments."""
    hints = typing.get_type_hints(WRAPPERS[name])
    assert set(typing.get_args(hints["client"])) == {pl.LightningModule, TrainableModule}


def module_of(package):
    class Mine(package.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, batch_idx):
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Mine


def fitted(client, rounds=2, **settings):
    loop = FederatedLoop(client, seed=1)
    trainer(rounds, **settings).fit(loop, datamodule=toy_data())
    return loop


AROUND = {
    "dp_sgd": lambda module: methods.dp_sgd(module, noise_multiplier=1.0),
    "local_dp": lambda module: methods.local_dp(module, noise_multiplier=1.0),
    "sign_flip": lambda module: attacks.sign_flip(module, [0]),
    "noise": lambda module: attacks.noise(module, [0]),
}


def test_every_wrapper_is_run():
    names = {name.rpartition(".")[2] for name in WRAPPERS}
    assert names - {"label_flip"} == AROUND.keys()
    for package in (pl, twin):
        with pytest.raises(ValueError, match="label_flip needs a client built with net="):
            attacks.label_flip(module_of(package)(), [0])


@pytest.mark.parametrize("around", AROUND)
def test_what_goes_around_a_module_gives_the_same_for_both(around):
    found = [weights_of(fitted(AROUND[around](module_of(package)()))) for package in (pl, twin)]
    assert equal(*found)


def test_a_compiled_module_computes_by_its_compiled_steps():
    calls = []

    def backend(graph, inputs):
        calls.append(graph)
        return graph.forward

    found = []
    for package in (pl, twin):
        torch._dynamo.reset()
        calls.clear()
        found.append(weights_of(fitted(torch.compile(module_of(package)(), backend=backend), rounds=1)))
        assert calls
    assert equal(*found)


@BOTH
def test_modules_and_callbacks_of_lightning_are_known(package):
    assert not are_foreign([package.callbacks.EarlyStopping("loss"), package.LightningModule()])
    for name in CHANGING:
        assert hasattr(package.callbacks, name)
    assert is_of_lightning(package.callbacks.LambdaCallback(), CHANGING)
    assert not is_of_lightning(package.callbacks.EarlyStopping("loss"), CHANGING)


@BOTH
def test_a_callback_that_calls_functions_is_watched(package):
    loops = []
    for callback in (package.callbacks.LambdaCallback(), package.callbacks.EarlyStopping("global/acc", mode="max")):
        loop = fitted(FedAvg(), callbacks=[callback], rounds=1)
        loops.append(loop._run._is_watched())
    assert loops == [True, False]


@BOTH
def test_own_bars_and_checkpoints_take_the_place_of_ours(package, tmp_path):
    from fl_lightning.cli.run_callbacks import checkpoints
    from fl_lightning.federation.checks import check_carried

    users = [package.callbacks.ModelCheckpoint(tmp_path, monitor="global/acc", save_last=True)]
    assert checkpoints(None, users) == []
    loop = fitted(FedAvg(), rounds=1)
    bar = package.callbacks.TQDMProgressBar()
    bar.on_client_start = print
    loop.trainer.callbacks.append(bar)
    check_carried([], [], loop.trainer)


@BOTH
def test_a_module_that_takes_rounds_for_batches_is_refused(package):
    with pytest.raises(TypeError, match="a FederatedDataModule gives rounds"):
        check_fitted(module_of(package)())


@BOTH
def test_dp_sgd_refuses_hooks_on_batches_by_who_wrote_them(package):
    kind = module_of(package)
    kind.on_after_batch_transfer = lambda self, batch, dataloader_idx: batch
    with pytest.raises(ValueError, match=r"Mine\.on_after_batch_transfer may make a sample of several"):
        methods.dp_sgd(kind(), noise_multiplier=1.0)
