"""A callback that ends a process of a run in a bad way."""

import os
import signal
import time
from pathlib import Path

import psutil
from pytorch_lightning import Callback

STARTER = "ENDS_STARTER"
"""Environment variable with the id of the process that was started first."""


class Mishap(Callback):
    """Strikes when the process of a rank begins its first client in a round.

    Args:
        how: The name of a method, or `late` or `hang_in_evaluation`, which strike later in the round.
        rank: Rank of the process.
        round_idx: Index of the round, from 0.
    """

    def __init__(self, how: str, rank: int = 1, round_idx: int = 1):
        self.how = how
        self.rank = rank
        self.round_idx = round_idx

    def on_client_start(self, trainer, loop, client_id):
        if self.is_here(trainer) and self.how not in ("late", "hang_in_evaluation"):
            Path("struck").touch()
            getattr(self, self.how)()

    def on_train_batch_end(self, trainer, *args):
        if self.is_here(trainer) and self.how == "late":
            raise ValueError("not where clients are trained")

    def on_validation_batch_start(self, trainer, *args):
        if self.is_here(trainer) and self.how == "hang_in_evaluation":
            Path("struck").touch()
            self.hang()

    def is_here(self, trainer):
        return trainer.current_epoch == self.round_idx and trainer.global_rank == self.rank

    def none(self):
        pass

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(self):
        time.sleep(1000)

    def stop(self):
        """Stop the process with all its threads."""
        os.kill(os.getpid(), signal.SIGSTOP)

    def exception(self):
        raise ValueError("a bug of one's own")

    def ctrl_c(self):
        """Interrupt all processes, as a terminal does."""
        to_all(signal.SIGINT)
        time.sleep(5)

    def interrupt_starter(self):
        """Interrupt the process that was started first, as a scheduler does."""
        os.kill(starter(), signal.SIGINT)
        time.sleep(1000)

    def kill_starter(self):
        """Kill the process that waits for this one and the other."""
        os.kill(starter(), signal.SIGKILL)
        time.sleep(1000)

    def term_itself(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1000)

    def term_group(self):
        """Ask all processes to end, as a cluster does."""
        to_all(signal.SIGTERM)
        time.sleep(1000)

    def term_starter(self):
        os.kill(starter(), signal.SIGTERM)
        time.sleep(1000)

    def hup_group(self):
        """Hang up all processes, as a terminal does that is closed."""
        to_all(signal.SIGHUP)
        time.sleep(1000)

    def hup_starter(self):
        os.kill(starter(), signal.SIGHUP)
        time.sleep(1000)

    def hup_itself(self):
        os.kill(os.getpid(), signal.SIGHUP)
        time.sleep(1000)

    def interrupt_itself(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    def slow(self):
        """Take longer than a process may be silent, with signs of life."""
        from fl_lightning import heartbeat

        for _ in range(100):
            time.sleep(0.2)
            heartbeat()


def starter():
    """Return the id of the process that was started first. Torchrun starts each rank in a session of its own."""
    return int(os.environ[STARTER])


def to_all(number):
    """Send a signal to every process group of the run, to that of this process last."""
    children = psutil.Process(starter()).children(recursive=True)
    groups = {os.getpgid(pid) for pid in [starter(), *(child.pid for child in children)]}
    own = os.getpgid(0)
    for group in groups - {own}:
        os.killpg(group, number)
    if own in groups:
        os.killpg(own, number)
