"""Buffers with `persistent=False`: set back for every client, or kept in its memory."""

import copy

import pytest
import pytorch_lightning as pl
import torch
from torch import nn

from fl_lightning import FederatedLoop
from tests.toys import equal, fit, toy_data, trainer, weights_of


class Bank(pl.LightningModule):
    """A memory bank that grows stale, a cache that comes and goes, one tensor under two names."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 3)
        self.register_buffer("queue", torch.randn(4, 3), persistent=False)
        self.register_buffer("cache", None, persistent=False)
        self.head = nn.Module()
        self.head.register_buffer("queue", self.queue, persistent=False)
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        assert self.queue is self.head.queue or self.cache is not None
        self.seen.append(self.queue.double().sum().item())
        out = self.net(x)
        loss = nn.functional.cross_entropy(out, y) + (out.mean(0) - self.queue).square().mean()
        self.queue[:-1] = self.queue[1:].clone()
        self.queue[-1] = out.detach().mean(0).to(self.queue.dtype)
        self.cache = x
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("queue", self.queue.sum())
        self.log("cached", float(self.cache is not None))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def bank():
    torch.manual_seed(0)
    return Bank()


def by_hand(rounds: int, keep: bool, data) -> dict[str, torch.Tensor]:
    """FedAvg on fresh copies of one module."""
    module = bank()
    queues = {}
    weights = {n: v.clone() for n, v in module.state_dict().items()}
    for round_idx in range(rounds):
        total = {n: torch.zeros_like(v, dtype=torch.float64) for n, v in weights.items()}
        sizes = 0
        for client_id in range(data.num_clients):
            client = copy.deepcopy(module)
            view = data.view(client_id, round_idx)
            client.load_state_dict(weights)
            if keep and client_id in queues:
                client.queue.copy_(queues[client_id])
            optimizer = client.configure_optimizers()
            for index, batch in enumerate(view.batches("train", 0)):
                optimizer.zero_grad()
                client.training_step(batch, index).backward()
                optimizer.step()
            queues[client_id] = client.queue.clone()
            for name, value in client.state_dict().items():
                total[name] += value.double() * view.size()
            sizes += view.size()
        weights = {name: (value / sizes).float() for name, value in total.items()}
    return weights


@pytest.mark.parametrize("keep", [None, ["module.queue"]])
def test_a_federation_equals_fresh_copies(keep):
    loop = fit(bank(), rounds=3, keep=keep)
    found = {n.removeprefix("client.module."): v for n, v in weights_of(loop).items() if n.startswith("client.")}
    data = toy_data()
    data.setup("fit")
    data.key_batches(3)
    assert equal(found, by_hand(3, bool(keep), data))


@pytest.mark.parametrize("keep", [None, ["module.queue"]])
def test_resume_is_exact_whatever_the_module_was_built_with(tmp_path, keep):
    whole = fit(bank(), rounds=3, keep=keep)
    first = trainer(3, tmp_path, max_steps=1)
    first.fit(FederatedLoop(bank(), seed=3, keep=keep), datamodule=toy_data())
    first.save_checkpoint(tmp_path / "one.ckpt")
    torch.manual_seed(1)
    again = fit(Bank(), rounds=3, keep=keep, ckpt_path=tmp_path / "one.ckpt")
    assert equal(weights_of(whole), weights_of(again))


@pytest.mark.parametrize("precision", ["32-true", "64-true"])
def test_the_global_model_has_them_as_they_were(precision):
    module = bank()
    start = bank().queue
    run = trainer(2, precision=precision)
    loop = FederatedLoop(module, seed=3)
    run.fit(loop, datamodule=toy_data(dtype=torch.float64 if precision == "64-true" else torch.float32))
    assert run.callback_metrics["queue"] == pytest.approx(float(start.sum()), rel=1e-5)
    assert run.callback_metrics["cached"] == 0
    assert torch.equal(module.queue.float(), start)
    assert module.queue is module.head.queue


def test_a_pattern_that_matches_none_is_refused():
    with pytest.raises(
        ValueError, match=r"keep: a pattern must match a buffer with persistent=False, 'net\.\*' matche"
    ):
        fit(bank(), keep="net.*")
