"""`model.faults` as people write it: a word or a policy, in files and on the command line."""

import pytest
import yaml

from tests.commands import EXPERIMENT, say

SKIP = {"nonfinite": "skip", "on_error": "error", "max_update_norm": None, "min_clients": 1}


def printed(line: str) -> dict:
    """The merged configuration of a command."""
    said = say(f"fit {EXPERIMENT} {line} --print_config")
    assert said.code == 0, said.err
    return yaml.safe_load(said.out)["model"]


@pytest.mark.parametrize(
    ("line", "faults"),
    [
        ("", "error"),
        ("--model.faults skip", "skip"),
        ("--model.faults.nonfinite skip", SKIP),
        ("--model.faults.nonfinite skip --model.faults.min_clients 3", SKIP | {"min_clients": 3}),
        ("-c word.yaml", "skip"),
        ("-c policy.yaml", SKIP | {"max_update_norm": 2.5}),
        ("-c policy.yaml --model.faults.on_error skip", SKIP | {"max_update_norm": 2.5, "on_error": "skip"}),
        ("-c policy.yaml -c word.yaml", "skip"),
    ],
)
def test_faults_are_a_word_or_a_policy(line, faults, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "word.yaml").write_text("model: {faults: skip}\n")
    (tmp_path / "policy.yaml").write_text("model: {faults: {nonfinite: skip, max_update_norm: 2.5}}\n")
    read = printed(line)["faults"]
    assert read == faults if isinstance(faults, str) else faults.items() <= read.items()


def test_the_weighting_of_the_mean_is_set_where_no_rule_is():
    read = printed("--model.aggregator Aggregator --model.aggregator.weighting uniform")["aggregator"]
    assert read["init_args"] == {"weighting": "uniform"}
    read = printed("--model.aggregator KrumAggregator --model.aggregator.f 2 --model.aggregator.weighting uniform")
    assert read["aggregator"]["init_args"] == {"f": 2, "num_selected": 1, "weighting": "uniform"}


def test_the_help_lists_the_policy():
    said = say("fit --model.faults.help")
    for name in ("nonfinite", "on_error", "max_update_norm", "min_clients", "client_timeout", "patience"):
        assert f"--model.faults.{name} " in said.out
