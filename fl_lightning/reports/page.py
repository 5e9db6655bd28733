"""Pages of reports: each is one HTML file that loads nothing from elsewhere.

Without scripts, and on paper, pictures take the place of the charts that answer to the pointer.
"""

import base64
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from markupsafe import Markup

from fl_lightning.reports.curves import Curves
from fl_lightning.reports.figures import TRUE_TYPE
from fl_lightning.reports.result_tables import Table, as_html
from fl_lightning.utils.files import write_file
from fl_lightning.utils.text import printable

if TYPE_CHECKING:
    from jinja2 import Environment
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Picture:
    """Has a figure of a report.

    Attributes:
        name: Name of the figure's file, without ending.
        figure: The figure.
        caption: Sentences about what it shows.
        wide: Whether the figure needs the width of the page. On a phone such a figure scrolls.
        heading: Words above the figure. Empty: there are none.
        curves: The curves that the figure shows, which the page also draws so that they answer to the pointer. None:
            the figure shows no curves.
    """

    name: str
    figure: "Figure"
    caption: str
    wide: bool = False
    heading: str = ""
    curves: Curves | None = None


@dataclass(frozen=True)
class SavedPicture:
    """Has a picture of a report that lies in a file.

    Attributes:
        name: Name of the picture's file among the figures, without ending.
        path: The file, png or svg.
        caption: Sentences about what it shows.
    """

    name: str
    path: Path
    caption: str


@dataclass(frozen=True)
class Methods:
    """Names the methods of a page beside their colors, where a reader hides and shows them in all charts.

    Attributes:
        names: The methods, in their order on the page.
    """

    names: Sequence[str]


@dataclass(frozen=True)
class Fold:
    """Has parts that a reader opens.

    Attributes:
        title: Words that are always seen.
        parts: Figures, tables and sentences, in their order.
    """

    title: str
    parts: "Sequence[Part]"


Part = Picture | SavedPicture | Table | Methods | Fold | str


@dataclass(frozen=True)
class Section:
    """Has a section of a report.

    Attributes:
        title: Title above the section.
        parts: Figures, tables and sentences, in their order.
    """

    title: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class Page:
    """Has all of a report.

    Attributes:
        title: Title of the report.
        sections: Its sections, in their order.
        facts: Short words about the runs in a line below the title.
        command: The command that makes the page again. Empty: none is shown.
    """

    title: str
    sections: Sequence[Section]
    facts: Sequence[str] = ()
    command: str = ""


WARNING = "Note: "
"""Beginning of a sentence that stands out."""


COORDINATE = re.compile(rb"(?<![\d.])([1-9]\d*\.\d\d)\d+")
"""A number above 1 with more than two decimals."""

TAG = re.compile(rb"<[^>]*>")
"""A tag of a picture in svg. Texts, such as the numbers at an axis, stand between tags."""


def write_page(path: Path, page: Page) -> None:
    """Write a report as one HTML file.

    Args:
        path: The file.
        page: The report.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined  # noqa: PLC0415 - a fit writes no page

    charts = Charts()
    sections = []
    for section in page.sections:
        sections.append({"title": section.title, "parts": charts.prepared(section.parts)})
    environment = Environment(
        loader=PackageLoader("fl_lightning.reports", package_path=""),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=without_controls,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    template = environment.get_template("page.html")
    text = template.render(
        page=page,
        titles=[section.title for section in page.sections],
        sections=sections,
        style=source_of(environment, "page.css"),
        library=charts.library(),
        charts=in_script(json.dumps(charts.items)),
        script=source_of(environment, "page.js"),
    )
    write_file(path, text)


def without_controls(value: Any) -> Any:
    """Write a text without what cannot be seen. HTML stays as it is."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value, keep="\n")
    return value


def source_of(environment: "Environment", name: str) -> Markup:
    """Return the content of a file beside the template."""
    assert environment.loader is not None
    text, _, _ = environment.loader.get_source(environment, name)
    return Markup(text)


def in_script(text: str) -> Markup:
    """Write JSON so that no text in it ends the script that holds it."""
    return Markup(text.replace("</", "<\\/").replace("<!--", "<\\!--"))


@dataclass
class Charts:
    """Collects the charts of a page.

    Attributes:
        items: What a chart is drawn from, by the id of its place on the page.
    """

    items: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    _count: int = 0

    def prepared(self, parts: Sequence[Part]) -> list[tuple[str, Any]]:
        """Prepare parts for the template: the kind of each, and its content. Figures in a row are one part."""
        prepared: list[tuple[str, Any]] = []
        for part in parts:
            kind, content = self._of(part)
            if kind == "pictures" and prepared and prepared[-1][0] == "pictures":
                prepared[-1][1].append(content)
            else:
                prepared.append((kind, [content] if kind == "pictures" else content))
        return prepared

    def _of(self, part: Part) -> tuple[str, Any]:
        """Return the kind of a part and its content."""
        match part:
            case Picture():
                return "pictures", self._picture(part)
            case SavedPicture():
                return "pictures", saved_picture(part)
            case Table():
                return "table", as_html(part)
            case Methods():
                return "methods", list(swatches(part))
            case Fold():
                return "fold", {"title": part.title, "parts": self.prepared(part.parts)}
            case _:
                return ("warning" if part.startswith(WARNING) else "sentence"), part

    def _picture(self, picture: Picture) -> dict[str, Any]:
        """Return what the template shows of a figure."""
        shown = {
            "heading": picture.heading,
            "caption": picture.caption,
            "alt": f"{picture.heading}. {picture.caption}" if picture.heading else picture.caption,
            "wide": picture.wide,
            "source": data_url(shortened(drawn(picture.figure, "svg", letters="none")), "svg+xml"),
            "number": None,
            "panels": [],
        }
        if picture.curves is None:
            return shown
        # Bokeh is slow to import.
        from fl_lightning.reports.live import live_panels  # noqa: PLC0415

        panels = live_panels(picture.curves)
        for index, panel in enumerate(panels):
            self.items[f"chart-{self._count}-{index}"] = panel.item
        shown["number"] = self._count
        shown["panels"] = panels
        self._count += 1
        return shown

    def library(self) -> Markup:
        """Return the library that draws the charts, nothing for a page without any."""
        if not self.items:
            return Markup("")
        from fl_lightning.reports.live import library  # noqa: PLC0415

        return Markup(library())


def swatches(methods: Methods) -> Iterator[dict[str, str]]:
    """Give each method with its color."""
    from fl_lightning.reports.live import color_of  # noqa: PLC0415

    for number, name in enumerate(methods.names):
        yield {"name": name, "color": color_of(number)}


def saved_picture(picture: SavedPicture) -> dict[str, Any]:
    """Return what the template shows of a picture that lies in a file."""
    kind = "svg+xml" if picture.path.suffix == ".svg" else "png"
    return {
        "heading": "",
        "caption": picture.caption,
        "alt": picture.caption,
        "wide": False,
        "source": data_url(picture.path.read_bytes(), kind),
        "number": None,
        "panels": [],
    }


def shortened(picture: bytes) -> bytes:
    """Cut the coordinates of a picture in svg to hundredths of a point, which nobody sees.

    Scales and texts stay as they are.

    >>> shortened(b"<path d='M 12.345678 0.015625'/><text>2.346</text>")
    b"<path d='M 12.34 0.015625'/><text>2.346</text>"
    """
    return TAG.sub(lambda tag: COORDINATE.sub(rb"\1", tag[0]), picture)


def data_url(content: bytes, kind: str) -> str:
    """Write a picture as an address that holds it."""
    encoded = base64.b64encode(content).decode("ascii")
    return f"data:image/{kind};base64,{encoded}"


def drawn(figure: "Figure", form: str, *, letters: Literal["path", "none"] = "path") -> bytes:
    """Draw a figure as svg, png or pdf. The same figure has the same bytes.

    Args:
        figure: The figure.
        form: Format of the picture.
        letters: Whether an svg draws its letters as paths, which look the same everywhere, or leaves them to the fonts
            of the reader, which is half as large.
    """
    import matplotlib as mpl  # noqa: PLC0415 - slow to import

    out = io.BytesIO()
    without_date = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    with mpl.rc_context({"svg.hashsalt": "fl_lightning", "svg.fonttype": letters, **TRUE_TYPE}):
        figure.savefig(out, format=form, metadata=without_date.get(form, {}))
    return out.getvalue()
