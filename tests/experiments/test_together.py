"""Settings that belong together are set together, in cases and in tuning."""

import pytest

from fl_lightning.experiments.cells import Cells, Request
from fl_lightning.experiments.compare import command_parser, experiment_of
from fl_lightning.experiments.overrides import parse_settings
from fl_lightning.experiments.tuning import choices_of
from tests.commands import refusal

PAIR = "model.client.beta,model.client.temperature=[0.3,1],[1,3]"
GRID = "-c experiment/digits_fedavg --methods FedAvg FedNTD --seeds 0"


def experiment(words):
    return experiment_of(command_parser().parse_args([*GRID.split(), *words]), ())


def test_cases_are_pairs_and_no_product():
    cases = experiment(["--set", PAIR, "data.partition.alpha=0.1,1"]).cases
    assert list(cases) == [
        "beta=0.3, temperature=1, alpha=0.1",
        "beta=0.3, temperature=1, alpha=1",
        "beta=1, temperature=3, alpha=0.1",
        "beta=1, temperature=3, alpha=1",
    ]
    first = cases["beta=0.3, temperature=1, alpha=0.1"]
    assert (first["model.client.beta"], first["model.client.temperature"]) == ("0.3", "1")


def test_pairs_are_tuned_for_methods_that_know_both():
    made = experiment(["--tune", PAIR, "model.local_epochs=1,2"])
    cells = Cells(made, Request())
    tried = {runs.methods[0]: choices_of(cells, runs)[runs.methods[0], ""] for runs in made.runs}
    assert [dict(candidate) for candidate in tried["FedAvg"]] == [{"model.local_epochs": v} for v in ("1", "2")]
    known = [(dict(c)["model.client.beta"], dict(c)["model.client.temperature"]) for c in tried["FedNTD"]]
    assert sorted(known) == [("0.3", "1"), ("0.3", "1"), ("1", "3"), ("1", "3")]
    config = next(iter(tried["FedNTD"].values()))[0].config["model"]["client"]["init_args"]
    assert (config["beta"], config["temperature"]) == (0.3, 1)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("model.client.beta,model.client.temperature=0.3,1", "take a list of one value for each, as in"),
        ("model.client.beta,model.client.temperature=[0.3]", "[V1,V2], got [0.3]"),
        ("model.client.beta,model.client.beta=[1,2]", "--set sets model.client.beta twice"),
        ("model.client.beta,model.client.betta=[1,2]", "no method of the experiment knows 'model.client.betta'"),
    ],
)
def test_what_is_no_pair_is_refused(given, sentence):
    assert sentence in refusal(f"compare {GRID} --set {given}", 1)


@pytest.mark.parametrize("first", ["a.alpha,a.beta=[1,2]", "a.beta=2"])
def test_one_setting_stands_in_one_option(first):
    with pytest.raises(ValueError, match=r"--tune sets a\.beta twice; give each setting once"):
        parse_settings([first, "a.beta=3"], "--tune")
