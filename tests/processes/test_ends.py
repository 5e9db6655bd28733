"""However a process of a run ends, all end, one sentence says why, and what is on disk stays."""

import json
import re
import warnings
from pathlib import Path

import pytest

from tests.processes.ends import LONGEST
from tests.processes.forked import run_script

SCRIPT = Path(__file__).with_name("ends.py")
BUG = r"ValueError in round \d: a bug of one's own \(.*mishap\.py, line \d+\); mend that line"
KILLED = r"rank {} of 2 ended without a word, last seen .*; was it killed, or was there no memory left"
SILENT = (
    r"rank {} of 2 has given no sign of life for 15 s, last seen {}; raise process_timeout of ClientParallelStrategy"
)
STOPPED = r"interrupted after 1 complete round; continue with fl-lightning fit .*last\.ckpt"
NOTHING_KEPT = "interrupted before the first round was complete; nothing is kept"
CLIENT = r"at client \d in round 1"

SOME = {
    "exception,1,fork,0": BUG,
    "kill,1,fork": KILLED.format(1),
    "term_starter,1,fork": STOPPED,
}
"""The sentence with which a case ends."""

REST = {
    "hang,1,fork": SILENT.format(1, CLIENT),
    "hang_in_evaluation,1,fork": SILENT.format(1, ".*"),
    "ctrl_c,1,fork": STOPPED,
    "exception,0,fork": BUG,
    "kill,0,fork": KILLED.format(0),
    "hang,0,fork": SILENT.format(0, CLIENT),
    "stop,1,fork": SILENT.format(1, ".*"),
    "stop,0,fork": SILENT.format(0, ".*"),
    "interrupt_starter,1,fork": STOPPED,
    "kill_starter,1,fork": None,
    "interrupt_itself,1,fork": STOPPED,
    "ctrl_c,1,fork,0": NOTHING_KEPT,
    "late,1,fork": None,
    "slow,1,fork": None,
    "exception,1,popen": BUG,
    "exception,0,popen,0": BUG,
    "kill,1,popen": KILLED.format(1),
    "kill,0,popen": KILLED.format(0),
    "hang,1,popen": SILENT.format(1, CLIENT),
    "hang,0,popen": SILENT.format(0, CLIENT),
    "stop,0,popen": SILENT.format(0, ".*"),
    "ctrl_c,0,popen": STOPPED,
    "kill,1,spawn": KILLED.format(1),
    "hang,1,spawn": SILENT.format(1, CLIENT),
    "ctrl_c,0,spawn": STOPPED,
    "term_itself,1,fork": STOPPED,
    "term_group,1,fork": STOPPED,
    "hup_group,0,fork": STOPPED,
    "term_starter,1,spawn": STOPPED,
    "term_itself,0,spawn,0": NOTHING_KEPT,
    "term_starter,1,popen": STOPPED,
    "term_itself,0,popen": STOPPED,
    "term_itself,1,popen": STOPPED,
    "term_group,1,popen": STOPPED,
    "term_starter,1,torchrun": STOPPED,
    "term_itself,0,torchrun": STOPPED,
    "term_itself,1,torchrun": STOPPED,
    "term_group,1,torchrun": STOPPED,
    "ctrl_c,0,torchrun": STOPPED,
    "hup_starter,1,torchrun": STOPPED,
    "interrupt_starter,0,torchrun": STOPPED,
    "hup_itself,0,torchrun": STOPPED,
    "interrupt_itself,1,torchrun": STOPPED,
    "hup_group,0,torchrun": STOPPED,
    "exception,0,torchrun": BUG,
    "exception,1,torchrun": BUG,
}


@pytest.fixture(scope="module")
def some(tmp_path_factory):
    """The cases that every run of the tests looks at, by one process."""
    return ends(tmp_path_factory.mktemp("some"), *SOME)


def ends(folder, *cases):
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setenv("PYTHONWARNINGS", "ignore")
        warnings.simplefilter("ignore")
        done = run_script(SCRIPT, str(folder), *cases, cwd=folder, timeout=(LONGEST + 30) * len(cases) + 60)
    assert done.returncode == 0, done.stderr
    return {case: json.loads((folder / f"{case}.json").read_text()) for case in cases}


def check(case, found, says):
    """One sentence, no process left, and a run folder exactly where there is something to keep."""
    assert found["left"] == 0
    assert not [name for name in found["files"] if name.endswith(".part")]
    kept = {Path(name).name for name in found["files"]} >= {"last.ckpt", "metrics.csv", "config.yaml"}
    assert kept == (not case.endswith(",0")), found["files"]
    if not kept:
        assert not [name for name in found["files"] if name.startswith("runs")]
    if says is None:
        return
    first_is_gone = case in ("kill,0,popen", "stop,0,popen")  # where processes are started by script, rank 0 is that
    if "torchrun" in case:
        check_torchrun(found, says)
        return
    assert found["code"] == (-9 if first_is_gone else 130 if "interrupted" in says else 1), found["err"]
    errors = [line for line in found["err"].splitlines() if "error" in line.lower() or "Traceback" in line]
    assert len(errors) == 1, found["err"]
    assert re.search(f"^fl-lightning: error: .*{says}", errors[0]), errors[0]
    assert found["err"].rstrip().endswith(errors[0])
    assert found["seconds"] < LONGEST / 2


def check_torchrun(found, says):
    """One sentence of ours; torchrun reports every process that did not end well, with a traceback of its own."""
    assert found["code"] == 1, found["err"]
    ours = [line for line in found["err"].splitlines() if line.startswith("fl-lightning: error: ")]
    assert len(ours) == 1, found["err"]
    assert re.search(says, ours[0]), ours[0]
    assert found["seconds"] < LONGEST / 2


@pytest.mark.parametrize("case", SOME)
def test_a_run_of_two_processes_ends(some, case):
    check(case, some[case], SOME[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", REST)
def test_a_run_ends_in_other_ways(tmp_path, case):
    found = ends(tmp_path, case)[case]
    check(case, found, REST[case])
    if case.startswith("slow"):
        assert found["code"] == 0  # it took longer than process_timeout, but lived
    if case.startswith("late"):
        assert "TRACEBACK ValueError: not where clients are trained" in found["err"]  # a bug keeps it
