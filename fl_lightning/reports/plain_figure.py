"""A figure that shows texts as they are, in a module of its own because matplotlib is slow to import."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import matplotlib as mpl
from matplotlib.backend_bases import RendererBase
from matplotlib.figure import Figure
from matplotlib.text import Text

from fl_lightning.utils.text import drawable


class PlainFigure(Figure):
    """Shows texts as they are. Users choose names, in which a `$` begins no formula."""

    def draw(self, renderer: RendererBase) -> None:
        """Draw the figure with its texts as they are."""
        with self._plain_texts():
            super().draw(renderer)

    def savefig(self, *args: Any, **kwargs: Any) -> None:
        """Write the figure, and place its parts only before the first time.

        Otherwise matplotlib, and loggers that draw the figure anew, would draw it a further time for each format.
        """
        engine = self.get_layout_engine()
        if engine is not None:
            # matplotlib leaves the parts where they are if there is no room for them.
            with self._plain_texts(), suppress(ValueError):
                engine.execute(self)
            self.set_layout_engine(None)
        super().savefig(*args, **kwargs)

    @contextmanager
    def _plain_texts(self) -> Iterator[None]:
        """Make all texts of the figure plain, and while the context lasts those that matplotlib makes."""
        for text in self.findobj(Text):
            text.set_parse_math(False)
            shown = drawable(text.get_text())
            if text.get_text() != shown:
                text.set_text(shown)
        # matplotlib makes the texts of the ticks while it draws.
        with mpl.rc_context({"text.parse_math": False}):
            yield
