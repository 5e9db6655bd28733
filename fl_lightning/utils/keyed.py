"""Keyed randomness: every draw comes from a generator that depends only on (seed, purpose, round, client)."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import torch


def keyed_number(seed: int, purpose: str, round_idx: int, *, client_id: int, num_bytes: int) -> int:
    """Return the number that a draw is keyed by.

    Args:
        seed: Seed of the run.
        purpose: What is drawn.
        round_idx: Index of the round. −1 is a draw of no round.
        client_id: Number of the client, from 0. −1 is a draw of no client.
        num_bytes: Length of the number in bytes.
    """
    key = f"{seed}/{purpose}/{round_idx}/{client_id}"
    digest = blake2b(key.encode(), digest_size=num_bytes).digest()
    return int.from_bytes(digest, "little")


def keyed_seed(seed: int, purpose: str, round_idx: int = -1, client_id: int = -1) -> int:
    """Make a 63-bit seed for one purpose, the same for equal keys on every machine.

    Args:
        seed: Seed of the run.
        purpose: Name of what is drawn.
        round_idx: Number of the round, from 0. −1 is a draw of no round.
        client_id: Number of the client, from 0. −1 is a draw of no client.

    >>> keyed_seed(0, "batches", 3, 1) == keyed_seed(0, "batches", 3, 1) != keyed_seed(0, "batches", 3, 2)
    True
    """
    return keyed_number(seed, purpose, round_idx, client_id=client_id, num_bytes=8) >> 1


def keyed_generator(seed: int, purpose: str, round_idx: int = -1, client_id: int = -1) -> torch.Generator:
    """Make a CPU generator for one purpose.

    Args:
        seed: Seed of the run.
        purpose: Name of what is drawn.
        round_idx: Number of the round, from 0. −1 is a draw of no round.
        client_id: Number of the client, from 0. −1 is a draw of no client.

    >>> torch.randperm(3, generator=keyed_generator(0, "batches")).sort().values
    tensor([0, 1, 2])
    """
    key = keyed_seed(seed=seed, purpose=purpose, round_idx=round_idx, client_id=client_id)
    return torch.Generator().manual_seed(key)


def keyed_numpy(seed: int, purpose: str, round_idx: int = -1, client_id: int = -1) -> np.random.Generator:
    """Make a numpy generator for one purpose.

    numpy draws Dirichlet variates from a given generator, and torch does not.

    Args:
        seed: Seed of the run.
        purpose: Name of what is drawn.
        round_idx: Number of the round, from 0. −1 is a draw of no round.
        client_id: Number of the client, from 0. −1 is a draw of no client.

    >>> keyed_numpy(0, "partition").integers(10) in range(10)
    True
    """
    key = keyed_seed(seed=seed, purpose=purpose, round_idx=round_idx, client_id=client_id)
    return np.random.default_rng(key)


def keyed_noise(seed: int, purpose: str, round_idx: int = -1, client_id: int = -1) -> np.random.Generator:
    """Make a numpy generator for noise that hides something: Philox, with the whole key in 128 bits.

    torch's CPU generator reads 32 bits of a seed. Somebody could try all of them.

    Args:
        seed: Seed of the run.
        purpose: Name of what is drawn.
        round_idx: Number of the round, from 0. −1 is a draw of no round.
        client_id: Number of the client, from 0. −1 is a draw of no client.

    >>> first, again = (keyed_noise(7 + (i << 32), "noise").standard_normal() for i in (0, 1))
    >>> first == again
    False
    """
    key = keyed_number(seed, purpose, round_idx, client_id=client_id, num_bytes=16)
    philox = np.random.Philox(key=key)
    return np.random.Generator(philox)


class GlobalStates:
    """Holds the states of the global random generators, to be put back later.

    A context that stays open between two calls would put them back as soon as it is collected as garbage, in the middle
    of what somebody else draws. This object does nothing unless it is asked to.

    Args:
        on_gpu: Whether the states of CUDA are held.
        foreign: Whether the states of NumPy and Python are held.
    """

    def __init__(self, *, on_gpu: bool, foreign: bool) -> None:
        self._of_torch = torch.get_rng_state()
        self._of_cuda = torch.cuda.get_rng_state_all() if on_gpu else None
        self._of_numpy = np.random.get_state() if foreign else None
        self._of_python = random.getstate() if foreign else None

    def restore(self) -> None:
        """Put the states back."""
        torch.set_rng_state(self._of_torch)
        if self._of_cuda is not None:
            torch.cuda.set_rng_state_all(self._of_cuda)
        if self._of_numpy is not None:
            np.random.set_state(self._of_numpy)
        if self._of_python is not None:
            random.setstate(self._of_python)


@contextmanager
def keyed_globals(seed: int, purpose: str) -> Iterator[None]:
    """Key the global generators of Python, NumPy and torch for code of others, and put them back afterwards.

    Args:
        seed: Seed of the run.
        purpose: Name of what is drawn.

    >>> with keyed_globals(0, "setup"):
    ...     first = (random.random(), np.random.rand(), float(torch.rand(())))
    >>> with keyed_globals(0, "setup"):
    ...     first == (random.random(), np.random.rand(), float(torch.rand(())))
    True
    """
    key = keyed_seed(seed, purpose)
    # CUDA is left alone before its first use, because a process that has used it cannot be forked.
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    with torch.random.fork_rng(devices):
        torch.default_generator.manual_seed(key)
        if devices:
            torch.cuda.manual_seed_all(key)
        random.seed(key)
        np.random.seed(key % 2**32)
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
