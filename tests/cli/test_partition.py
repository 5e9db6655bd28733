"""`fl-lightning partition`."""

import csv

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
    assert sum(int(row[str(c)]) for row in rows for c in range(10)) == 200


def test_targets_that_are_no_classes_have_sizes(tmp_path):
    (tmp_path / "t.csv").write_text("x,who,y\n" + "".join(f"{i},{'ab'[i % 3 > 0]},{i / 2}\n" for i in range(20)))
    table = f"--data.source TableSource --data.source.train {tmp_path}/t.csv --data.source.label y --data.by who"
    said = say(f"partition --model.client FedAvg {table} --data.num_clients null --output {tmp_path}/drawn")
    assert said.code == 0, said.err
    assert said.out.splitlines()[0] == "16 training samples, 2 clients, 2 in a round, ColumnPartition by who"
    assert (tmp_path / "drawn" / "partition.png").stat().st_size > 1000


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    said = refusal(f"{COMMAND} --output {tmp_path}/file/drawn", 1)
    assert f"--output must be a folder, got {tmp_path}/file/drawn (Not a directory); name another" in said


def test_a_split_that_cannot_be_is_one_sentence():
    assert "min_samples" in refusal(f"{COMMAND} --data.num_clients 100 --data.partition DirichletPartition "
                                    f"--data.partition.alpha 0.1", 1)  # fmt: skip
