"""Fingerprints of the files that a run reads: those of sources of samples, and the initial weights."""

from collections.abc import Mapping
from typing import Any

from pytorch_lightning.utilities import rank_zero_info

from fl_lightning.data import Source
from fl_lightning.federation.described import arguments_of, places_of
from fl_lightning.federation.differences import defaults_of
from fl_lightning.federation.values import Settings, below_of, resolved
from fl_lightning.utils.files import content_digest

INITIAL_WEIGHTS = "model.initial_weights"
"""Name of the file with the weights that a run begins with."""


def fingerprints(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the fingerprints of sources and of the sources within them, by name, as far as sources give any.

    Args:
        values: The arguments of a part by dotted name.
    """
    found: dict[str, str] = {}
    for name, value in values.items():
        if not isinstance(value, Source):
            continue
        arguments = arguments_of(value)
        fingerprint = type(value).fingerprint(arguments) if value.places else None
        if fingerprint is not None:
            found[name] = fingerprint
        found |= fingerprints({f"{name}.{key}": item for key, item in arguments.items()})
    return found


def fingerprint_in(name: str, settings: Settings) -> str | None:
    """Return the fingerprint of the files that a source of some settings reads today, or None if nothing tells.

    Args:
        name: Dotted name of the source, or of the initial weights.
        settings: Settings with the source and its arguments. An argument without a value has its default.
    """
    if name == INITIAL_WEIGHTS:
        path = settings.get(name)
        return None if path is None else content_digest(path)
    kind = resolved(settings.get(name))
    if not places_of(kind):
        return None
    fingerprint: str | None = kind.fingerprint(defaults_of(kind) | below_of(settings, name))
    return fingerprint


def changed_files(was: Mapping[str, str], settings: Settings) -> list[str]:
    """Return the names of the sources whose files have changed. Files that are gone have not changed.

    Args:
        was: Fingerprints of files when the run was begun, by the name of the source.
        settings: Settings with the sources and their arguments.
    """
    now = {name: fingerprint_in(name, settings) for name in was}
    return [name for name in was if now[name] not in (None, was[name])]


def tell_changed_files(was: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Name in one line the sources whose files have changed since the run was begun, and in another the weights."""
    changed = [name for name in was if now.get(name, was[name]) != was[name]]
    if INITIAL_WEIGHTS in changed:
        changed.remove(INITIAL_WEIGHTS)
        rank_zero_info(
            f"{INITIAL_WEIGHTS}: the file has changed since the run was begun, which goes on from the weights of "
            f"before; start a new run without --ckpt_path to begin with these"
        )
    if changed:
        rank_zero_info(
            f"{', '.join(changed)}: the files have changed since the run was begun, by their names, sizes or contents; "
            f"start a new run without --ckpt_path if they hold other samples"
        )
