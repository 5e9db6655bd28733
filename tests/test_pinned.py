"""The demo, shortened, has these numbers: whoever changes a draw, a sum or an order has to say so here.

In float64, so that machines and versions of torch differ by rounding only.
"""

import csv

import pytest

from tests.commands import EXPERIMENT, run_in, say

SHORT = "--trainer.max_epochs 2 --model.local_epochs 2 --trainer.precision 64-true --trainer.callbacks null"
SIZES = [148, 26, 164, 158, 269, 159, 64, 107, 107, 235]
"""Training samples of the clients."""

ROWS = [
    {
        "train/ce": 1.2859874094,
        "train/ntd": 0.1513876818,
        "comm/bytes_down": 192400,
        "comm/bytes_up": 192400,
        "global/loss": 2.1936182140,
        "global/acc": 117 / 360,
        "global/acc_class/03": 30 / 37,
        "global/acc_class/08": 25 / 33,
        "global/forgetting": 0.0,
    },
    {
        "train/ce": 0.9716343728,
        "train/ntd": 0.1386974978,
        "comm/bytes_down": 192400,
        "comm/bytes_up": 192400,
        "global/loss": 2.0041895349,
        "global/acc": 119 / 360,
        "global/acc_class/03": 35 / 37,
        "global/acc_class/08": 16 / 33,
        "global/forgetting": (25 - 16) / 33 / 10,
    },
]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert say(f"fit {EXPERIMENT} {SHORT}").code == 0
    return run_in(folder)


def table(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_demo_has_its_numbers(demo):
    rows = table(demo / "metrics.csv")
    assert len(rows) == len(ROWS)
    for row, expected in zip(rows, ROWS, strict=True):
        assert {key: float(row[key]) for key in expected} == pytest.approx(expected, rel=1e-7, abs=1e-12)


def test_the_demo_has_its_partition(demo):
    clients = [{key: float(value) for key, value in row.items()} for row in table(demo / "partition.csv")]
    sizes = [int(sum(row.values()) - row["client"]) for row in clients]
    assert sum(sizes) == 1437
    assert sizes == SIZES
