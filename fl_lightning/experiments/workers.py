"""Processes that run the cells of an experiment, several cells each: what they import is imported once.

A process ends with the one that started it, however that ends, so that an experiment that is started again finds its
runs unused.
"""

import gc
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnContext, SpawnProcess

from fl_lightning.experiments.cells import CellFiles
from fl_lightning.experiments.run import Outcome, run_cell, stopped

SPAWN: SpawnContext = get_context("spawn")
"""Fork is no choice: threads of torch do not survive it, nor does CUDA."""


class Worker:
    """A process, and the cell that it is at.

    Args:
        processes: how many there are, which share the cores.
    """

    def __init__(self, processes: int) -> None:
        self.pipe, other = SPAWN.Pipe()
        threads = None if "OMP_NUM_THREADS" in os.environ else max(1, (os.cpu_count() or 1) // processes)
        self.process: SpawnProcess = SPAWN.Process(target=serve, args=(other, threads))
        self.process.start()
        other.close()  # so that the pipe ends with the process
        self.cell: CellFiles | None = None

    def start(self, cell: CellFiles) -> None:
        """Send a cell."""
        self.cell = cell
        with suppress(OSError):  # it has ended, which is found when its message is awaited
            self.pipe.send(cell)

    def finish(self) -> None:
        """Leave the cell, which has ended, whatever its outcome."""
        self.cell = None

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def serve(pipe: Connection, threads: int | None) -> None:
    """Run the cells that come through a pipe, in a process of its own.

    Args:
        pipe: brings cells; takes the number of complete rounds, and the outcome of each cell.
        threads: of torch operations; None: left alone.
    """
    import torch  # noqa: PLC0415

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the process that started this one, too
    threading.Thread(target=end_with_parent, daemon=True).start()
    gc.freeze()  # what is imported is not searched for garbage after each cell
    while True:
        cell = pipe.recv()
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            outcome = run_cell(cell, pipe.send)
        except KeyboardInterrupt as stop:  # raised by the cell itself
            outcome = Outcome(stopped(stop))
        pipe.send(outcome)


def end_with_parent() -> None:
    """Wait for the end of the process that started this one, and end."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def run_here(
    cells: Iterable[CellFiles], on_round: Callable[[CellFiles, int], None], on_end: Callable[[CellFiles, Outcome], None]
) -> None:
    """Run cells in this process, one after the other, as `run_all` does in others."""
    gc.freeze()  # what is imported is not searched for garbage after each cell
    try:
        for files in cells:
            on_end(files, run_cell(files, partial(on_round, files)))
    finally:
        gc.unfreeze()


def run_all(
    cells: Iterable[CellFiles],
    processes: int,
    on_round: Callable[[CellFiles, int], None],
    on_end: Callable[[CellFiles, Outcome], None],
) -> None:
    """Run cells, several at once, of which one that fails does not stop the others.

    A cell that runs out of memory beside others is run again when all others are done, alone.

    Args:
        cells: to be run.
        processes: how many at once; 0: one after the other in this process.
        on_round: is called with a cell and its number of complete rounds.
        on_end: is called with a cell and its outcome.
    """
    if not processes:
        run_here(cells, on_round, on_end)
        return
    waiting = deque(cells)
    alone = deque[CellFiles]()
    workers: list[Worker] = []
    try:
        while waiting or alone or any(worker.cell for worker in workers):
            if not waiting and not any(worker.cell for worker in workers):
                waiting.append(alone.popleft())
            busy = hand_out(waiting, workers, processes)
            ready = wait([worker.pipe for worker in busy])
            for worker, cell in busy.items():
                if worker.pipe not in ready:
                    continue
                message = received(worker)
                if isinstance(message, int):
                    on_round(cell, message)
                    continue
                worker.finish()
                if message.memory and len(busy) > 1:
                    alone.append(cell)
                else:
                    on_end(cell, message)
            workers = [worker for worker in workers if worker.cell or worker.process.is_alive()]
    finally:
        for worker in workers:
            worker.stop()


def hand_out(waiting: deque[CellFiles], workers: list[Worker], processes: int) -> dict[Worker, CellFiles]:
    """Give waiting cells to idle processes, and to new ones up to their number, and return what each is at."""
    for worker in workers:
        if waiting and worker.cell is None:
            worker.start(waiting.popleft())
    while waiting and len(workers) < processes:
        workers.append(Worker(processes))
        workers[-1].start(waiting.popleft())
    return {worker: worker.cell for worker in workers if worker.cell is not None}


def received(worker: Worker) -> int | Outcome:
    """Take the next message of a process, an outcome where it has ended."""
    try:
        message: int | Outcome = worker.pipe.recv()
        return message
    except (EOFError, OSError):
        worker.process.join()
        code = worker.process.exitcode or 0
        killed = code == -9  # the operating system's way when memory runs out
        return Outcome(f"its process ended with {f'signal {-code}' if code < 0 else f'code {code}'}", memory=killed)
