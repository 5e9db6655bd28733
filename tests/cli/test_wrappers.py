"""Wrappers stay around the client, whichever files and options come after them, or the command line refuses."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, permutations
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from jsonargparse import ActionConfigFile, Namespace
from pytorch_lightning import LightningModule
from torch import nn

import fl_lightning.attacks
import fl_lightning.methods
from fl_lightning import ClientModule
from fl_lightning.attacks import Attack, sign_flip
from fl_lightning.cli.main import DEFAULTS
from fl_lightning.cli.parser import FederatedParser
from fl_lightning.cli.wrappers import Kept, MergedFile, check_options, layers_of
from fl_lightning.experiments.cells import Cells, Request
from fl_lightning.experiments.composing import Composer
from fl_lightning.experiments.experiment import Experiment, Runs, Tables
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.methods import FedAvg, dp_sgd
from fl_lightning.nets import Perceptron
from tests.commands import CONFIGS, refusal

HERE = __name__
DEFAULTS_OF_MODEL = {name: value for name, value in DEFAULTS.items() if name.startswith("model.")}


class Lit(LightningModule):
    def __init__(self, hidden: int = 3) -> None:
        super().__init__()

    def training_step(self, batch, batch_idx):
        return None


class Shield(ClientModule):
    """A user's wrapper that is a class of clients."""

    def __init__(self, client: LightningModule, strength: float = 1.0) -> None:
        super().__init__(module=client)


class Harder(Shield):
    """It takes its client by an argument of its base."""

    def __init__(self, hardness: int = 1, **base) -> None:
        super().__init__(**base)


class Averaged(LightningModule):
    """A user's wrapper that is no client."""

    def __init__(self, inner: LightningModule, decay: float = 0.9) -> None:
        super().__init__()


class Needing(ClientModule):
    """A class of clients that must be given a module, which may be a wrapper or a method."""

    def __init__(self, module: LightningModule, **base) -> None:
        super().__init__(module=module, **base)


class Hidden(ClientModule):
    """A private method."""

    is_private = True


class Taught(ClientModule):
    """A method with a module for a purpose of its own."""

    def __init__(self, teacher: LightningModule | None = None, **base) -> None:
        super().__init__(**base)


class Makers:
    @staticmethod
    def rounded(module: LightningModule, digits: int = 2) -> ClientModule:
        return ClientModule(module=module)


def shielded(student: "LightningModule", bits: int = 8) -> ClientModule:
    """A user's wrapper that is a function."""
    return ClientModule(module=student)


class Named(FedAvg):
    """A method with a text and a part of its own."""

    def __init__(self, title: str = "", loss: nn.Module | None = None, **base) -> None:
        super().__init__(**base)


def make_loss(weight: float = 1.0) -> nn.Module:
    return nn.CrossEntropyLoss()


def make_net(num_classes: int, input_shape: tuple[int, ...]) -> Perceptron:
    return Perceptron(num_classes, input_shape)


def handing_on(factor: float = 2.0, **others) -> ClientModule:
    """A user's wrapper that hands its arguments on."""
    return sign_flip(factor=factor, **others)


def lazily(client: Callable[[], ClientModule], times: int = 1) -> ClientModule:
    """A user's wrapper that makes its client itself."""
    return client()


def tolerant(client: Any, bits: int = 8) -> ClientModule:
    """A user's wrapper without a type."""
    return client


class Noisy(ClientModule):
    """A user's wrapper whose client is the `module` of its base."""

    def __init__(self, strength: float = 1.0, **base) -> None:
        super().__init__(**base)


def chosen(clients: list[ClientModule], index: int = 0) -> ClientModule:
    """It takes several clients, of which none is known to be replaced."""
    return clients[index]


class Evil(Attack, FedAvg):
    """A user's attack that is no wrapper."""


SETTINGS = {"attackers": [0], "noise_multiplier": 1.0}
"""Arguments without a default of the wrappers of the package."""


def package_wrappers() -> list[str]:
    """The wrappers of the package: functions that take a module and return a client."""
    found = []
    for room in (fl_lightning.methods, fl_lightning.attacks):
        for name in dir(room):
            function = getattr(room, name)
            if inspect.isfunction(function):
                hints = get_type_hints(function)
                makes_client = hints.pop("return", None) is ClientModule
                takes_module = any(LightningModule in (hint, *get_args(hint)) for hint in hints.values())
                if makes_client and takes_module:
                    found.append(f"{room.__name__}.{name}")
    return found


WRAPPERS = {path: "client" for path in package_wrappers()} | {
    f"{HERE}.Shield": "client",
    f"{HERE}.Harder": "client",
    f"{HERE}.shielded": "student",
    f"{HERE}.Makers.rounded": "module",
    f"{HERE}.handing_on": "client",
}
"""Import paths of wrappers, with the argument that takes the client."""

FIRST = ("fl_lightning.methods.dp_sgd", f"{HERE}.Shield")
"""A wrapper that is a function of the package, and one that is a user's class: the others are like one of them."""

LIKE_THEM = [pytest.param(path, marks=() if path in FIRST else pytest.mark.slow) for path in WRAPPERS]

METHODS = sorted((CONFIGS / "method").glob("*.yaml"))
CLIENT = {
    "class_path": "fl_lightning.methods.FedAvg",
    "init_args": {"net": {"class_path": "fl_lightning.nets.Perceptron"}},
}


def test_the_package_has_wrappers():
    assert {f"{dp_sgd.__module__.rpartition('.')[0]}.dp_sgd", "fl_lightning.attacks.sign_flip"} <= set(WRAPPERS)


def wrapped(path: str, client: object = None, **settings) -> dict:
    """The settings of a wrapper, around a client or none."""
    name = path.rpartition(".")[2]
    home = getattr(fl_lightning.methods, name, None) or getattr(fl_lightning.attacks, name, None)
    if name == "handing_on":
        home = sign_flip
    needed = inspect.signature(home).parameters if home else ()
    arguments = {key: value for key, value in SETTINGS.items() if key in needed}
    if client is not None:
        arguments[WRAPPERS[path]] = client
    return {"class_path": path, "init_args": arguments | settings}


def written(folder, name: str, client: object, **model) -> str:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump({"model": {"client": client, **model}}))
    return str(path)


@pytest.fixture(scope="module")
def parser():
    """The parser of the command line with the settings of the loop only, which is faster."""
    found = FederatedParser()
    found.add_argument("-c", "--config", action=ActionConfigFile)
    found.add_class_arguments(FederatedLoop, "model", fail_untyped=False, sub_configs=True)
    found.add_argument("--data.pooled", type=bool, default=False)
    found.set_defaults(DEFAULTS_OF_MODEL)
    return found


@pytest.fixture
def client_of(parser):
    """The settings of the client that files make."""

    def parse(*files):
        words = [word for file in files for word in ("-c", str(file))]
        return parser.parse_args(words).as_dict()["model"]["client"]

    return parse


def chain(node: dict | None) -> list[str]:
    """The names of a client's classes, the outermost first."""
    names = []
    while node:
        names.append(node["class_path"].rpartition(".")[2])
        arguments = node["init_args"]
        node = next((arguments[name] for name in ("client", "module", "student", "inner") if arguments.get(name)), None)
    return names


def method_of(path) -> str | None:
    client = yaml.safe_load(path.read_text())["model"].get("client") or {}
    return client.get("class_path", "").rpartition(".")[2] or None


def in_turn() -> list[tuple]:
    """Each method's file with one of the wrappers, which take turns."""
    return [(path, method) for path, method in zip(cycle(WRAPPERS), METHODS, strict=False)]


@pytest.mark.parametrize(("path", "method"), in_turn(), ids=lambda value: str(value).rpartition("/")[2])
def test_a_wrapper_stays_around_every_method(path, method, client_of, tmp_path):
    base = written(tmp_path, "base", wrapped(path, CLIENT))
    settings = client_of(base, method)
    assert chain(settings) == [path.rpartition(".")[2], method_of(method) or "FedAvg"]
    assert settings["init_args"][WRAPPERS[path]]["init_args"]["net"]["class_path"].endswith("Perceptron")


@pytest.mark.parametrize("path", LIKE_THEM)
def test_a_wrapper_stands_before_between_and_after_other_files(path, client_of, tmp_path):
    name = path.rpartition(".")[2]
    bare = written(tmp_path, "bare", wrapped(path))
    files = [CONFIGS / "method/fedntd.yaml", CONFIGS / "net/fedntd_cnn.yaml", CONFIGS / "method/sam.yaml"]
    made = [client_of(*files[:place], bare, *files[place:]) for place in range(len(files) + 1)]
    assert chain(made[0]) == [name, "FedNTD"]
    inner = made[0]["init_args"][WRAPPERS[path]]["init_args"]
    assert inner["net"]["class_path"].endswith("FedNTDCNN")
    assert inner["optimizer"]["class_path"].endswith("SAM")
    assert all(other == made[0] for other in made)


@pytest.mark.parametrize("path", WRAPPERS)
@pytest.mark.parametrize("option", ["--model.client FedProx", "--model.client.class_path fl_lightning.methods.FedProx"])
def test_an_option_does_not_drop_a_wrapper(path, option, parser, tmp_path, capsys):
    base = written(tmp_path, "base", wrapped(path, CLIENT))
    with pytest.raises(SystemExit):
        parser.parse_args(["-c", base, *option.split()])
    sentence = capsys.readouterr().err
    assert f"model.client must keep {path.rpartition('.')[2]}" in sentence
    remedy = f"--model.client.{WRAPPERS[path]}"
    assert f"got FedProx in its place from the options; write {remedy} NAME" in sentence
    config = parser.parse_args(["-c", base, remedy, "FedProx"]).as_dict()
    assert chain(config["model"]["client"]) == [path.rpartition(".")[2], "FedProx"]


OPTION_BETWEEN = (
    "--model.client FedProx",
    "--model.client=FedProx",
    "--model.client.class_path fl_lightning.methods.FedNTD",
)


@pytest.mark.parametrize("path", LIKE_THEM)
@pytest.mark.parametrize("option", OPTION_BETWEEN)
def test_an_option_between_two_files_does_not_drop_a_wrapper(path, option, parser, tmp_path, capsys):
    base = written(tmp_path, "base", wrapped(path, CLIENT))
    for later in ("data: {pooled: true}", str(CONFIGS / "method/fedprox.yaml"), "model: {local_epochs: 2}"):
        with pytest.raises(SystemExit):
            parser.parse_args(["-c", base, *option.split(), "-c", later])
        sentence = capsys.readouterr().err
        assert f"model.client must keep {path.rpartition('.')[2]}" in sentence
        assert "from the options" in sentence
    inner = f"--model.client.{WRAPPERS[path]}"
    config = parser.parse_args(["-c", base, inner, "FedProx", "-c", "model: {local_epochs: 2}"]).as_dict()
    assert chain(config["model"]["client"]) == [path.rpartition(".")[2], "FedProx"]


def test_an_option_between_two_files_that_replaces_a_private_rule_says_so(parser):
    private = str(CONFIGS / "method/dpfedavg.yaml")
    words = ["-c", private, "--model.aggregator", "MedianAggregator", "-c", "model: {local_epochs: 2}"]
    with pytest.warns(UserWarning, match=r"model\.aggregator is MedianAggregator by an option, in place of DPFedAvg"):
        parser.parse_args(words)


def test_a_file_for_another_command_is_not_compared():
    """`fl-lightning -c FILE fit` takes a file with the settings of several commands."""
    wrapper = layers_of(wrapped("fl_lightning.methods.local_dp", CLIENT))
    bare = layers_of(CLIENT)
    lost = MergedFile(prefix="test.", before=Kept(bare, None), after=Kept(wrapper, None))
    config = Namespace(subcommand="fit", fit=Namespace(model=Namespace(client=Namespace(CLIENT))))
    check_options([lost], config)
    with pytest.raises(ValueError, match="must keep local_dp"):
        check_options([replace(lost, prefix="fit.")], config)


def test_two_wrappers_stay_in_their_order(client_of, tmp_path):
    both = wrapped("fl_lightning.attacks.sign_flip", wrapped("fl_lightning.methods.dp_sgd", CLIENT))
    base = written(tmp_path, "base", both)
    assert chain(client_of(base, CONFIGS / "method/fedprox.yaml")) == ["sign_flip", "dp_sgd", "FedProx"]
    for path, setting in {"sign_flip": {"factor": 3.0}, "dp_sgd": {"noise_multiplier": 7.0}}.items():
        home = "attacks" if path == "sign_flip" else "methods"
        for client in (None, {"class_path": "fl_lightning.methods.FedNTD"}):
            one = written(tmp_path, "one", wrapped(f"fl_lightning.{home}.{path}", client, **setting))
            settings = client_of(base, one)
            assert chain(settings) == ["sign_flip", "dp_sgd", "FedNTD" if client else "FedAvg"]
            nested = {"sign_flip": settings["init_args"], "dp_sgd": settings["init_args"]["client"]["init_args"]}
            assert setting.items() <= nested[path].items()
        partly = written(tmp_path, "partly", {"init_args": setting})
        settings = client_of(base, partly, CONFIGS / "method/fedprox.yaml")
        assert chain(settings) == ["sign_flip", "dp_sgd", "FedProx"]
        nested = {"sign_flip": settings["init_args"], "dp_sgd": settings["init_args"]["client"]["init_args"]}
        assert setting.items() <= nested[path].items()


PARTLY = [
    "model: {client: {init_args: {attackers: [3]}}}",
    "model: {client: {attackers: [3]}}",
    "model.client: {init_args: {attackers: [3]}}",
    "model.client.init_args: {attackers: [3]}",
    "model.client.init_args.attackers: [3]",
    "model.client.attackers: [3]",
    "model: {client.init_args.attackers: [3]}",
]


@pytest.mark.parametrize("text", PARTLY)
def test_a_file_may_name_an_argument_of_a_wrapper_in_every_way(text, client_of, tmp_path):
    """Its class is that of the file before."""
    both = wrapped("fl_lightning.attacks.sign_flip", wrapped("fl_lightning.methods.dp_sgd", CLIENT))
    settings = client_of(written(tmp_path, "base", both), text)
    assert chain(settings) == ["sign_flip", "dp_sgd", "FedAvg"]
    assert settings["init_args"]["attackers"] == [3]
    inner = client_of(written(tmp_path, "base", both), text.replace("attackers: [3]", "noise_multiplier: 7.0"))
    assert chain(inner) == ["sign_flip", "dp_sgd", "FedAvg"]
    assert inner["init_args"]["client"]["init_args"]["noise_multiplier"] == 7.0


def test_a_file_with_both_wrappers_says_how_they_are_nested(client_of, tmp_path):
    one = written(tmp_path, "one", wrapped("fl_lightning.methods.dp_sgd", CLIENT, noise_multiplier=3.0))
    both = written(
        tmp_path, "both", wrapped("fl_lightning.attacks.sign_flip", wrapped("fl_lightning.methods.dp_sgd", delta=1e-3))
    )
    for files in ([one, both], [both, one]):
        settings = client_of(*files)
        assert chain(settings) == ["sign_flip", "dp_sgd", "FedAvg"]
        assert settings["init_args"]["client"]["init_args"]["delta"] == 1e-3


def test_wrappers_of_two_files_without_an_order_are_refused(parser, tmp_path, capsys):
    one = written(tmp_path, "one", wrapped("fl_lightning.methods.dp_sgd", CLIENT))
    other = written(tmp_path, "other", wrapped("fl_lightning.attacks.sign_flip"))
    for first, second in permutations([one, other]):
        with pytest.raises(SystemExit):
            parser.parse_args(["-c", first, "-c", second])
        sentence = capsys.readouterr().err
        assert "sign_flip" in sentence
        assert "dp_sgd" in sentence
        assert second in sentence


def test_a_file_within_a_file_does_not_drop_a_wrapper(parser, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    base = written(tmp_path, "base", wrapped("fl_lightning.methods.local_dp", CLIENT))
    (tmp_path / "client.yaml").write_text("class_path: fl_lightning.methods.FedProx")
    (tmp_path / "model.yaml").write_text("client: {class_path: fl_lightning.methods.FedProx}")
    for text in ("model: {client: client.yaml}", "model: model.yaml", "model: {client: null}"):
        with pytest.raises(SystemExit):
            parser.parse_args(["-c", base, "-c", text])
        assert "model.client must keep local_dp" in capsys.readouterr().err


@pytest.mark.parametrize("method", [path for path in METHODS if method_of(path) not in (None, "FedAvg")])
def test_a_module_stays_within_every_method(method, client_of, tmp_path):
    """It would be replaced by the default net, which trains without a word."""
    lit = written(tmp_path, "lit", {"class_path": f"{HERE}.Lit", "init_args": {"hidden": 5}})
    for files in ([lit, method], [method, lit]):
        settings = client_of(*files)
        assert chain(settings) == [method_of(method), "Lit"]
        assert settings["init_args"]["module"]["init_args"] == {"hidden": 5}


def test_a_wrapper_that_is_no_client_stays(client_of, tmp_path):
    around = {"class_path": f"{HERE}.Averaged", "init_args": {"decay": 0.5, "inner": {"class_path": f"{HERE}.Lit"}}}
    base = written(tmp_path, "base", around)
    assert chain(client_of(base, CONFIGS / "method/fedprox.yaml")) == ["FedProx", "Averaged", "Lit"]
    around["init_args"]["inner"] = CLIENT
    base = written(tmp_path, "base", around)
    assert chain(client_of(base, CONFIGS / "method/fedprox.yaml")) == ["Averaged", "FedProx"]


def test_a_class_that_may_be_a_wrapper_is_not_lost(parser, client_of, tmp_path, capsys):
    needing = written(
        tmp_path, "needing", {"class_path": f"{HERE}.Needing", "init_args": {"module": {"class_path": f"{HERE}.Lit"}}}
    )
    averaged = written(
        tmp_path, "averaged", {"class_path": f"{HERE}.Averaged", "init_args": {"inner": {"class_path": f"{HERE}.Lit"}}}
    )
    lit = written(tmp_path, "lit", {"class_path": f"{HERE}.Lit"})
    for first, second in ((needing, CONFIGS / "method/fedprox.yaml"), (averaged, lit)):
        with pytest.raises(SystemExit):
            parser.parse_args(["-c", first, "-c", str(second)])
        assert "keeps a module" in capsys.readouterr().err
    taught = written(
        tmp_path, "taught", {"class_path": f"{HERE}.Taught", "init_args": {"teacher": {"class_path": f"{HERE}.Lit"}}}
    )
    assert chain(client_of(taught, CONFIGS / "method/fedprox.yaml")) == ["FedProx"]


@pytest.mark.parametrize(("name", "argument"), [("lazily", "client"), ("tolerant", "client"), ("Noisy", "module")])
def test_whatever_has_a_client_in_it_is_a_wrapper(name, argument, client_of, tmp_path):
    """Its arguments may have any type."""
    path = f"{HERE}.{name}"
    base = written(tmp_path, "base", {"class_path": path, "init_args": {argument: CLIENT}})
    for method in ("fedprox", "fedntd", "fedavg"):
        made = client_of(base, CONFIGS / f"method/{method}.yaml")
        assert chain(made) == [name, method_of(CONFIGS / f"method/{method}.yaml")]
        inner = made["init_args"][argument]["init_args"]
        assert inner["net"]["class_path"].endswith("Perceptron")


def test_text_and_functions_among_arguments_are_no_clients(client_of, tmp_path):
    """A net may come from a function, and text may be the name of a method."""
    loss = {"class_path": f"{HERE}.make_loss", "init_args": {"weight": 2.0}}
    settings = {"title": "FedAvg", "net": f"{HERE}.make_net", "loss": loss}
    base = written(tmp_path, "base", {"class_path": f"{HERE}.Named", "init_args": settings})
    made = client_of(base, CONFIGS / "method/fedprox.yaml")
    assert chain(made) == ["FedProx"]
    assert made["init_args"]["net"] is make_net


def test_several_clients_in_one_are_not_lost(parser, tmp_path, capsys):
    base = written(tmp_path, "base", {"class_path": f"{HERE}.chosen", "init_args": {"clients": [CLIENT]}})
    with pytest.raises(SystemExit):
        parser.parse_args(["-c", base, "-c", str(CONFIGS / "method/fedprox.yaml")])
    assert "model.client has chosen, which keeps a module and would be lost" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--model.client", "FedProx"], ["-c", str(CONFIGS / "method/fedprox.yaml")]], ids=["option", "file"]
)
def test_an_attack_that_is_no_wrapper_is_not_lost(words, parser, tmp_path, capsys):
    base = written(tmp_path, "base", {"class_path": f"{HERE}.Evil"})
    with pytest.raises(SystemExit):
        parser.parse_args(["-c", base, *words])
    assert "model.client must keep Evil" in capsys.readouterr().err


RULES = [path for path in METHODS if "aggregator" in yaml.safe_load(path.read_text())["model"]]


@pytest.mark.parametrize("path", [path for path in RULES if path.stem != "dpfedavg"], ids=lambda path: path.stem)
def test_another_rule_does_not_take_the_place_of_a_private_one(path, parser, capsys):
    private = CONFIGS / "method/dpfedavg.yaml"
    with pytest.raises(SystemExit):
        parser.parse_args(["-c", str(private), "-c", str(path)])
    sentence = capsys.readouterr().err
    assert "model.aggregator must keep DPFedAvg" in sentence
    assert str(path) in sentence
    parser.parse_args(["-c", str(path), "-c", str(private)])


def test_options_do_not_drop_privacy(parser, tmp_path, capsys):
    hidden = written(tmp_path, "hidden", {"class_path": f"{HERE}.Hidden"})
    for words in (
        [hidden, "--model.client", "FedProx"],
        [hidden, "-c", str(CONFIGS / "method/fedprox.yaml")],
    ):
        with pytest.raises(SystemExit):
            parser.parse_args(["-c", *words])
        assert "must keep" in capsys.readouterr().err


@pytest.mark.parametrize("rule", ["MedianAggregator", "null"])
def test_an_option_that_replaces_a_private_rule_says_so(rule, parser):
    """A comparison has a run without privacy (docs/privacy.yaml)."""
    with pytest.warns(UserWarning, match=r"model\.aggregator is .* in place of DPFedAvg: the run makes no guarantee"):
        parser.parse_args(["-c", str(CONFIGS / "method/dpfedavg.yaml"), "--model.aggregator", rule])


def test_compare_keeps_the_wrapper_of_the_base(tmp_path):
    base = written(tmp_path, "base", wrapped("fl_lightning.methods.local_dp", CLIENT))
    composer = Composer([base])
    for method in ("FedAvg", "FedProx", "FedProx+SAM", "fl_lightning.methods.FedNTD"):
        assert chain(composer.compose(method)["model"]["client"])[0] == "local_dp"
    with pytest.raises(SystemExit):
        composer.compose("FedAvg", [("model.client", "FedProx")])


@pytest.mark.parametrize(
    "option",
    [
        "model.client.optimizer.lr",
        pytest.param("model.client.init_args.optimizer.lr", marks=pytest.mark.slow),
    ],
)
def test_an_option_of_compare_reaches_the_client_in_every_wrapper(option, tmp_path):
    """A comparison of clean and attacked runs would compare two learning rates."""
    dp = written(tmp_path, "dp", wrapped("fl_lightning.methods.dp_sgd"))
    attack = written(tmp_path, "attack", wrapped("fl_lightning.attacks.sign_flip"))
    both = written(
        tmp_path, "both", wrapped("fl_lightning.attacks.sign_flip", wrapped("fl_lightning.methods.dp_sgd", CLIENT))
    )
    optimizer = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}
    base = written(
        tmp_path, "base", {"class_path": "fl_lightning.methods.FedAvg", "init_args": {"optimizer": optimizer}}
    )
    methods = ["FedAvg", "FedProx", dp, attack, both]
    experiment = Experiment(base=[base], runs=[Runs(methods)], cases={"": {option: 0.5}}, tables=Tables())
    cells = Cells(experiment, Request()).all()
    assert len(cells) == len(methods)
    for cell in cells:
        client = layers_of(cell.config["model"]["client"]).client
        assert client["init_args"]["optimizer"]["init_args"]["lr"] == 0.5


def test_a_monitor_of_one_client_is_no_wrapper():
    said = refusal("fit -c experiment/digits_fedavg --trainer.callbacks ClassCount --trainer.callbacks.client_id 2", 2)
    assert "unknown option 'client_id'; the nearest is 'client'" in said


@pytest.mark.parametrize("path", [path for path in WRAPPERS if WRAPPERS[path] == "client"])
def test_an_option_that_a_wrapper_lacks_is_looked_for_in_the_client(path, parser, tmp_path, capsys):
    base = written(tmp_path, "base", wrapped(path, CLIENT))
    words = ["-c", base, "-c", str(CONFIGS / "method/fedprox.yaml")]
    with pytest.raises(SystemExit):
        parser.parse_args([*words, "--model.client.mu", "0.7"])
    assert "unknown option 'mu'; write client.mu for an option of the client in it" in capsys.readouterr().err
    made = parser.parse_args([*words, "--model.client.client.mu", "0.7"]).as_dict()["model"]["client"]
    assert layers_of(made).client["init_args"]["mu"] == 0.7


def test_an_option_of_a_wrapper_stays_the_wrappers(tmp_path):
    both = wrapped("fl_lightning.attacks.sign_flip", wrapped("fl_lightning.methods.dp_sgd", CLIENT))
    composer = Composer([written(tmp_path, "base", both)])
    options = [("model.client.attackers", "[2]"), ("model.client.noise_multiplier", "3.0"), ("model.client.mu", "0.7")]
    made = layers_of(composer.compose("FedProx", options)["model"]["client"])
    assert made.wrappers[0].settings["attackers"] == [2]
    assert made.wrappers[1].settings["noise_multiplier"] == 3.0
    assert made.client["init_args"]["mu"] == 0.7


def test_files_without_a_wrapper_merge_as_before(client_of, tmp_path):
    """The names of stored runs depend on every setting."""
    optimizer = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.05}}
    base = written(
        tmp_path, "base", {"class_path": "fl_lightning.methods.FedAvg", "init_args": {"optimizer": optimizer}}
    )
    plain = client_of(base, CONFIGS / "method/fedprox.yaml")
    assert chain(plain) == ["FedProx"]
    assert plain["init_args"]["optimizer"]["init_args"]["lr"] == 0.05
    lit = client_of(written(tmp_path, "lit", {"class_path": f"{HERE}.Lit"}))
    assert lit == {"class_path": f"{HERE}.Lit", "init_args": {"hidden": 3}}
