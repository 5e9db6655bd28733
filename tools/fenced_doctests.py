"""Extends griffe: the site shows doctests of docstrings as code, wherever they stand."""

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"^( *)>>> .*(?:\n(?! *$).*)*", re.MULTILINE)


class FencedDoctests(griffe.Extension):
    """Puts doctests between fences before the docstring is read."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Change the docstring of one object."""
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(r"\1```pycon\n\g<0>\n\1```", obj.docstring.value)
