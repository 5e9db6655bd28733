"""Options of the test suite, and a fixture of many tests."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--golden-dir",
        action="append",
        default=[],
        metavar="DIR",
        help="a folder of further golden files (*.json) for tests/golden; may be given several times",
    )


@pytest.fixture
def without_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures are made but not drawn, which is half of a short run's time: their files hold a word."""
    draw = Figure.savefig

    def written(figure: Figure, to: Any, **settings: Any) -> None:
        if isinstance(to, str | Path):
            Path(to).write_text("drawn", encoding="utf-8")
        else:  # into a page
            draw(figure, to, **settings)

    monkeypatch.setattr(Figure, "savefig", written)
