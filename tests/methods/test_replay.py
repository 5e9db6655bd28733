"""Replay: which samples a client's buffer holds, and what it trains on them."""

from collections import Counter

import pytest
import torch

from fl_lightning import FederatedDataModule
from fl_lightning.data import ClassIncremental, FixedPartition, TensorSource, Window
from fl_lightning.methods import Replay
from tests.methods.changing import Small, changing, run
from tests.toys import fit, samples, sgd, toy_data, weights_of


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
    loop = run(Replay, 1, toy_data((17,), scenario=ClassIncremental([[0, 1], [2]], 2)), net=Small, size=30, alpha=0.5)
    memory = loop.store.record(0)[0]
    rows = memory["buffer"]["x"][: memory["count"]]
    assert len(rows) > 5
    with torch.no_grad():
        torch.testing.assert_close(memory["buffer"]["z"][: len(rows)], loop.client(rows))
    assert "z" not in buffers_of(changing(), 1, size=30)[1]["buffer"]


# A client without samples is the first row of a stack in which nobody has a full batch.
@pytest.mark.parametrize(("alpha", "clients_at_once", "batch_size"), [(0.0, 4, 20), (0.5, 2, 5)])
def test_a_client_that_never_had_samples_is_trained_at_once_with_the_others(alpha, clients_at_once, batch_size):
    def run_by(chunk):
        # Client 1 has no sample of classes 0 and 1, client 2 has none of class 2, and client 3 none at all.
        order = samples(34)[1].argsort(stable=True).tolist()
        parts = [order[12:20], order[-9:], order[0:12], []]
        source = TensorSource(samples(34, dtype=torch.float64), samples(9, seed=1, dtype=torch.float64), num_classes=3)
        data = FederatedDataModule(
            source,
            num_clients=4,
            partition=FixedPartition(parts),
            batch_size=batch_size,
            scenario=ClassIncremental([[0, 1], [2]], rounds_per_task=2),
        )
        client = Replay(size=6, alpha=alpha, net=Small, optimizer=sgd())
        return fit(client, 4, data, precision="64-true", chunk=chunk, local_epochs=2)

    alone = run_by(1)
    together = run_by(clients_at_once)
    assert together.engine.why_not() is None
    assert not together.engine._logged_reasons
    for name, value in weights_of(alone).items():
        torch.testing.assert_close(weights_of(together)[name], value, rtol=1e-9, atol=1e-12)
    for client in range(4):
        kept = alone.store.record(client)[0]
        again = together.store.record(client)[0]
        assert again.get("seen") == kept.get("seen")
        torch.testing.assert_close(again.get("buffer", {}), kept.get("buffer", {}))
