"""A world of several processes, played by threads of the test's own process."""

import threading
from functools import reduce
from types import SimpleNamespace

import torch

NOT_OF_GLOO = (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn)
"""Types that the process group of the CPU does not send."""


class World:
    """Stands for `torch.distributed` with gloo: each thread that joined is a rank.

    Args:
        size: Number of ranks.
    """

    ReduceOp = SimpleNamespace(SUM="sum", MAX="max")

    def __init__(self, size):
        self.size = size
        self.local = threading.local()
        self.barrier = threading.Barrier(size, timeout=20)
        self.values = [None] * size

    def join(self, rank):
        self.local.rank = rank

    def get_rank(self):
        return self.local.rank

    def get_world_size(self):
        return self.size

    def exchange(self, value):
        """Return the values of all ranks."""
        self.barrier.wait()
        self.values[self.local.rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values

    def all_gather_object(self, by_rank, value):
        by_rank[:] = self.exchange(value)

    def gather_object(self, value, by_rank, dst):
        values = self.exchange(value)
        if self.local.rank == dst:
            by_rank[:] = values

    def broadcast_object_list(self, values, src):
        values[:] = self.exchange(list(values))[src]

    def broadcast(self, tensor, src):
        check_sent(tensor)
        tensor.copy_(self.exchange(tensor.clone())[src])

    def all_reduce(self, tensor, op="sum"):
        check_sent(tensor)
        join = torch.maximum if op == "max" else torch.add
        tensor.copy_(reduce(join, self.exchange(tensor.clone())))

    def run(self, function, *, here=None):
        """Call `function(rank)` in a thread for each rank, and return the results or errors by rank.

        Args:
            function: The function.
            here: The rank that this thread plays itself. None if it plays none.
        """
        results = [None] * self.size

        def play(rank):
            self.join(rank)
            try:
                results[rank] = function(rank)
            except BaseException as error:
                results[rank] = error

        threads = [threading.Thread(target=play, args=(rank,)) for rank in range(self.size) if rank != here]
        for thread in threads:
            thread.start()
        if here is not None:
            play(here)
        for thread in threads:
            thread.join(20)
        return results


def check_sent(tensor):
    """Refuse what gloo refuses."""
    if tensor.dtype in NOT_OF_GLOO:
        raise RuntimeError("Invalid scalar type")
    if not tensor.is_contiguous():
        raise ValueError("Tensors must be contiguous")
