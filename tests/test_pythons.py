"""The Pythons that `make test-oldest` and `make test-newest` find: only those that work and that setup.cfg names."""

import sys

import pytest

from tools import pythons


def put(folder, name, answer):
    """Write a program into a folder that answers as a Python does."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{answer}\n", encoding="utf-8")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine whose path and pyenv are empty folders; this file's Python is too old for setup.cfg."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    monkeypatch.setattr(sys, "executable", put(tmp_path / "own", "python", "echo 3 6 own"))
    monkeypatch.setattr(pythons, "supported", lambda: {(3, 11), (3, 12), (3, 13)})
    return tmp_path


def test_the_python_of_these_tests_is_found(monkeypatch):
    version = sys.version_info[:2]
    monkeypatch.setattr(pythons, "supported", lambda: {version})
    assert set(pythons.installed()) == {version}


def test_setup_cfg_names_python_3_11():
    assert (3, 11) in pythons.supported()


def test_oldest_and_newest_pass_over_names_that_fail_and_versions_that_setup_cfg_does_not_name(machine, capfd):
    put(machine / "bin", "python3.13", "echo 'pyenv: python3.13: command not found' >&2; exit 127")
    put(machine / "bin", "python3.11", "echo 3 11 on/the path")
    put(machine / "bin", "python3", "echo 3 15 too/new")
    put(machine / "pyenv/versions/3.12.1/bin", "python3", "echo 3 12 of/pyenv")
    put(machine / "pyenv/versions/3.15.1/bin", "python3", "echo 3 15 too/new")
    assert pythons.main(["oldest"]) == 0
    assert pythons.main(["newest"]) == 0
    assert capfd.readouterr().out.splitlines() == ["on/the path", "of/pyenv"]


def test_a_newest_python_that_works_only_in_pyenv_is_found(machine):
    put(machine / "bin", "python3.13", "exit 127")
    put(machine / "pyenv/versions/3.13.0/bin", "python3", "echo 3 13 of/pyenv")
    assert pythons.installed() == {(3, 13): "of/pyenv"}


def test_a_machine_without_a_supported_python_is_told_which_are(machine, capfd):
    assert pythons.main(["newest"]) == 1
    assert "3.11, 3.12, 3.13" in capfd.readouterr().err


def test_another_word_is_refused(capfd):
    assert pythons.main(["latest"]) == 2
    assert "oldest or newest" in capfd.readouterr().err
