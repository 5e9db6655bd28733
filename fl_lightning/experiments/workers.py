"""Processes that run the cells of an experiment, several cells each: what they import is imported once.

A process ends when its parent ends, for whatever reason. So an experiment that is started again finds its runs unused.
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

from fl_lightning.experiments.cell_files import CellFiles
from fl_lightning.experiments.run import Outcome, run_cell, stopped

SPAWN: SpawnContext = get_context("spawn")
"""Neither the threads of torch nor CUDA survive a fork."""

KILLED = -9
"""Exit code of a process that the operating system has killed, as when memory runs out."""

OnRound = Callable[[CellFiles, int], None]
"""Function that is called with a cell and its number of complete rounds."""

OnEnd = Callable[[CellFiles, Outcome], None]
"""Function that is called with a cell and its outcome."""


class Worker:
    """Holds a process, and the cell that it is at.

    Args:
        processes: Number of processes, which share the cores.
    """

    def __init__(self, processes: int) -> None:
        self.pipe, other = SPAWN.Pipe()
        threads = None if "OMP_NUM_THREADS" in os.environ else max(1, (os.cpu_count() or 1) // processes)
        self.process: SpawnProcess = SPAWN.Process(target=serve, args=(other, threads))
        self.process.start()
        # The pipe must end with the process, which has the other end now.
        other.close()
        self.cell: CellFiles | None = None

    def start(self, cell: CellFiles) -> None:
        """Send a cell."""
        self.cell = cell
        # The process may have ended. `received` finds that.
        with suppress(OSError):
            self.pipe.send(cell)

    def finish(self) -> None:
        """Leave the cell, which has ended."""
        self.cell = None

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def serve(pipe: Connection, threads: int | None) -> None:
    """Run the cells that come through a pipe, in a process of its own.

    Args:
        pipe: Connection that brings cells, and takes the numbers of complete rounds and the outcomes.
        threads: Number of threads of torch operations. None leaves it alone.
    """
    import torch  # noqa: PLC0415

    # Ctrl-C reaches the parent, too, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    # Imported modules are not searched for garbage after each cell.
    gc.freeze()
    while True:
        cell = pipe.recv()
        if threads is not None:
            torch.set_num_threads(threads)
        try:
            outcome = run_cell(cell, pipe.send)
        except KeyboardInterrupt as stop:
            # The cell has raised it: the signal is ignored.
            outcome = Outcome(stopped(stop))
        pipe.send(outcome)


def end_with_parent() -> None:
    """Wait for the end of the parent, and end this process."""
    parent = parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def run_here(cells: Iterable[CellFiles], on_round: OnRound, on_end: OnEnd) -> None:
    """Run cells in this process, one after the other, as `run_all` does in others."""
    # Imported modules are not searched for garbage after each cell.
    gc.freeze()
    try:
        for files in cells:
            on_end(files, run_cell(files, partial(on_round, files)))
    finally:
        gc.unfreeze()


def run_all(cells: Iterable[CellFiles], processes: int, on_round: OnRound, on_end: OnEnd) -> None:
    """Run cells, several at once. A cell that fails does not stop the others.

    A cell that runs out of memory beside others is run again when all others are done, alone.

    Args:
        cells: The cells.
        processes: Number of cells at once. 0 runs them one after the other in this process.
        on_round: Function that is called with a cell and its number of complete rounds.
        on_end: Function that is called with a cell and its outcome.
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
    """Give waiting cells to idle processes, and to new processes.

    Args:
        waiting: Cells that no process is at. Cells that are handed out are removed.
        workers: The processes. New processes are added.
        processes: Largest number of processes.

    Returns:
        The cells that processes are at, by process.
    """
    for worker in workers:
        if waiting and worker.cell is None:
            worker.start(waiting.popleft())
    while waiting and len(workers) < processes:
        workers.append(Worker(processes))
        workers[-1].start(waiting.popleft())
    return {worker: worker.cell for worker in workers if worker.cell is not None}


def received(worker: Worker) -> int | Outcome:
    """Take the next message of a process, an outcome if the process has ended."""
    try:
        message: int | Outcome = worker.pipe.recv()
    except (EOFError, OSError):
        worker.process.join()
        code = worker.process.exitcode or 0
        reason = f"signal {-code}" if code < 0 else f"code {code}"
        return Outcome(f"its process ended with {reason}", memory=code == KILLED)
    return message
