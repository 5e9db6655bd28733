"""The strategy that spreads the clients of a round over processes, without synchronized gradients."""

import os
import pickle
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from traceback import format_exception
from typing import Any

import torch
from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from fl_lightning.distributed.stops import stops_interrupt
from fl_lightning.distributed.watch import GRACE, RemoteError, Watch
from fl_lightning.utils.life import LIFE
from fl_lightning.utils.renamed import check_not_gone
from fl_lightning.utils.settings import check_above
from fl_lightning.utils.tracebacks import raised_by_check

WHOLE_ROUND = timedelta(days=1)
"""Longest time that a process waits for the others. The watch ends a run with a silent process much earlier."""


class RemoteTracebackError(Exception):
    """Shows the traceback of another process, as the cause of its error in this process."""


class ClientParallelStrategy(DDPStrategy):
    """Trains a share of the cohort in each process, and sends sums of weights across once per exchange.

    Registered as `client_parallel` (one script per process), `client_parallel_spawn`, `client_parallel_fork` and
    `client_parallel_notebook` (processes started from the running one). A process that ends or fails ends the others.

    Args:
        process_timeout: Seconds between two signs of life (a client, a batch) of a process, > 0. If others wait for the
            process and it needs longer, the run ends.
        timeout: Time limit of one collective.
        kwargs: Arguments of Lightning's DDPStrategy.

    Attributes:
        watch: Watches over the processes. None outside a run, and with one process.
        starts_all: Whether this process starts all processes of the run, and takes part in none.
    """

    def __init__(
        self,
        process_timeout: float = 600.0,
        timeout: timedelta | None = WHOLE_ROUND,
        **kwargs: Any,
    ) -> None:
        check_not_gone(type(self), kwargs)  # DDPStrategy would take every name
        check_above(0, process_timeout=process_timeout)
        super().__init__(timeout=timeout, **kwargs)
        self.process_timeout = process_timeout
        self.watch: Watch | None = None
        self.starts_all = kwargs.get("start_method", "popen") != "popen"
        self._mail: Path | None = None
        """Folder in which an error that ends the run is left for the process that has started this one."""
        self._children: list[Any] = []
        """The processes that this one has started."""

    @property
    def launcher(self) -> Any:
        """Lightning's launcher, which reports the error of a process once."""
        launcher: Any = super().launcher
        if launcher is not None and "launch" not in vars(launcher):
            launcher.launch = partial(self._launch, launcher, launcher.launch)
        return launcher

    def _launch(self, launcher: Any, launch: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
        """Start the processes with Lightning's launcher, and run a function in each.

        Args:
            launcher: Lightning's launcher.
            launch: The launcher's own method `launch`.
            function: The function.
            args: Positional arguments of the function.
            kwargs: Keyword arguments of the launcher and the function.

        Raises:
            BaseException: A process failed. It is the first error of all processes.
        """
        mail = Path(tempfile.mkdtemp(prefix="fl_lightning-")) if self.starts_all else None
        run_rank = partial(self._run_rank, function, mail=mail, starter=os.getpid())
        try:
            with stops_interrupt():
                return launch(run_rank, *args, **kwargs)
        except KeyboardInterrupt:
            end_all(launcher.procs, stop=True)
            raise
        except (ProcessRaisedException, ProcessExitedException) as error:
            first = error if mail is None else first_error(mail, error)
            raise first from first.__cause__
        finally:
            if mail is not None:
                shutil.rmtree(mail, ignore_errors=True)

    def _run_rank(self, function: Any, *args: Any, mail: Path | None, starter: int, **kwargs: Any) -> Any:
        """Run a function in one of the processes.

        Args:
            function: The function.
            args: Positional arguments of the function.
            mail: The folder in which an error is left for the process that has started this one and waits for it. None
                if there is no such process.
            starter: The id of the process that starts the run.
            kwargs: Keyword arguments of the function.

        Raises:
            BaseException: A process failed. It is the run's first error.
            SystemExit: A process failed, and this process was started for the fit.
        """
        self._mail = mail
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if mail is not None:
                # The starting process sends this signal once one process has ended, and the handler may block.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            watch = self.watch
            first = error if watch is None else watch.explain(error)
            if mail is not None:
                leave(mail, 0 if watch is None else watch.rank, first)
                if os.getppid() != starter:
                    # The starting process is gone, so nobody else removes the folder.
                    shutil.rmtree(mail, ignore_errors=True)
                sys.exit(1)
            if watch is not None:
                first.reported = not watch.reports  # type: ignore[attr-defined]
            if first is error:
                raise
            raise first from None

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.world_size == 1:
            return
        starter = None if self._mail is None else os.getppid()
        self.watch = Watch(self.process_timeout, last_word=self._last_word, starter=starter)
        if self._mail is None and self.launcher is not None:
            self._children += self.launcher.procs
            # Lightning's observer of these processes would kill this process before it can report.
            self.launcher.procs.clear()

    def _last_word(self, error: BaseException) -> None:
        """Report why the run ends, in the place of the main thread, which is stuck."""
        if self.watch is None:
            return
        if self._mail is not None:
            leave(self._mail, self.watch.rank, error)
        elif self.watch.reports:
            sentence = str(error) or "interrupted"
            sys.stderr.write(f"fl-lightning: error: {sentence}\n")
            sys.stderr.flush()

    # Lightning sets its own handlers of signals just before these hooks.

    def on_train_start(self) -> None:
        super().on_train_start()
        self._listen()

    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._listen()

    def on_test_start(self) -> None:
        super().on_test_start()
        self._listen()

    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._listen()

    def _listen(self) -> None:
        if self.watch is not None:
            self.watch.listen()

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        end_all(self._children)

    def teardown(self) -> None:
        if self.watch is not None:
            self.watch.close()
        self.watch = None
        super().teardown()

    def configure_ddp(self) -> None:
        """Leave the module unwrapped.

        Raises:
            ValueError: The module synchronizes BatchNorm, whose statistics belong to one client.
        """
        if any(isinstance(module, torch.nn.SyncBatchNorm) for module in self.lightning_module.modules()):  # type: ignore[union-attr]
            raise ValueError(
                "processes train different clients, whose BatchNorm must not be synchronised, got SyncBatchNorm; leave "
                "trainer.sync_batchnorm unset"
            )

    # --- signs of life ---

    barrier = LIFE.waiting()(DDPStrategy.barrier)
    broadcast = LIFE.waiting()(DDPStrategy.broadcast)
    reduce = LIFE.waiting()(DDPStrategy.reduce)
    all_gather = LIFE.waiting()(DDPStrategy.all_gather)


def leave(mail: Path, rank: int, error: BaseException) -> None:
    """Leave an error for the process that started this one.

    Args:
        mail: The folder for the error.
        rank: The rank of this process.
        error: The error.
    """
    text = "".join(format_exception(error))
    checked = raised_by_check(error)
    try:
        content = pickle.dumps((error, checked, text))
        pickle.loads(content)
    except Exception:  # Some errors cannot be pickled or unpickled.
        substitute = RuntimeError(f"{type(error).__name__}: {error}")
        content = pickle.dumps((substitute, checked, text))
    with suppress(OSError):
        part = mail / f"{rank}.part"
        part.write_bytes(content)
        part.replace(mail / f"{rank}.error")


def first_error(mail: Path, ended: Exception) -> BaseException:
    """Return the error from which the others follow.

    Of several such errors it is that of the least rank. If no process has left an error, it says how a process ended.

    Args:
        mail: The folder with the errors.
        ended: The error of Lightning's launcher.
    """
    errors: list[BaseException] = []
    for path in sorted(mail.glob("*.error"), key=lambda path: int(path.stem)):
        with suppress(Exception):
            error, checked, text = pickle.loads(path.read_bytes())
            error.raised_by_check = checked
            error.__cause__ = RemoteTracebackError(f"\n{text}")
            errors.append(error)
    if errors:
        # A RemoteError follows from the error of another process.
        return min(errors, key=lambda error: isinstance(error, RemoteError))
    if isinstance(ended, ProcessExitedException):
        return RemoteError(f"rank {ended.error_index} ended without a word: {ended}")
    return ended


def end_all(processes: Sequence[Any], *, stop: bool = False) -> None:
    """Wait until processes have ended, and kill the others.

    Args:
        processes: The processes, of subprocess or multiprocessing.
        stop: Whether the processes must be asked to stop, because they may not know that the run ends.
    """
    if stop:
        for process in processes:
            process.terminate()
    deadline = monotonic() + GRACE / 3
    while monotonic() < deadline and any(alive(process) for process in processes):
        sleep(0.05)
    for process in processes:
        process.kill()


def alive(process: Any) -> bool:
    """Return True if a process (of subprocess or multiprocessing) runs."""
    if hasattr(process, "is_alive"):
        return bool(process.is_alive())
    return process.poll() is None


START_METHODS = {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}
"""How the processes are started, by the ending of the strategy's name."""

for suffix, method in START_METHODS.items():
    StrategyRegistry.register(
        f"client_parallel{suffix}",
        ClientParallelStrategy,
        description=f"federated clients spread over processes ({method})",
        override=True,
        start_method=method,
    )
