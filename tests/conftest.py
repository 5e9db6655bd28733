"""Options of the test suite."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir",
        action="append",
        default=[],
        metavar="DIR",
        help="a folder of further golden files (*.json) for tests/golden; may be given several times",
    )
