"""Every shipped YAML is parsed by the real command line, alone and composed with others in any order."""

import inspect
import random
import re
from itertools import combinations, cycle, permutations

import pytest
import yaml

import fl_lightning.methods
from fl_lightning import ClientModule
from fl_lightning.cli.configs import small_experiment
from fl_lightning.cli.main import FederatedCLI
from tests.commands import CONFIGS

FILES = sorted(CONFIGS.rglob("*.yaml"))
FOLDERS = sorted(path.name for path in CONFIGS.iterdir() if path.is_dir())
WHOLE = {
    "experiment": "Each of its files is a whole run, over which others are given.",
    "comparison": "Its files are of `reproduce`, and the federation that they share.",
    "papers": "Its files are of `reproduce`, and no configurations of a fit.",
}
"""Folders whose files are no parts that are put together, and why."""

KINDS = {kind: sorted((CONFIGS / kind).glob("*.yaml")) for kind in FOLDERS if kind not in WHOLE}
"""Files by the kind of their settings."""

EXPERIMENTS = sorted((CONFIGS / "experiment").glob("*.yaml"))
METHODS = fl_lightning.methods.__all__


class CaughtError(Exception):
    """Carries the parser out of a CLI that has not yet read its arguments."""


class ParserOnly(FederatedCLI):
    def parse_arguments(self, parser, args):
        raise CaughtError(parser)


@pytest.fixture(scope="module")
def parse():
    with pytest.raises(CaughtError) as caught:
        ParserOnly(["fit"])
    parser = caught.value.args[0]
    return lambda paths: parser.parse_args(
        ["fit", *(word for path in paths for word in ("-c", str(path)))]
    ).fit.as_dict()


def test_lines_of_all_files_end_within_120_columns():
    texts = {path: path.read_text(encoding="utf-8") for path in CONFIGS.rglob("*.yaml")}
    long = {
        f"{path.relative_to(CONFIGS)}:{n}": len(line)
        for path, text in texts.items()
        for n, line in enumerate(text.splitlines(), 1)
    }
    assert {place: size for place, size in long.items() if size > 120} == {}


def load(path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def leaves(given: dict, *above: str) -> dict[tuple[str, ...], object]:
    """What a configuration sets, by path, classes in a list by their number; `init_args: {}` sets nothing."""
    found = {}
    for key, value in given.items():
        listed = isinstance(value, list) and value and all(isinstance(item, dict) for item in value)
        nest = {str(i): item for i, item in enumerate(value)} if listed else value
        found |= leaves(nest, *above, key) if isinstance(nest, dict) else {(*above, key): value}
    return found


def name_of(path) -> str:
    return f"{path.parent.name}/{path.stem}"


def client_of(path) -> str | None:
    return leaves(load(path)).get(("model", "client", "class_path"))


def experiment(path):
    """A row for an experiment, slow but for two: `make smoke` runs all of them."""
    marks = [] if path.stem in ("digits_fedntd", "digits_scaffold") else [pytest.mark.slow]
    return pytest.param(path, id=name_of(path), marks=marks)


@pytest.mark.parametrize("path", [experiment(path) for path in EXPERIMENTS])
def test_an_experiment_sets_what_it_says(parse, path):
    assert leaves(load(path)).items() <= leaves(parse([path])).items()


def test_every_folder_of_files_is_of_a_kind():
    """A test over the files of a folder that does not exist tests nothing."""
    assert set(WHOLE) < set(FOLDERS)
    assert all(KINDS.values())
    assert EXPERIMENTS
    places = {path.relative_to(CONFIGS).parts[0] for path in FILES}
    assert places == set(FOLDERS)


PAIRS = list(combinations(KINDS, 2))


@pytest.mark.parametrize("kinds", PAIRS, ids="+".join)
def test_no_two_kinds_set_the_same_key(kinds):
    """The order of two files would matter then."""
    one, other = (keys_by_file(KINDS[kind]) for kind in kinds)
    both = {
        ".".join(max(key, same, key=len)): (path.stem, further.stem)
        for path, keys in one.items()
        for further, others in other.items()
        for key in keys
        for same in others
        if key[: len(same)] == same[: len(key)]
    }
    assert both == {}


def keys_by_file(paths) -> dict:
    return {path: list(leaves(load(path))) for path in paths}


@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("kinds", PAIRS, ids="+".join)
def test_files_of_two_kinds_mean_the_same_in_both_orders(parse, kinds, number):
    paths = [random.Random(f"{kind}{number}").choice(KINDS[kind]) for kind in kinds]
    parsed = [parse(order) for order in (paths, paths[::-1])]
    for config in parsed:
        config.pop("config")
    assert leaves(parsed[0]) == leaves(parsed[1])


@pytest.mark.parametrize("path", KINDS["federation"], ids=name_of)
def test_the_optimizer_of_a_method_stays_with_every_federation(parse, path):
    for order in permutations([CONFIGS / "method/sam.yaml", CONFIGS / "net/perceptron.yaml", path]):
        assert leaves(load(CONFIGS / "method/sam.yaml")).items() <= leaves(parse(order)).items()


def compositions():
    """Each file of each kind at least once, in changing orders, with two others; all kinds are together below."""
    clients = [path for path in KINDS["method"] if client_of(path)]
    largest_first = sorted((KINDS[kind] for kind in KINDS if kind != "method"), key=len, reverse=True)
    others = [cycle(files) for files in largest_first]
    order = random.Random(0)
    for number, client in enumerate(clients):
        shuffled = [client, next(others[0]), next(others[1]), next(others[2 + number % (len(others) - 2)])]
        order.shuffle(shuffled)
        yield shuffled


def test_every_file_of_a_kind_is_composed():
    composed = {path for paths in compositions() for path in paths}
    assert {
        path for path in FILES if path.parent.name in KINDS and (path.parent.name != "method" or client_of(path))
    } <= (composed)


@pytest.mark.parametrize("paths", list(compositions()), ids=lambda paths: "+".join(map(name_of, paths)))
def test_files_compose_in_any_order(parse, paths):
    parsed = leaves(parse(paths))
    for path in paths:
        assert leaves(load(path)).items() <= parsed.items(), path


@pytest.mark.parametrize("order", [1, pytest.param(-1, marks=pytest.mark.slow)])  # orders are tried above and below
@pytest.mark.parametrize("path", [path for path in KINDS["method"] if not client_of(path)], ids=name_of)
def test_a_part_goes_with_any_client(parse, path, order):
    paths = [path, CONFIGS / "method/fedprox.yaml"][::order]
    parsed = leaves(parse([CONFIGS / "federation/cross_silo.yaml", *paths]))
    for own in paths:
        assert leaves(load(own)).items() <= parsed.items()


def test_all_orders_of_five_files_mean_the_same(parse):
    paths = [CONFIGS / f"{name}.yaml" for name in ("method/fedntd", "net/perceptron", "data/digits")]
    paths += [CONFIGS / f"{name}.yaml" for name in ("federation/cross_device", "trainer/cpu")]
    parsed = []
    for start in range(len(paths)):
        config = parse(paths[start:] + paths[:start])
        config.pop("config")
        parsed.append(leaves(config))
    config = parse(paths[::-1])
    config.pop("config")
    assert all(other == parsed[0] for other in [*parsed, leaves(config)])


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_its_files(name):
    path = f"fl_lightning.methods.{name}"
    kind = getattr(fl_lightning.methods, name)
    if issubclass(kind, ClientModule):
        for part in {f"method/{name.lower()}", small_experiment(name.lower())[-1]}:
            file = CONFIGS / f"{part}.yaml"
            assert file.is_file(), f"{name} needs {file.relative_to(CONFIGS.parent)}"
            assert client_of(file) == path
        return
    assert any(path in leaves(load(file)).values() for file in KINDS["method"]), (
        f"{name} needs a file in configs/method that sets it"
    )


def classes_in(given):
    """The classes of `methods` in a configuration, each with its arguments."""
    if not isinstance(given, dict):
        return
    home, _, name = str(given.get("class_path", "")).rpartition(".")
    if home == "fl_lightning.methods":
        yield getattr(fl_lightning.methods, name), given.get("init_args", {})
    for value in given.values():
        yield from classes_in(value)


def defaults_of(kind: type) -> dict[str, object]:
    """A class's arguments, those that it hands on to its bases too, with their defaults."""
    found = {}
    for base in kind.__mro__[::-1]:
        if base.__module__.startswith("fl_lightning") and "__init__" in vars(base):
            found |= inspect.signature(base.__init__).parameters
    return {name: parameter.default for name, parameter in found.items()}


def departures(text: str) -> list[str]:
    """The arguments that a method's file gives another value than its class, as far as the file does not say why."""
    found = []
    for kind, given in classes_in(yaml.safe_load(text)):
        for name, value in given.items():
            default = defaults_of(kind)[name]  # a KeyError is an argument that the class does not have
            excused = re.search(rf"^ *{name}:.*# not the default:( \S+){{3,}}", text, re.MULTILINE)
            if default is not inspect.Parameter.empty and (value == default) == bool(excused):
                found.append(f"{kind.__name__}: {name} is {value}, by default {default}")
    return found


@pytest.mark.parametrize("path", KINDS["method"], ids=name_of)
def test_a_method_file_holds_the_defaults_of_its_classes(path):
    """Another value is marked in its line: `# not the default: REASON`."""
    assert not departures(path.read_text(encoding="utf-8"))


def test_another_value_than_the_default_needs_a_reason():
    text = "model: {client: {class_path: fl_lightning.methods.FedProx, init_args:\n  {\n    mu: %s\n}}}"
    assert not departures(text % "0.01")
    assert not departures(text % "0.1 # not the default: the paper's for digits")
    assert departures(text % "0.1") == ["FedProx: mu is 0.1, by default 0.01"]
    assert departures(text % "0.1 # not the default") == ["FedProx: mu is 0.1, by default 0.01"]
    assert departures(text % "0.01 # not the default: the paper's for digits")  # it is


@pytest.mark.parametrize("path", KINDS["method"], ids=name_of)
def test_a_method_file_sets_nothing_of_the_data(path):
    """It would win over the base's: the data are the experiment's, whatever the order of the files."""
    content = load(path)
    reference = {"data": {"pooled": True}} if path.stem == "centralized" else {}
    assert {name: part for name, part in content.items() if name != "model"} == reference


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_classes_are_named_by_their_full_path(path):
    classes = [value for keys, value in leaves(load(path)).items() if keys[-1] == "class_path"]
    assert all("." in value for value in classes), classes
