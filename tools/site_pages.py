"""Makes pages of the site of the repository's other files and of the code, as hooks of mkdocs (`make docs`)."""

import logging
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

import fl_lightning.aggregation
import fl_lightning.methods
from fl_lightning.cli.configs import HOME, small_experiment, title
from fl_lightning.cli.methods import Record, records, short_number
from fl_lightning.papers.stored import csv_rows
from tools.draw_methods import PICTURES, counted
from tools.measure_methods import name_of

ROOT = Path(__file__).resolve().parents[1]
COPIED = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "bench/README.md": "bench.md",
    "LICENSE": "license.md",
}
"""Pages that are files of the repository outside docs/."""

ROOMS = {
    "fl_lightning.federation.loop": "The federation: the loop that Lightning fits",
    "fl_lightning.data": "Sources, partitions and the data module",
    "fl_lightning.client": "Clients: the base class of methods",
    "fl_lightning.members": "Members of a round: what happens on faults",
    "fl_lightning.engines": "Engines: local training, one client or several at once",
    "fl_lightning.aggregation": "Rules, server modules and transforms",
    "fl_lightning.nets": "Nets",
    "fl_lightning.callbacks": "Callbacks and pictures",
    "fl_lightning.monitors": "Monitors of clients",
    "fl_lightning.attacks": "Attacks, for studies of robust rules",
    "fl_lightning.metrics": "Metrics",
    "fl_lightning.papers": "Drawings and tables of the papers",
    "fl_lightning.distributed": "Several processes",
    "fl_lightning.types": "Messages, jobs and protocols",
    "fl_lightning.functional.accuracy": "Accuracy",
    "fl_lightning.functional.class_means": "Means and covariances of the classes",
    "fl_lightning.functional.classes": "Splits of the classes",
    "fl_lightning.functional.coding": "Coding of vectors",
    "fl_lightning.functional.continual": "Measures of continual learning",
    "fl_lightning.functional.density": "Densities",
    "fl_lightning.functional.drift": "Drift",
    "fl_lightning.functional.forgetting": "Forgetting",
    "fl_lightning.functional.hessian": "Curvature of the loss",
    "fl_lightning.functional.importance": "Importance of weights",
    "fl_lightning.functional.losses": "Losses",
    "fl_lightning.functional.privacy": "Differential privacy",
    "fl_lightning.functional.sample_gradients": "Gradients of single samples",
    "fl_lightning.functional.simplex": "Weights on the simplex",
    "fl_lightning.functional.state": "States",
    "fl_lightning.functional.traffic": "Bytes of messages",
}
"""Titles of the pages of the API by the modules that have one."""

METHODS = "methods/index.md"
"""The page with the table of the methods."""

DRAWINGS = 3
"""The most drawings of a paper on its method's page."""

LONGEST = 36
"""The most characters of a text that has room in `picture`."""

LOG = logging.getLogger("mkdocs.site_pages")
STEP = 10
"""Pages from one line of the log to the next."""

CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)\s]*)?\))")


def public_names(room: str) -> list[str]:
    """Return the names that a module lists, or else defines or, for a package, imports from this package."""
    module = import_module(room)
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    is_package = hasattr(module, "__path__")
    home = "fl_lightning" if is_package else room
    names = []
    for name, value in vars(module).items():
        if name.startswith("_") or not callable(value):
            continue
        if getattr(value, "__module__", "").startswith(home):
            names.append(name)
    return sorted(names)


# --- pages


def copied(path: str) -> str:
    """Return a file of the repository as the text of a page."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return text if path.endswith(".md") else f"# Licence\n\n```text\n{text}```\n"


def relinked(markdown: str, source: str, page: str) -> str:
    """Turn links between files of the repository into links between pages.

    Args:
        markdown: Text of the page.
        source: Path of the page's file in the repository.
        page: Place of the page in docs/.
    """

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        there = COPIED.get(target) or target.removeprefix("docs/")
        return match[1] + posixpath.relpath(there, posixpath.dirname(page) or ".") + match[3]

    parts = []
    for part in CODE.split(markdown):
        is_code = part.startswith("```")
        parts.append(part if is_code else LINK.sub(link, part))
    return "".join(parts)


def slug(name: str) -> str:
    """Return the file name of a method's page."""
    return name.lower().replace("-", "_")


def documented(record: Record, methods_in: Counter[str]) -> str:
    """Return the object whose docstring explains a method: its module, or its class if the module has several.

    Args:
        record: The method.
        methods_in: Number of methods in each file.
    """
    module = module_of(record)
    if not module or (methods_in[record["file"]] == 1 and ".methods." in module):
        return module
    names = [*vars(fl_lightning.methods), *vars(fl_lightning.aggregation)]
    class_name = next(name for name in names if name_of(name) == record["method"])
    return f"{module}.{class_name}"


def module_of(record: Record) -> str:
    """Return the module of a method. It is empty if the method is only a configuration."""
    file: str = record["file"]
    return "" if file.endswith(".yaml") else file.removesuffix(".py").replace("/", ".")


def method_page(record: Record, methods_in: Counter[str]) -> str:
    """Return the page of one method.

    Args:
        record: The method.
        methods_in: Number of methods in each file.
    """
    name = record["method"]
    papers = ", ".join(f"[{paper}]({url})" if url else paper for paper, url in record["papers"])
    file = config_of(name)
    goes_with = [
        ("any module (`module=`)", "yes" if record["module"] else "no, it needs a classifier (`net=`)"),
        ("rules", listed(record["rules"], "it is one")),
        ("server optimizers", listed(record["server_optimizers"], "it is one")),
        ("data besides the clients' own", ", ".join(record["data"]) or "none"),
    ]
    lines = [
        f"# {name}",
        summary(record, methods_in),
        f"{part_of(record).capitalize()}. Source: {papers}.",
        picture(record),
        "## Settings",
        *settings(file),
        "## Costs",
        *cost_lines(record, file),
        "## Accuracy",
        *figures(name, file),
        "## Goes with",
        table(["part", name], goes_with),
        *refusals(record["refused"]),
    ]
    target = documented(record, methods_in)
    if target:
        options = "heading_level: 3"
        if target == module_of(record):
            options += ", show_root_heading: false, show_root_toc_entry: false"
        lines += ["## In Python", f"::: {target}\n    options: {{{options}}}"]
    return "\n\n".join(lines) + "\n"


def config_of(name: str) -> str:
    """Return the stem of a method's file in configs/method."""
    by_plain_name = {path.stem.replace("_", ""): path.stem for path in (HOME / "method").glob("*.yaml")}
    return by_plain_name[slug(name).replace("_", "")]


def summary(record: Record, methods_in: Counter[str]) -> str:
    """Return the sentence about a method: the first line of its own module, or else of its configuration."""
    module = module_of(record)
    if module and methods_in[record["file"]] == 1:
        sentence = (import_module(module).__doc__ or "").splitlines()[0]
    else:
        sentence = title(f"method/{config_of(record['method'])}")
    # The name of the method is the heading.
    sentence = re.sub(r"^[\w-]+: ", "", sentence)
    return sentence[:1].upper() + sentence[1:]


def refusals(refused: Mapping[str, str]) -> list[str]:
    """Write with which parts a method does not go, and the reasons. A module has a row of its own above."""
    parts_of = dict[str, list[str]]()
    for part, sentence in refused.items():
        if part != "module":
            reason = sentence.replace(f", got {part}", "").replace(f"{part}Aggregator", "this rule")
            parts_of.setdefault(reason, []).append(part)
    if not parts_of:
        return []
    return [table(["not with", "because"], [(", ".join(parts), reason) for reason, parts in parts_of.items()])]


def part_of(record: Record) -> str:
    """Name the part of a federation that a method is."""
    return "method" if record["kind"] == "client" else str(record["kind"])


def settings(file: str) -> list[str]:
    """Show the command that runs a method, and its YAML."""
    text = (HOME / f"method/{file}.yaml").read_text(encoding="utf-8")
    return [
        f"```sh\nfl-lightning fit -c {' -c '.join(small_experiment(file))}\n```",
        f"`-c method/{file}` gives an experiment of your own this method:",
        f"```yaml\n{text}```",
    ]


def cost_lines(record: Record, file: str) -> list[str]:
    """Write the costs of a method, beside FedAvg's."""
    name = record["method"]
    rows = [
        ("sent to a client", models(record["down"], record["down_contents"]), "1 model: weights"),
        ("sent by a client", models(record["up"], record["up_contents"]), "1 model: weights"),
        ("kept by a client from round to round", models(record["client_state"]), "nothing"),
        ("kept by the server besides the model", models(record["server_state"]), "nothing"),
    ]
    steps = counted()[name]
    rows.append(("local steps", f"{steps['steps']} × those of {steps['beside']}", "1"))
    for workload, times in ratios().items():
        if name in times:
            ratio, low, high = times[name]
            rows.append((f"time of a round of `{workload}`", f"{ratio} × ({low} to {high})", "1"))
    return [
        table(["in a round", name, "FedAvg"], rows),
        "Amounts are in sizes of the model: bytes of a message, and floats that are kept, measured on toy data "
        "([the columns](index.md#the-columns)). Steps are counted in "
        f"`{small_experiment(file)[0]}`, beside the same without the method. Times are medians and quartiles "
        "of the ratio to a round of FedAvg in the benchmark's workloads `tiny` and `cnn` "
        "([how they are measured](../bench.md#the-committed-results)); FedAvg beside itself gives 0.9 to 1.05.",
    ]


@cache
def ratios() -> dict[str, dict[str, list[str]]]:
    """Read the ratio of a round's time to FedAvg's and its quartiles, by workload and method."""
    columns = ("ratio_to_fedavg", "ratio_low", "ratio_high")
    found = {}
    for path in sorted(ROOT.glob("bench/results/costs_*.csv")):
        times = {}
        for row in csv_rows(path):
            times[row["method"]] = [f"{float(row[column]):.2f}" for column in columns]
        times["FedAvg"] = ["1", "1", "1"]
        found[path.stem.removeprefix("costs_")] = times
    return found


def models(amount: float, contents: Sequence[str] = ()) -> str:
    """Write an amount that is measured in models, with its contents."""
    if not amount:
        text = "nothing"
    elif amount > 1:
        text = f"{short_number(amount)} models"
    else:
        text = f"{short_number(amount)} model"
    return f"{text}: {', '.join(contents)}" if contents else text


def figures(name: str, file: str) -> list[str]:
    """Show the accuracy of a method's small experiment, and the drawings of its paper."""
    text = (ROOT / "docs/figures.md").read_text(encoding="utf-8")
    drawings = re.findall(rf"!\[([^]]*)\]\(images/(figures/{slug(name)}-[^)]*)\)", text)
    accuracy = (f"`{small_experiment(file)[0]}` after each round, one seed", f"methods/{file}.png")
    lines = []
    for caption, path in [accuracy, *drawings[:DRAWINGS]]:
        if (PICTURES.parent / path).is_file():
            image = f"../images/{path}"
            lines.append(f"[![{caption}]({image}){{ loading=lazy }}]({image})\n/// caption\n{caption}\n///")
    heading = re.search(rf"^### ({name}\b.*)$", text, re.MULTILINE)
    if drawings and heading:
        anchor = re.sub(r"[^\w -]", "", heading[1].lower()).replace(" ", "-")
        lines.append(f"What the drawings of its paper show: [The papers' figures](../figures.md#{anchor}).")
    return lines


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    line = ["---"] * len(head)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, line, *rows])


def listed(names: list[str] | None, otherwise: str) -> str:
    """Write names with commas, or `otherwise` for None."""
    if names is None:
        return otherwise
    return ", ".join(names) or "none"


def picture(record: Record) -> str:
    """Draw what travels between server and client, and what each keeps."""
    down = models(record["down"], record["down_contents"])
    up = models(record["up"], record["up_contents"])
    parts = [
        box(4, name="server", kept=models(record["server_state"])),
        box(404, name="client", kept=models(record["client_state"])),
        arrow(37, head="399,37 391,32 391,42", text=down),
        arrow(70, head="137,70 145,65 145,75", text=up),
    ]
    label = f"The server sends {down}; a client sends {up}"
    return (
        f'<svg viewBox="0 0 536 90" role="img" aria-label="{escape(label)}" style="max-width: 34rem" font-size="14" '
        f'fill="currentColor">{"".join(parts)}</svg>'
    )


def box(x: int, *, name: str, kept: str) -> str:
    """Draw the box of the server or the client, with what it keeps."""
    return (
        f'<rect x="{x}" y="10" width="128" height="70" rx="6" fill="none" stroke="currentColor"/>'
        f'<text x="{x + 64}" y="40" text-anchor="middle" font-weight="bold">{name}</text>'
        f'<text x="{x + 64}" y="62" text-anchor="middle">keeps {kept}</text>'
    )


def arrow(y: int, *, head: str, text: str) -> str:
    """Draw an arrow between the boxes with a text above it.

    Args:
        y: Height of the arrow.
        head: Corners of its head.
        text: The text, squeezed if it is long.
    """
    squeezed = ' textLength="246" lengthAdjust="spacingAndGlyphs"' if len(text) > LONGEST else ""
    return (
        f'<line x1="141" y1="{y}" x2="395" y2="{y}" stroke="currentColor"/>'
        f'<polygon points="{head}" fill="currentColor"/>'
        f'<text x="268" y="{y - 7}" text-anchor="middle"{squeezed}>{escape(text)}</text>'
    )


def costs_table() -> str:
    """Write the local steps and the time of a round of each method, beside FedAvg's."""
    rows = []
    for record in records():
        name = record["method"]
        shown = [times[name][0] if name in times else "–" for times in ratios().values()]
        rows.append([f"[{name}]({slug(name)}.md)", counted()[name]["steps"], *shown])
    head = ["method", "local steps", *(f"time, `{workload}`" for workload in ratios())]
    return (
        "## Steps and time beside FedAvg\n\nOf a round; steps of methods for clients with nets of their own are beside "
        f"Local's. The page of each method says how they were measured.\n\n{table(head, rows)}\n"
    )


def api_page(room: str, heading: str) -> str:
    """Return the page of a module of the API."""
    names = "\n\n".join(f"::: {room}.{name}" for name in public_names(room))
    module = import_module(room)
    return f"# {heading}\n\n`{room}`: {(module.__doc__ or '').strip()}\n\n{names}\n"


# --- hooks of mkdocs


def pages() -> dict[str, str]:
    """Return the text of all generated pages by their places in docs/."""
    methods_in = Counter(record["file"] for record in records())
    made = {page: relinked(copied(path), path, page) for path, page in COPIED.items()}
    for record in records():
        made[f"methods/{slug(record['method'])}.md"] = method_page(record, methods_in)
    rooms = "\n".join(f"- [`{room}`]({room}.md): {heading}" for room, heading in ROOMS.items())
    made["api/index.md"] = f"# API\n\n{rooms}\n"
    for room, heading in ROOMS.items():
        made[f"api/{room}.md"] = api_page(room, heading)
    return made


def on_config(config: Any) -> Any:
    """Make the pages, add those of the methods and of the API to the navigation, and the version to every page."""
    LOG.info("Making the pages of the methods and of the API")
    made = pages()
    config["site_name"] = f"fl_lightning {fl_lightning.__version__}"
    config["made"] = made
    config["done"] = 0
    for entry in config["nav"]:
        for heading, folder in (("Methods", "methods"), ("API", "api")):
            if heading in entry:
                listed_pages = entry[heading]
                listed_pages += [page for page in made if page.startswith(folder) and page not in listed_pages]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages to those of docs/."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - the extra `docs`

    for page, text in config["made"].items():
        files.append(File.generated(config, page, content=text))
    config["total"] = len(files.documentation_pages())
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Turn links of docs/ to other files of the repository into links to pages, and log the progress."""
    place = page.file.src_uri
    config["done"] += 1
    if config["done"] % STEP == 0 or config["done"] == config["total"]:
        progress = f"{config['done']} of {config['total']} pages"
        LOG.info("%s: %s", progress, place)
    if place in config["made"]:
        return markdown
    if place != METHODS:
        return relinked(markdown, f"docs/{place}", place)
    linked = relinked(with_links_of_methods(markdown), f"docs/{place}", place)
    return f"{linked}\n{costs_table()}"


def with_links_of_methods(markdown: str) -> str:
    """Turn the names of methods that begin a row of a table into links to their pages."""
    for record in records():
        name = record["method"]
        row = re.compile(rf"^\| {re.escape(name)} (?=[|(])", re.MULTILINE)
        markdown = row.sub(f"| [{name}]({slug(name)}.md) ", markdown)
    return markdown
