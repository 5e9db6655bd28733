"""Lets every command print where the output is not UTF-8: in a pipe on Windows, or by `PYTHONIOENCODING`."""

import codecs
import sys
import unicodedata
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TextIO

HANDLER = "fl_lightning.plain"
"""Name of the error handler, as `codecs` knows it."""

PLAIN = {
    "–": "-",
    "—": "-",
    "−": "-",
    "×": "x",
    "·": "*",
    "≥": ">=",
    "≤": "<=",
    "≠": "!=",
    "≈": "~",
    "±": "+/-",
    "→": "->",
    "∞": "inf",
    "∇": "grad ",
    "√": "sqrt",
    "∈": " in ",
    "‖": "||",
    "…": "...",
    "’": "'",
    "‘": "'",
    "“": '"',
    "”": '"',
}
"""What is printed for a letter that the output lacks."""

GREEK = "GREEK SMALL LETTER "
BIG_GREEK = "GREEK CAPITAL LETTER "


@contextmanager
def any_encoding() -> Iterator[None]:
    """Context in which standard output and standard error take every letter, whatever their encoding.

    A letter that the encoding lacks is printed by the nearest letters that it has: `α` as `alpha`, `≥` as `>=`.
    """
    with ExitStack() as undone:
        for stream in (sys.stdout, sys.stderr):
            undone.enter_context(_taking_all(stream))
        yield


@contextmanager
def _taking_all(stream: TextIO | None) -> Iterator[None]:
    """Context in which a stream takes every letter. A stream that cannot be told so is left alone."""
    reconfigure = getattr(stream, "reconfigure", None)
    if stream is None or reconfigure is None or _is_utf(stream.encoding):
        yield
        return
    before = stream.errors
    reconfigure(errors=HANDLER)
    try:
        yield
    finally:
        # A command may close its output.
        if not stream.closed:
            reconfigure(errors=before)


def _is_utf(encoding: str | None) -> bool:
    return encoding is not None and codecs.lookup(encoding).name.startswith("utf")


def plain(letter: str) -> str:
    r"""Return the nearest ASCII letters.

    >>> plain("α"), plain("Ω"), plain("é"), plain("≥"), plain("日")
    ('alpha', 'Omega', 'e', '>=', '\\u65e5')
    """
    if letter in PLAIN:
        return PLAIN[letter]
    name = unicodedata.name(letter, "")
    if name.startswith(GREEK):
        return name.removeprefix(GREEK).lower()
    if name.startswith(BIG_GREEK):
        return name.removeprefix(BIG_GREEK).capitalize()
    without_marks = unicodedata.normalize("NFKD", letter).encode("ascii", "ignore").decode("ascii")
    return without_marks or letter.encode("unicode_escape").decode("ascii")


def _replaced(error: UnicodeError) -> tuple[str | bytes, int]:
    """Handle what a codec cannot encode, as `codecs.register_error` asks for."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letters = error.object[error.start : error.end]
    return "".join(map(plain, letters)), error.end


codecs.register_error(HANDLER, _replaced)
