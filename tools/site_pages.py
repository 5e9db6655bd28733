"""Pages of the site that are made of the repository's other files and of the code; hooks of mkdocs (`make docs`)."""

import csv
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
"""Modules with a page of the API, and its title."""

METHODS = "methods/index.md"
"""The page with the table of the methods."""

DRAWINGS = 3
LONGEST = 36
"""Drawings of a paper on its method's page; characters of a text that has room in `picture`."""

LOG = logging.getLogger("mkdocs.site_pages")
STEP = 10
"""Pages from one line of the log to the next."""

CODE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)\s]*)?\))")


def public_names(room: str) -> list[str]:
    """Return the names that a module offers: what it lists, else what it defines or hands on from this package."""
    module = import_module(room)
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    here = room if not hasattr(module, "__path__") else "fl_lightning"
    found = {name: value for name, value in vars(module).items() if not name.startswith("_") and callable(value)}
    return sorted(name for name, value in found.items() if getattr(value, "__module__", "").startswith(here))


# --- pages


def copied(path: str) -> str:
    """Return a file of the repository as a page: its links lead to pages."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return text if path.endswith(".md") else f"# Licence\n\n```text\n{text}```\n"


def relinked(markdown: str, source: str, page: str) -> str:
    """Turn links between files of the repository into links between pages.

    Args:
        markdown: of the page.
        source: the file that it is made of, in the repository.
        page: its place in docs/.
    """

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        there = COPIED.get(target) or target.removeprefix("docs/")
        return match[1] + posixpath.relpath(there, posixpath.dirname(page) or ".") + match[3]

    return "".join(part if part.startswith("```") else LINK.sub(link, part) for part in CODE.split(markdown))


def slug(name: str) -> str:
    """Return the file name of a method's page."""
    return name.lower().replace("-", "_")


def documented(record: Record, shared: Counter[str]) -> str:
    """Return the object whose docstring explains a method: its module, or its class where a module has several."""
    module = module_of(record)
    if not module or (shared[record["file"]] == 1 and ".methods." in module):
        return module
    homes = (fl_lightning.methods, fl_lightning.aggregation)
    return next(f"{module}.{name}" for home in homes for name in vars(home) if name_of(name) == record["method"])


def module_of(record: Record) -> str:
    """Return the module of a method, empty where it is no more than a configuration."""
    file: str = record["file"]
    return "" if file.endswith(".yaml") else file.removesuffix(".py").replace("/", ".")


def method_page(record: Record, shared: Counter[str]) -> str:
    """Return the page of one method."""
    name = record["method"]
    papers = ", ".join(f"[{paper}]({url})" if url else paper for paper, url in record["papers"])
    plain = {path.stem.replace("_", ""): path.stem for path in (HOME / "method").glob("*.yaml")}
    file = plain[slug(name).replace("_", "")]
    target = documented(record, shared)
    module = module_of(record)
    alone = module and shared[record["file"]] == 1
    said = (import_module(module).__doc__ or "").splitlines()[0] if alone else title(f"method/{file}")
    said = re.sub(r"^[\w-]+: ", "", said)  # its name is the heading
    goes_with = [
        ("any module (`module=`)", "yes" if record["module"] else "no, it needs a classifier (`net=`)"),
        ("rules", listed(record["rules"], "it is one")),
        ("server optimizers", listed(record["server_optimizers"], "it is one")),
        ("data besides the clients' own", ", ".join(record["data"]) or "none"),
    ]
    lines = [
        f"# {name}",
        said[:1].upper() + said[1:],
        f"{part_of(record).capitalize()}. Source: {papers}.",
        picture(record),
        *(["## Settings", *settings(file)]),
        *(["## Costs", *cost_lines(record, file)]),
        *(["## Accuracy", *figures(name, file)]),
        "## Goes with",
        table(["part", name], goes_with),
        *refusals(record["refused"]),
    ]
    if target:
        root = ", show_root_heading: false, show_root_toc_entry: false" * (target == module)
        lines += ["## In Python", f"::: {target}\n    options: {{heading_level: 3{root}}}"]
    return "\n\n".join(lines) + "\n"


def refusals(refused: Mapping[str, str]) -> list[str]:
    """Write what a method does not go with, and why; a module has a row of its own above."""
    reasons = dict[str, list[str]]()
    for part, sentence in refused.items():
        if part != "module":
            reason = sentence.replace(f", got {part}", "").replace(f"{part}Aggregator", "this rule")
            reasons.setdefault(reason, []).append(part)
    return [table(["not with", "because"], [(", ".join(parts), why) for why, parts in reasons.items()])] * bool(reasons)


def part_of(record: Record) -> str:
    """Name the part of a federation that a method is."""
    return "method" if record["kind"] == "client" else str(record["kind"])


def settings(file: str) -> list[str]:
    """Show how a method is run, and its YAML."""
    text = (HOME / f"method/{file}.yaml").read_text(encoding="utf-8")
    return [
        f"```sh\nfl-lightning fit -c {' -c '.join(small_experiment(file))}\n```",
        f"`-c method/{file}` gives an experiment of your own this method:",
        f"```yaml\n{text}```",
    ]


def cost_lines(record: Record, file: str) -> list[str]:
    """Say what a method costs, beside FedAvg."""
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
        if found := times.get(name):
            rows.append((f"time of a round of `{workload}`", f"{found[0]} × ({found[1]} to {found[2]})", "1"))
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
    """Read the time of a round beside FedAvg's and its quartiles, by workload and method."""
    found = {}
    for path in sorted(ROOT.glob("bench/results/costs_*.csv")):
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        columns = ("ratio_to_fedavg", "ratio_low", "ratio_high")
        times = {row["method"]: [f"{float(row[column]):.2f}" for column in columns] for row in rows}
        found[path.stem.removeprefix("costs_")] = times | {"FedAvg": ["1"] * len(columns)}
    return found


def models(amount: float, contents: Sequence[str] = ()) -> str:
    """Write an amount that is measured in models, and what it consists of."""
    text = "nothing" if not amount else f"{short_number(amount)} model{'s' * (amount > 1)}"
    return text + (f": {', '.join(contents)}" if contents else "")


def figures(name: str, file: str) -> list[str]:
    """Show the accuracy of a method's small experiment, and the drawings of its paper."""
    text = (ROOT / "docs/figures.md").read_text(encoding="utf-8")
    found = re.findall(rf"!\[([^]]*)\]\(images/(figures/{slug(name)}-[^)]*)\)", text)
    heading = re.search(rf"^### ({name}\b.*)$", text, re.MULTILINE)
    shown = [(f"`{small_experiment(file)[0]}` after each round, one seed", f"methods/{file}.png")]
    shown = [(said, path) for said, path in [*shown, *found[:DRAWINGS]] if (PICTURES.parent / path).is_file()]
    lines = [
        f"[![{said}](../images/{path}){{ loading=lazy }}](../images/{path})\n/// caption\n{said}\n///"
        for said, path in shown
    ]
    if found and heading:
        anchor = re.sub(r"[^\w -]", "", heading[1].lower()).replace(" ", "-")
        lines.append(f"What the drawings of its paper show: [The papers' figures](../figures.md#{anchor}).")
    return lines


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Write a table in Markdown."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


def listed(names: list[str] | None, otherwise: str) -> str:
    """Write names with commas; None: `otherwise`."""
    return otherwise if names is None else ", ".join(names) or "none"


def picture(record: Record) -> str:
    """Draw what travels between server and client, and what each keeps."""
    down = models(record["down"], record["down_contents"])
    up = models(record["up"], record["up_contents"])
    parts = [
        f'<rect x="{x}" y="10" width="128" height="70" rx="6" fill="none" stroke="currentColor"/>'
        f'<text x="{x + 64}" y="40" text-anchor="middle" font-weight="bold">{name}</text>'
        f'<text x="{x + 64}" y="62" text-anchor="middle">keeps {models(kept)}</text>'
        for name, kept, x in (("server", record["server_state"], 4), ("client", record["client_state"], 404))
    ]
    for line, text, points in ((37, down, "399,37 391,32 391,42"), (70, up, "137,70 145,65 145,75")):
        parts.append(f'<line x1="141" y1="{line}" x2="395" y2="{line}" stroke="currentColor"/>')
        parts.append(f'<polygon points="{points}" fill="currentColor"/>')
        squeezed = ' textLength="246" lengthAdjust="spacingAndGlyphs"' * (len(text) > LONGEST)
        parts.append(f'<text x="268" y="{line - 7}" text-anchor="middle"{squeezed}>{escape(text)}</text>')
    said = f"The server sends {down}; a client sends {up}"
    return (
        f'<svg viewBox="0 0 536 90" role="img" aria-label="{escape(said)}" style="max-width: 34rem" font-size="14" '
        f'fill="currentColor">{"".join(parts)}</svg>'
    )


def costs_table() -> str:
    """Write the local steps and the time of a round of each method, beside FedAvg's."""
    rows = []
    for name in [record["method"] for record in records()]:
        times = [times[name][0] if name in times else "–" for times in ratios().values()]
        rows.append([f"[{name}]({slug(name)}.md)", counted()[name]["steps"], *times])
    head = ["method", "local steps", *(f"time, `{workload}`" for workload in ratios())]
    return (
        "## Steps and time beside FedAvg\n\nOf a round; steps of methods for clients with nets of their own are beside "
        f"Local's. The page of each method says how they were measured.\n\n{table(head, rows)}\n"
    )


def api_page(room: str, title: str) -> str:
    """Return the page of a module of the API."""
    names = "\n\n".join(f"::: {room}.{name}" for name in public_names(room))
    module = import_module(room)
    return f"# {title}\n\n`{room}`: {(module.__doc__ or '').strip()}\n\n{names}\n"


# --- hooks of mkdocs


def pages() -> dict[str, str]:
    """Return the text of all generated pages by their places in docs/."""
    found = records()
    shared = Counter(record["file"] for record in found)
    made = {page: relinked(copied(path), path, page) for path, page in COPIED.items()}
    made |= {f"methods/{slug(record['method'])}.md": method_page(record, shared) for record in found}
    rooms = "\n".join(f"- [`{room}`]({room}.md): {title}" for room, title in ROOMS.items())
    made["api/index.md"] = f"# API\n\n{rooms}\n"
    return made | {f"api/{room}.md": api_page(room, title) for room, title in ROOMS.items()}


def on_config(config: Any) -> Any:
    """Make the pages, add those of the methods and of the API to the navigation, and the version to every page."""
    LOG.info("Making the pages of the methods and of the API")
    config["site_name"] = f"fl_lightning {fl_lightning.__version__}"
    config["made"] = made = pages()
    config["done"] = 0
    for entry in config["nav"]:
        for heading, folder in (("Methods", "methods"), ("API", "api")):
            if heading in entry:
                entry[heading] += [page for page in made if page.startswith(folder) and page not in entry[heading]]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages to those of docs/."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - the extra `docs`

    for page, text in config["made"].items():
        files.append(File.generated(config, page, content=text))
    config["total"] = len(files.documentation_pages())
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Turn links of docs/ to other files of the repository into links to pages, and say how far the site is."""
    place = page.file.src_uri
    config["done"] += 1
    if config["done"] % STEP == 0 or config["done"] == config["total"]:
        LOG.info("%d of %d pages: %s", config["done"], config["total"], place)
    if place in config["made"]:
        return markdown
    for name in [record["method"] for record in records()] if place == METHODS else []:
        markdown = re.sub(
            rf"^\| {re.escape(name)} (?=[|(])", f"| [{name}]({slug(name)}.md) ", markdown, flags=re.MULTILINE
        )
    linked = relinked(markdown, f"docs/{place}", place)
    return f"{linked}\n{costs_table()}" if place == METHODS else linked
