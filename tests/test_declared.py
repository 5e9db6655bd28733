"""Whatever the package imports is declared in setup.cfg: nothing is there only because another package needs it."""

import ast
import configparser
import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

READ_IF_THERE = {"pandas": "a user's DataFrame is read; the package itself makes none"}
"""Modules of no declared distribution, with the reason."""

DISTRIBUTIONS = {"datasets": "datasets", "flwr": "flwr", "shtab": "shtab", "tensorboard": "tensorboard"}
"""Distributions of modules that may be absent here."""


def imported() -> set[str]:
    """Return the top-level modules outside the standard library that the package imports anywhere."""
    names: set[str] = set()
    for path in (ROOT / "fl_lightning").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names.add(node.module.partition(".")[0])
    return names - sys.stdlib_module_names - {"fl_lightning"}


def declared() -> set[str]:
    """Return the names of the distributions in setup.cfg, in lower case, with those of the extras."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    texts = [config["options"]["install_requires"], *config["options.extras_require"].values()]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    return {re.split(r"[\[<>=]", line)[0].lower() for line in lines if line}


def explained() -> set[str]:
    """Return the names of the distributions in the table of dependencies, in lower case."""
    page = (ROOT / "docs" / "decisions.md").read_text(encoding="utf-8")
    table = page.partition("**Dependencies**")[2].partition("\n\n**")[0]
    cells = re.findall(r"^\| ([a-zA-Z][^|]*) \|", table, flags=re.MULTILINE)
    without_extras = [re.sub(r" \(.*\)|\[.*\]", "", cell) for cell in cells]
    names = {name.lower() for cell in without_extras for name in cell.split(", ")}
    return names - {"package"}


def test_every_import_is_of_a_declared_distribution():
    here = packages_distributions()
    undeclared = {}
    for module in imported() - READ_IF_THERE.keys():
        homes = {home.lower() for home in here.get(module, [DISTRIBUTIONS.get(module, module)])}
        if not homes & declared():
            undeclared[module] = homes
    assert not undeclared


def test_no_reason_outlives_its_import():
    assert READ_IF_THERE.keys() <= imported()


def test_each_declared_distribution_has_its_reason_in_the_decisions():
    assert explained() == declared()
