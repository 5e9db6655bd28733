"""skipped.csv names every client that was left out, also after a resume."""

import csv
from pathlib import Path

import pytest

from fl_lightning.callbacks import SkippedClients
from fl_lightning.members.faults import FaultError
from fl_lightning.utils.round_table import RoundTable
from tests.commands import TINY, say
from tests.federation.faulty import faulty
from tests.toys import toy_data, trainer


def rows_of(path):
    with path.open(newline="") as file:
        return [(int(row["round"]), int(row["client"]), row["reason"]) for row in csv.DictReader(file)]


@pytest.mark.parametrize("how", ["NaN", "exception", "3e38"])
def test_a_skipped_client_stands_in_the_file_with_its_reason(how, tmp_path):
    trainer(3, callbacks=[SkippedClients(tmp_path)]).fit(faulty(how, "skip"), datamodule=toy_data())
    ((round_idx, client_id, reason),) = rows_of(tmp_path / "skipped.csv")
    assert (round_idx, client_id) == (1, 2)
    said = {"NaN": "NaN or infinite values", "exception": "ZeroDivisionError: a bug of two lines (", "3e38": "norm 1"}
    assert said[how] in reason


def test_rounds_that_are_run_again_are_not_named_twice(tmp_path):
    loop = faulty("NaN", "skip")
    saves = SkippedClients(tmp_path)
    run = trainer(1, callbacks=[saves])
    run.fit(loop, datamodule=toy_data())
    run.save_checkpoint(tmp_path / "at.ckpt")
    assert not (tmp_path / "skipped.csv").exists()
    for _ in range(2):
        again = trainer(3, callbacks=[SkippedClients(tmp_path)])
        again.fit(faulty("NaN", "skip"), datamodule=toy_data(), ckpt_path=tmp_path / "at.ckpt")
        assert len(rows_of(tmp_path / "skipped.csv")) == 1
    with (tmp_path / "skipped.csv").open("a") as file:
        file.write("0,")  # cut
    trainer(0, callbacks=[SkippedClients(tmp_path)])
    again = trainer(3, callbacks=[SkippedClients(tmp_path)])
    again.fit(faulty("NaN", "skip"), datamodule=toy_data(), ckpt_path=tmp_path / "at.ckpt")
    assert len(rows_of(tmp_path / "skipped.csv")) == 1


def test_a_table_that_is_none_is_refused(tmp_path):
    for content in (b"\xff\xfe\x89PNG", b"round,client\n" + b"1" * 200_000):
        (tmp_path / "skipped.csv").write_bytes(content)
        with pytest.raises(ValueError, match=r"skipped.csv must be a table .* move it away"):
            RoundTable(tmp_path / "skipped.csv", ("round", "client")).begin(1)
        assert (tmp_path / "skipped.csv").read_bytes() == content


@pytest.mark.usefixtures("without_pictures")
def test_the_command_line_writes_it_into_the_run_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = f"fit {TINY} --trainer.max_epochs 3 --trainer.enable_progress_bar false --model.faults.max_update_norm 1e-9"
    said = say(f"{line} --model.faults.nonfinite skip --model.faults.patience 2")
    assert said.code == 1
    assert "every client was skipped for 2 rounds in a row (model.faults.patience), up to round 1" in said.err
    (path,) = Path("runs").glob("*/*/skipped.csv")
    assert {row[0] for row in rows_of(path)} == {0, 1}
    with pytest.raises(FaultError):  # from Python as well
        trainer(3).fit(faulty("", "skip", max_update_norm=1e-9, patience=1), datamodule=toy_data())
