"""Which cells are one run, and the names of their files."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from fl_lightning.federation.configured import flat
from fl_lightning.federation.differences import are_one_run, is_place, places_that_differ
from fl_lightning.federation.effects import below, distinguishes
from fl_lightning.federation.files import INITIAL_WEIGHTS, fingerprint_in
from fl_lightning.federation.values import Settings
from fl_lightning.reports.saved import MAX_SECONDS, load_config
from fl_lightning.runs.checkpoints import CHECKPOINTS
from fl_lightning.runs.folder import LAST, identity_of, runs
from fl_lightning.utils.text import slug

LONGEST_STEM = 80
"""Bytes of a name that a reader knows a cell by."""

LIMITS = ("max_epochs", "max_steps", "max_time")
"""Settings of the Trainer that end a run; a step is a round."""

ALL_LIMITS = (*LIMITS, MAX_SECONDS)
"""Likewise, and the setting of the model that ends a run by its simulated seconds."""


def settings_of(config: Mapping[str, Any], start: str = "") -> Settings:
    """Return the settings in which two cells must be equal to be one run. More rounds of a run are the same run.

    Args:
        config: Whole configuration of a cell.
        start: Identity and limits of the cell whose last weights it begins with. Empty without one.
    """
    settings = {name: value for name, value in flat(config).items() if distinguishes(name)}
    if start:
        settings[INITIAL_WEIGHTS] = start
    return settings


def cell_name(stem: str, seed: int, config: Mapping[str, Any], start: str = "") -> str:
    """Name a cell: by a text that a reader knows it by, its seed, and a digest of its settings.

    Args:
        stem: Text that a reader knows the cell by.
        seed: Seed of the run.
        config: Whole configuration of the cell.
        start: Identity and limits of the cell whose last weights it begins with. Empty without one.
    """
    settings = settings_of(config, start)
    for name in list(settings):
        if is_place(name, settings):
            settings[name] = fingerprint_of(name, settings) or settings[name]
    text = json.dumps(sorted(settings.items()), default=str)
    short = slug(stem).encode()[:LONGEST_STEM].decode(errors="ignore")
    return f"{short}-seed{seed}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def identity_of_name(name: str) -> str:
    """Return the seed and the digest in a cell's name.

    >>> identity_of_name("FedNTD-beta=0.3-seed0-1a2b3c4d")
    'seed0-1a2b3c4d'
    """
    return "-".join(name.rsplit("-", 2)[1:])


def fingerprint_of(name: str, settings: Settings) -> str | None:
    """Return what tells which samples lie at a place, or None if nothing tells.

    Args:
        name: Dotted name of the argument of a source that holds the place.
        settings: Settings with the arguments of the source.
    """
    source = name.rpartition(".")[0]
    arguments = {key: value for key, value in settings.items() if below(key, source)}
    return read_fingerprint(source, json.dumps(arguments, sort_keys=True, default=str))


@cache
def read_fingerprint(source: str, settings: str) -> str | None:
    """Return the fingerprint of a source's files, which are looked at once.

    Args:
        source: Dotted name of the source.
        settings: The class of the source and its arguments by dotted name, as JSON.
    """
    return fingerprint_in(source, json.loads(settings))


def limits_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Choose the limits that are limits.

    >>> limits_of({"max_epochs": None, "max_steps": -1, "max_time": "00:00:10:00", "devices": 1})
    {'max_time': '00:00:10:00'}
    """
    return {name: given[name] for name in ALL_LIMITS if given.get(name) not in (None, -1)}


def limits_in(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the limits in a whole configuration, by the names in `ALL_LIMITS`.

    >>> limits_in({"trainer": {"max_epochs": -1, "devices": 1}, "model": {"max_seconds": 600}})
    {'max_seconds': 600}
    """
    model = config.get("model") or {}
    trainer = config.get("trainer") or {}
    return limits_of({**trainer, MAX_SECONDS: model.get(MAX_SECONDS)})


def start_identity(name: str, limits: Mapping[str, Any]) -> str:
    """Return what tells the last weights of a cell that others begin with: its identity, and its limits."""
    return f"{identity_of_name(name)} {dict(limits)}"


class StoredCells:
    """Finds the runs of cells in a folder.

    Args:
        folder: Folder of the runs of an experiment.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._named: dict[str, str] = {}
        """Names by the digest of the settings, of all cells that were asked for."""
        self._read: dict[str, Settings] = {}
        """Settings of stored cells by name, as far as they were read."""

    def name_of(self, name: str, settings: Settings) -> str:
        """Return the name that a run of these settings has in the folder, or a name that no other run has.

        Args:
            name: Name of the cell, from `cell_name`.
            settings: Settings of the cell, from `settings_of`.
        """
        identity = identity_of_name(name)
        if identity not in self._named:
            self._named[identity] = self._stored_name(name, settings) or self._free_name(name)
        return self._named[identity]

    def _stored_name(self, name: str, settings: Settings) -> str | None:
        """Return the name of the stored cell that is the same run, or None without one."""
        for other in self._candidates(name):
            if self._is_same(other, settings):
                return other
        return None

    def _candidates(self, name: str) -> Iterator[str]:
        """Give the names of stored cells with the seed of a cell, that of the cell's own name first."""
        identity = identity_of_name(name)
        seed = identity.partition("-")[0]
        stored = sorted(path.stem for path in (self.folder / "cells").glob(f"*-{seed}-*.yaml"))
        own = [other for other in stored if identity_of_name(other) == identity]
        yield from own
        yield from (other for other in stored if other not in own)

    def _is_same(self, name: str, settings: Settings) -> bool:
        """Return True if a stored cell is a run of these settings."""
        was = self._settings(name)
        if not was or not are_one_run(was, settings):
            return False
        for place in places_that_differ(was, settings):
            now = fingerprint_of(place, settings)
            if now is None or now not in (fingerprint_of(place, was), self._stored_fingerprint(name, place)):
                return False
        return True

    def _settings(self, name: str) -> Settings:
        """Return the settings of a stored cell, empty if its file cannot be read."""
        if name not in self._read:
            self._read[name] = self._read_settings(name)
        return self._read[name]

    def _read_settings(self, name: str) -> Settings:
        """Read the settings of a stored cell, with the start that its initial weights are of."""
        try:
            config = load_config(self.folder / "cells" / f"{name}.yaml")
        except ValueError:
            return {}
        if "model" not in config:
            return {}
        return settings_of(config, self._start_in(config))

    def _start_in(self, config: Mapping[str, Any]) -> str:
        """Return identity and limits of the stored cell whose last weights a configuration begins with, or ""."""
        weights = Path(str(config["model"].get("initial_weights")))
        is_of_experiment = weights.name == LAST and weights.parent.name == CHECKPOINTS and len(weights.parts) > 4
        if not is_of_experiment or weights.parts[-5] != "runs":
            return ""
        name = weights.parts[-4]
        limits = limits_in(load_config(self.folder / "cells" / f"{name}.yaml"))
        return start_identity(name, limits)

    def _stored_fingerprint(self, name: str, place: str) -> str | None:
        """Return the fingerprint of a source's files that the stored run has read, or None if nothing tells."""
        for run in reversed(runs(self.folder / "runs" / name).values()):
            found = identity_of(run).get("files", {}).get(place.rpartition(".")[0])
            if found is not None:
                return str(found)
        return None

    def _free_name(self, name: str) -> str:
        """Return a name that neither a stored cell nor a cell that was asked for has."""
        taken = {identity_of_name(path.stem) for path in (self.folder / "cells").glob("*.yaml")}
        taken |= {identity_of_name(other) for other in self._named.values()}
        free = name
        while identity_of_name(free) in taken:
            digest = hashlib.sha256(free.encode()).hexdigest()[:8]
            free = f"{name.rpartition('-')[0]}-{digest}"
        return free
