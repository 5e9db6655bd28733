"""Measures the table of `fl-lightning methods` and writes it: `python -m tools.measure_methods`, about a minute.

Two rounds of each method on toy data show what it sends and keeps, one round what it runs with.
"""

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import SGD

import fl_lightning
from fl_lightning import aggregation, methods
from fl_lightning.aggregation import Aggregator, Codec, Pacing, ServerModule, UpdateTransform
from fl_lightning.cli.methods import TABLE, Record, as_json
from fl_lightning.client import ClientModule
from fl_lightning.client.optimizers import needs_closure
from tools.measurement_runs import (
    CLASSES,
    INPUTS,
    LOCAL_SGD,
    Federation,
    ToyNet,
    measurement_run,
    num_floats,
)
from tools.quiet import silent

PACKAGE = Path(fl_lightning.__file__).parent
SERVER_SGD = partial(SGD, lr=1.0)
FLOATS = num_floats(ToyNet(CLASSES, (INPUTS,)).state_dict())
"""Number of floats of the model."""

CONFIGURED = {
    "FedPer": ("Arivazhagan et al. 2019, arXiv:1912.00818", ("net.head.*",)),
    "LG-FedAvg": ("Liang et al. 2020, arXiv:2001.01523", ("*", "!net.head.*")),
}
"""Source and `model.personal` of the methods that are only a file in `configs/method`."""

PRINTED = {"PFedMe": "pFedMe"}
"""Names of methods that differ from the names of their classes, by these."""

ARGUMENTS: dict[str, dict[str, Any]] = {
    "DPFedAvg": {"noise_multiplier": 0.3, "delta": 0.01},
    "FedDFServer": {"distill_steps": 1},
    "NormClip": {"max_norm": 1.0},
    "SAM": {"base": LOCAL_SGD},
}
"""Arguments without a default, and those that keep a measurement run short."""

MODULE_SETTINGS: dict[str, dict[str, Any]] = {"FedBABU": {"head": "module.net.head.*"}}
"""Settings that a client needs around a module."""


@dataclass(frozen=True)
class Entry:
    """Holds a method, and the federation in which it is measured.

    Args:
        name: Name in the tables.
        kind: The part of the federation that the method is.
        source: Its paper.
        file: Its file in the repository.
        stackable: Whether several of its clients can be trained at once. None means that this is up to the client.
        federation: FedAvg with this method.
    """

    name: str
    kind: str
    source: str
    file: str
    stackable: bool | None
    federation: Federation


# --- the methods


def entries() -> list[Entry]:
    """List all methods: clients, FedAvg first, then the parts that go with any client."""
    listed = []
    for home in (methods, aggregation):
        listed += [entry_of(name, kind) for name, kind in classes_in(home)]
    for name, (source, personal) in CONFIGURED.items():
        entry = Entry(
            name=name,
            kind="personal entries",
            source=source,
            file=f"configs/method/{name.lower().replace('-', '_')}.yaml",
            stackable=None,
            federation=Federation(personal=personal),
        )
        listed.append(entry)
    kinds = list(dict.fromkeys(["client", "personal entries", *(entry.kind for entry in listed)]))

    def place(entry: Entry) -> tuple[int, bool, str]:
        return kinds.index(entry.kind), entry.name != "FedAvg", entry.name.lower()

    return sorted(listed, key=place)


def classes_in(home: Any) -> list[tuple[str, type]]:
    """List the classes of a package that are a method: their docstring or that of their file names the source.

    Codecs have a table of their own, in docs/compression.md. A pacing needs devices, and nothing is measured with them.
    """
    found = []
    for name, kind in vars(home).items():
        if not isinstance(kind, type) or issubclass(kind, Codec | Pacing):
            continue
        if home is methods or "Source:" in (kind.__doc__ or ""):
            found.append((name, kind))
    return found


def entry_of(name: str, kind: type) -> Entry:
    """Describe an exported class."""
    file = Path(inspect.getfile(kind))
    made: Any = partial(kind, **ARGUMENTS.get(name, {}))
    stackable: bool | None = None
    if issubclass(kind, ClientModule):
        part = "client"
        federation = Federation(client=kind, module_settings=MODULE_SETTINGS.get(name, {}))
        stackable = bool(vars(kind).get("stackable", False))
    elif issubclass(kind, Aggregator):
        part = "rule"
        federation = Federation(rule=made)
    elif issubclass(kind, ServerModule):
        part = "server module"
        federation = Federation(server_module=made)
    elif issubclass(kind, UpdateTransform):
        part = "transform"
        federation = Federation(transform=made)
    elif needs_closure(made([nn.Parameter(torch.zeros(1))])):
        part = "local optimizer"
        federation = Federation(optimizer=made)
    else:
        part = "server optimizer"
        federation = Federation(server_optimizer=made)
    source = source_in(kind.__doc__) or source_in(inspect.getmodule(kind).__doc__)
    return Entry(
        name=name_of(name),
        kind=part,
        source=source,
        file=file.relative_to(PACKAGE.parent).as_posix(),
        stackable=stackable,
        federation=federation,
    )


def name_of(class_name: str) -> str:
    """Name a method by its class.

    >>> name_of("FedNovaAggregator"), name_of("FedProx"), name_of("PFedMe")
    ('FedNova', 'FedProx', 'pFedMe')
    """
    name = class_name.removesuffix("Aggregator").removesuffix("Server")
    return PRINTED.get(name, name)


def source_in(text: str | None) -> str:
    """Find the sentence after `Source:` in a docstring. It is empty if there is none.

    >>> source_in("Title. Source: Li et al., ICLR 2021, arXiv:2102.07623, Alg. 1. Server: FedAvg.")
    'Li et al., ICLR 2021, arXiv:2102.07623, Alg. 1'
    """
    sentence = re.search(r"Source:\s+(.+?)\.(?:\s+(?=[A-Z])|\s*\Z)", text or "", re.DOTALL)
    return " ".join(sentence[1].split()) if sentence else ""


def papers(source: str) -> list[tuple[str, str]]:
    """Return the names and the addresses of the papers of a source.

    >>> papers("Li et al., ICLR 2021, arXiv:2102.07623, Alg. 1; and its code")
    [('Li et al., ICLR 2021', 'https://arxiv.org/abs/2102.07623')]
    """
    on_arxiv = re.findall(r"(?:^|; )([^;]+?),? arXiv:([\d.]+\d)", source)
    if not on_arxiv:
        return [(re.split(r"[;(]", source)[0].strip(), "")]
    return [(name, f"https://arxiv.org/abs/{number}") for name, number in on_arxiv]


# --- the measurements


def records() -> list[Record]:
    """Measure all methods, and return the columns of each by name."""
    measurable = entries()
    rules = {entry.name: entry.federation.rule for entry in measurable if entry.kind == "rule"}
    optimizers: dict[str, Any] = {"SGD": SERVER_SGD}
    for entry in measurable:
        if entry.kind == "server optimizer":
            optimizers[entry.name] = entry.federation.server_optimizer
    with silent():
        size = measurement_run(Federation()).down
        return [measured(entry, size=size, rules=rules, optimizers=optimizers) for entry in measurable]


def measured(entry: Entry, *, size: float, rules: Mapping[str, Any], optimizers: Mapping[str, Any]) -> Record:
    """Measure one method. Its numbers are relative to the model's: bytes of messages, floats of states.

    Args:
        entry: The method.
        size: Bytes of the model.
        rules: Factories of the rules by name.
        optimizers: Factories of the server optimizers by name.

    Raises:
        RuntimeError: The method by itself is refused.
    """
    federation = entry.federation
    outcome = measurement_run(federation)
    if outcome.refused:
        raise RuntimeError(f"{entry.name} must run with the other parts of FedAvg, but: {outcome.refused}")
    refused = dict[str, str | None]()
    rules_taken = None
    if federation.rule is None:
        for name, rule in rules.items():
            refused[name] = measurement_run(replace(federation, rule=rule), rounds=1).refused
        rules_taken = [name for name in rules if not refused[name]]
    optimizers_taken = None
    if federation.server_optimizer is None:
        for name, optimizer in optimizers.items():
            refused[name] = measurement_run(replace(federation, server_optimizer=optimizer), rounds=1).refused
        optimizers_taken = [name for name in optimizers if not refused[name]]
    refused["module"] = measurement_run(federation, around_module=True, rounds=1).refused
    return {
        "method": entry.name,
        "kind": entry.kind,
        "papers": papers(entry.source),
        "file": entry.file,
        "down": outcome.down / size,
        "down_contents": outcome.down_contents,
        "up": outcome.up / size,
        "up_contents": outcome.up_contents,
        "client_state": outcome.client_state / FLOATS,
        "server_state": outcome.server_state / FLOATS,
        **declared(entry),
        "data": outcome.data,
        "stackable": entry.stackable,
        "module": not refused["module"],
        "rules": rules_taken,
        "server_optimizers": optimizers_taken,
        "refused": {name: sentence for name, sentence in refused.items() if sentence},
    }


def declared(entry: Entry) -> Record:
    """List what the clients of a method send and read of their training data. None means that it is up to the client.

    A server module that asks clients for more is shown around FedAvg.
    """
    federation = entry.federation
    inquiry = federation.server_module().inquiry if federation.server_module else None
    if inquiry is not None:
        client = federation.client
        return {"sends": sorted(client.sends | inquiry.sends), "reads": sorted(client.reads | inquiry.reads)}
    if entry.kind not in ("client", "personal entries"):
        return {"sends": None, "reads": None}
    means = {"personal means"} if federation.personal else set()
    return {"sends": sorted(federation.client.sends | means), "reads": sorted(federation.client.reads)}


if __name__ == "__main__":
    TABLE.write_text(as_json(records()), encoding="utf-8")
