"""`fl-lightning methods`: the table of all methods that comes with the package."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fl_lightning.cli import configs
from fl_lightning.cli.plain_parser import PlainParser
from fl_lightning.utils.text import folded, write_cells

Record = dict[str, Any]
"""A method's columns by name."""

DESCRIPTION = (
    "List all methods. What they send and keep was measured by two rounds of each on toy data, what they run with by "
    "one; the numbers are relative to the model's: bytes of messages, floats of states."
)
HEADINGS = [
    *("method", "paper", "file", "down", "up", "client state", "server state", "sends", "reads", "data", "stacks"),
    *("module", "rules", "server optimizers"),
]
FOLDER = "method/"
"""Beginning of the names of the methods' configurations."""

TABLE = Path(__file__).with_name("methods.json")
"""The measured table: an object for each method, with the sentences of what was refused."""


def run(argv: list[str]) -> None:
    """Print the table.

    Args:
        argv: options of the command.

    Raises:
        SystemExit: with 2 for a wrong option, 0 after the help.
    """
    forms = {"md": methods_as_markdown, "csv": methods_as_csv, "json": as_json}
    parser = PlainParser("fl-lightning methods", description=DESCRIPTION)
    parser.add_argument("--output", choices=list(forms), default="md", help="form of the table (default: md)")
    print(forms[parser.parse_args(argv).output](records()), end="")


def records() -> list[Record]:
    """Read the columns of all methods by name."""
    return list(json.loads(TABLE.read_text(encoding="utf-8")))


def printed_names() -> dict[str, str]:
    """Name every file of a method as the table of methods does, one that is not in it by the comment in the file.

    >>> names = printed_names()
    >>> names["lg_fedavg"], names["geometric_median"], names["centralized"]
    ('LG-FedAvg', 'GeometricMedian', 'Centralized')
    """
    stems = [name.removeprefix(FOLDER) for name in configs.config_names() if name.startswith(FOLDER)]
    printed = {folded(record["method"]): record["method"] for record in records()}
    return {s: printed.get(folded(s)) or configs.title(f"{FOLDER}{s}").partition(":")[0] for s in stems}


def as_json(methods: Sequence[Record]) -> str:
    """Write an object for each method, with the sentences of what was refused."""
    return json.dumps(methods, indent=1, ensure_ascii=False) + "\n"


def methods_as_csv(methods: Sequence[Record]) -> str:
    """Write a line for each method, with spaces between several values in a field."""
    out = io.StringIO()
    columns = [column for column in methods[0] if column != "refused"]
    rows = [record | {"papers": [url or name for name, url in record["papers"]]} for record in methods]
    cells = ([" ".join(v) if isinstance(v, list | tuple) else v for v in map(row.get, columns)] for row in rows)
    write_cells(out, [columns, *cells])
    return out.getvalue()


def methods_as_markdown(methods: Sequence[Record]) -> str:
    """Write the table of docs/methods/index.md."""
    every = {name: max((r[name] or [] for r in methods), key=len) for name in ("rules", "server_optimizers")}
    lines = [HEADINGS, ["---"] * len(HEADINGS)]
    for r in methods:
        lines.append(
            [
                r["method"] if r["kind"] == "client" else f"{r['method']} ({r['kind']})",
                ", ".join(f"[{name}]({url})" if url else name for name, url in r["papers"]),
                f"`{r['file']}`",
                sent(r["down"], r["down_contents"]),
                sent(r["up"], r["up_contents"]),
                short_number(r["client_state"]),
                short_number(r["server_state"]),
                *("–" if r[name] is None else ", ".join(r[name]) or "nothing" for name in ("sends", "reads")),
                ", ".join(r["data"]) or "–",
                {True: "yes", False: "no", None: "–"}[r["stackable"]],
                "yes" if r["module"] else "no",
                *(choice_in_words(r[name], every[name]) for name in ("rules", "server_optimizers")),
            ]
        )
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def sent(amount: float, contents: Sequence[str]) -> str:
    """Write how much is sent, and what.

    >>> sent(1.972, ["weights", "control"]), sent(0, [])
    ('1.97: weights, control', '0')
    """
    return short_number(amount) + (": " + ", ".join(contents) if contents else "")


def short_number(value: float) -> str:
    """Write a number with at most two decimals.

    >>> short_number(1.0), short_number(0.0432)
    ('1', '0.04')
    """
    return f"{value:.2f}".rstrip("0").rstrip(".")


def choice_in_words(names: Sequence[str] | None, every: Sequence[str]) -> str:
    """Write which names of `every` these are, in few words.

    >>> every = ["a", "b", "c"]
    >>> choice_in_words(["a", "b", "c"], every), choice_in_words(["a", "b"], every), choice_in_words(["a"], every)
    ('all', 'not c', 'a')
    """
    if names is None:
        return "–"
    rest = [name for name in every if name not in names]
    if not names or not rest:
        return "none" if rest else "all"
    return "not " + ", ".join(rest) if len(rest) < len(names) else ", ".join(names)
