"""argparse's parser, which is imported in no time, for the commands that need neither torch nor Lightning."""

import argparse
import re
import sys
from difflib import get_close_matches
from typing import Any, NoReturn

from fl_lightning.utils.text import printable

CHOICE = re.compile(r"argument (?:--)?(\S+): invalid choice: '(.*)' \(choose from (.*)\)")
UNKNOWN = "unrecognized arguments: "


class PlainParser(argparse.ArgumentParser):
    """A parser without abbreviations, with its errors in one line."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"fl-lightning: error: {printable(self.sentence(message))}\n")
        sys.exit(2)

    def sentence(self, message: str) -> str:
        """Explain a message of argparse, with what is right.

        >>> parser = PlainParser("try", add_help=False)
        >>> parser.sentence("argument --form: invalid choice: 'xm' (choose from 'xml', 'csv')")
        "form must be xml or csv, got xm; the nearest is 'xml'"
        >>> parser.sentence("unrecognized arguments: --nosuch x")
        "unknown option '--nosuch'; usage: try"
        """
        if wrong := CHOICE.fullmatch(message):
            name, given, listed = wrong.groups()
            names = [choice.strip("'") for choice in listed.split(", ")]
            near = "".join(f"; the nearest is {close!r}" for close in get_close_matches(given, names, 1))
            return f"{name} must be {' or '.join(names)}, got {given}{near}"
        if message.startswith(UNKNOWN):
            word = message.removeprefix(UNKNOWN).split()[0]
            message = f"{'unknown option' if word[0] == '-' else 'unexpected argument'} {word!r}"
        return f"{message}; {' '.join(self.format_usage().split())}"
