"""Every draw depends on its key alone: these numbers are those of the first release, on every machine."""

import random

import numpy as np
import pytest
import torch

from fl_lightning.utils.keyed import keyed_generator, keyed_globals, keyed_noise, keyed_numpy, keyed_seed


@pytest.mark.parametrize(
    ("key", "seed"),
    [
        ((0, "batches", 3, 1), 3857532704859168239),
        ((7, "weights"), 4132544732213776093),
        ((2**40, "train/train", 0, 9), 2348329375400203764),
    ],
)
def test_a_seed_is_that_of_its_key(key, seed):
    assert keyed_seed(*key) == seed
    assert torch.Generator().manual_seed(seed).initial_seed() == keyed_generator(*key).initial_seed()


def test_each_part_of_a_key_counts():
    keys = [(0, "a"), (1, "a"), (0, "b"), (0, "a", 0), (0, "a", 0, 0), (0, "a", -1, 0), (0, "a", 1, 0), (0, "a", 0, 1)]
    for draw in (keyed_seed, lambda *key: keyed_numpy(*key).random(), lambda *key: keyed_noise(*key).random()):
        assert len({draw(*key) for key in keys}) == len(keys)


def test_the_first_draws_are_those_of_their_keys():
    assert torch.randperm(6, generator=keyed_generator(0, "batches", 1, 2)).tolist() == [3, 4, 0, 2, 5, 1]
    assert keyed_numpy(0, "partition").integers(1000, size=4).tolist() == [756, 869, 256, 154]
    assert keyed_noise(0, "noise").integers(1000, size=4).tolist() == [780, 791, 223, 570]


def test_code_of_others_draws_by_the_key_and_the_global_generators_go_on_as_before():
    def draws():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    expected = draws()
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    with keyed_globals(0, "setup"):
        first = draws()
    assert draws() == expected
    key = keyed_seed(0, "setup")
    random.seed(key)
    np.random.seed(key % 2**32)
    torch.manual_seed(key)
    assert first == draws()
