"""Collects no modules of an extra that is not installed. Any other import error is a failure."""

from importlib.util import find_spec

NEEDS = {
    "flwr": ["fl_lightning/flower/*.py", "tests/flower/deployed.py", "tests/flower/grid.py"],
    "dp_accounting": ["fl_lightning/functional/privacy.py"],
}
"""Modules with doctests, or without tests of their own, by the package that they need."""

collect_ignore_glob = []
for package, paths in NEEDS.items():
    if find_spec(package) is None:
        collect_ignore_glob += paths
