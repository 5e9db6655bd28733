"""What `make dist` builds is enough: the main job runs from the wheel, in an empty folder, without TensorBoard."""

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.commands import CONFIGS, run_in

ROOT = Path(__file__).resolve().parents[1]
FILES = ("setup.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in")
ABSENT = ("fl_lightning", "fl-lightning", "__editable__", "tensorboard")
"""What the fresh environment must not find beside the wheel."""

pytestmark = pytest.mark.slow


def run(*command: object, cwd: Path, **environment: str) -> str:
    there = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | environment
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=there, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of sdist and wheel; the wheel is built from the sdist."""
    there = tmp_path_factory.mktemp("sources")
    for folder in ("fl_lightning", "configs"):
        shutil.copytree(ROOT / folder, there / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in FILES:
        shutil.copy(ROOT / file, there)
    (there / "tests").mkdir()
    (there / "tests/test_left_out.py").touch()
    run(sys.executable, "-m", "build", "--no-isolation", ".", cwd=there)
    return there / "dist"


@pytest.fixture(scope="module")
def programs(built, tmp_path_factory):
    """Programs of a fresh environment that has the wheel; what it depends on is linked from this one."""
    there = tmp_path_factory.mktemp("fresh")
    outer = tmp_path_factory.mktemp("outer")
    venv.create(there, symlinks=True)
    site = Path(run(there / "bin/python", "-c", "import site; print(site.getsitepackages()[0])", cwd=there).strip())
    for path in map(Path, sys.path):
        for entry in path.iterdir() if path.name == "site-packages" else ():
            if not entry.name.startswith(ABSENT) and entry.suffix != ".pth" and not (outer / entry.name).exists():
                (outer / entry.name).symlink_to(entry)
    (site / "outer.pth").write_text(str(outer))
    (wheel,) = built.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "--python", there / "bin/python", "--disable-pip-version-check")
    run(*pip, "install", "--no-deps", "--no-index", "--quiet", wheel, cwd=there)
    return there / "bin"


def test_wheel_and_sdist_hold_every_configuration_file_once(built):
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    wanted = sorted(f"configs/{path.relative_to(CONFIGS).as_posix()}" for path in CONFIGS.rglob("*.yaml"))
    with zipfile.ZipFile(wheel) as file:
        found = sorted(name for name in file.namelist() if name.endswith(".yaml"))
        assert found == [f"fl_lightning/{name}" for name in wanted]
        assert {"fl_lightning/py.typed", "fl_lightning/cli/methods.json"} <= {*file.namelist()}
    with tarfile.open(sdist) as file:
        assert not [name for name in file.getnames() if "/tests" in name]
        assert sorted(m.name.partition("/")[2] for m in file.getmembers() if m.name.endswith(".yaml")) == wanted


def test_the_main_job_runs_from_the_wheel_in_an_empty_folder(programs, tmp_path):
    where = run(programs / "python", "-c", "import fl_lightning; print(fl_lightning.__file__)", cwd=tmp_path)
    assert where.startswith(str(programs.parent)), where
    said = run(programs / "fl-lightning", "fit", "-c", "experiment/digits_fedntd", cwd=tmp_path, OMP_NUM_THREADS="1")
    assert "Class-wise accuracy of the global model after 30 rounds" in said
    assert said.count("TensorBoard is not installed") == 1
    folder = run_in(tmp_path)
    assert folder.name == "0"
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml",
        "status.json",
        "metrics.csv",
        "classwise.csv",
        "classification.csv",
        "confusion.csv",
        "confusion.png",
        "partition.csv",
        "checkpoints",
        "partition.png",
        "accuracy.png",
        "classwise.png",
    }
    run(programs / "fl-lightning", "test", "-c", "experiment/digits_fedntd", "--ckpt_path", "best", cwd=tmp_path)
    assert "| FedNTD |" in run(programs / "fl-lightning", "methods", cwd=tmp_path)


def test_files_of_the_wheel_are_found(programs, tmp_path):
    listed = run(programs / "fl-lightning", "configs", cwd=tmp_path)
    assert len(listed.splitlines()) == len(list(CONFIGS.rglob("*.yaml")))
    assert "fedntd/2" in run(programs / "fl-lightning", "reproduce", cwd=tmp_path)
    run(programs / "fl-lightning", "new", "method", "Mine", cwd=tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"mine.py", "mine.yaml", "test_mine.py"}


def test_a_source_tree_without_links_finds_its_files(built, tmp_path):
    """As a clone on Windows does, where git may make no links; the package runs where it lies."""
    shutil.unpack_archive(*built.glob("*.tar.gz"), tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    assert not [path for path in tree.rglob("*") if path.is_symlink()]
    assert "data/digits" in run(sys.executable, "-m", "fl_lightning", "configs", "data", cwd=tree)
