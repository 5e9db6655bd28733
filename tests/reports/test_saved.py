import json

import numpy as np
import pytest

from fl_lightning.reports.saved import data_differences, find_runs, grouped, read_run, read_test
from fl_lightning.runs.partition import write_partition
from tests.reports.saved_runs import CLASSES, settings, write_run, write_table

NTD = {"beta": 1.0}


def groups_of(folder):
    return grouped(map(read_run, find_runs([folder])))


def test_runs_are_found_in_a_folder_and_below_in_the_order_of_their_numbers(tmp_path):
    for number in (10, 2):
        write_run(tmp_path / f"a/{number}-seed0", [0.1])
    write_run(tmp_path / "b/0", [0.1])
    found = find_runs([tmp_path, tmp_path / "b"])
    assert [str(path.relative_to(tmp_path)) for path in found] == ["a/2-seed0", "a/10-seed0", "b/0"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"none in .*empty or below"):
        find_runs([tmp_path / "empty"])


def test_runs_that_differ_in_the_seed_are_a_group_and_its_curves_have_a_row_for_each(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / f"{seed}", [0.1, 0.2 + seed / 10, 0.5], settings("FedAvg", seed))
    write_run(tmp_path / "2", [0.4, 0.4], settings("FedNTD", 0, **NTD))
    avg, ntd = groups_of(tmp_path)
    assert (avg.label, ntd.label) == ("FedAvg", "FedNTD")
    rounds, values = avg.curves("global/acc")
    assert rounds == [0, 1, 2]
    np.testing.assert_allclose(values, [[0.1, 0.2, 0.5], [0.1, 0.3, 0.5]])
    assert [run.seed for run in avg.runs] == ["0", "1"]
    rounds, names, table = avg.columns("/acc_class/")
    assert names == list(CLASSES)
    np.testing.assert_allclose(table[1], [0.15, 0.25, 0.35])


def test_a_curve_has_the_rounds_that_all_runs_have(tmp_path):
    write_run(tmp_path / "0", [0.1, 0.2, 0.3], settings("FedAvg", 0))
    write_run(tmp_path / "1", [0.1, 0.2], settings("FedAvg", 1))
    (group,) = groups_of(tmp_path)
    assert group.curves("global/acc")[0] == [0, 1]
    assert group.curves("unknown")[1].shape == (0, 0)


def test_of_two_runs_with_all_settings_alike_the_newer_counts(tmp_path):
    for number, accuracy in enumerate((0.1, 0.9)):
        write_run(tmp_path / f"{number}", [accuracy], settings("FedAvg", 0))
    (group,) = groups_of(tmp_path)
    assert [run.folder.name for run in group.runs] == ["1"]


@pytest.mark.parametrize(
    ("one", "other", "labels"),
    [
        (settings("FedNTD", 0, beta=0.3), settings("FedNTD", 0, beta=1.0), ["beta=0.3", "beta=1.0"]),
        (settings("FedNTD", 0, beta=0.3), settings("FedAvg", 0), ["FedNTD", "FedAvg"]),
        ({"model": {"a": 1, "b": 2}}, {"model": {"a": 2, "b": 1}}, ["a=1, b=2", "a=2, b=1"]),
        (None, None, ["runs/0", "runs/1"]),
        (settings("FedAvg", 0), None, ["runs/0", "runs/1"]),
    ],
)
def test_labels_are_the_settings_that_distinguish(tmp_path, one, other, labels):
    for number, config in enumerate((one, other)):
        write_run(tmp_path / f"runs/{number}", [0.1], config)
    assert [group.label for group in groups_of(tmp_path)] == labels


def test_a_setting_beside_the_class_is_named_only_where_classes_do_not_tell(tmp_path):
    for number, (method, weighting) in enumerate([("FedAvg", "samples"), ("SCAFFOLD", "uniform")]):
        config = settings(method, 0)
        config["model"]["weighting"] = weighting
        write_run(tmp_path / f"{number}", [0.1], config)
    assert [group.label for group in groups_of(tmp_path)] == ["FedAvg", "SCAFFOLD"]


def test_data_are_compared_within_a_seed_and_training_settings_are_no_data(tmp_path):
    for number, (seed, batch) in enumerate([(0, 32), (1, 32), (0, 64)]):
        config = settings("FedAvg", seed)
        config["data"]["batch_size"] = batch
        write_run(tmp_path / f"{number}", [0.1], config)
    assert not data_differences(groups_of(tmp_path))
    other = settings("FedNTD", 0, **NTD)
    other["data"] |= {"num_clients": 5, "participation": 0.5}
    write_run(tmp_path / "3", [0.1], other)
    named = [str(one) for one in data_differences(groups_of(tmp_path))]
    assert named == ["data.num_clients was 2, is 5", "data.participation was unset, is 0.5"]


def test_a_partition_is_read_as_it_was_written(tmp_path):
    write_run(tmp_path / "0", [0.1])
    write_partition(tmp_path / "0/partition.csv", [[3, 0, 1], [0, 5, 2]], CLASSES, ["0", "ann"])
    table, names, clients, unseen = read_run(tmp_path / "0").partition
    assert unseen == ()
    assert (table.tolist(), names) == ([[3, 0, 1], [0, 5, 2]], list(CLASSES))
    assert clients == ["0", "ann"]
    path = tmp_path / "0/partition.csv"
    write_partition(path, [[3, 0, 1], [0, 5, 2]], names=CLASSES, clients=["0", "ann"], unseen=[1])
    table, names, clients, unseen = read_run(tmp_path / "0").partition
    assert (table.tolist(), names) == ([[3, 0, 1], [0, 5, 2]], list(CLASSES))
    assert (clients, unseen) == (["0", "ann"], (1,))


def test_text_in_a_table_of_clients_is_no_number(tmp_path):
    write_run(tmp_path / "0", [0.1])
    write_table(tmp_path / "0/clients.csv", ["round", "client", "skipped"], [[0, 1, ""], [0, 2, "timeout"]])
    clients = read_run(tmp_path / "0").clients
    assert clients["client"].tolist() == [1, 2]
    assert np.isnan(clients["skipped"]).all()


def test_a_file_that_is_no_configuration_is_named(tmp_path):
    run = write_run(tmp_path / "0", [0.1])
    (run / "config.yaml").write_text("- 1\n- [", encoding="utf-8")
    with pytest.raises(ValueError, match=r"config\.yaml must be the configuration of a run"):
        read_run(run)


def test_candidates_of_tuning_are_no_results_of_an_experiment(tmp_path):
    chosen, candidate = (write_run(tmp_path / part / "runs/FedProx/0", [0.5]) for part in (".", "tuning"))
    (tmp_path / "cells").mkdir()
    assert find_runs([tmp_path]) == [chosen]
    assert find_runs([tmp_path / "tuning"]) == [candidate]


@pytest.mark.parametrize(("told", "is_read"), [({"round": 1.0}, True), ({}, True), ({"round": 0.0}, False)])
def test_what_test_gave_is_read_for_its_round_only(told, is_read, tmp_path):
    """A run that was continued after `test` has no test value of its last round."""
    path = tmp_path / "test.json"
    path.write_text(json.dumps({"test/acc": 0.5, "round_best": 0.0, **told}))
    assert read_test(path, 1) == ({"test/acc": 0.5} if is_read else {})


@pytest.mark.parametrize(
    ("first", "second", "is_one"),
    [
        ("runs/FedAvg-seed0-1a2b3c4d/0/last.ckpt", "runs/FedAvg-seed1-5e6f7a8b/0/last.ckpt", True),
        ("runs/FedAvg-seed0-1a2b3c4d/0/last.ckpt", "runs/FedNTD-seed1-5e6f7a8b/0/last.ckpt", False),
        ("one-seed0.pt", "one-seed1.pt", False),
        ("one.pt", "two.pt", False),
        ("one.pt", "one.pt", True),
        (None, "one.pt", False),
    ],
    ids=str,
)
def test_runs_that_begin_with_other_weights_are_two_groups_unless_the_weights_are_of_their_own_seeds(
    tmp_path, first, second, is_one
):
    for seed, weights in enumerate((first, second)):
        config = settings("FedAvg", seed)
        config["model"]["initial_weights"] = weights
        write_run(tmp_path / str(seed), [0.1], config)
    assert (len(groups_of(tmp_path)) == 1) == is_one


def test_another_setting_that_looks_like_a_start_is_compared_as_it_is(tmp_path):
    for seed, name in enumerate(("a-seed0-1a2b3c4d", "a-seed1-5e6f7a8b")):
        write_run(tmp_path / str(seed), [0.1], settings("FedNTD", seed, note=name))
    assert len(groups_of(tmp_path)) == 2
