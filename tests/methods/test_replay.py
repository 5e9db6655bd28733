"""Replay: which samples a client's buffer holds, and what it trains on them."""

from collections import Counter

import pytest
import torch

from fl_lightning.data import ClassIncremental, Window
from fl_lightning.methods import Replay
from tests.methods.changing import Small, changing, run
from tests.toys import fit, sgd, toy_data


def buffers_of(data, rounds, **settings):
    loop = run(Replay, rounds, data, net=Small, **settings)
    return {client: loop.store.record(client)[0] for client in loop.store.clients}


def test_each_sample_comes_to_the_buffer_once():
    kept = buffers_of(changing(), 6, size=100)
    data = changing()
    data.setup("fit")
    for client, memory in kept.items():
        part = data.client_samples().dealt[client]
        assert memory["count"] == sum(memory["seen"].values()) == len(part)
        rows = memory["buffer"]["x"][: memory["count"]]
        expected = data.split("train").x[part]
        assert sorted(rows[:, 0].tolist()) == sorted(expected[:, 0].tolist())
        assert not memory["buffer"]["x"][memory["count"] :].any()


def test_every_sample_stays_in_the_reservoir_with_one_probability():
    client = Replay(size=4)
    draws = torch.rand(4000, 12, 2, generator=torch.Generator().manual_seed(0)).tolist()
    counts = Counter()
    for of_run in draws:
        buffer = []
        for sample in range(12):
            place = client._place([0] * len(buffer), label=0, seen={0: sample + 1}, draws=of_run[sample])
            if place is not None:
                buffer[place : place + 1] = [sample]
        assert len(set(buffer)) == 4
        counts.update(buffer)
    for sample in range(12):
        assert counts[sample] / 4000 == pytest.approx(4 / 12, abs=0.03)


def test_the_buffer_is_filled_over_the_rounds():
    data = toy_data((12,), scenario=Window(per_round=0.25))
    memory = fit(Replay(size=4, net=Small, optimizer=sgd()), 4, data).store.record(0)[0]
    assert (memory["count"], sum(memory["seen"].values())) == (4, 12)


def test_balanced_buffers_have_as_many_of_each_class_as_they_can():
    tasks = ClassIncremental([[0], [1], [2]], rounds_per_task=1)
    for memory in buffers_of(toy_data((40, 40), scenario=tasks), 3, size=7, select="balanced").values():
        assert sorted(Counter(memory["buffer"]["y"].tolist()).values()) == [2, 2, 3]


def test_stored_logits_are_those_of_the_client_that_stored_them():
    memory = buffers_of(changing(), 1, size=30, alpha=0.5)[1]
    assert memory["buffer"]["z"][: memory["count"]].abs().sum() > 0
    assert "z" not in buffers_of(changing(), 1, size=30)[1]["buffer"]
