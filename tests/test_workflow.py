"""What GitHub runs for a change is what the Makefile has."""

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text(encoding="utf-8"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


def test_each_step_makes_what_the_makefile_has():
    suites = WORKFLOW["jobs"]["versions"]["strategy"]["matrix"]["suite"]
    steps = [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]
    words = [word for step in steps for word in step.replace("${{ matrix.suite }}", " ".join(suites)).split()]
    made = [word for word in words if word != "make" and "=" not in word]
    assert made == ["lint", "test", "smoke", "test-oldest", "test-newest"]
    assert set(made) <= TARGETS


def test_ci_makes_the_same():
    lines = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    words = " ".join(line for line in lines if line.startswith("make ")).split()
    made = [word for word in words if word != "make" and "=" not in word]
    assert made == ["lint", "test", "smoke", "test-oldest", "test-newest"]
