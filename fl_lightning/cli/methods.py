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
    "method",
    "paper",
    "file",
    "down",
    "up",
    "client state",
    "server state",
    "sends",
    "reads",
    "data",
    "stacks",
    "module",
    "rules",
    "server optimizers",
]
"""Columns of the table in Markdown."""

FOLDER = "method/"
"""Beginning of the names of the methods' configurations."""

TABLE = Path(__file__).with_name("methods.json")
"""The measured table: an object for each method, with the sentences of what was refused."""


def run(argv: list[str]) -> None:
    """Print the table.

    Args:
        argv: The options of the command.

    Raises:
        SystemExit: The exit status is 2 after a wrong option, 0 after the help.
    """
    forms = {"md": methods_as_markdown, "csv": methods_as_csv, "json": as_json}
    parser = PlainParser("fl-lightning methods", description=DESCRIPTION)
    parser.add_argument("--output", choices=list(forms), default="md", help="form of the table (default: md)")
    form = parser.parse_args(argv).output
    print(forms[form](records()), end="")


def records() -> list[Record]:
    """Read the columns of all methods by name."""
    return list(json.loads(TABLE.read_text(encoding="utf-8")))


def printed_names() -> dict[str, str]:
    """Return the name of every method by the stem of its file: its name in the table, else in the file's comment.

    >>> names = printed_names()
    >>> names["lg_fedavg"], names["geometric_median"], names["centralized"]
    ('LG-FedAvg', 'GeometricMedian', 'Centralized')
    """
    in_table = {folded(record["method"]): record["method"] for record in records()}
    printed: dict[str, str] = {}
    for config in configs.config_names():
        if not config.startswith(FOLDER):
            continue
        stem = config.removeprefix(FOLDER)
        name = in_table.get(folded(stem))
        if name is None:
            name, _, _ = configs.title(config).partition(":")
        printed[stem] = name
    return printed


def as_json(methods: Sequence[Record]) -> str:
    """Write an object for each method, with the sentences of what was refused."""
    return json.dumps(methods, indent=1, ensure_ascii=False) + "\n"


def methods_as_csv(methods: Sequence[Record]) -> str:
    """Write a line for each method, with spaces between several values in a field."""
    columns = [column for column in methods[0] if column != "refused"]
    rows = [columns]
    for method in methods:
        rows.append([csv_cell(column, method.get(column)) for column in columns])
    text = io.StringIO()
    write_cells(text, rows)
    return text.getvalue()


def csv_cell(column: str, value: Any) -> Any:
    """Return the cell of a column. Papers are given by their addresses, else by their names."""
    if column == "papers":
        value = [url or name for name, url in value]
    return " ".join(value) if isinstance(value, list | tuple) else value


def methods_as_markdown(methods: Sequence[Record]) -> str:
    """Write the table of docs/methods/index.md."""
    all_rules = longest([method["rules"] for method in methods])
    all_optimizers = longest([method["server_optimizers"] for method in methods])
    rows = [HEADINGS, ["---"] * len(HEADINGS)]
    for method in methods:
        rows.append(
            [
                method["method"] if method["kind"] == "client" else f"{method['method']} ({method['kind']})",
                ", ".join(f"[{name}]({url})" if url else name for name, url in method["papers"]),
                f"`{method['file']}`",
                sent(method["down"], method["down_contents"]),
                sent(method["up"], method["up_contents"]),
                short_number(method["client_state"]),
                short_number(method["server_state"]),
                declared(method["sends"]),
                declared(method["reads"]),
                ", ".join(method["data"]) or "–",
                {True: "yes", False: "no", None: "–"}[method["stackable"]],
                "yes" if method["module"] else "no",
                choice_in_words(method["rules"], all_rules),
                choice_in_words(method["server_optimizers"], all_optimizers),
            ]
        )
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def longest(choices: Sequence[Sequence[str] | None]) -> Sequence[str]:
    """Return the longest of some lists. None counts as an empty list."""
    return max([choice or [] for choice in choices], key=len)


def declared(contents: Sequence[str] | None) -> str:
    """Write what a method says that it sends or reads. None means that it says nothing.

    >>> declared(None), declared([]), declared(["weights", "control"])
    ('–', 'nothing', 'weights, control')
    """
    if contents is None:
        return "–"
    return ", ".join(contents) or "nothing"


def sent(amount: float, contents: Sequence[str]) -> str:
    """Write how much is sent, and what.

    Args:
        amount: Bytes as a multiple of the model's.
        contents: Names of what is sent.

    >>> sent(1.972, ["weights", "control"]), sent(0, [])
    ('1.97: weights, control', '0')
    """
    number = short_number(amount)
    return f"{number}: {', '.join(contents)}" if contents else number


def short_number(value: float) -> str:
    """Write a number with at most two decimals.

    >>> short_number(1.0), short_number(0.0432)
    ('1', '0.04')
    """
    return f"{value:.2f}".rstrip("0").rstrip(".")


def choice_in_words(names: Sequence[str] | None, every: Sequence[str]) -> str:
    """Write which names of `every` these are, in few words.

    Args:
        names: Some of the names. None means that none can be chosen.
        every: All names.

    >>> every = ["a", "b", "c"]
    >>> choice_in_words(["a", "b", "c"], every), choice_in_words(["a", "b"], every), choice_in_words(["a"], every)
    ('all', 'not c', 'a')
    """
    if names is None:
        return "–"
    rest = [name for name in every if name not in names]
    if not rest:
        return "all"
    if not names:
        return "none"
    return f"not {', '.join(rest)}" if len(rest) < len(names) else ", ".join(names)
