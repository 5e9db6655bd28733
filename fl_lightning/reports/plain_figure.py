"""A figure shows its texts as they are, in a module of its own, for matplotlib is slow to import."""

import matplotlib as mpl
from matplotlib.backend_bases import RendererBase
from matplotlib.figure import Figure
from matplotlib.text import Text

from fl_lightning.utils.text import drawable


class PlainFigure(Figure):
    """A figure in whose texts, which users name, a `$` begins no formula."""

    def draw(self, renderer: RendererBase) -> None:
        """Draw the figure, whoever asks for it."""
        for text in self.findobj(Text):
            text.set_parse_math(False)
            if text.get_text() != (shown := drawable(text.get_text())):
                text.set_text(shown)
        with mpl.rc_context({"text.parse_math": False}):  # of the ticks, which are made while it is drawn
            super().draw(renderer)
