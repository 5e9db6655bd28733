"""Names that users chose are drawn as they are, whatever letters they have."""

import io
import re

import numpy as np
import pytest
import torch
from matplotlib.text import Text

from fl_lightning.monitors.probe_figures import plot_circles, plot_embedding
from fl_lightning.papers.panels import draw_maps, finish, panels
from fl_lightning.reports.comparisons import plot_before_after, plot_forgetting
from fl_lightning.reports.curves import Band, Curves, Panel, plot_curves
from fl_lightning.reports.figures import (
    draw_line,
    new_figure,
    plot_accuracy,
    plot_bubbles,
    plot_classwise,
    plot_partition,
    plot_sizes,
    plot_values,
)
from fl_lightning.reports.page import drawn, shortened
from fl_lightning.runs.logged_figures import pixels
from tests.commands import say
from tests.reports.saved_runs import settings, write_run

NAMES = ("cost_$_a", "$\\frac$", "a^b_{", "_hidden", "\\", "$", "$$", "a\x00\x1b[2J\nb", "\ud800", "x" * 5000)
CURVES = {name: [0.1 * k, 0.5] for k, name in enumerate(NAMES)}
BANDS = {name: Band([0, 1], np.array([values])) for name, values in CURVES.items()}
PANELS = [Panel("$\\bad$", BANDS), Panel("_^$", BANDS)]
TABLE = np.full((len(NAMES), len(NAMES)), 0.5)


def grid(rows, columns):
    figure, axes = panels(rows, columns, width=0.4, height=0.4)
    for i, name in enumerate(NAMES):
        draw_line(axes[0, 0], i, [0, 1], np.array([0.1, 0.2]), label=name)
    finish(figure, axes)
    return figure


def titled():
    figure = new_figure(3, 3)
    axes = figure.subplots()
    axes.set(title=NAMES[0], xlabel=NAMES[1], ylabel=NAMES[2])
    axes.annotate(NAMES[1], (0, 0))
    axes.set_xticks([0, 1], ["$_a", "b$^"])
    figure.suptitle(NAMES[1])
    return figure


DRAWN = {
    "accuracy": lambda: plot_accuracy([0, 1], CURVES, CURVES, "$\\bad$"),
    "values": lambda: plot_values([0, 1], CURVES, "$\\bad$"),
    "classwise": lambda: plot_classwise(TABLE, NAMES, title="$\\bad$"),
    "partition": lambda: plot_partition(TABLE * 4, NAMES, "$\\bad$"),
    "curves": lambda: plot_curves(Curves(NAMES, PANELS, "$\\bad$", "$_^$")),
    "forgetting": lambda: plot_forgetting(dict.fromkeys(NAMES, TABLE), NAMES),
    "before and after": lambda: plot_before_after(
        dict.fromkeys(NAMES, (np.ones(1), np.ones(1))), "$\\bad$", ("$_", "^$")
    ),
    "maps": lambda: draw_maps(
        dict.fromkeys(NAMES, TABLE), xlabel="$\\bad$", ylabel="^_", value="$\\a$", row_names=NAMES
    ),
    "rows": lambda: grid(NAMES, [""]),
    "columns": lambda: grid([""], NAMES),
    "embedding": lambda: plot_embedding(torch.rand(10, 4, 2), torch.arange(4), NAMES, NAMES),
    "circles": lambda: plot_circles(torch.rand(10, 10, 2), torch.arange(10), NAMES, NAMES),
    "any": titled,
}


@pytest.mark.filterwarnings("ignore:constrained_layout not applied", "ignore:Glyph", "ignore:Tight layout")
@pytest.mark.parametrize("name", DRAWN)
def test_any_name_is_drawn(name):
    """By whoever draws the figure: the page, a file, or a logger."""
    figure = DRAWN[name]()
    figure.savefig(io.BytesIO(), format="svg")
    assert pixels(figure).size


def test_no_text_is_read_as_a_formula():
    """Also those of ticks, which are made while a figure is drawn: a formula would not look as it was written."""
    figure = plot_values([0], {"a$x^2$": [1.0]})
    pixels(figure)
    assert not any(text.get_parse_math() for text in figure.findobj(Text))


def test_a_name_that_begins_with_an_underscore_is_in_the_legend():
    bands = {"_a": BANDS["$"], "_b": BANDS["$"]}
    curves = plot_curves(Curves(["_a", "_b"], [Panel("", bands)], "y"))
    for figure in (curves, plot_accuracy([0, 1], {"_acc": [0.1, 0.2]})):
        svg = io.StringIO()
        figure.savefig(svg, format="svg")
        assert "_a" in svg.getvalue()


def test_a_report_of_keys_and_settings_with_a_dollar(tmp_path):
    for number, name in enumerate(("$\\a$", "_^$")):
        run = write_run(tmp_path / f"{number}", [0.1], {"model": {"tag": name}}, classes=("$\\i$", "b_$", "^"))
        (run / "metrics.csv").write_text((run / "metrics.csv").read_text().replace("train/ce", "cost_$_{a"))
    assert say(f"report {tmp_path} --output {tmp_path}/out").code == 0
    assert "cost_$_{a" in (tmp_path / "out/report.html").read_text("utf-8")


def test_each_key_has_a_figure_of_its_own(tmp_path):
    keys = ["a/b", "a-b", "a b", "a//b", "a$b", "global/acc", "../../etc", "x" * 300, "x" * 301]
    run = write_run(tmp_path / "0", [0.1], settings("FedAvg", 0))
    (run / "metrics.csv").write_text("round," + ",".join(keys) + "\n0" + ",0.5" * len(keys) + "\n")
    assert say(f"report {run} --output {tmp_path}/out --format svg").code == 0
    files = {path.name for path in (tmp_path / "out/figures").iterdir()}
    assert len(files) == len(keys)
    assert {"curve-a-b.svg", "curve-global-acc.svg"} <= files


def test_values_that_are_all_infinite_leave_an_empty_panel():
    pixels(plot_accuracy([0], {"val_acc": [0.5]}, {"val_loss": [float("inf")]}))


def test_maps_grow_with_their_rows_up_to_a_limit():
    few, many, most = (
        draw_maps(
            {"a": np.ones((rows, 3))}, xlabel="x", ylabel="y", value="v", row_names=[""] * rows
        ).get_size_inches()[1]
        for rows in (1, 10, 100)
    )
    assert many - few == pytest.approx(0.19 * 10 + 0.7 - 1.6)
    assert most - few == pytest.approx(4.0 - 1.6)


def test_the_groups_of_a_class_lie_beside_each_other_around_its_place():
    table = {name: np.full((2, 3), 0.5) for name in ("a", "b")}
    axes = plot_forgetting(table, ["x", "y", "z"]).axes[0]
    places = [line.get_ydata() for line in axes.lines if len(line.get_ydata()) == 3]
    np.testing.assert_allclose(places[0], np.arange(3) - 0.175)
    np.testing.assert_allclose(places[1], np.arange(3) + 0.175)


def test_a_picture_of_clients_grows_with_what_it_shows_up_to_a_limit():
    few, many, most = (
        plot_bubbles(np.ones((size, size), dtype=int), [""] * size).get_size_inches() for size in (2, 20, 100)
    )
    assert few.tolist() == pytest.approx([3.2 + 1.6, 2.4 + 1.2])
    assert many.tolist() == pytest.approx([0.42 * 20 + 1.6, 0.3 * 20 + 1.2])
    assert most.tolist() == pytest.approx([14 + 1.6, 9 + 1.2])
    assert [plot_sizes(np.ones(size)).get_size_inches()[0] for size in (2, 20, 100)] == pytest.approx([4.2, 9.4, 12])


def test_a_small_picture_has_the_texts_of_the_whole_one():
    """Names and the numbers at axes keep their decimals."""
    bands = {name: Band([0, 1, 2], np.array([[2.345, 2.351, 2.355]])) for name in ("mu=1.2345", "mu=1.2389")}
    figure = plot_curves(Curves(list(bands), [Panel("α=1.0625", bands)], ylabel="loss"))
    whole = drawn(figure, "svg", letters="none")
    texts = re.findall(rb"<text[^>]*>([^<]*)<", whole)
    assert {b"2.348", b"mu=1.2345", b"mu=1.2389"} <= {*texts}
    assert re.findall(rb"<text[^>]*>([^<]*)<", shortened(whole)) == texts
    assert len(shortened(whole)) < len(whole)
