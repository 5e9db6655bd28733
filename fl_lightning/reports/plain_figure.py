"""A figure shows its texts as they are, in a module of its own, for matplotlib is slow to import."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import matplotlib as mpl
from matplotlib.backend_bases import RendererBase
from matplotlib.figure import Figure
from matplotlib.text import Text

from fl_lightning.utils.text import drawable


class PlainFigure(Figure):
    """A figure in whose texts, which users name, a `$` begins no formula."""

    def draw(self, renderer: RendererBase) -> None:
        """Draw the figure, whoever asks for it."""
        with self._plain_texts():
            super().draw(renderer)

    def savefig(self, *args: Any, **kwargs: Any) -> None:
        """Write the figure, and place its parts before it is first written, and never again.

        matplotlib would draw it a further time for that, in each format, and so would loggers that draw it anew.
        """
        engine = self.get_layout_engine()
        if engine is not None:
            with self._plain_texts(), suppress(ValueError):  # as matplotlib, which then leaves the parts where they are
                engine.execute(self)
            self.set_layout_engine(None)
        super().savefig(*args, **kwargs)

    @contextmanager
    def _plain_texts(self) -> Iterator[None]:
        for text in self.findobj(Text):
            text.set_parse_math(False)
            if text.get_text() != (shown := drawable(text.get_text())):
                text.set_text(shown)
        with mpl.rc_context({"text.parse_math": False}):  # of the ticks, which are made while it is drawn
            yield
