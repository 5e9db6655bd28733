"""`fl-lightning methods`: the table that ships is measured, complete, and that of the page on methods."""

import csv
import doctest
import io
import json
import re
from dataclasses import replace

import pytest
import yaml

from fl_lightning import methods
from fl_lightning.cli import methods as table
from fl_lightning.members.faults import ClientError
from fl_lightning.methods import FedAvg
from tests.commands import CONFIGS, refusal, say
from tools import measure_methods as measured
from tools.measurement_runs import CLASSES, CLIENTS, PER_CLIENT, Federation, ToyNet, measurement_run
from tools.quiet import silent

ROOT = CONFIGS.parent
PAGE = (ROOT / "docs/methods/index.md").read_text(encoding="utf-8")
NET = ToyNet(CLASSES, (64,))
W = sum(value.numel() for value in NET.state_dict().values() if value.is_floating_point())
THETA = sum(value.numel() for value in NET.parameters()) / W
HEAD = sum(value.numel() for value in NET.head.parameters()) / W
NORM = 4 * 8 / W
BYTES = sum(value.nbytes for value in NET.state_dict().values())
FLOAT = 4 * W / BYTES
"""What a message of all floats is of one of all entries: BatchNorm's counter is an integer."""
NORMS = NORM * FLOAT + 8 / BYTES
PREDICTIONS = CLIENTS * PER_CLIENT * CLASSES * 4 / BYTES
CONTRACT = {  # down, up, client state, server state; a model is 1
    "FedAvg": (1, 1, 0, 0),
    "FedProx": (1, 1, 0, 0),
    "FedCL": (1 + THETA * FLOAT, 1, 0, 0),
    "MOON": (1, 1, 1, 0),
    "FedDyn": (1, 1, THETA, THETA),
    "SCAFFOLD": (1 + THETA * FLOAT, 1 + THETA * FLOAT, THETA, THETA),
    "FedCurv": (1 + 2 * THETA * FLOAT, 1 + 2 * THETA * FLOAT, 2 * THETA, 2 * THETA),
    "Ditto": (1, 1, 1, 0),
    "pFedMe": (1, 1, 1, 0),
    "FedALA": (1, 1, 1 + HEAD, 0),
    "FedRoD": (1, 1, HEAD, 0),
    "FedRep": (1 - HEAD * FLOAT, 1 - HEAD * FLOAT, HEAD, 0),
    "FedBABU": (1 - HEAD * FLOAT, 1 - HEAD * FLOAT, HEAD, 0),
    "FedPer": (1 - HEAD * FLOAT, 1 - HEAD * FLOAT, HEAD, 0),
    "LG-FedAvg": (HEAD * FLOAT, HEAD * FLOAT, 1 - HEAD, 0),
    "FedBN": (1 - NORMS, 1 - NORMS, NORM, 0),
    "FedMD": (PREDICTIONS, PREDICTIONS, 1, 0),
    "KnFu": (PREDICTIONS, PREDICTIONS, 1, 0),
    "Local": (0, 0, 1, 0),
    "FedNova": (1, 1, 0, 1 / W),  # the statistics of its rule are taken at the server
    "FedEXP": (1, 1, 0, 1 + 1 / W),
    "FedAvgM": (1, 1, 0, THETA),
    "FedAdam": (1, 1, 0, 2 * THETA),
    "Median": (1, 1, 0, 0),
    "SAM": (1, 1, 0, 0),
}
SHARE_NOTHING = {"FedMD", "FedProto", "KnFu", "Local", "SelectiveFD"}
OWN_START = {"FedAMP", "FedFOMO", "IFCA"}
"""Methods whose clients train from models that the server makes or keeps for each."""


@pytest.fixture(scope="module")
def records():
    return table.records()


@pytest.fixture(scope="module")
def by_name(records):
    return {record["method"]: record for record in records}


@pytest.mark.slow  # hundreds of federations
def test_the_table_that_ships_is_what_is_measured(records):
    assert json.loads(table.as_json(measured.records())) == records, "python -m tools.measure_methods writes it anew"


def test_the_table_that_ships_has_a_row_for_every_method_and_no_other(records):
    assert [record["method"] for record in records] == [entry.name for entry in measured.entries()]


def test_the_table_that_ships_is_what_the_classes_say(records):
    for record, entry in zip(records, measured.entries(), strict=True):
        said = {"kind": entry.kind, "file": entry.file, "stackable": entry.stackable, **measured.declared(entry)}
        assert {name: record[name] for name in said} == said, entry.name
        assert list(map(tuple, record["papers"])) == measured.papers(entry.source), entry.name


def test_the_examples_of_the_script_hold():
    assert doctest.testmod(measured) == (0, 3)


def test_the_page_has_the_table(records):
    assert table.methods_as_markdown(records) in PAGE, (
        "put the output of `fl-lightning methods` into docs/methods/index.md"
    )
    assert f"a net of {W}\nfloats" in PAGE


@pytest.mark.parametrize("text", [PAGE, (ROOT / "README.md").read_text(encoding="utf-8")], ids=["page", "readme"])
def test_every_method_is_sorted_by_its_purpose(by_name, text):
    listed = text.split("- To compare with: ")[1].split("\n\n")[0]
    listed = f"- To compare with: {listed}"
    named = [name for line in listed.splitlines() if line.startswith("- ") for name in line.split(": ")[1].split(", ")]
    assert sorted(named) == sorted(by_name)


def test_every_method_is_there_with_paper_and_file(by_name):
    assert {*map(measured.name_of, methods.__all__), *measured.CONFIGURED} <= by_name.keys()
    assert {"Median", "TrimmedMean", "Krum", "GeometricMedian", "NormClip"} <= by_name.keys()
    for record in by_name.values():
        assert (ROOT / record["file"]).is_file()
        assert record["papers"]
        assert all(re.fullmatch(r"https://arxiv\.org/abs/\d{4}\.\d{5}|", url) for _, url in record["papers"])
        assert all(5 < len(name) < 45 for name, _ in record["papers"])


@pytest.mark.parametrize("name", measured.CONFIGURED)
def test_a_method_that_is_only_a_file_is_that_file(name, by_name):
    source, personal = measured.CONFIGURED[name]
    text = (ROOT / by_name[name]["file"]).read_text(encoding="utf-8")
    assert f"# Source: {source}." in text
    assert yaml.safe_load(text)["model"]["personal"] in (personal[0], list(personal))


@pytest.mark.parametrize("name", CONTRACT)
def test_what_is_sent_and_kept_is_the_papers(name, by_name):
    found = [by_name[name][column] for column in ("down", "up", "client_state", "server_state")]
    assert found == pytest.approx(CONTRACT[name])


def test_what_it_runs_with(by_name):
    rules = by_name["FedAvg"]["rules"]
    optimizers = by_name["FedAvg"]["server_optimizers"]
    assert {"Median", "Krum", "FedNova", "FedEXP"} <= set(rules)
    assert {"SGD", "FedAvgM", "FedAdam"} <= set(optimizers)
    assert {n for n, r in by_name.items() if r["rules"] == []} == SHARE_NOTHING | OWN_START
    without_optimizer = {n for n, r in by_name.items() if r["server_optimizers"] == []}
    assert without_optimizer == SHARE_NOTHING | OWN_START | {"CCVR", "FedDyn"}
    for name in ("SCAFFOLD", "FedCurv"):
        assert by_name[name]["server_optimizers"] == ["SGD"]
    assert "FedNova" not in by_name["SAM"]["rules"]
    assert "torch.optim.SGD" in by_name["SAM"]["refused"]["FedNova"]


@pytest.mark.slow  # the table has run one round of each
@pytest.mark.parametrize("entry", measured.entries(), ids=lambda entry: entry.name)
def test_what_it_runs_with_runs_two_rounds(entry, by_name):
    own = entry.federation
    others = measured.entries()
    rules = {other.name: replace(own, rule=other.federation.rule) for other in others if other.kind == "rule"}
    optimizers = {other.name: other.federation.server_optimizer for other in others if other.kind == "server optimizer"}
    optimizers["SGD"] = measured.SERVER_SGD
    with silent():
        for name in by_name[entry.name]["rules"] or ():
            assert measurement_run(rules[name]).down > 0
        for name in by_name[entry.name]["server_optimizers"] or ():
            assert measurement_run(replace(own, server_optimizer=optimizers[name])).down > 0


def test_auxiliary_data_and_contents(by_name):
    asked = {name: record["data"] for name, record in by_name.items() if record["data"]}
    transfer = {name: ["transfer"] for name in ("FedMD", "KnFu", "SelectiveFD")}
    assert asked == {"FedCL": ["proxy"], "FedDF": ["proxy"], "FedKA": ["shared"], **transfer}
    assert by_name["SCAFFOLD"]["down_contents"] == ["weights", "control"]
    assert by_name["KnFu"]["up_contents"] == ["knowledge"]


def test_stackable_is_what_the_class_itself_says(by_name):
    assert by_name["FedAvg"]["stackable"] is True
    assert by_name["MOON"]["stackable"] is False
    assert by_name["FedNova"]["stackable"] is None


def test_other_outputs_have_the_same_rows(records):
    read = json.loads(say("methods --output json").out)
    assert [record["method"] for record in read] == [record["method"] for record in records]
    assert "logits" in {record["method"]: record for record in read}["KnFu"]["refused"]["module"]
    lines = list(csv.DictReader(io.StringIO(say("methods --output csv").out)))
    assert [line["method"] for line in lines] == [record["method"] for record in records]
    assert float(lines[0]["down"]) == 1
    assert say("methods").out == table.methods_as_markdown(records)


def test_the_help_has_the_command():
    assert re.search(r"^  methods ", say("--help").out, re.MULTILINE)
    assert "--output {md,csv,json}" in say("methods --help").out


def test_a_wrong_option_is_refused_in_one_sentence():
    assert "output must be md or csv or json, got xml" in refusal("methods --output xml", 2)
    assert "got method; the nearest is 'methods'" in refusal("method", 2)


def test_a_method_that_fails_in_training_is_no_refusal():
    class Fails(FedAvg):
        def reply(self, exchange, local):
            raise ValueError("in the first round")

    with silent(), pytest.raises(ClientError, match="in the first round"):
        measurement_run(Federation(Fails))
