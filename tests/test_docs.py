"""The documents: every public name has a docstring, every link leads somewhere, the site builds without a warning."""

import csv
import inspect
import os
import re
import subprocess
import sys
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml
from pytorch_lightning import LightningModule

import fl_lightning
from fl_lightning import methods
from tools import attacks, draw_methods

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "bench/README.md"]

spec = spec_from_file_location("site_pages", ROOT / "tools/site_pages.py")
site = module_from_spec(spec)
spec.loader.exec_module(site)


def undocumented(kind) -> list[str]:
    """Public methods and properties that this package defines without a docstring, of their own or of a base class."""
    found = []
    for name, value in inspect.getmembers(kind):
        home = getattr(value, "fget", value)
        ours = str(getattr(home, "__module__", "")).startswith("fl_lightning")
        if not name.startswith("_") and ours and (inspect.isroutine(value) or isinstance(value, property)):
            bases = (*kind.__mro__, LightningModule)  # some stand in for a LightningModule's own
            found += [] if any(inspect.getdoc(getattr(base, name, None)) for base in bases) else [name]
    return found


@pytest.mark.parametrize("room", [*site.ROOMS, "fl_lightning", "fl_lightning.methods"])
def test_every_public_name_is_documented(room):
    names = site.public_names(room)
    assert names
    for name in names:
        value = getattr(import_module(room), name)
        assert inspect.getdoc(value), f"{room}.{name}"
        if inspect.isclass(value):
            assert vars(value).get("__doc__"), f"{room}.{name}"
            assert not undocumented(value), f"{room}.{name}"


def test_the_api_has_every_room_that_is_handed_on():
    """Methods have pages of their own; the command line, run folders, apps and helpers are no API."""
    rooms = {path.parent.name for path in (ROOT / "fl_lightning").glob("*/__init__.py")}
    shown = {room.split(".")[1] for room in site.ROOMS}
    assert rooms - shown == {"methods", "cli", "experiments", "flower", "reports", "runs", "utils"}
    functional = {path.stem for path in (ROOT / "fl_lightning/functional").glob("[!_]*.py")} - {"summary"}
    assert functional == {room.split(".")[2] for room in site.ROOMS if ".functional." in room}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(path):
    for _, target, _ in site.LINK.findall(site.CODE.sub("", path.read_text(encoding="utf-8"))):
        assert (path.parent / target).exists(), target


HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchors(path) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = HEADING.findall(site.CODE.sub("", path.read_text(encoding="utf-8")))
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_headings(path):
    text = site.CODE.sub("", path.read_text(encoding="utf-8"))
    for target, anchor in re.findall(r"\]\(([\w./-]*\.md)?#([\w-]+)\)", text):
        page = path.parent / target if target else path
        assert anchor in anchors(page), f"{target}#{anchor}"


def test_links_of_a_page_lead_to_pages():
    text = "[a](docs/a.md#data) [b](CONTRIBUTING.md) [c](https://x.org/a.md) [d](#here) ![e](docs/images/a.png)"
    made = "[a](a.md#data) [b](contributing.md) [c](https://x.org/a.md) [d](#here) ![e](images/a.png)"
    assert site.relinked(text, "README.md", "index.md") == made
    assert site.relinked("[a](../../README.md#runs)", "docs/recipes/x.md", "recipes/x.md") == "[a](../index.md#runs)"
    code = "```python\nlayers[0](x)\n```"
    assert site.relinked(code, "docs/recipes/x.md", "recipes/x.md") == code


def test_every_document_is_in_the_navigation():
    listed = set(re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    assert {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")} <= listed


def test_every_method_has_its_steps_and_its_picture():
    names = {record["method"] for record in site.records()}
    assert set(draw_methods.counted()) == names == set(draw_methods.files()), "python -m tools.draw_methods METHOD"
    pictures = {path.name for path in draw_methods.PICTURES.iterdir()}
    assert pictures == {f"{stem}.png" for stem in draw_methods.files().values()}


@pytest.mark.parametrize(
    ("file", "beside"), [("sam", "FedAvg"), ("norm_clip", "FedAvg"), ("fedper", "FedAvg"), ("knfu", "Local")]
)
def test_a_method_is_drawn_beside_the_same_without_it(file, beside):
    name, plain = draw_methods.without(draw_methods.config_of(file))
    assert name == beside
    text = yaml.safe_dump(plain)
    assert f"methods.{beside}\n" in text
    assert "torch.optim.SGD" in text
    assert ("sign_flip" in text) == (file == "norm_clip")
    assert not re.search("SAM|NormClip|personal|KnFu", text)


def test_the_table_of_malicious_clients_is_that_of_its_runs():
    with attacks.FILE.open(newline="", encoding="utf-8") as file:
        assert attacks.table(csv.DictReader(file)) in (ROOT / "docs/attacks.md").read_text(encoding="utf-8")


def test_the_table_of_stragglers_is_that_of_its_runs():
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    with (ROOT / "docs/stragglers.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 15
    for momentum, work in dict.fromkeys((row["momentum"], row["local_work"]) for row in rows):
        cells = [
            f"{float(row['mean']):.1f} ± {float(row['std']):.1f}"
            for row in rows
            if (row["momentum"], row["local_work"]) == (momentum, work)
        ]
        named = f"SGD, momentum {momentum}" if work == "1.0" else ""
        line = f"| {named} | {work.replace(',', ', ')} | {' | '.join(cells)} |"
        assert line.replace("|  |", "| |") in page


def test_the_citation_is_of_this_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == fl_lightning.__version__
    assert cited["license"] in (ROOT / "setup.cfg").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    there = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, env=there, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = {path.parent.name for path in (tmp_path / "site/methods").glob("*/index.html")}
    assert {name.lower().removesuffix("aggregator").removesuffix("server") for name in methods.__all__} <= pages
    version = f"fl_lightning {fl_lightning.__version__}</title>"
    without = [path for path in (tmp_path / "site").rglob("index.html") if version not in path.read_text("utf-8")]
    assert not without
    prox = (tmp_path / "site/methods/fedprox/index.html").read_text(encoding="utf-8")
    assert "Trains with the loss L + (mu/2)" in prox
    assert "<svg viewBox" in prox
    assert "fl-lightning fit -c experiment/digits_fedprox" in re.sub("<[^>]+>", "", prox)


def test_the_settings_of_the_site_are_what_mkdocs_reads():
    """A line in the wrong place makes a list of a setting, and the site is not built by the tests."""
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert settings["validation"]["nav"] == {"omitted_files": "warn"}
    titles = [next(iter(entry)) for entry in settings["nav"]]
    assert titles[:9] == [
        "Begin",
        "My module",
        "Compare",
        "Methods",
        "Measure",
        "Personalise",
        "Private",
        "Deploy",
        "Extend",
    ]


def measured_rows() -> list[list[str]]:
    """Cells of each row in the tables of docs/measured.md: question, main figure, command, machine and date, page."""
    text = (ROOT / "docs/measured.md").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.startswith("| ") and "](" in line]
    assert lines, "without rows the test below would be skipped"
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


@pytest.mark.parametrize("row", measured_rows(), ids=lambda row: row[0])
def test_a_main_figure_stands_on_the_page_that_it_comes_from(row):
    _, figure, _, when, link = row
    page = re.search(r"\(([^#)]+)", link)[1]
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for number in re.findall(r"\d[\d.,]*(?<![.,])", figure):
        assert re.search(rf"(?<![\d.]){re.escape(number)}(?!\d)", text), number
    assert "2026" in when or "each table" in when
