"""How the local learning rate falls over the rounds: in real runs, and what is refused."""

import math

import pytest

from fl_lightning.engines.settings import LocalSettings
from fl_lightning.methods import FedAvg
from tests.hooks.toy import Updates
from tests.toys import fit, sgd, toy_data

LR = 0.1
ROUNDS = 4


def rates(lr_decay, **options) -> list[float]:
    """The local learning rate of each round: accumulated lr per step of plain SGD."""
    watch = Updates()
    fit(FedAvg(optimizer=sgd(LR, 0.0)), ROUNDS, toy_data((8, 8)), callbacks=[watch], lr_decay=lr_decay, **options)
    return [updates[0].accumulated_lr / updates[0].num_steps for updates in watch.rounds]


@pytest.mark.parametrize("chunk", [1, 2])
def test_a_cosine_falls_from_the_optimizers_rate_to_the_final_one(chunk):
    final = 0.02
    wanted = [final + (LR - final) * (1 + math.cos(math.pi * t / ROUNDS)) / 2 for t in range(ROUNDS)]
    assert rates({"cosine": final}, chunk=chunk) == pytest.approx(wanted, rel=1e-12)


def test_a_cosine_of_its_own_rounds_ends_with_them():
    """Whatever the number of rounds of the run; then the rate stays."""
    final = 0.02
    T = 2
    wanted = [final + (LR - final) * (1 + math.cos(math.pi * t / T)) / 2 for t in range(T)] + [final] * (ROUNDS - T)
    assert rates({"cosine": final, "rounds": T}) == pytest.approx(wanted, rel=1e-12)
    assert rates({"cosine": final, "rounds": 2.0}, chunk=2) == pytest.approx(wanted, rel=1e-12)
    assert rates({"cosine": final, "rounds": 1}) == pytest.approx([LR, final, final, final], rel=1e-12)


def test_a_factor_is_a_power_of_the_round():
    assert rates(0.5) == pytest.approx([LR * 0.5**t for t in range(ROUNDS)], rel=1e-12)


@pytest.mark.parametrize(
    ("given", "rounds", "sentence"),
    [
        (0.0, 3, "lr_decay must be above 0"),
        ({"linear": 0.1}, 3, "lr_decay must be a factor > 0, {cosine: FINAL_LR} or"),
        ({"cosine": -0.1}, 3, "cosine must be at least 0"),
        ({"cosine": 0.1}, -1, "needs the number of rounds, got trainer.max_epochs=-1; set it, or give {cosine: FINAL"),
        ({"cosine": 0.1}, None, "needs the number of rounds, got trainer.max_epochs=None"),
        ({"rounds": 3}, 3, "lr_decay must be a factor > 0, {cosine: FINAL_LR} or {cosine: FINAL_LR, rounds: T}, got"),
        ({"cosine": 0.1, "rounds": 0}, 3, "rounds of lr_decay={cosine: …} must be a whole number ≥ 1, got 0"),
        ({"cosine": 0.1, "rounds": 2.5}, 3, "must be a whole number ≥ 1, got 2.5"),
        ({"cosine": 0.1, "rounds": math.inf}, 3, "must be a whole number ≥ 1, got inf"),
        ({"cosine": 0.1, "rounds": math.nan}, 3, "must be a whole number ≥ 1, got nan"),
        ({"cosine": 0.1, "rounds": "ten"}, 3, "must be a whole number ≥ 1, got ten"),
        ({"cosine": 0.1, "rounds": None}, 3, "must be a whole number ≥ 1, got None"),
    ],
)
def test_what_is_refused(given, rounds, sentence):
    with pytest.raises(ValueError, match=sentence.replace("{", r"\{")):
        LocalSettings(lr_decay=given).over(rounds)
