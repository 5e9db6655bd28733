"""Pages of the site that are made of the repository's other files and of the code; hooks of mkdocs (`make docs`)."""

import inspect
import posixpath
import re
from collections import Counter
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

import fl_lightning.aggregation
import fl_lightning.methods
from docs.measure_methods import name_of
from fl_lightning.cli.configs import HOME
from fl_lightning.cli.methods import Record, number, records, sent

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
    "fl_lightning.functional.classes": "Splits of the classes",
    "fl_lightning.functional.coding": "Coding of vectors",
    "fl_lightning.functional.density": "Densities",
    "fl_lightning.functional.drift": "Drift",
    "fl_lightning.functional.forgetting": "Forgetting",
    "fl_lightning.functional.hessian": "Curvature of the loss",
    "fl_lightning.functional.importance": "Importance of weights",
    "fl_lightning.functional.losses": "Losses",
    "fl_lightning.functional.privacy": "Differential privacy",
    "fl_lightning.functional.simplex": "Weights on the simplex",
    "fl_lightning.functional.state": "States",
    "fl_lightning.functional.traffic": "Bytes of messages",
}
"""Modules with a page of the API, and its title."""

METHODS = "methods/index.md"
"""The page with the table of the methods."""

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
    module = record["file"].removesuffix(".py").replace("/", ".")
    if record["file"].endswith(".yaml"):
        return ""
    if shared[record["file"]] == 1 and ".methods." in module:
        return module
    homes = (fl_lightning.methods, fl_lightning.aggregation)
    return next(f"{module}.{name}" for home in homes for name in vars(home) if name_of(name) == record["method"])


def method_page(record: Record, shared: Counter[str]) -> str:
    """Return the page of one method."""
    name = record["method"]
    papers = ", ".join(f"[{paper}]({url})" if url else paper for paper, url in record["papers"])
    known = {path.stem.replace("_", ""): path for path in (HOME / "method").glob("*.yaml")}
    yaml = known.get(slug(name).replace("_", ""))
    goes_with = [
        ("any module (`module=`)", "yes" if record["module"] else "no, it needs a classifier (`net=`)"),
        ("rules", listed(record["rules"], "it is one")),
        ("server optimizers", listed(record["server_optimizers"], "it is one")),
        ("data besides the clients' own", ", ".join(record["data"]) or "none"),
    ]
    lines = [
        f"# {name}",
        f"A {'method' if record['kind'] == 'client' else record['kind']}. {papers}.",
        picture(record),
        "Amounts are in models: what a client is sent and sends in a round, and what stays between rounds.",
        "| goes with | |\n| --- | --- |\n" + "\n".join(f"| {what} | {which} |" for what, which in goes_with),
    ]
    if target := documented(record, shared):
        whole = import_module(record["file"].removesuffix(".py").replace("/", "."))
        if target != whole.__name__ and ".methods." in target:  # its class does not say what the file says of all
            lines.append(inspect.cleandoc(whole.__doc__ or ""))
        lines.append(f"::: {target}")
    if yaml is not None:
        tried = HOME / f"experiment/digits_{yaml.stem}.yaml"
        files = f"experiment/{tried.stem}" if tried.is_file() else f"experiment/digits_fedavg -c method/{yaml.stem}"
        lines += ["## Settings", f"```sh\nfl-lightning fit -c {files}\n```", f"`-c method/{yaml.stem}` is:"]
        lines.append(f"```yaml\n{yaml.read_text(encoding='utf-8')}```")
    if record["refused"]:
        lines += ["## Refused", "\n".join(f"- with {what}: {why}" for what, why in record["refused"].items())]
    return "\n\n".join(lines) + "\n"


def listed(names: list[str] | None, otherwise: str) -> str:
    """Write names with commas; None: `otherwise`."""
    return otherwise if names is None else ", ".join(names) or "none"


def picture(record: Record) -> str:
    """Draw what travels between server and client, and what each keeps."""
    down, up = sent(record["down"], record["down_contents"]), sent(record["up"], record["up_contents"])
    boxes = [("server", record["server_state"], 10), ("client", record["client_state"], 510)]
    parts = [
        f'<rect x="{x}" y="10" width="120" height="70" rx="6" fill="none" stroke="currentColor"/>'
        f'<text x="{x + 60}" y="40" text-anchor="middle" font-weight="bold">{name}</text>'
        f'<text x="{x + 60}" y="62" text-anchor="middle">keeps {number(kept)}</text>'
        for name, kept, x in boxes
    ]
    for y, text, points in ((32, down, "505,37 497,32 497,42"), (68, up, "135,68 143,63 143,73")):
        line = y + 5 if y == 32 else y
        parts.append(f'<line x1="140" y1="{line}" x2="500" y2="{line}" stroke="currentColor"/>')
        parts.append(f'<polygon points="{points}" fill="currentColor"/>')
        parts.append(f'<text x="320" y="{line - 7}" text-anchor="middle">{escape(text)}</text>')
    title = f"The server sends {down}; a client sends {up}"
    return (
        f'<svg viewBox="0 0 640 90" role="img" aria-label="{escape(title)}" style="max-width: 40rem" font-size="14" '
        f'fill="currentColor">{"".join(parts)}</svg>'
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
    """Make the pages, and add those of the methods and of the API to the navigation."""
    config["made"] = made = pages()
    for entry in config["nav"]:
        for title, folder in (("Methods", "methods"), ("API", "api")):
            if title in entry:
                entry[title] += [page for page in made if page.startswith(folder) and page not in entry[title]]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages to those of docs/."""
    from mkdocs.structure.files import File  # noqa: PLC0415 - the extra `docs`

    for page, text in config["made"].items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Turn links of docs/ to other files of the repository into links to pages."""
    place = page.file.src_uri
    if place in config["made"]:
        return markdown
    for name in [record["method"] for record in records()] if place == METHODS else []:
        markdown = re.sub(
            rf"^\| {re.escape(name)} (?=[|(])", f"| [{name}]({slug(name)}.md) ", markdown, flags=re.MULTILINE
        )
    return relinked(markdown, f"docs/{place}", place)
