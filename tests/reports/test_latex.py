"""Tables of results go into a paper as they are."""

import shutil
import subprocess

import pytest

from fl_lightning.reports.result_tables import LATEX_HEAD, Table, TableCell, as_latex
from fl_lightning.reports.summary import summary_table
from tests.reports.test_summary import shown

PAPER = r"""\documentclass{article}
\usepackage{booktabs}
\begin{document}
\input{results}
Table~\ref{tab:results} has the results.
\end{document}
"""
HOSTILE = ("A_B & 50 %", "α=0.1, μ → 1", "#1 {x} ~ ^ \\ $", "[0, 1]", "* a − b ≥ c", "<|>")


def compiled(folder, text: str) -> str:
    """Compile a paper with tables, and return the log."""
    (folder / "results.tex").write_text(text, encoding="utf-8")
    (folder / "paper.tex").write_text(PAPER, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    for _ in range(2):  # the second run knows the labels
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
def test_a_file_of_tables_compiles_and_fits_the_page(tmp_path):
    accuracy, loss = shown()
    two = summary_table({"α = 0.1": [accuracy, loss], "α = 1": [accuracy, loss]})
    log = compiled(tmp_path, LATEX_HEAD + as_latex(two))
    assert "Overfull" not in log
    assert "undefined" not in log
    assert (tmp_path / "paper.pdf").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
def test_names_with_letters_of_latex_compile(tmp_path):
    rows = [[TableCell(name), TableCell(name, "bold", star=True), TableCell(name, "underlined")] for name in HOSTILE]
    every = [Table("; ".join(HOSTILE), ["method", *HOSTILE[:2]], [[TableCell(HOSTILE[0])], *rows], note=HOSTILE[1])]
    every += [summary_table({name: shown() for name in HOSTILE})]
    compiled(tmp_path, LATEX_HEAD + "\n".join(map(as_latex, every)))


def test_a_label_is_plain_and_the_note_stands_below_the_table():
    text = as_latex(Table("Final & more, %", ["method", "x"], [[TableCell("A"), TableCell("1")]], note="Of seeds."))
    assert r"\label{tab:final-more}" in text
    assert text.index(r"\end{tabular}") < text.index("Of seeds.") < text.index(r"\end{table}")
    assert "Of seeds" not in text.partition(r"\label")[0]
