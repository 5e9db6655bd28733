"""Callback that logs what a round costs."""

import sys
from collections.abc import Mapping
from time import monotonic

import torch
from pytorch_lightning import LightningModule, Trainer

from fl_lightning.distributed import current_communicator
from fl_lightning.federation.loop import FederatedLoop
from fl_lightning.monitors.monitor import Measurements, Monitor, add_to_row, log_known, steps_of
from fl_lightning.types import ClientUpdate

KIBIBYTE = 1024


class CostMonitor(Monitor):
    """Logs the work, time and memory of a round.

    The bytes of a round are logged without the monitor, as `comm/bytes_down` and `comm/bytes_up`.

    - `cost/steps`: the optimizer steps of all clients of the cohort, over all exchanges and phases, with the steps that
      count in no method's K.
    - `cost/seconds`: seconds by the clock, with the evaluation.
    - `cost/memory`: the most bytes so far of the GPU's tensors, else of the process, added up over the processes. It is
      missing if nothing tells.

    For a module without a federation the monitor measures each epoch, with the steps and memory of the root process.

    Args:
        every: Number of rounds from one measured round to the next.
    """

    measures_any_fit = True

    def __init__(self, every: int = 1) -> None:
        super().__init__(every)
        self._began = 0.0
        self._first_step = 0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self._began = monotonic()
        self._first_step = trainer.global_step

    def exchange_end(self, loop: FederatedLoop, update: ClientUpdate, measured: Measurements) -> None:
        measured["steps"] = measured.get("steps", 0) + steps_of(update)

    def summarise(self, trainer: Trainer, loop: FederatedLoop, measured: Mapping[int, Measurements]) -> None:
        log_known(loop, {"cost/steps": float(sum(values["steps"] for values in measured.values()))})

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        if not isinstance(pl_module, FederatedLoop) and self.measures(trainer):
            steps = float(trainer.global_step - self._first_step)
            memory = peak_memory(pl_module.device)
            values = {"cost/steps": steps, "cost/seconds": monotonic() - self._began}
            if memory is not None:
                values["cost/memory"] = memory
            pl_module.log_dict(values, rank_zero_only=True)

    def round_end(self, trainer: Trainer, loop: FederatedLoop, measured: Mapping[int, Measurements]) -> None:
        of_processes = current_communicator(loop.device).gather(peak_memory(loop.device))
        memory = None if None in of_processes else sum(of_processes)
        add_to_row(loop, {"cost/seconds": monotonic() - self._began, "cost/memory": memory})


def peak_memory(device: torch.device) -> float | None:
    """Return the most bytes so far of tensors on the GPU, else of the process, or None if nothing tells."""
    if device.type == "cuda":
        return float(torch.cuda.max_memory_allocated(device))
    try:
        from resource import RUSAGE_SELF, getrusage  # noqa: PLC0415 - not on Windows
    except ImportError:
        return None
    # macOS counts bytes, and Linux kibibytes.
    unit = 1 if sys.platform == "darwin" else KIBIBYTE
    return float(getrusage(RUSAGE_SELF).ru_maxrss) * unit
