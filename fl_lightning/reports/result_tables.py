"""Tables of results, and how they are written as Markdown, LaTeX and HTML."""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Literal, NamedTuple

from fl_lightning.utils.text import printable

LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "±": r"$\pm$",
    "−": "$-$",
    "–": "--",
    "…": r"\dots{}",
    "→": r"$\to$",
    "≥": r"$\ge$",
    "×": r"$\times$",
    "≤": r"$\le$",
    "∞": r"$\infty$",
    "·": r"$\cdot$",
    "²": "$^2$",
}
"""Letters that LaTeX has other uses for, or does not know in every font."""

GREEK = (
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lamda mu nu xi pi rho sigma tau upsilon phi chi psi omega"
)
"""Names of the Greek letters that LaTeX has, as Unicode spells them."""


def greek_letters() -> dict[str, str]:
    """Return the commands of LaTeX for Greek letters, by letter. Capitals that look like Latin ones have none."""
    commands: dict[str, str] = {"µ": r"$\mu$"}
    for name in GREEK.split():
        command = name.replace("lamda", "lambda")
        commands[unicodedata.lookup(f"GREEK SMALL LETTER {name.upper()}")] = rf"$\{command}$"
    for name in ("gamma", "delta", "theta", "lamda", "xi", "pi", "sigma", "upsilon", "phi", "psi", "omega"):
        command = name.replace("lamda", "lambda").capitalize()
        commands[unicodedata.lookup(f"GREEK CAPITAL LETTER {name.upper()}")] = rf"$\{command}$"
    return commands


LATEX |= greek_letters()

SHORT = 30
"""Largest number of characters of a cell that stay in one line."""

Mark = Literal["", "bold", "underlined"]

MARKDOWN_MARKS: dict[Mark, tuple[str, str]] = {"": ("", ""), "bold": ("**", "**"), "underlined": ("<u>", "</u>")}
"""What stands before and after a marked text in Markdown."""

LATEX_MARKS: dict[Mark, str] = {"": "", "bold": r"\textbf", "underlined": r"\underline"}
"""Commands of LaTeX for a marked text."""

HTML_MARKS: dict[Mark, str] = {"": "", "bold": "b", "underlined": "u"}
"""Tags of HTML for a marked text."""


@dataclass(frozen=True)
class TableCell:
    """Has the text of a cell.

    Attributes:
        text: The text.
        mark: How the text stands out. Empty: it does not.
        star: Whether a star stands after the text.
    """

    text: str
    mark: Mark = ""
    star: bool = False


class Span(NamedTuple):
    """Has a heading above the headings of several columns.

    Args:
        text: The heading.
        columns: Number of columns below it, ≥ 1.
    """

    text: str
    columns: int


@dataclass(frozen=True)
class Table:
    """Has a table of results, whose first column holds names.

    Attributes:
        title: Title above the table. Empty: there is none.
        header: Headings of the C columns.
        rows: Rows of C cells. A row of one cell is a heading of the rows below it.
        note: Sentences below the table. Empty: there are none.
        spans: Headings above those of all columns but the first, C − 1 columns in all. Empty: there are none.
        label: Name by which a text in LaTeX refers to the table. Empty: the words of the title.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[TableCell]]
    note: str = ""
    spans: Sequence[Span] = ()
    label: str = ""

    @property
    def full_header(self) -> list[str]:
        """Headings of the columns, each with the one above it."""
        above = [""]
        for span in self.spans:
            above += [span.text] * span.columns
        if len(above) == 1:
            return list(self.header)
        return [": ".join(filter(None, both)) for both in zip(above, self.header, strict=True)]


def as_markdown(table: Table) -> str:
    r"""Write a table as Markdown.

    >>> print(as_markdown(Table("Accuracy", ["method", "final"], [[TableCell("A|B"), TableCell("1 ± 0", "bold")]])))
    **Accuracy**
    <BLANKLINE>
    | method | final |
    | --- | ---: |
    | A\|B | **1 ± 0** |
    <BLANKLINE>
    """
    ruler = ["---"] + ["---:"] * (len(table.header) - 1)
    lines = [markdown_line([markdown(name) for name in table.full_header]), markdown_line(ruler)]
    for row in table.rows:
        cells = row
        if is_heading(row, table):
            cells = [replace(row[0], mark="bold"), *[TableCell("")] * (len(table.header) - 1)]
        lines.append(markdown_line([markdown_cell(cell) for cell in cells]))
    body = "".join(lines)
    title = f"**{printable_line(table.title)}**\n\n" if table.title else ""
    note = f"\n{printable_line(table.note)}\n" if table.note else ""
    return title + body + note


def markdown_line(texts: Sequence[str]) -> str:
    """Write a line of a table of Markdown from the texts of its cells."""
    return f"| {' | '.join(texts)} |\n"


def is_heading(row: Sequence[TableCell], table: Table) -> bool:
    """Return True for a row that is the heading of the rows below it."""
    return len(row) == 1 < len(table.header)


def markdown_cell(cell: TableCell) -> str:
    """Write a cell as Markdown, with its mark."""
    before, after = MARKDOWN_MARKS[cell.mark]
    star = "\\*" if cell.star else ""
    return f"{before}{markdown(cell.text)}{after}{star}"


def printable_line(text: str) -> str:
    """Put a text into one line, without what cannot be seen."""
    return printable(" ".join(text.splitlines()))


def markdown(text: str) -> str:
    """Write the text of a cell so that it ends neither the cell nor the row."""
    return printable_line(text).replace("\\", "\\\\").replace("|", "\\|")


def as_latex(table: Table) -> str:
    r"""Write a table as LaTeX, for the package booktabs. The note stands below it.

    >>> print(as_latex(Table("50 % of", ["method", "final"], [[TableCell("A_1"), TableCell("1 ± 0", "bold")]])))
    \begin{table}
      \centering\small\setlength{\tabcolsep}{4pt}
      \caption{50 \% of}
      \label{tab:50-of}
      \begin{tabular}{@{}lr@{}}
        \toprule
        method & final \\
        \midrule
        A\_1 & \textbf{1 $\pm$ 0} \\
        \bottomrule
      \end{tabular}
    \end{table}
    <BLANKLINE>
    """
    columns = "@{}l" + "r" * (len(table.header) - 1) + "@{}"
    lines = [
        r"\begin{table}",
        r"  \centering\small\setlength{\tabcolsep}{4pt}",
        rf"  \caption{{{latex(table.title)}}}",
        rf"  \label{{tab:{label_of(table)}}}",
        rf"  \begin{{tabular}}{{{columns}}}",
        r"    \toprule",
    ]
    if table.spans:
        lines += latex_spans(table.spans)
    lines += [latex_line([latex(name) for name in table.header]), r"    \midrule"]
    for number, row in enumerate(table.rows):
        if not is_heading(row, table):
            lines.append(latex_line([latex_cell(cell) for cell in row]))
            continue
        if number:
            lines.append(r"    \addlinespace")
        lines.append(rf"    \multicolumn{{{len(table.header)}}}{{l}}{{\emph{{{latex(row[0].text)}}}}} \\")
    lines += [r"    \bottomrule", r"  \end{tabular}"]
    if table.note:
        lines.append(rf"  \par\medskip\parbox{{\linewidth}}{{\footnotesize {latex(table.note)}}}")
    lines += [r"\end{table}", ""]
    return "\n".join(lines)


LATEX_HEAD = """% Tables for a paper: \\input this file where they belong.
% It needs \\usepackage{booktabs} in the preamble, and UTF-8, which LaTeX has had by itself since 2018.
"""
"""Comment at the beginning of a file of tables."""


def label_of(table: Table) -> str:
    """Return the name by which a text refers to a table."""
    if table.label:
        return table.label
    words = re.findall(r"[a-z0-9]+", table.title.lower())
    return "-".join(words) or "results"


def latex_spans(spans: Sequence[Span]) -> list[str]:
    """Write the headings above those of the columns, each with a rule below it."""
    cells = [rf"\multicolumn{{{span.columns}}}{{c}}{{{latex(span.text)}}}" for span in spans]
    rules = []
    first = 2
    for span in spans:
        last = first + span.columns - 1
        rules.append(rf"\cmidrule(lr){{{first}-{last}}}")
        first = last + 1
    return [latex_line(["", *cells]), f"    {' '.join(rules)}"]


def latex_line(texts: Sequence[str]) -> str:
    """Write a line of a table of LaTeX from the texts of its cells."""
    return rf"    {' & '.join(texts)} \\"


def latex_cell(cell: TableCell) -> str:
    """Write a cell as LaTeX, with its mark."""
    text = latex(cell.text)
    command = LATEX_MARKS[cell.mark]
    marked = f"{command}{{{text}}}" if command else text
    return rf"{marked}\rlap{{$^{{*}}$}}" if cell.star else marked


def latex(text: str) -> str:
    """Write text so that LaTeX shows it as it is."""
    written = "".join(LATEX.get(letter, letter) for letter in printable_line(text))
    # LaTeX takes a bracket or a star after the end of a row as an option of that end.
    return f"{{}}{written}" if written.startswith(("[", "*")) else written


def unbroken(text: str) -> str:
    """Escape a text, and keep a short one in one line."""
    if len(text) <= SHORT:
        text = text.replace(" ", "\u00a0")
    return escaped(text)


def escaped(text: str) -> str:
    """Escape a text for a page."""
    return escape(printable(text, keep="\n"))


def as_html(table: Table) -> str:
    """Write a table as HTML, in a frame that scrolls if the table is wider than the page.

    >>> page = as_html(Table("", ["", ""], [[TableCell("A<B"), TableCell("1", "bold")]]))
    >>> "<th scope='row'>A&lt;B</th><td><b>1</b></td>" in page
    True
    """
    head = "".join(f"<th scope='col'>{escaped(name)}</th>" for name in table.header)
    spans = ""
    if table.spans:
        above = "".join(
            f"<th colspan='{span.columns}' scope='colgroup'>{escaped(span.text)}</th>" for span in table.spans
        )
        spans = f"<tr><td></td>{above}</tr>"
    body = "\n".join(html_row(row, table) for row in table.rows)
    title = f"<h3>{escaped(table.title)}</h3>\n" if table.title else ""
    note = f"<p class='note'>{escaped(table.note)}</p>" if table.note else ""
    return (
        f"{title}<div class='scroll' tabindex='0'><table>\n<thead>{spans}<tr>{head}</tr></thead>\n"
        f"<tbody>{body}</tbody></table></div>{note}\n"
    )


def html_row(row: Sequence[TableCell], table: Table) -> str:
    """Write a row of a table as HTML, whose first cell is a name."""
    name, *cells = row
    if is_heading(row, table):
        return f"<tr><th colspan='{len(table.header)}' scope='rowgroup'>{escaped(name.text)}</th></tr>"
    texts = "".join(f"<td>{html_cell(cell)}</td>" for cell in cells)
    return f"<tr><th scope='row'>{escaped(name.text)}</th>{texts}</tr>"


def html_cell(cell: TableCell) -> str:
    """Write the content of a cell as HTML, with its mark."""
    text = unbroken(cell.text)
    tag = HTML_MARKS[cell.mark]
    marked = f"<{tag}>{text}</{tag}>" if tag else text
    return f"{marked}<sup>*</sup>" if cell.star else marked
