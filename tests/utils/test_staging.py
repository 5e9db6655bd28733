"""Staging: the order of copies, errors, types that are left alone, and what is asked of a GPU."""

from collections import namedtuple
from contextlib import contextmanager

import pytest
import torch

from fl_lightning.utils import staging
from fl_lightning.utils.staging import Staging, begin_copy, fits, holds_host_tensors, staging_for

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
Named = namedtuple("Named", "x")


@pytest.fixture
def seen():
    return []


def noting(seen):
    """A staging that notes when copies begin and are used."""

    def begin(batch, device):
        seen.append(f"begin {batch}")
        return lambda: seen.append(f"use {batch}") or batch

    return Staging(CPU, begin)


def read(seen, number, broken=None):
    for i in range(number):
        seen.append(f"read {i}")
        if i == broken:
            raise OSError("no such sample")
        yield i


def test_each_batch_is_given_when_the_next_copy_was_begun(seen):
    for batch in noting(seen).one_ahead(read(seen, 3)):
        seen.append(f"train {batch}")
    first = ["read 0", "begin 0", "read 1", "begin 1", "use 0", "train 0", "read 2", "begin 2", "use 1", "train 1"]
    assert seen == [*first, "use 2", "train 2"]


@pytest.mark.parametrize("number", [0, 1, 2, 5])
def test_every_batch_comes_once_and_in_order(number, seen):
    assert list(noting(seen).one_ahead(read(seen, number))) == list(range(number))


def test_an_error_comes_where_it_would_without(seen):
    ahead = noting(seen).one_ahead(read(seen, 4, broken=2))
    assert [next(ahead), next(ahead)] == [0, 1]
    with pytest.raises(OSError, match="no such sample"):
        next(ahead)


def test_who_stops_early_meets_no_error_of_a_later_batch_and_ends_the_reading(seen):
    closed = []

    @contextmanager
    def source():
        yield read(seen, 4, broken=2)
        closed.append(True)

    with source() as batches:
        ahead = noting(seen).one_ahead(batches)
        assert [next(ahead), next(ahead)] == [0, 1]
        ahead.close()
    assert closed
    assert "use 2" not in seen


def test_other_types_than_plain_ones_stay_where_they_are():
    def refused(batch, device):
        raise AssertionError

    sparse = torch.eye(2).to_sparse()
    graph = torch.nn.utils.rnn.pack_sequence([torch.ones(2)])
    for batch in (
        sparse,
        graph,
        Named(torch.ones(1)),
        {"x": [torch.ones(1), graph]},
        torch.nn.Parameter(torch.ones(1)),
    ):
        assert Staging(CPU, refused)(batch) is batch
    assert not holds_host_tensors(torch.ones(1, device="meta"))


def test_a_cpu_has_none_and_holds_everything():
    assert staging_for(CPU) is None
    assert staging_for(CUDA).device == CUDA
    assert fits(2**60, CPU)


def test_samples_fit_in_half_of_the_free_memory(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    assert fits(50, CUDA)
    assert not fits(51, CUDA)


class Stream:
    """In place of CUDA's: notes what it is asked for."""

    def __init__(self, name, seen):
        self.name = name
        self.seen = seen

    def record_event(self):
        self.seen.append(f"{self.name} records")
        return "copied"

    def wait_event(self, event):
        self.seen.append(f"{self.name} waits for {event}")


def test_what_is_asked_of_a_gpu(monkeypatch, seen):
    present = Stream("present", seen)
    side = Stream("side", seen)

    @contextmanager
    def entered(stream):
        seen.append(f"in {stream.name}")
        yield
        seen.append(f"out of {stream.name}")

    def moved(self, device, non_blocking=False):
        assert non_blocking
        seen.append("copy")
        return self.view_as(self)

    monkeypatch.setattr(staging, "side_stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "stream", entered)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: present)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: seen.append("pin") or self)
    monkeypatch.setattr(torch.Tensor, "to", moved)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: seen.append(f"kept for {stream.name}"))
    begun = begin_copy([torch.ones(1)], CUDA)
    assert seen == ["in side", "pin", "copy", "out of side", "side records"]
    del seen[:]
    assert begun()[0].tolist() == [1]
    assert seen == ["present waits for copied", "kept for present"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_arrive_on_a_gpu():
    batches = [(torch.randn(64, 1000), torch.arange(64)) for _ in range(20)]
    sums = [(x @ x.T).sum() + y.sum() for x, y in Staging(CUDA).one_ahead(batches)]
    expected = [(x @ x.T).sum() + y.sum() for x, y in ((x.cuda(), y.cuda()) for x, y in batches)]
    torch.testing.assert_close(sums, expected)
