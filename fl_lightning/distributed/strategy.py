"""Strategy that spreads the clients of a round over processes, without synchronised gradients."""

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

from fl_lightning.distributed.watch import GRACE, RemoteError, Watch
from fl_lightning.utils.life import LIFE
from fl_lightning.utils.renamed import check_not_gone
from fl_lightning.utils.settings import check_above
from fl_lightning.utils.tracebacks import raised_by_check

WHOLE_ROUND = timedelta(days=1)
"""Longest time that a process waits for the others; the watch ends a run with a silent process much earlier."""


class RemoteTracebackError(Exception):
    """Traceback of another process, as the cause of its error in this one."""


class ClientParallelStrategy(DDPStrategy):
    """Trains a share of the cohort in each process, and sends sums of weights across once per exchange.

    Registered as `client_parallel` (one script per process), `client_parallel_spawn`, `client_parallel_fork` and
    `client_parallel_notebook` (processes started from the running one). A process that ends or fails ends the others.

    Args:
        process_timeout: seconds between two signs of life (a client, a batch) of a process for which others wait;
            longer ends the run.
        timeout: of one collective.
        kwargs: of Lightning's DDPStrategy.
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
        self._mail: Path | None = None
        """Folder in which an error that ends the run is left for the process that has started this one."""
        self.starts_all = kwargs.get("start_method", "popen") != "popen"
        self._children: list[Any] = []  # that this process has started

    @property
    def launcher(self) -> Any:
        """Lightning's launcher, under watch, so that an error of one process is reported once."""
        launcher: Any = super().launcher
        if launcher is not None and "launch" not in vars(launcher):
            launcher.launch = partial(self._launch, launcher, launcher.launch)
        return launcher

    def _launch(self, launcher: Any, launch: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
        """Start the processes by a launcher of Lightning's and run `function` in each.

        Args:
            launcher: of Lightning's.
            launch: its own method of this name.
            function: to be run.
            args: of the function.
            kwargs: of the launcher and the function.

        Raises:
            BaseException: the first error of any process.
        """
        mail = Path(tempfile.mkdtemp(prefix="fl_lightning-")) if self.starts_all else None
        try:
            return launch(partial(self._run_rank, mail, os.getpid(), function), *args, **kwargs)
        except KeyboardInterrupt:
            end_all(launcher.procs)
            raise
        except (ProcessRaisedException, ProcessExitedException) as error:
            first = error if mail is None else first_error(mail, error)
            raise first from first.__cause__
        finally:
            if mail is not None:
                shutil.rmtree(mail, ignore_errors=True)

    def _run_rank(self, mail: Path | None, starter: int, function: Any, *args: Any, **kwargs: Any) -> Any:
        """Run `function` in one of the processes.

        Args:
            mail: folder for an error, where another process has started this one and waits for it; else None.
            starter: id of that process.
            function: to be run.
            args: of the function.
            kwargs: of the function.

        Raises:
            BaseException: the run's first error.
            SystemExit: in place of that error, in a process that was started for the fit.
        """
        self._mail = mail
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            if mail is not None:  # the starting process sends that signal once one has ended, and the handler may block
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            watch = self.watch
            first = error if watch is None else watch.explain(error)
            if mail is not None:
                leave(mail, 0 if watch is None else watch.rank, first)
                if os.getppid() != starter:
                    shutil.rmtree(mail, ignore_errors=True)
                sys.exit(1)
            if watch is not None:
                first.reported = not watch.reports  # type: ignore[attr-defined]
            if first is error:
                raise
            raise first from None

    def setup_environment(self) -> None:
        super().setup_environment()
        if self.world_size > 1:
            starter = None if self._mail is None else os.getppid()
            self.watch = Watch(self.process_timeout, self._last_word, starter)
            if self._mail is None and self.launcher is not None:
                self._children += self.launcher.procs
                self.launcher.procs.clear()  # else Lightning's observer kills this process before it can report

    def _last_word(self, error: BaseException) -> None:
        """Explain why the run ends, in place of the main thread, which is stuck."""
        if self.watch is None:
            return
        if self._mail is not None:
            leave(self._mail, self.watch.rank, error)
        elif self.watch.reports:
            sys.stderr.write(f"fl-lightning: error: {error}\n")
            sys.stderr.flush()

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
            ValueError: if it synchronises BatchNorm, whose statistics belong to one client.
        """
        if any(isinstance(module, torch.nn.SyncBatchNorm) for module in self.lightning_module.modules()):  # type: ignore[union-attr]
            raise ValueError(
                "processes train different clients, whose BatchNorm must not be synchronised, got SyncBatchNorm; leave "
                "trainer.sync_batchnorm unset"
            )

    # --- signs of life -----------------------------------------------------------------------------------------

    barrier = LIFE.waiting()(DDPStrategy.barrier)
    broadcast = LIFE.waiting()(DDPStrategy.broadcast)
    reduce = LIFE.waiting()(DDPStrategy.reduce)
    all_gather = LIFE.waiting()(DDPStrategy.all_gather)


def leave(mail: Path, rank: int, error: BaseException) -> None:
    """Leave an error for the process that started this one."""
    text = "".join(format_exception(error))
    checked = raised_by_check(error)
    try:
        content = pickle.dumps((error, checked, text))
        pickle.loads(content)
    except Exception:  # some errors cannot be pickled or unpickled
        content = pickle.dumps((RuntimeError(f"{type(error).__name__}: {error}"), checked, text))
    with suppress(OSError):
        part = mail / f"{rank}.part"
        part.write_bytes(content)
        part.replace(mail / f"{rank}.error")


def first_error(mail: Path, ended: Exception) -> BaseException:
    """Choose the error that the others follow from, or tell how a process ended where none has left one."""
    errors: list[BaseException] = []
    for path in sorted(mail.glob("*.error")):
        with suppress(Exception):
            error, checked, text = pickle.loads(path.read_bytes())
            error.raised_by_check = checked
            error.__cause__ = RemoteTracebackError(f"\n{text}")
            errors.append(error)
    if errors:
        return min(errors, key=lambda error: isinstance(error, RemoteError))
    if isinstance(ended, ProcessExitedException):
        return RemoteError(f"rank {ended.error_index} ended without a word: {ended}")
    return ended


def end_all(processes: Sequence[Any]) -> None:
    """Wait until processes have ended after Ctrl-C, and end those that have not."""
    until = monotonic() + GRACE / 3
    while monotonic() < until and any(alive(process) for process in processes):
        sleep(0.05)
    for process in processes:
        process.kill()


def alive(process: Any) -> bool:
    """Tell whether a process (of subprocess or multiprocessing) runs."""
    return bool(process.is_alive() if hasattr(process, "is_alive") else process.poll() is None)


for suffix, method in {"": "popen", "_spawn": "spawn", "_fork": "fork", "_notebook": "fork"}.items():
    StrategyRegistry.register(
        f"client_parallel{suffix}",
        ClientParallelStrategy,
        description=f"federated clients spread over processes ({method})",
        override=True,
        start_method=method,
    )
