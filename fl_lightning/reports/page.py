"""Pages of reports: each is one HTML file that loads nothing from elsewhere and needs no script."""

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
    """Has a figure of a report.

    Attributes:
        name: Name of the figure's file, without ending.
        figure: The figure.
        caption: Sentences about what it shows.
        wide: Whether the figure needs the width of the page. On a phone such a figure scrolls.
    """

    name: str
    figure: "Figure"
    caption: str
    wide: bool = False


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


Part = Picture | SavedPicture | Table | str


@dataclass(frozen=True)
class Section:
    """Has a section of a report.

    Attributes:
        title: Title above the section.
        parts: Figures, tables and sentences, in their order.
    """

    title: str
    parts: Sequence[Part]


WARNING = "Note: "
"""Beginning of a sentence that stands out."""

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
    """Write a report as one HTML file.

    Args:
        path: The file.
        title: Title of the report.
        sections: Its sections, in their order.
    """
    body = "\n".join(section_html(section) for section in sections)
    page = (
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        f"<title>{escaped(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<h1>{escaped(title)}</h1>\n{body}\n</body>\n</html>\n"
    )
    write_file(path, page)


def section_html(section: Section) -> str:
    """Write a section, in which figures that follow each other lie side by side if there is room."""
    lines = [f"<section>\n<h2>{escaped(section.title)}</h2>"]
    is_row_open = False
    for part in section.parts:
        is_picture = isinstance(part, Picture | SavedPicture)
        if is_picture and not is_row_open:
            lines.append("<div class='figures'>")
        elif is_row_open and not is_picture:
            lines.append("</div>")
        is_row_open = is_picture
        lines.append(part_html(part))
    # A section whose last part is no picture ends with an empty line.
    lines.append("</div>" if is_row_open else "")
    lines.append("</section>")
    return "\n".join(lines)


def part_html(part: Part) -> str:
    """Write a part of a section."""
    if isinstance(part, SavedPicture):
        return saved_picture_html(part)
    if isinstance(part, Picture):
        return picture_html(part)
    if isinstance(part, Table):
        return as_html(part)
    kind = " class=warning" if part.startswith(WARNING) else ""
    return f"<p{kind}>{escaped(part)}</p>"


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
    """Draw a figure as svg, png or pdf. The same figure has the same bytes."""
    import matplotlib as mpl  # noqa: PLC0415 - slow to import

    out = io.BytesIO()
    without_date = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
    with mpl.rc_context({"svg.hashsalt": "fl_lightning", "svg.fonttype": "path"}):
        figure.savefig(out, format=form, metadata=without_date.get(form, {}))
    return out.getvalue()
