"""The commands of docs/deployment.md: each names only files and connections that a block above it has made."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/deployment.md"
STANDS_IN = ("fl-lightning", "flower-superlink", "flower-supernode", "flwr")
OWN_NAMES_OF_FLOWER = {"local", "supergrid"}

STAND_IN = """#!/bin/sh
{ basename "$0"; for word in "$@"; do printf '%s\\n' "$word"; done; printf '\\n'; } >> "$CALLS"
case "$1" in split) mkdir -p "$SRV/parties/server" "$SRV/parties/client_0" "$SRV/parties/client_1"
    for party in server client_0 client_1; do : > "$SRV/parties/$party/data.yaml"; done;; esac
for word in "$@"; do
    for path in $(printf '%s' "$word" | grep -o "$SRV/[A-Za-z0-9_./{}]*" | sed 's/{client}/0/'); do
        [ -e "$path" ] || { echo "$path is not there" >&2; exit 1; }
    done
done
"""


def blocks_of_commands() -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def followed(tmp_path_factory) -> Path:
    """Follow the page with stand-ins for the commands that train or stay; returns the folder of what they left."""
    for tool in ("bash", "openssl", "ssh-keygen"):
        if shutil.which(tool) is None:
            pytest.skip(f"the page is followed with {tool}, which is not here")
    tmp_path = tmp_path_factory.mktemp("page")
    clone = tmp_path / "clone"
    shutil.copytree(ROOT / "examples", clone / "examples", ignore=shutil.ignore_patterns("runs", "__pycache__"))
    (clone / ".venv/bin").mkdir(parents=True)
    (clone / ".venv/bin/activate").write_text(f'PATH="{clone}/.venv/bin:{Path(sys.executable).parent}:$PATH"\n')
    for name in STANDS_IN:
        (clone / ".venv/bin" / name).write_text(STAND_IN)
        (clone / ".venv/bin" / name).chmod(0o755)
    srv = tmp_path / "srv"
    home = tmp_path / "home"
    srv.mkdir()
    home.mkdir()
    environment = os.environ | {"HOME": str(home), "SRV": str(srv), "CALLS": str(tmp_path / "calls")}
    first, *blocks = blocks_of_commands()
    for block in blocks:
        commands = f"set -e\n{first}{block}".replace("/srv", str(srv))
        ran = subprocess.run(
            ["bash", "-c", commands],
            cwd=clone,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ran.returncode == 0, f"{block}\n{ran.stdout}{ran.stderr}"
    return tmp_path


@pytest.fixture
def calls(followed) -> list[list[str]]:
    """The words of each call of a stand-in, its name first."""
    return [call.split("\n") for call in (followed / "calls").read_text().strip().split("\n\n")]


def test_every_block_finds_what_it_names(calls, followed):
    """The connections are those of config.toml, each there once and under a name that Flower's own file has not."""
    connections = tomllib.loads((followed / "home/.flwr/config.toml").read_text())["superlink"]
    assert not OWN_NAMES_OF_FLOWER & set(connections)
    used = {call[3] for call in calls if call[:2] == ["flwr", "run"]}
    used |= {call[4] for call in calls if call[:3] == ["flwr", "supernode", "register"]}
    assert used == set(connections)


def test_every_node_and_server_is_started_with_data_of_its_own(calls):
    nodes = [word for call in calls if call[0] == "flower-supernode" for word in call if word.startswith("data=")]
    assert len(nodes) == len(set(nodes)) == 4
    runs = [" ".join(call) for call in calls if call[:2] == ["flwr", "run"]]
    assert all("server-data=" in run for run in runs)
    assert [run.split()[2] for run in runs].count("examples/clinics") == 2


def test_no_command_in_a_sentence_names_an_unknown_connection():
    text = PAGE.read_text(encoding="utf-8")
    known = set(re.findall(r"^\[superlink\.(\w+)\]", text, re.MULTILINE))
    named = re.findall(r"`flwr (?:run|log|stop|ls) (?:\S+ )?(\w+)`", text)
    assert named
    assert set(named) <= known
