"""`fl-lightning methods`: a table of all methods, measured by rounds of each on toy data."""

import csv
import inspect
import io
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import SGD

import fl_lightning
from fl_lightning import aggregation, methods
from fl_lightning.aggregation import Aggregator, ServerModule, UpdateTransform
from fl_lightning.cli.errors import PROG
from fl_lightning.cli.parser import CommandParser
from fl_lightning.cli.trials import LOCAL_SGD, Federation, silent, trial
from fl_lightning.client import ClientModule
from fl_lightning.client.optimizers import needs_closure
from fl_lightning.utils.text import as_row

Record = dict[str, Any]
"""A method's columns by name."""

DESCRIPTION = (
    "List all methods. What they send and keep is measured by two rounds of each on toy data, what they run with by "
    "one; the numbers are floats relative to the model's."
)
HEADINGS = [
    "method",
    "paper",
    "file",
    "down",
    "up",
    "client state",
    "server state",
    "data",
    "stacks",
    "module",
    "rules",
    "server optimizers",
]
PACKAGE = Path(fl_lightning.__file__).parent
SERVER_SGD = partial(SGD, lr=1.0)
CONFIGURED = {
    "FedPer": ("Arivazhagan et al. 2019, arXiv:1912.00818", ("net.head.*",)),
    "LG-FedAvg": ("Liang et al. 2020, arXiv:2001.01523", ("*", "!net.head.*")),
}
"""Methods that are a file in `configs/method` only: their source, and `model.personal`."""

ARGUMENTS: dict[str, dict[str, Any]] = {
    "FedDFServer": {"distill_steps": 1},
    "NormClip": {"max_norm": 1.0},
    "SAM": {"base": LOCAL_SGD},
}
"""Arguments without a default, and those that keep a trial short."""


@dataclass(frozen=True)
class Entry:
    """A method, and the federation in which it is tried.

    Args:
        name: as the tables have it.
        kind: the part of the federation that it is.
        source: its paper.
        file: in the repository.
        stackable: whether several of its clients can be trained at once; None: that is up to the client.
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
    found = [entry_of(name, kind) for home in (methods, aggregation) for name, kind in classes_in(home)]
    for name, (source, personal) in CONFIGURED.items():
        file = f"configs/method/{name.lower().replace('-', '_')}.yaml"
        found.append(Entry(name, "personal entries", source, file, None, Federation(personal=personal)))
    kinds = list(dict.fromkeys(["client", "personal entries", *(entry.kind for entry in found)]))
    return sorted(found, key=lambda e: (kinds.index(e.kind), e.name != "FedAvg", e.name.lower()))


def classes_in(home: Any) -> list[tuple[str, type]]:
    """List the classes of a package that are a method: those whose docstring, or whose file's, names its source."""
    public = {name: kind for name, kind in vars(home).items() if isinstance(kind, type)}
    return [(name, kind) for name, kind in public.items() if home is methods or "Source:" in (kind.__doc__ or "")]


def entry_of(name: str, kind: type) -> Entry:
    """Describe an exported class."""
    file = Path(inspect.getfile(kind))
    made: Any = partial(kind, **ARGUMENTS.get(name, {}))
    stackable: bool | None = None
    if issubclass(kind, ClientModule):
        part, federation = "client", Federation(client=kind)
        stackable = bool(vars(kind).get("stackable", False))
    elif issubclass(kind, Aggregator):
        part, federation = "rule", Federation(rule=made)
    elif issubclass(kind, ServerModule):
        part, federation = "server module", Federation(server_module=made)
    elif issubclass(kind, UpdateTransform):
        part, federation = "transform", Federation(transform=made)
    elif needs_closure(made([nn.Parameter(torch.zeros(1))])):
        part, federation = "local optimizer", Federation(optimizer=made)
    else:
        part, federation = "server optimizer", Federation(server_optimizer=made)
    source = source_in(kind.__doc__) or source_in(inspect.getmodule(kind).__doc__)
    return Entry(name_of(name), part, source, file.relative_to(PACKAGE.parent).as_posix(), stackable, federation)


def name_of(class_name: str) -> str:
    """Name a method by its class.

    >>> name_of("FedNovaAggregator"), name_of("FedProx")
    ('FedNova', 'FedProx')
    """
    return class_name.removesuffix("Aggregator").removesuffix("Server")


def source_in(text: str | None) -> str:
    """Find the sentence after `Source:` in a docstring; empty where there is none.

    >>> source_in("Title. Source: Li et al., ICLR 2021, arXiv:2102.07623, Alg. 1. Server: FedAvg.")
    'Li et al., ICLR 2021, arXiv:2102.07623, Alg. 1'
    """
    found = re.search(r"Source:\s+(.+?)\.(?:\s+(?=[A-Z])|\s*\Z)", text or "", re.DOTALL)
    return " ".join(found[1].split()) if found else ""


def papers(source: str) -> list[tuple[str, str]]:
    """Take the papers out of a source: what to call them, and their addresses.

    >>> papers("Li et al., ICLR 2021, arXiv:2102.07623, Alg. 1; and its code")
    [('Li et al., ICLR 2021', 'https://arxiv.org/abs/2102.07623')]
    """
    found = re.findall(r"(?:^|; )([^;]+?),? arXiv:([\d.]+\d)", source)
    if not found:
        return [(re.split(r"[;(]", source)[0].strip(), "")]
    return [(name, f"https://arxiv.org/abs/{number}") for name, number in found]


# --- the measurements


def records() -> list[Record]:
    """Measure all methods: the columns of each by name."""
    found = entries()
    rules = {entry.name: entry.federation.rule for entry in found if entry.kind == "rule"}
    optimizers: dict[str, Any] = {"SGD": SERVER_SGD}
    optimizers |= {entry.name: entry.federation.server_optimizer for entry in found if entry.kind == "server optimizer"}
    with silent():
        model = trial(Federation()).down
        return [measured(entry, model, rules, optimizers) for entry in found]


def measured(entry: Entry, model: float, rules: Mapping[str, Any], optimizers: Mapping[str, Any]) -> Record:
    """Measure one method; its numbers are floats relative to the model's.

    Args:
        entry: of the method.
        model: floats of the model.
        rules: factories of the rules by name.
        optimizers: factories of the server optimizers by name.

    Raises:
        RuntimeError: if the method by itself is refused.
    """
    own = entry.federation
    found = trial(own)
    if found.refused:
        raise RuntimeError(f"{entry.name} must run with the other parts of FedAvg, but: {found.refused}")
    with_rules = {} if own.rule else {name: replace(own, rule=rule) for name, rule in rules.items()}
    with_optimizers = {n: replace(own, server_optimizer=o) for n, o in optimizers.items() if not own.server_optimizer}
    refused = {name: trial(other, rounds=1).refused for name, other in (with_rules | with_optimizers).items()}
    refused["module"] = trial(own, around_module=True, rounds=1).refused
    return {
        "method": entry.name,
        "kind": entry.kind,
        "papers": papers(entry.source),
        "file": entry.file,
        "down": found.down / model,
        "down_contents": found.down_contents,
        "up": found.up / model,
        "up_contents": found.up_contents,
        "client_state": found.client_state / model,
        "server_state": found.server_state / model,
        "data": found.data,
        "stackable": entry.stackable,
        "module": not refused["module"],
        "rules": None if own.rule else [name for name in with_rules if not refused[name]],
        "server_optimizers": None if own.server_optimizer else [n for n in with_optimizers if not refused[n]],
        "refused": {name: sentence for name, sentence in refused.items() if sentence},
    }


# --- the table


def run(argv: list[str]) -> None:
    """Print the table.

    Args:
        argv: options of the command.

    Raises:
        SystemExit: with 2 for a wrong option, 0 after the help.
    """
    parser = CommandParser(prog=f"{PROG} methods", description=DESCRIPTION)
    parser.add_argument("--output", type=Literal["md", "csv", "json"], default="md", help="form of the table")
    output = parser.parse_args(argv).output
    print({"md": as_markdown, "csv": as_csv, "json": as_json}[output](records()), end="")


def as_json(found: Sequence[Record]) -> str:
    """Write an object for each method, with the sentences of what was refused."""
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def as_csv(found: Sequence[Record]) -> str:
    """Write a line for each method; several values in a field stand with spaces between."""
    out = io.StringIO()
    columns = [column for column in found[0] if column != "refused"]
    writer = csv.DictWriter(out, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for record in found:
        named = record | {"papers": [url or name for name, url in record["papers"]]}
        cells = [" ".join(v) if isinstance(v, list | tuple) else v for v in named.values()]
        writer.writerow(dict(zip(named, as_row(cells), strict=True)))
    return out.getvalue()


def as_markdown(found: Sequence[Record]) -> str:
    """Write the README's table."""
    every = {name: max((r[name] or [] for r in found), key=len) for name in ("rules", "server_optimizers")}
    lines = [HEADINGS, ["---"] * len(HEADINGS)]
    for r in found:
        lines.append(
            [
                r["method"] if r["kind"] == "client" else f"{r['method']} ({r['kind']})",
                ", ".join(f"[{name}]({url})" if url else name for name, url in r["papers"]),
                f"`{r['file']}`",
                sent(r["down"], r["down_contents"]),
                sent(r["up"], r["up_contents"]),
                number(r["client_state"]),
                number(r["server_state"]),
                ", ".join(r["data"]) or "–",
                {True: "yes", False: "no", None: "–"}[r["stackable"]],
                "yes" if r["module"] else "no",
                *(chosen(r[name], every[name]) for name in ("rules", "server_optimizers")),
            ]
        )
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def sent(amount: float, contents: Sequence[str]) -> str:
    """Write how much is sent, and what.

    >>> sent(1.972, ["weights", "control"]), sent(0, [])
    ('1.97: weights, control', '0')
    """
    return number(amount) + (": " + ", ".join(contents) if contents else "")


def number(value: float) -> str:
    """Write a number with at most two decimals.

    >>> number(1.0), number(0.0432)
    ('1', '0.04')
    """
    return f"{value:.2f}".rstrip("0").rstrip(".")


def chosen(names: Sequence[str] | None, every: Sequence[str]) -> str:
    """Write which names of `every` these are, in few words.

    >>> chosen(["a", "b", "c"], ["a", "b", "c"]), chosen(["a", "b"], ["a", "b", "c"]), chosen(["a"], ["a", "b", "c"])
    ('all', 'not c', 'a')
    """
    if names is None:
        return "–"
    rest = [name for name in every if name not in names]
    if not names or not rest:
        return "none" if rest else "all"
    return "not " + ", ".join(rest) if len(rest) < len(names) else ", ".join(names)
