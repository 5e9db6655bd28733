"""Two cells that are one run: which of them is run, and under which name. Tuning on a loss."""

import csv
from pathlib import Path

import pytest

from fl_lightning.experiments.naming import identity_of_name
from tests.commands import say, working_in
from tests.experiments.test_compare import BASE


def test_an_identity_is_the_seed_and_the_digest_whatever_the_stem_is():
    assert identity_of_name("FedNTD-beta=0.3-seed0-1a2b3c4d") == "seed0-1a2b3c4d"
    assert identity_of_name("a-seed5-b-seed0-1a2b3c4d") == "seed0-1a2b3c4d"


@pytest.mark.parametrize(("metric", "best"), [("val/loss", min), ("val/acc", max)])
def test_tuning_takes_the_lowest_loss_and_the_highest_accuracy(tmp_path, without_pictures, metric, best):
    with working_in(tmp_path, ""):
        Path("base.yaml").write_text(BASE, encoding="utf-8")
        said = say(
            "compare -c base.yaml --methods FedNTD --seeds 0 --output out --processes 0 --val_fraction 0.2 "
            f"--tune model.client.optimizer.lr=0.001,0.1 --tune_metric {metric}"
        )
        assert said.code == 0, said
        with Path("out/tuning.csv").open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        scores = {row["settings"]: float(row[metric]) for row in rows}
        assert len(set(scores.values())) == 2
        (chosen,) = [row["settings"] for row in rows if row["chosen"] == "True"]
        assert scores[chosen] == best(scores.values())
        word = "lowest" if best is min else "highest"
        assert f"Tuned in validation: {chosen} for FedNTD ({metric} {scores[chosen]:.4g}, the {word} of 2" in said.out
