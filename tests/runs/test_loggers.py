"""The table of a run: one row per round, whole whenever somebody reads it."""

import csv

import pytest

from fl_lightning.runs.loggers import RoundCSVLogger


def rows(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_is_on_disk_as_soon_as_it_is_logged(tmp_path):
    logger = RoundCSVLogger(tmp_path)
    for round_idx in range(3):
        logger.log_metrics({"a": round_idx / 2}, step=round_idx)
        assert [row["round"] for row in rows(tmp_path)] == [str(r) for r in range(round_idx + 1)]
    assert [float(row["a"]) for row in rows(tmp_path)] == [0.0, 0.5, 1.0]


def test_values_of_one_round_share_a_row_and_new_keys_widen_the_table(tmp_path):
    logger = RoundCSVLogger(tmp_path)
    logger.log_metrics({"a": 1}, step=0)
    logger.log_metrics({"b": 2}, step=0)
    logger.log_metrics({"a": 3}, step=1)
    logger.log_metrics({"late": 4}, step=0)
    assert rows(tmp_path) == [
        {"round": "0", "a": "1.0", "b": "2.0", "late": "4.0"},
        {"round": "1", "a": "3.0", "b": "", "late": ""},
    ]


def test_a_value_logged_twice_is_the_later_one(tmp_path):
    logger = RoundCSVLogger(tmp_path)
    logger.log_metrics({"a": 1.25}, step=0)
    logger.log_metrics({"a": 2}, step=0)
    assert rows(tmp_path) == [{"round": "0", "a": "2.0"}]


def test_a_continued_run_loses_the_rows_after_its_checkpoint(tmp_path):
    first = RoundCSVLogger(tmp_path)
    for round_idx in range(4):
        first.log_metrics({"a": round_idx}, step=round_idx)
    first.finalize("failed")
    second = RoundCSVLogger(tmp_path)
    assert len(rows(tmp_path)) == 4  # untouched until there is something to say
    second.log_metrics({"a": 20, "b": 1}, step=2)
    assert rows(tmp_path) == [
        {"round": "0", "a": "0.0", "b": ""},
        {"round": "1", "a": "1.0", "b": ""},
        {"round": "2", "a": "20.0", "b": "1.0"},
    ]


def test_a_row_that_was_cut_in_the_middle_is_left_out(tmp_path):
    logger = RoundCSVLogger(tmp_path)
    logger.log_metrics({"a": 1, "b": 1}, step=0)
    logger.finalize("failed")
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("1,0.")
    logger.log_metrics({"a": 2, "b": 2}, step=2)
    assert [row["round"] for row in rows(tmp_path)] == ["0", "2"]


def test_an_evaluation_outside_a_fit_leaves_no_row(tmp_path):
    logger = RoundCSVLogger(tmp_path / "run")
    logger.log_metrics({"test/acc": 1, "epoch": 0}, step=0)
    logger.finalize("success")
    assert not (tmp_path / "run").exists()


def test_what_lightning_logs_joins_the_row_of_its_round(tmp_path):
    logger = RoundCSVLogger(tmp_path)
    logger.log_metrics({"lr-SGD": 0.5, "epoch": 0}, step=0)  # as LearningRateMonitor does
    logger.log_metrics({"a": 1}, step=0)
    assert rows(tmp_path) == [{"round": "0", "lr-SGD": "0.5", "a": "1.0"}]


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b"a,b\n1,2\n", b"round,a\nx,1\n", b"round,a\n0,x\n", b"round,a\n0,\x00\n\x89PNG"]
)
def test_a_file_that_is_no_table_of_rounds_is_refused(tmp_path, content):
    (tmp_path / "metrics.csv").write_bytes(content)
    with pytest.raises(ValueError, match=r"metrics.csv must be a table of numbers with a row for each round"):
        RoundCSVLogger(tmp_path).rows_on_disk()


def test_rows_with_too_many_or_too_few_values_are_left_out(tmp_path):
    (tmp_path / "metrics.csv").write_text("round,a\n0,1\n1,2,3\n2\n3,4\n")
    assert RoundCSVLogger(tmp_path).rows_on_disk() == {0: {"a": 1.0}, 3: {"a": 4.0}}
