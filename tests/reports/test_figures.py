"""Figures as people and publishers want them."""

import json
import re

import numpy as np
import pytest

from fl_lightning.reports.curve_pictures import MOST_METHODS
from fl_lightning.reports.curves import Band, Curves, Panel
from fl_lightning.reports.figures import (
    plot_accuracy,
    plot_bubbles,
    plot_classwise,
    plot_confusion,
    plot_partition,
    save,
)
from fl_lightning.reports.live import color_of, live_panels, texts_at
from fl_lightning.reports.page import drawn

COUNTS = np.array([[100, 3], [0, 41]])


def test_pdf_files_embed_true_type_letters(tmp_path):
    """Publishers refuse Type 3."""
    figure = plot_accuracy([0, 1], {"acc": [0.1, 0.2]})
    save(figure, tmp_path / "a.pdf")
    for content in ((tmp_path / "a.pdf").read_bytes(), drawn(figure, "pdf")):
        assert b"/Subtype /CIDFontType2" in content
        assert b"/Type3" not in content


def test_bubbles_name_the_counts_of_three_sizes():
    figure = plot_bubbles(COUNTS, ["00", "01"])
    (legend,) = figure.legends
    assert legend.get_title().get_text() == "samples"
    assert [text.get_text() for text in legend.get_texts()] == ["100", "50", "10"]
    areas = [handle.get_sizes()[0] for handle in legend.legend_handles]
    (bubbles, *_) = figure.axes[0].collections
    assert areas == pytest.approx([bubbles.get_sizes().max() * share for share in (1, 0.5, 0.1)])


def test_classes_without_names_have_plain_numbers_in_pictures():
    for figure in (
        plot_partition(COUNTS, ["00", "01"]),
        plot_bubbles(COUNTS, ["00", "01"]),
        plot_classwise(COUNTS / 100, ["00", "01"]),
        plot_confusion({"last": COUNTS}, ["00", "01"]),
    ):
        texts = [tick.get_text() for axes in figure.axes for tick in axes.get_yticklabels()]
        assert {"0", "1"} <= {*texts}
        assert "00" not in texts
    assert "01" in [tick.get_text() for tick in plot_bubbles(COUNTS, ["01", "x"]).axes[0].get_yticklabels()]


def test_every_method_of_a_figure_has_a_color_of_its_own():
    assert len({color_of(number) for number in range(MOST_METHODS)}) == MOST_METHODS


def test_the_pointer_reads_a_method_at_the_places_of_a_longer_one():
    """Long curves are thinned, each at places of its own, and a method has its values at all of them."""
    bands = {"a": Band(range(1000), np.zeros((1, 1000))), "b": Band(range(900), np.arange(900.0)[np.newaxis])}
    (panel,) = live_panels(Curves(list(bands), [Panel("", bands)], ylabel="loss"))
    columns = dict(re.findall(r'\["(x|m1)", \[(.*?)\]\]', json.dumps(panel.item, ensure_ascii=False)))
    places = json.loads(f"[{columns['x']}]")
    texts = json.loads(f"[{columns['m1']}]")
    expected = [str(place) if place < 900 else "–" for place in places]
    assert [text.partition(".")[0] for text in texts] == expected


def test_the_pointer_reads_a_value_in_steps_until_the_next_one():
    band = Band([1.0, 2.0], np.array([[10.0, 20.0]]))
    assert texts_at([0.5, 1.0, 1.5, 2.0, 9.0], band, in_steps=True) == ["–", "10.00", "10.00", "20.00", "20.00"]
    assert texts_at([0.5, 1.0, 1.5, 2.0, 9.0], band, in_steps=False) == ["–", "10.00", "–", "20.00", "–"]
