"""A callback with which a process of a run comes to a bad end."""

import os
import signal
import time
from pathlib import Path

import psutil
from pytorch_lightning import Callback

STARTER = "ENDS_STARTER"
"""Environment variable with the id of the process that was started first."""


class Mishap(Callback):
    """What happens when the process of a rank begins its first client in a round.

    Args:
        how: `none`, or the name of a method.
        rank: of the process.
        round_idx: from 0.
    """

    def __init__(self, how: str, rank: int = 1, round_idx: int = 1):
        self.how = how
        self.rank = rank
        self.round_idx = round_idx

    def on_client_start(self, trainer, loop, client_id):
        now = (trainer.current_epoch, trainer.global_rank) == (self.round_idx, self.rank)
        if now and self.how not in ("late", "hang_in_evaluation"):
            Path("struck").touch()
            getattr(self, self.how)()

    def on_train_batch_end(self, trainer, *args):
        if (trainer.current_epoch, trainer.global_rank, self.how) == (self.round_idx, self.rank, "late"):
            raise ValueError("not where clients are trained")

    def on_validation_batch_start(self, trainer, *args):
        if (trainer.current_epoch, trainer.global_rank, self.how) == (self.round_idx, self.rank, "hang_in_evaluation"):
            Path("struck").touch()
            self.hang()

    def none(self):
        pass

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def hang(self):
        time.sleep(1000)

    def stop(self):
        """Neither does its thread run any more."""
        os.kill(os.getpid(), signal.SIGSTOP)

    def exception(self):
        raise ValueError("a bug of one's own")

    def ctrl_c(self):
        """As by a terminal: all processes are interrupted."""
        to_all(signal.SIGINT)
        time.sleep(5)

    def interrupt_starter(self):
        """As by a scheduler: the process that was started first is."""
        os.kill(starter(), signal.SIGINT)
        time.sleep(1000)

    def kill_starter(self):
        """The process that waits for this one and the other."""
        os.kill(starter(), signal.SIGKILL)
        time.sleep(1000)

    def term_itself(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1000)

    def term_group(self):
        """As by a cluster: all processes are asked to end."""
        to_all(signal.SIGTERM)
        time.sleep(1000)

    def term_starter(self):
        os.kill(starter(), signal.SIGTERM)
        time.sleep(1000)

    def hup_group(self):
        """As by a terminal that is closed."""
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
        """Takes longer than a process may be silent, in signs of life."""
        from fl_lightning import heartbeat

        for _ in range(100):
            time.sleep(0.2)
            heartbeat()


def starter():
    """Return the id of the process that was started first. Torchrun starts each rank in a session of its own."""
    return int(os.environ[STARTER])


def to_all(number):
    """Send a signal to every process group of the run, to that of this process last."""
    processes = [starter(), *(child.pid for child in psutil.Process(starter()).children(recursive=True))]
    groups = {os.getpgid(process) for process in processes}
    for group in sorted(groups, key=lambda group: group == os.getpgid(0)):
        os.killpg(group, number)
