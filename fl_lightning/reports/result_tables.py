"""Tables of results, and how they are written as Markdown, LaTeX and HTML."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

from fl_lightning.utils.text import printable

LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
LATEX |= {"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"}
LATEX |= {letter: f"\\{letter}" for letter in "&%$#_{}"}
LATEX |= {"±": r"$\pm$", "−": "$-$", "–": "--", "…": r"\dots{}", "→": r"$\to$", "≥": r"$\ge$", "×": r"$\times$"}
"""Letters that LaTeX has other uses for, or does not know in every font."""

SHORT = 30
"""Characters of a cell that stay in one line."""


Mark = Literal["", "bold", "underlined"]


@dataclass(frozen=True)
class TableCell:
    """A cell has a text, which the eye should find where it has a mark."""

    text: str
    mark: Mark = ""


@dataclass(frozen=True)
class Table:
    """A table whose first column holds names.

    Attributes:
        title: above it.
        header: of the columns.
        rows: a cell for each column.
        note: below it.
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

    def text(cell: TableCell) -> str:
        before, after = {"": ("", ""), "bold": ("**", "**"), "underlined": ("<u>", "</u>")}[cell.mark]
        return f"{before}{markdown(cell.text)}{after}"

    ruler = ["---", *["---:"] * (len(table.header) - 1)]
    lines = [[*map(markdown, table.header)], ruler, *([*map(text, row)] for row in table.rows)]
    body = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    title = f"**{printable_line(table.title)}**\n\n" if table.title else ""
    return title + body + (f"\n{printable_line(table.note)}\n" if table.note else "")


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
    commands = {"": "", "bold": r"\textbf", "underlined": r"\underline"}
    marked = ([(commands[cell.mark], latex(cell.text)) for cell in row] for row in table.rows)
    rows = [" & ".join(f"{command}{{{text}}}" if command else text for command, text in row) for row in marked]
    caption = latex(" ".join(filter(None, (table.title + "." * bool(table.note), table.note))))
    lines = [r"\begin{table}", r"  \centering", rf"  \caption{{{caption}}}"]
    lines += [rf"  \begin{{tabular}}{{l{'r' * (len(table.header) - 1)}}}", r"    \toprule"]
    lines += [rf"    {' & '.join(map(latex, table.header))} \\", r"    \midrule", *(rf"    {row} \\" for row in rows)]
    lines += [r"    \bottomrule", r"  \end{tabular}", r"\end{table}", ""]
    return "\n".join(lines)


def latex(text: str) -> str:
    """Write text so that LaTeX shows it as it is."""
    text = "".join(LATEX.get(letter, letter) for letter in printable_line(text))
    return f"{{}}{text}" if text.startswith(("[", "*")) else text  # which after a row's end would be its option


def unbroken(text: str) -> str:
    """Escape a text, which is not broken into lines where it is short."""
    return escaped(text.replace(" ", "\u00a0") if len(text) <= SHORT else text)


def escaped(text: str) -> str:
    """Escape a text for a page."""
    return escape(printable(text, keep="\n"))


def as_html(table: Table) -> str:
    """Write a table as HTML, in a frame that scrolls where the table is wider than the page.

    >>> page = as_html(Table("", ["", ""], [[TableCell("A<B"), TableCell("1", "bold")]]))
    >>> "<th scope='row'>A&lt;B</th><td><b>1</b></td>" in page
    True
    """
    head = "".join(f"<th scope='col'>{escaped(name)}</th>" for name in table.header)
    rows = []
    for name, *cells in table.rows:
        tags = ({"": "", "bold": "b", "underlined": "u"}[cell.mark] for cell in cells)
        marked = zip(tags, (unbroken(cell.text) for cell in cells), strict=True)
        texts = [f"<{tag}>{text}</{tag}>" if tag else text for tag, text in marked]
        rows.append(
            f"<tr><th scope='row'>{escaped(name.text)}</th>" + "".join(f"<td>{t}</td>" for t in texts) + "</tr>"
        )
    note = f"<p class='note'>{escaped(table.note)}</p>" if table.note else ""
    body = "\n".join(rows)
    return (
        f"<h3>{escaped(table.title)}</h3>\n<div class='scroll'><table>\n<thead><tr>{head}</tr></thead>\n"
        f"<tbody>{body}</tbody></table></div>{note}\n"
    )
