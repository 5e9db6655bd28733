"""`fl-lightning partition`."""

import csv

from fl_lightning.data import Devices
from tests.commands import refusal, say

COMMAND = "partition --model.client FedAvg --data.source Digits --data.source.limit 200"


def test_a_split_is_described_and_drawn(tmp_path):
    shards = "--data.partition ShardPartition --data.partition.shards_per_client 5"
    said = say(f"{COMMAND} --data.num_clients 4 --data.participation 0.5 {shards} --output {tmp_path}/drawn")
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert lines[0] == "200 training samples, 4 clients, 2 in a round, ShardPartition"
    assert "classes of a client: " in lines[2]
    assert [line.split()[0] for line in lines if line.startswith("     ")] == ["0", "1", "2", "3"]
    assert lines[-1] == f"{tmp_path}/drawn: partition.csv, partition.png"
    with (tmp_path / "drawn" / "partition.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(int(row[f"{c:02d}"]) for row in rows for c in range(10)) == 200


def test_targets_that_are_no_classes_have_sizes(tmp_path):
    (tmp_path / "t.csv").write_text("x,who,y\n" + "".join(f"{i},{'ab'[i % 3 > 0]},{i / 2}\n" for i in range(20)))
    table = f"--data.source TableSource --data.source.train {tmp_path}/t.csv --data.source.label y --data.by who"
    said = say(f"partition --model.client FedAvg {table} --data.num_clients null --output {tmp_path}/drawn")
    assert said.code == 0, said.err
    first, _, _, *rows, _ = said.out.splitlines()
    assert first == "16 training samples, 2 clients, 2 in a round, ColumnPartition by who"
    assert [row.split() for row in rows] == [["client", "samples"], ["a", "4"], ["b", "12"]]
    assert (tmp_path / "drawn" / "partition.png").stat().st_size > 1000


def test_owners_are_named_in_place_of_numbers(tmp_path, monkeypatch, without_pictures):
    monkeypatch.chdir(tmp_path)
    names = ["ann", "bob" * 20, "=1+1"]
    (tmp_path / "t.csv").write_text("x,who,y\n" + "".join(f"{i},{names[i % 3]},{i % 2}\n" for i in range(30)))
    table = "--data.source TableSource --data.source.train t.csv --data.source.label y --data.by who"
    said = say(f"partition --model.client FedAvg {table} --data.num_clients null --output drawn")
    assert [line.split()[0] for line in said.out.splitlines()[-5:-1]] == ["client", "=1+1", "ann", "bob" * 9 + "bo…"]
    assert say(f"fit {table} --data.num_clients null --trainer.max_epochs 1").code == 0
    (written,) = tmp_path.glob("runs/*/*/partition.csv")
    for path in (tmp_path / "drawn/partition.csv", written):
        with path.open() as file:
            assert [row["client"] for row in csv.DictReader(file)] == ["'=1+1", "ann", "bob" * 20]
    said = say(f"partition --model.client FedAvg {table} --data.num_clients 2")  # of several owners each
    assert [line.split()[0] for line in said.out.splitlines()[-3:-1]] == ["0", "1"]


def test_clients_that_never_train_are_marked(tmp_path):
    names = ["ann", "bob", "eve"]
    (tmp_path / "t.csv").write_text("x,who,y\n" + "".join(f"{i},{names[i % 3]},{i % 2}\n" for i in range(30)))
    table = f"--data.source TableSource --data.source.train {tmp_path}/t.csv --data.source.label y --data.by who"
    said = say(f"partition --model.client FedAvg {table} --data.num_clients null --data.unseen [eve]")
    assert said.code == 0, said.err
    first, _, third, *rest = said.out.splitlines()
    assert first.endswith("3 clients, 2 in a round, ColumnPartition by who")
    assert third == "never train (data.unseen): eve"
    rows = [line.split() for line in rest if line]
    assert [row[-1] for row in rows[-5:-1]] == ["unseen", "0", "0", "1"]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    said = refusal(f"{COMMAND} --output {tmp_path}/file/drawn", 1)
    assert f"--output must be a folder, got {tmp_path}/file/drawn: {tmp_path}/file is a file; name another" in said


def test_a_split_that_cannot_be_is_one_sentence():
    assert "min_samples" in refusal(f"{COMMAND} --data.num_clients 100 --data.partition DirichletPartition "
                                    f"--data.partition.alpha 0.1", 1)  # fmt: skip


def test_devices_are_described_and_drawn_and_their_table_is_one_of_devices(tmp_path):
    given = "--data.devices.step_seconds [0.2,0.9] --data.devices.up_mbps [2.0,0.7] --data.devices.latency 0.05"
    split = "--data.num_clients 4 --data.participation 0.5"
    said = say(f"{COMMAND} {split} {given} --output {tmp_path}/drawn")
    assert said.code == 0, said.err
    lines = said.out.splitlines()
    assert any(line.startswith("step_seconds of a client: 0.") for line in lines)
    assert "latency of all clients: 0.05" in lines
    assert not any("jitter" in line or "down_mbps" in line for line in lines)
    assert lines[-1] == f"{tmp_path}/drawn: partition.csv, partition.png, devices.csv, devices.png"
    with (tmp_path / "drawn" / "devices.csv").open() as file:
        rows = list(csv.DictReader(file))
    drawn = Devices(step_seconds=[0.2, 0.9], up_mbps=[2.0, 0.7], latency=0.05).draw(num_clients=4, seed=0)
    assert [float(row["step_seconds"]) for row in rows] == drawn.step_seconds.tolist()
    assert [float(row["up_mbps"]) for row in rows] == drawn.up_mbps.tolist()
    again = Devices(file=tmp_path / "drawn/devices.csv").draw(num_clients=4, seed=7)
    assert [column.tolist() for column in again] == [column.tolist() for column in drawn]


def test_devices_that_are_all_alike_have_no_picture(tmp_path, without_pictures):
    said = say(f"{COMMAND} --data.num_clients 4 --data.devices.step_seconds 0.1 --output {tmp_path}/drawn")
    assert said.code == 0, said.err
    assert said.out.splitlines()[-1].endswith("partition.csv, partition.png, devices.csv")
    assert "step_seconds of all clients: 0.1" in said.out.splitlines()


CHANGING = """
data:
  num_clients: 4
  stays: {2: [1, null]}
  scenario:
    class_path: fl_lightning.data.ClassIncremental
    init_args: {tasks: [[0, 1], [2, 3, 4]], rounds_per_task: 2}
"""


def test_the_samples_of_a_round_are_shown_where_data_change(tmp_path, without_pictures):
    (tmp_path / "changing.yaml").write_text(CHANGING)
    command = f"{COMMAND} -c {tmp_path}/changing.yaml --output {tmp_path}/drawn"
    together = say(command).out.splitlines()
    assert together[0] == "ClassIncremental: in all rounds together (--round T shows round T)"
    assert together[1].startswith("200 training samples, 4 clients")
    first = say(f"{command} --round 0").out.splitlines()
    assert first[0] == "ClassIncremental: in round 0, 3 of 4 clients are there"
    later = say(f"{command} --round=2").out.splitlines()
    assert later[0] == "ClassIncremental: in round 2"
    assert [line.split()[-1] for line in first[-6:-1]] == ["away", "0", "0", "1", "0"]
    assert "away" not in " ".join([*together, *later])
    tables = {}
    for name in ("partition", "partition-0", "partition-2"):
        with (tmp_path / "drawn" / f"{name}.csv").open() as file:
            tables[name] = [[int(row[f"{c:02d}"]) for c in range(10)] for row in csv.DictReader(file)]
    for client_id, whole in enumerate(tables["partition"]):
        is_there = client_id != 2
        assert tables["partition-0"][client_id] == [is_there * count * (c < 2) for c, count in enumerate(whole)]
        assert tables["partition-2"][client_id] == [count * (c in {2, 3, 4}) for c, count in enumerate(whole)]
    sizes = [sum(counts) for counts in tables["partition-2"]]
    assert [int(line.split()[1]) for line in later[-5:-1]] == sizes


def test_a_round_that_shows_nothing_else_is_refused():
    assert "--round shows the samples of a round, which are the same in all" in refusal(f"{COMMAND} --round 3", 1)
    assert "--round needs a round, a whole number from 0, got x; write --round 10" in refusal(f"{COMMAND} --round x", 1)


def test_split_refuses_data_that_change(tmp_path):
    words = COMMAND.removeprefix("partition")
    for setting in ("scenario Window --data.scenario.per_round 0.1", "stays '{2: [1, null]}'"):
        said = refusal(f"split {words} --data.{setting} --output {tmp_path}/parties", 1)
        assert f"data.{setting.split()[0]} says it for each round; set data.{setting.split()[0]} to null" in said
