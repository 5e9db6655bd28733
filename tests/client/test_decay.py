"""How the local learning rate falls over the rounds: in real runs, and what is refused."""

import math

import pytest

from fl_lightning.client.decay import decay_of
from fl_lightning.client.settings import LocalSettings
from fl_lightning.methods import FedAvg
from tests.hooks.toy import Updates
from tests.toys import fit, sgd, toy_data

LR, ROUNDS = 0.1, 4


def rates(lr_decay, **options) -> list[float]:
    """The local learning rate of each round: exposure per step of plain SGD."""
    watch = Updates()
    fit(FedAvg(optimizer=sgd(LR, 0.0)), ROUNDS, toy_data((8, 8)), callbacks=[watch], lr_decay=lr_decay, **options)
    return [updates[0].exposure / updates[0].num_steps for updates in watch.rounds]


@pytest.mark.parametrize("chunk", [1, 2])
def test_a_cosine_falls_from_the_optimizers_rate_to_the_final_one(chunk):
    final = 0.02
    wanted = [final + (LR - final) * (1 + math.cos(math.pi * t / ROUNDS)) / 2 for t in range(ROUNDS)]
    assert rates({"cosine": final}, chunk=chunk) == pytest.approx(wanted, rel=1e-12)


def test_a_factor_is_a_power_of_the_round():
    assert rates(0.5) == pytest.approx([LR * 0.5**t for t in range(ROUNDS)], rel=1e-12)


@pytest.mark.parametrize(
    ("given", "rounds", "sentence"),
    [
        (0.0, 3, "lr_decay must be above 0"),
        ({"linear": 0.1}, 3, "lr_decay must be a factor > 0 or {cosine: FINAL_LR}"),
        ({"cosine": -0.1}, 3, "cosine must be at least 0"),
        ({"cosine": 0.1}, -1, "needs the number of rounds, got trainer.max_epochs=-1"),
    ],
    ids=["zero", "unknown", "negative", "endless"],
)
def test_what_is_refused(given, rounds, sentence):
    with pytest.raises(ValueError, match=sentence.replace("{", r"\{")):
        decay_of(LocalSettings(lr_decay=given).lr_decay, rounds)
