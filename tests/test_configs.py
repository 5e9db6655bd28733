"""Every shipped YAML is parsed by the real command line, alone and composed with others in any order."""

import random
from itertools import cycle

import pytest
import yaml

import fl_lightning.methods
from fl_lightning import ClientModule
from fl_lightning.cli import FederatedCLI
from tests.commands import CONFIGS

FILES = sorted(CONFIGS.rglob("*.yaml"))
KINDS = {kind: sorted((CONFIGS / kind).glob("*.yaml")) for kind in ("method", "net", "data", "federation", "trainer")}
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


def load(path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def leaves(given: dict, *above: str) -> dict[tuple[str, ...], object]:
    """What a configuration sets, by path; `init_args: {}` sets nothing."""
    found = {}
    for key, value in given.items():
        found |= leaves(value, *above, key) if isinstance(value, dict) else {(*above, key): value}
    return found


def name_of(path) -> str:
    return f"{path.parent.name}/{path.stem}"


def client_of(path) -> str | None:
    return leaves(load(path)).get(("model", "client", "class_path"))


@pytest.mark.parametrize("path", [path for path in FILES if path.parent.name not in KINDS], ids=name_of)
def test_an_experiment_sets_what_it_says(parse, path):
    assert leaves(load(path)).items() <= leaves(parse([path])).items()


def compositions():
    """Each file of each kind at least once, with changing company and in changing orders."""
    clients = [path for path in KINDS["method"] if client_of(path)]
    columns = [clients, *(KINDS[kind] for kind in KINDS if kind != "method")]
    order = random.Random(0)
    rows = max(map(len, columns))
    for row in zip(*([next(files) for _ in range(rows)] for files in map(cycle, columns)), strict=True):
        shuffled = list(row)
        order.shuffle(shuffled)
        yield shuffled


@pytest.mark.parametrize("paths", list(compositions()), ids=lambda paths: "+".join(map(name_of, paths)))
def test_files_compose_in_any_order(parse, paths):
    parsed = leaves(parse(paths))
    for path in paths:
        assert leaves(load(path)).items() <= parsed.items(), path


@pytest.mark.parametrize("path", [path for path in KINDS["method"] if not client_of(path)], ids=name_of)
def test_a_part_goes_with_any_client(parse, path):
    client = CONFIGS / "method/fedprox.yaml"
    for paths in ([path, client], [client, path]):
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
    wanted = ["method/{}.yaml", "experiment/digits_{}.yaml"]
    if issubclass(kind, ClientModule):
        for form in wanted:
            file = CONFIGS / form.format(name.lower())
            assert file.is_file(), f"{name} needs {file.relative_to(CONFIGS.parent)}"
            assert client_of(file) == path
        return
    for folder in ("method", "experiment"):
        assert any(path in leaves(load(file)).values() for file in (CONFIGS / folder).glob("*.yaml")), (
            f"{name} needs a file in configs/{folder} that sets it"
        )


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_classes_are_named_by_their_full_path(path):
    classes = [value for keys, value in leaves(load(path)).items() if keys[-1] == "class_path"]
    assert all("." in value for value in classes), classes
