"""A report is one HTML file that loads nothing from elsewhere and needs no script."""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fl_lightning.reports.result_tables import Table, as_html, escaped
from fl_lightning.utils.files import write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Picture:
    """A figure of a report.

    Attributes:
        name: of its file, without ending.
        figure: drawn.
        caption: a sentence of what is seen.
        wide: whether it needs the width of the page; on a phone such a figure scrolls.
    """

    name: str
    figure: "Figure"
    caption: str
    wide: bool = False


@dataclass(frozen=True)
class SavedPicture:
    """A picture of a report that somebody else has drawn.

    Attributes:
        name: of its file among the figures, without ending.
        path: png or svg.
        caption: a sentence of what is seen.
    """

    name: str
    path: Path
    caption: str


Part = Picture | SavedPicture | Table | str


@dataclass(frozen=True)
class Section:
    """A part of a report.

    Attributes:
        title: above it.
        parts: in order: figures, tables, and sentences.
    """

    title: str
    parts: Sequence[Part]


STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; background: #fff; color: #1a1a1a;
       font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0.5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2rem 0 0.5rem; padding-bottom: 0.2rem; border-bottom: 1px solid #bbb; }
.figures { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 27rem), 1fr)); gap: 1rem 2rem; }
figure { margin: 0; min-width: 0; }
figure.wide { grid-column: 1 / -1; }
figure img { display: block; width: 100%; max-width: 34rem; height: auto; }
figure.wide img { width: auto; max-width: 100%; }
figcaption, .note { color: #444; font-size: 0.9rem; margin: 0.25rem 0 0.75rem; max-width: 60rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 0.5rem 0; font-variant-numeric: tabular-nums; }
h3 { font-size: 1rem; margin: 1rem 0 0; }
th, td { padding: 0.25rem 0.75rem; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top; }
th:first-child { text-align: left; padding-left: 0; }
thead th { border-bottom: 2px solid #888; }
tbody th { font-weight: 400; }
.warning { border-left: 0.3rem solid #D55E00; background: #fdf1ea; padding: 0.5rem 0.8rem; }
@media (max-width: 40rem) {
  body { padding: 0.75rem; }
  figure.wide img { max-width: none; }
  th, td { padding: 0.25rem 0.5rem; }
}
@media print {
  @page { margin: 14mm; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  .figures { display: block; columns: 2; column-gap: 8mm; }
  .figures:has(.wide) { columns: auto; }
  figure, figure img, .scroll, .warning { break-inside: avoid; }
  figure img { max-height: 220mm; object-fit: contain; object-position: left; }
  h2, h3 { break-after: avoid; }
  .scroll { overflow: visible; }
  th, td { padding: 0.15rem 0.4rem; }
}
"""


def write_page(path: Path, title: str, sections: Sequence[Section]) -> None:
    """Write a report as one HTML file."""
    body = "\n".join(map(section_html, sections))
    page = (
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        f"<title>{escaped(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<h1>{escaped(title)}</h1>\n{body}\n</body>\n</html>\n"
    )
    write_file(path, page)


def section_html(section: Section) -> str:
    """Write a section, with figures that follow each other side by side where there is room."""
    lines = [f"<section>\n<h2>{escaped(section.title)}</h2>"]
    within = False
    for part in section.parts:
        if isinstance(part, Picture | SavedPicture) != within:
            within = not within
            lines.append("<div class='figures'>" if within else "</div>")
        if isinstance(part, SavedPicture):
            lines.append(saved_picture_html(part))
        elif isinstance(part, Picture):
            lines.append(picture_html(part))
        elif isinstance(part, Table):
            lines.append(as_html(part))
        else:
            lines.append(f"<p{' class=warning' * part.startswith(WARNING)}>{escaped(part)}</p>")
    return "\n".join([*lines, "</div>" * within, "</section>"])


WARNING = "Note: "
"""Beginning of a sentence that stands out."""


def picture_html(picture: Picture) -> str:
    """Write a figure with its picture inside."""
    encoded = base64.b64encode(drawn(picture.figure, "svg")).decode("ascii")
    caption = escaped(picture.caption)
    image = f"<img alt='{caption}' src='data:image/svg+xml;base64,{encoded}'>"
    if picture.wide:
        return f"<figure class='wide'><div class='scroll'>{image}</div><figcaption>{caption}</figcaption></figure>"
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def saved_picture_html(picture: SavedPicture) -> str:
    """Write a picture that lies in a file, with its content inside."""
    kind = "svg+xml" if picture.path.suffix == ".svg" else "png"
    encoded = base64.b64encode(picture.path.read_bytes()).decode("ascii")
    caption = escaped(picture.caption)
    image = f"<img alt='{caption}' src='data:image/{kind};base64,{encoded}'>"
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>"


def drawn(figure: "Figure", form: str) -> bytes:
    """Draw a figure as svg, png or pdf, the same figure with the same bytes."""
    import matplotlib as mpl  # noqa: PLC0415 - slow to import

    out = io.BytesIO()
    dates = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    with mpl.rc_context({"svg.hashsalt": "fl_lightning", "svg.fonttype": "path"}):
        figure.savefig(out, format=form, metadata=dates.get(form, {}))
    return out.getvalue()
