"""The fault matrix with two processes: nothing hangs, the model is that of one process, every error is named."""

import json
import re
from pathlib import Path

import pytest

from tests.federation.faulty import KINDS
from tests.members.test_faults import SAYS
from tests.processes.faults import run
from tests.processes.forked import run_script
from tests.processes.skips import CASES
from tests.processes.skips import run as run_law

SCRIPT = Path(__file__).with_name("faults.py")
SOME = ("exception", "shape", "negative weight", "3e38", "replaces")
REST = tuple(kind for kind in KINDS if kind not in SOME)


@pytest.fixture(scope="module", params=[SOME, pytest.param(REST, marks=pytest.mark.slow)], ids=["some", "rest"])
def together(request, tmp_path_factory):
    """The kinds, the folder in which two processes met them by one script, and what they said."""
    folder = tmp_path_factory.mktemp("faults")
    done = run_script(SCRIPT, str(folder), *request.param, cwd=folder, timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    return request.param, folder, json.loads((folder / "said.json").read_text())


@pytest.mark.parametrize("mode", ["error", "skip"])
def test_two_processes_do_what_one_does(together, mode):
    kinds = together[0]
    folder = together[1]
    said = together[2][mode]
    for kind in kinds:
        alone = run(folder, mode, kind)
        name = f"{mode}-{kind.replace(' ', '_')}"
        one, two = (json.loads((folder / f"{name}-{count}.json").read_text()) for count in (1, 2))
        assert two == one, kind
        if mode == "error":
            assert re.search(SAYS[kind], alone), alone
            assert re.search(SAYS[kind], said[kind]), said[kind]
            assert len(one["skipped"]) == 1, kind  # the round before the fault
        else:
            assert (alone, said[kind]) == ("", ""), kind
            assert sum(map(len, one["skipped"])) == sum(one["counts"]) > 0, kind


def test_two_processes_repeat_a_round_as_one_does(tmp_path):
    done = run_script(SCRIPT.with_name("skips.py"), str(tmp_path), cwd=tmp_path, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in CASES:
        alone = run_law(tmp_path, name)
        assert alone["skipped"] == [[], [2], []]
        assert json.loads((tmp_path / f"{name}-2.json").read_text()) == alone, name
