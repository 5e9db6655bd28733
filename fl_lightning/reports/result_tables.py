"""Tables of results, and how they are written as Markdown, LaTeX and HTML."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

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
}
"""Letters that LaTeX has other uses for, or does not know in every font."""

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
    """

    text: str
    mark: Mark = ""


@dataclass(frozen=True)
class Table:
    """Has a table of results, whose first column holds names.

    Attributes:
        title: Title above the table. Empty: there is none.
        header: Headings of the C columns.
        rows: Rows of C cells.
        note: Sentences below the table. Empty: there are none.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[TableCell]]
    note: str = ""


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
    lines = [markdown_line([markdown(name) for name in table.header]), markdown_line(ruler)]
    lines += [markdown_line([markdown_cell(cell) for cell in row]) for row in table.rows]
    body = "".join(lines)
    title = f"**{printable_line(table.title)}**\n\n" if table.title else ""
    note = f"\n{printable_line(table.note)}\n" if table.note else ""
    return title + body + note


def markdown_line(texts: Sequence[str]) -> str:
    """Write a line of a table of Markdown from the texts of its cells."""
    return f"| {' | '.join(texts)} |\n"


def markdown_cell(cell: TableCell) -> str:
    """Write a cell as Markdown, with its mark."""
    before, after = MARKDOWN_MARKS[cell.mark]
    return f"{before}{markdown(cell.text)}{after}"


def printable_line(text: str) -> str:
    """Put a text into one line, without what cannot be seen."""
    return printable(" ".join(text.splitlines()))


def markdown(text: str) -> str:
    """Write the text of a cell so that it ends neither the cell nor the row."""
    return printable_line(text).replace("\\", "\\\\").replace("|", "\\|")


def as_latex(table: Table) -> str:
    r"""Write a table as LaTeX, for the package booktabs.

    >>> print(as_latex(Table("50 % of", ["method", "final"], [[TableCell("A_1"), TableCell("1 ± 0", "bold")]])))
    \begin{table}
      \centering
      \caption{50 \% of}
      \begin{tabular}{lr}
        \toprule
        method & final \\
        \midrule
        A\_1 & \textbf{1 $\pm$ 0} \\
        \bottomrule
      \end{tabular}
    \end{table}
    <BLANKLINE>
    """
    columns = "l" + "r" * (len(table.header) - 1)
    lines = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{latex(caption_of(table))}}}",
        rf"  \begin{{tabular}}{{{columns}}}",
        r"    \toprule",
        latex_line([latex(name) for name in table.header]),
        r"    \midrule",
    ]
    lines += [latex_line([latex_cell(cell) for cell in row]) for row in table.rows]
    lines += [r"    \bottomrule", r"  \end{tabular}", r"\end{table}", ""]
    return "\n".join(lines)


def caption_of(table: Table) -> str:
    """Join the title of a table and its note."""
    if not table.note:
        return table.title
    return f"{table.title}. {table.note}"


def latex_line(texts: Sequence[str]) -> str:
    """Write a line of a table of LaTeX from the texts of its cells."""
    return rf"    {' & '.join(texts)} \\"


def latex_cell(cell: TableCell) -> str:
    """Write a cell as LaTeX, with its mark."""
    text = latex(cell.text)
    command = LATEX_MARKS[cell.mark]
    return f"{command}{{{text}}}" if command else text


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
    body = "\n".join(html_row(row) for row in table.rows)
    note = f"<p class='note'>{escaped(table.note)}</p>" if table.note else ""
    return (
        f"<h3>{escaped(table.title)}</h3>\n<div class='scroll'><table>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>{body}</tbody></table></div>{note}\n"
    )


def html_row(row: Sequence[TableCell]) -> str:
    """Write a row of a table as HTML, whose first cell is a name."""
    name, *cells = row
    texts = "".join(f"<td>{html_cell(cell)}</td>" for cell in cells)
    return f"<tr><th scope='row'>{escaped(name.text)}</th>{texts}</tr>"


def html_cell(cell: TableCell) -> str:
    """Write the content of a cell as HTML, with its mark."""
    text = unbroken(cell.text)
    tag = HTML_MARKS[cell.mark]
    return f"<{tag}>{text}</{tag}>" if tag else text
