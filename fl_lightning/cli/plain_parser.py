"""A parser for the commands that need neither torch nor Lightning. It is argparse's, which is imported at once."""

import argparse
import re
import sys
from typing import Any, NoReturn

from fl_lightning.utils.suggestions import suggestion
from fl_lightning.utils.text import printable

CHOICE = re.compile(r"argument (?:--)?(\S+): invalid choice: '(.*)' \(choose from (.*)\)")
"""argparse's words for a value that is none of the choices."""

UNKNOWN = "unrecognized arguments: "
"""argparse's words before the arguments that it does not know."""


class PlainParser(argparse.ArgumentParser):
    """Parses arguments without abbreviations, and prints an error in one line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"fl-lightning: error: {printable(self.sentence(message))}\n")
        sys.exit(2)

    def sentence(self, message: str) -> str:
        """Return a message of argparse as one sentence that names what is right.

        >>> parser = PlainParser("try", add_help=False)
        >>> parser.sentence("argument --form: invalid choice: 'xm' (choose from 'xml', 'csv')")
        "form must be xml or csv, got xm; the nearest is 'xml'"
        >>> parser.sentence("unrecognized arguments: --nosuch x")
        "unknown option '--nosuch'; usage: try"
        """
        wrong_choice = CHOICE.fullmatch(message)
        if wrong_choice:
            name, given, listed = wrong_choice.groups()
            choices = [choice.strip("'") for choice in listed.split(", ")]
            return f"{name} must be {' or '.join(choices)}, got {given}{suggestion(given, choices)}"
        usage = " ".join(self.format_usage().split())
        if message.startswith(UNKNOWN):
            word = message.removeprefix(UNKNOWN).split()[0]
            kind = "unknown option" if word.startswith("-") else "unexpected argument"
            return f"{kind} {word!r}; {usage}"
        return f"{message}; {usage}"
