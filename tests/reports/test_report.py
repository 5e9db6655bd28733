import base64
import re
from dataclasses import replace

import pytest

from fl_lightning.reports import curve_pictures
from fl_lightning.reports.curve_pictures import Shown, shown_of
from fl_lightning.reports.facts import facts_of, title_of
from fl_lightning.reports.report import forgotten_classes_of, long_tables, scores_of, write_report
from fl_lightning.reports.result_tables import Table, TableCell
from fl_lightning.reports.saved import Group, find_runs, grouped, read_run
from tests.commands import refusal, say
from tests.reports import pages
from tests.reports.saved_runs import settings, write_run, write_table

PARTITION = [[5, 0, 1], [0, 7, 2]]


def report(folder, **options):
    return write_report(grouped(map(read_run, find_runs([folder]))), folder / "out", **options).read_text("utf-8")


def pictures(page):
    return [base64.b64decode(part) for part in re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', page)]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    for seed in (0, 1):
        for method in ("FedAvg", "FedNTD"):
            curve = [0.2, 0.5, 0.4 + 0.1 * seed]
            run = write_run(folder / f"{method}/{seed}", curve, settings(method, seed), partition=PARTITION)
            header = ["round", "client", "loss_before", "loss_after", "acc_own_before", "acc_own"]
            write_table(run / "clients.csv", header, [[0, 0, 2, 1, 0.1, 0.2], [2, 1, 1, 0.25, 0.5, 0.75]])
    return report(folder, forms=("png", "pdf")), folder / "out"


def test_the_page_needs_nothing_but_itself(page):
    text, _ = page
    without_scripts = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert not re.findall(r"<link|@import|url\(", without_scripts)
    assert not re.findall(r"<script[^>]* src", text)
    addresses = re.findall(r"""(?:src|href)=["']([^"']*)""", without_scripts)
    assert {address[:5] for address in addresses if not address.startswith("#")} == {"data:"}
    assert all(picture.startswith(b"<?xml") for picture in pictures(text))
    assert 'name="viewport"' in text
    assert "@media print" in text


def test_it_has_every_section_and_each_figure_a_sentence(page):
    text, _ = page
    titles = re.findall(r"<h2>(.*?)</h2>", text)
    assert titles == [
        "Results",
        "Costs",
        "Curves",
        "Classes",
        "Before and after local training",
        "Partition",
        "Details",
    ]
    captions = pages.captions(text)
    assert len(captions) == len(pictures(text)) == 10  # 3 curves, forgetting, 2 maps, 2 pairs, bytes, partition
    assert any("FedNTD, mean over 2 seeds. Lowest at the end: class cat, 35.0 %." in caption for caption in captions)
    assert any("A client has 2 to 2 of the 3 classes and 6 to 9 samples" in caption for caption in captions)
    assert any("Change: FedAvg -0.75; FedNTD -0.75" in caption for caption in captions)
    assert any("acc_own_before and acc_own, " in caption and "FedNTD +25" in caption for caption in captions)


def test_the_figures_are_files_of_their_own(page):
    _, folder = page
    files = {path.name for path in (folder / "figures").iterdir()}
    assert {"curve-global-acc.png", "curve-global-acc.pdf", "partition-0.png", "classes-1.pdf"} <= files
    assert (folder / "figures/communication.pdf").read_bytes().startswith(b"%PDF")


def test_the_same_runs_give_the_same_bytes(tmp_path):
    write_run(tmp_path / "0", [0.1, 0.2], settings("FedAvg", 0), partition=PARTITION)
    assert report(tmp_path) == report(tmp_path)


def test_a_run_of_losses_only_gets_what_it_has(tmp_path):
    run = write_run(tmp_path / "0", [0.1])
    (run / "metrics.csv").write_text("round,val/mse\n0,2.0\n1,1.0\n", encoding="utf-8")
    text = report(tmp_path)
    assert re.findall(r"<h2>(.*?)</h2>", text) == ["Results", "Curves", "Details"]
    assert pages.rows(text)[0][1] == "1.000"  # the last mse
    assert len(pictures(text)) == 1


@pytest.mark.usefixtures("without_pictures")
def test_what_classes_forget_is_drawn_where_the_last_group_has_no_classes(tmp_path):
    write_run(tmp_path / "a", [0.3, 0.6, 0.4], settings("FedAvg", 0))
    local = write_run(tmp_path / "b", [0.1], settings("Local", 0))
    (local / "metrics.csv").write_text("round,local/alma\n0,0.5\n", encoding="utf-8")
    (drawn,) = forgotten_classes_of(Shown(grouped(map(read_run, find_runs([tmp_path])))))
    assert drawn.caption.endswith("The class that is forgotten most: FedAvg cat.")


@pytest.mark.parametrize(("rounds", "tables"), [(None, 1), (2, 1), (1, 0)])
def test_scores_of_the_last_round_are_shown_where_it_is_read(tmp_path, rounds, tables):
    run = write_run(tmp_path / "a", [0.3, 0.6], settings("FedAvg", 0))
    rows = [["macro", 30, 0.5, 0.4, 0.3], ["weighted", 30, 0.6, 0.5, 0.4]]
    write_table(run / "classification.csv", ["class", "samples", "precision", "recall", "F1"], rows)
    assert len(scores_of(grouped([read_run(run, rounds)]))) == tables


def test_runs_with_different_data_stand_in_columns_of_their_own(tmp_path):
    """Nobody is warned of it: a reader sees which settings differ."""
    for number, (client, clients) in enumerate((("FedAvg", 2), ("FedAvg", 9), ("FedNTD", 9))):
        config = settings(client, 0)
        config["data"]["num_clients"] = clients
        write_run(tmp_path / str(number), [0.1, 0.2 + 0.1 * number], config)
    groups = grouped(map(read_run, find_runs([tmp_path])))
    assert [(group.row, group.case) for group in groups] == [
        ("FedAvg", "num_clients=2"),
        ("FedAvg", "num_clients=9"),
        ("FedNTD", "num_clients=9"),
    ]
    text = report(tmp_path)
    assert 'class="warning"' not in text
    assert title_of(groups) == "FedAvg and FedNTD"
    assert "2 clients or 9 clients" in facts_of(groups)


def test_one_client_and_one_round_are_named_as_one(tmp_path):
    config = settings("FedAvg", 0)
    config["data"]["num_clients"] = 1
    write_run(tmp_path / "0", [0.1], config)
    assert facts_of(grouped([read_run(tmp_path / "0")]))[:2] == ["1 client", "1 round"]


def test_a_reference_with_all_samples_at_one_place_is_compared_with_the_others(tmp_path):
    for number, pooled in enumerate((False, True)):
        config = settings("FedAvg", 0)
        config["data"]["pooled"] = pooled
        write_run(tmp_path / str(number), [0.1, 0.2], config)
    groups = grouped(map(read_run, find_runs([tmp_path])))
    assert [(group.row, group.case) for group in groups] == [("pooled=False", ""), ("pooled=True", "")]


def test_data_that_differ_with_equal_settings_are_no_comparison(tmp_path):
    """A checkpoint tells it, such as by the digest of the labels."""
    groups = []
    for name, digest in {"a": "1", "b": "2"}.items():
        run = read_run(write_run(tmp_path / name, [0.1, 0.2], settings("FedAvg", 0)))
        groups.append(Group(name, [replace(run, data={"data.labels": digest})]))
    text = write_report(groups, tmp_path / "out").read_text("utf-8")
    assert "runs differ in their data or cohorts" in text
    assert "data.labels (1, 2)" in text
    assert "Final values" not in pages.headings(text)
    assert "Tables of each metric" not in text


def test_the_title_names_the_first_of_many_methods(tmp_path):
    run = read_run(write_run(tmp_path / "0", [0.1]))
    assert title_of([Group("FedAvg, a=1", [run]), Group("FedNTD", [run])]) == "FedAvg, a=1 and FedNTD"
    assert title_of([Group(name, [run]) for name in "abcdefg"]) == "a, b, c and 4 others"
    one = replace(run, settings={"model.client": "fl_lightning.methods.FedProx"})
    assert title_of([Group(name, [one]) for name in "abcdefg"]) == "7 settings of FedProx"


def test_long_tables_show_the_best_rows_and_fold_all():
    rows = [[TableCell(f"m{number}"), TableCell("1")] for number in range(40)]
    shown, folded = long_tables([Table("Final", ["method", "x"], rows)], best=["m3", "m7"])
    assert (shown.title, [row[0].text for row in shown.rows]) == ("Final: 2 of 40 rows", ["m3", "m7"])
    assert (folded.title, len(folded.parts[0].rows)) == ("All 40 rows", 40)
    table = Table("Final", ["method", "x"], rows[:3])
    assert long_tables([table], best=[]) == [table]


def test_rows_of_long_tables_keep_the_headings_of_their_cases():
    rows = []
    for case in ("α=0.1", "α=1"):
        rows.append([TableCell(case)])
        rows += [[TableCell(f"m{number}"), TableCell("1")] for number in range(20)]
    table = Table("Final", ["method", "x"], rows)
    shown, folded = long_tables([table], best=["m3", "m7"])
    assert [row[0].text for row in shown.rows] == ["α=0.1", "m3", "m7", "α=1", "m3", "m7"]
    assert (shown.title, folded.title) == ("Final: 4 of 40 rows", "All 40 rows")


def test_a_long_table_of_the_best_methods_stands_once():
    rows = [[TableCell(f"m{number % 2}"), TableCell("1")] for number in range(40)]
    table = Table("Final", ["method", "x"], rows)
    assert long_tables([table], best=["m0", "m1"]) == [table]


@pytest.mark.usefixtures("without_pictures")
def test_names_are_escaped(tmp_path):
    for number, name in enumerate(("<b>", "&")):
        write_run(tmp_path / f"{number}", [0.1], {"model": {"tag": name}}, classes=("<i>", "b", "c"))
    text = report(tmp_path)
    assert "tag=&lt;b&gt;" in text
    assert "<b>," not in text.split("<style>")[0]


@pytest.mark.usefixtures("without_pictures")
def test_the_command_says_where_the_page_is(tmp_path):
    run = write_run(tmp_path / "a/0", [0.1, 0.2], settings("FedAvg", 0))
    said = say(f"report {run}")
    assert (said.code, said.out.strip()) == (0, str(run / "report.html"))
    said = say(f"report {tmp_path} --output {tmp_path}/out --format html svg")
    assert said.out.strip() == f"{tmp_path}/out/report.html"
    assert (tmp_path / "out/figures/curve-global-acc.svg").is_file()


def test_wrong_options_are_one_sentence(tmp_path):
    assert "none in" in refusal(f"report {tmp_path}", 1)
    (tmp_path / "file").touch()
    assert "file is a file; name another" in refusal(f"report {tmp_path} --output {tmp_path}/file/out", 1)
    assert "html" in refusal(f"report {tmp_path} --format gif", 2)


def test_figures_of_many_groups_show_the_best_at_the_end(tmp_path, monkeypatch):
    """In their own order; tables have all of them, and a sentence says so."""
    monkeypatch.setattr(curve_pictures, "MOST_METHODS", 2)
    for name, last in {"a": 0.3, "b": 0.2, "c": float("nan"), "d": 0.9}.items():
        write_run(tmp_path / name, [0.1, last], settings("FedAvg", 0, mu=name))
    groups = grouped(map(read_run, find_runs([tmp_path])))
    shown, left_out = shown_of(groups)
    assert [group.runs[0].folder.name for group in shown.groups] == ["a", "d"]
    assert left_out == ["Figures show the 2 of 4 methods that are best at the end; tables have all."]
    text = report(tmp_path)
    assert left_out[0] in text
    assert len(re.findall("accuracy by class|on each class after each round", text)) == 2 * 2  # alt text and caption
    assert len(re.findall("<th scope='row'>mu=[abcd]</th>", text)) >= 4


def test_runs_that_two_settings_share_have_a_curve_in_both_panels_and_one_map(tmp_path):
    run = read_run(write_run(tmp_path / "0", [0.1, 0.2], settings("FedAvg", 0)))
    other = read_run(write_run(tmp_path / "1", [0.1, 0.3], settings("FedNTD", 0)))
    groups = [Group(f"FedAvg, {case}", [run], case=case, method="FedAvg") for case in ("beta=1", "beta=2")]
    groups.append(Group("FedNTD, beta=1", [other], case="beta=1", method="FedNTD"))
    text = write_report(groups, tmp_path / "out").read_text("utf-8")
    first, second, *_ = pages.curves(text)
    assert (list(first), list(second)) == (["FedAvg", "FedNTD"], ["FedAvg"])
    assert first["FedAvg"] == second["FedAvg"]
    assert (
        len([caption for caption in pages.captions(text) if caption.startswith("Accuracy of the global model on each")])
        == 2
    )
