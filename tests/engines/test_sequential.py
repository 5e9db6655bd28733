"""The sequential engine by itself: without a Trainer, without a loop."""

from contextlib import closing
from dataclasses import replace
from functools import partial

import pytest
import torch
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassRecall

from fl_lightning.engines.cohort import CohortEngine
from fl_lightning.engines.sequential import SequentialEngine
from fl_lightning.engines.settings import LocalSettings
from fl_lightning.functional.state import clone, weighted_mean
from fl_lightning.methods import FedAvg, FedProx
from fl_lightning.types import Broadcast, ClientJob, Scoring
from tests.toys import BatchNormNet, equal, fit, sgd, toy_data

SHAPE = {"num_classes": 3, "input_shape": (4,)}


def jobs_of(engine, data, round_idx=0, **message):
    data.setup("fit")
    data.key_batches(3)
    sent = Broadcast(round_idx, "train", engine.global_weights.snapshot(engine.global_weights.shared), **message)
    return [ClientJob(client_id, sent, data.view(client_id, round_idx), {}) for client_id in range(data.num_clients)]


def test_an_engine_trains_clients_without_a_trainer_and_a_loop():
    client = FedProx(mu=0.5, net=BatchNormNet, optimizer=sgd(), **SHAPE)
    engine = SequentialEngine(client, LocalSettings(local_epochs=2, seed=3))
    data = toy_data((7, 0, 12))
    client.load_state_dict(fit(FedAvg(net=BatchNormNet), 0).client.state_dict())  # where the loop below begins
    results = []
    for result in engine.run("train", jobs_of(engine, data)):  # its weights hold until the next is drawn
        results.append(result._replace(update=replace(result.update, weights=clone(result.update.weights))))
    assert [r.update.num_steps for r in results] == [4, 0, 6]
    assert [r.update.num_samples for r in results] == [7, 0, 12]
    assert results[0].logged.drain()[1].keys() == {"train/ce", "train/proximal"}

    federated = fit(FedProx(mu=0.5, net=BatchNormNet, optimizer=sgd()), 1, toy_data((7, 0, 12)), local_epochs=2)
    mean = weighted_mean([r.update.weights for r in results], [r.update.num_samples for r in results])
    assert equal(mean, federated.client.state_dict())


def test_memory_and_personal_entries_go_in_and_come_back():
    class Counts(FedAvg):
        def reply(self, exchange, local):
            self.memory["times"] = self.memory.get("times", 0) + 1
            return {"times": self.memory["times"]}

        def is_personal(self, name, owner):
            return ".head." in name

    client = Counts(net=BatchNormNet, optimizer=sgd(), **SHAPE)
    engine = SequentialEngine(client)
    (job,) = jobs_of(engine, toy_data((7,)))
    own = {name: torch.full_like(value, 0.5) for name, value in client.state_dict().items() if ".head." in name}
    (first,) = engine.run("train", [job._replace(memory={"times": 4}, personal=own)])
    assert (first.memory, first.update.extras) == ({"times": 5}, {"times": 5})
    assert first.personal.keys() == own.keys()
    assert not first.update.weights.keys() & own.keys()
    (again,) = engine.run("train", [job._replace(memory={"times": 4}, personal=own)])
    assert equal(first.personal, again.personal)


def test_without_uploads_the_weights_stay_with_the_client():
    client = FedAvg(net=BatchNormNet, optimizer=sgd(), **SHAPE)
    engine = SequentialEngine(client)
    (result,) = engine.run("train", jobs_of(engine, toy_data((7,)), uploads=False))
    assert result.update.weights is None
    assert result.update.num_steps == 2


def deployed_jobs(engine, data):
    start = engine.global_weights.snapshot(engine.global_weights.shared)
    return [
        job._replace(broadcast=Broadcast(0, "deployed", None), memory={"bias": float(job.client_id)}, start=start)
        for job in jobs_of(engine, data)
    ]


@pytest.mark.parametrize("kind", [SequentialEngine, partial(CohortEngine, chunk=2)])
def test_what_clients_deploy_is_tested_on_their_own_samples(kind):
    """Also where all jobs are drawn before the first score, or nobody wants the last one; nothing stays behind."""

    class Shifts(FedAvg):
        def deployed(self):
            return lambda x: self(x) + self.memory["bias"] * torch.eye(3)[0]

    client = Shifts(net=BatchNormNet, optimizer=sgd(), **SHAPE)
    engine = kind(client)
    data = toy_data((7, 5, 6))
    before = clone(client.state_dict())
    modes = [module.training for module in client.modules()]
    jobs = deployed_jobs(engine, data)
    metrics = MetricCollection({"recall": MulticlassRecall(3)})
    scores = list(engine.evaluate(iter(jobs), Scoring("validation", 2, classifies=True, metrics=metrics)))
    client.eval()
    for job, score in zip(jobs, scores, strict=True):
        x, y = job.data.all("test")
        answers = (client(x) + job.client_id * torch.eye(3)[0]).argmax(1)
        assert (score.client_id, int(score.num_samples)) == (job.client_id, len(y))
        assert int(score.correct) == int((answers == y).sum())
        assert score.metrics["recall"] == MulticlassRecall(3)(answers, y)
    for module, mode in zip(client.modules(), modes, strict=True):
        module.training = mode
    with closing(engine.evaluate(jobs, Scoring("validation", 100, classifies=True))) as found:
        assert next(found).correct == scores[0].correct
    assert equal(before, client.state_dict())
    assert [module.training for module in client.modules()] == modes


def test_afterwards_the_module_is_as_any_other():
    """Nothing is attached any more, modes are restored; also where training was broken off."""
    for broken in (False, True):
        client = FedAvg(net=BatchNormNet, optimizer=sgd(), **SHAPE)
        engine = SequentialEngine(client)
        before = set(vars(client))
        modes = [module.training for module in client.modules()]
        running = engine.run("train", jobs_of(engine, toy_data((7, 1))))
        next(running)
        assert set(vars(client)) > before
        running.close() if broken else list(running)
        assert set(vars(client)) == before
        assert [module.training for module in client.modules()] == modes
        assert all(parameter.grad is None for parameter in client.parameters())


@pytest.mark.parametrize("where", ["receive", "training_step", "reply"])
def test_a_stop_iteration_names_the_client_and_the_round(where):
    """It would pass for the end of the epoch: the round would vanish."""

    class Stops(FedAvg):
        def receive(self, broadcast, local):
            self.stop("receive")

        def training_step(self, batch, batch_idx):
            self.stop("training_step")
            return super().training_step(batch, batch_idx)

        def reply(self, exchange, local):
            self.stop("reply")
            return {}

        def stop(self, here):
            if here == where and self.context.client_id == 3 and self.trainer.current_epoch == 1:
                next(iter(()))

    with pytest.raises(RuntimeError, match="client 3 raised StopIteration in round 1"):
        fit(Stops(), 3)


def test_own_steps_of_a_module_are_told_the_round_without_a_trainer():
    class Own(FedAvg):
        told = ()

        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            self.told = (*self.told, ("zero_grad", epoch, batch_idx))
            optimizer.zero_grad()

        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None):
            optimizer.step(optimizer_closure)
            self.told = (*self.told, ("step", epoch, batch_idx))

    client = Own(net=BatchNormNet, optimizer=sgd(), **SHAPE)
    engine = SequentialEngine(client)
    (result,) = engine.run("train", jobs_of(engine, toy_data((7,)), round_idx=5))
    assert result.update.num_steps == 2
    assert client.told == (("zero_grad", 5, 0), ("step", 5, 0), ("zero_grad", 5, 1), ("step", 5, 1))
