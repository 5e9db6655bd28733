"""Fine-tuning of what a client would deploy, before it is tested. The run is afterwards as if it had not been."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from pytorch_lightning.utilities.seed import isolate_rng

from fl_lightning.client.checks import runs_foreign_code
from fl_lightning.client.metric_states import fresh_metrics, parts_that_count
from fl_lightning.client.services import ClientServices, MetricAccumulator, attach_services
from fl_lightning.engines.clock import without_logs
from fl_lightning.engines.deployed import stage_of
from fl_lightning.engines.settings import LocalSettings
from fl_lightning.engines.training import LocalTrainer
from fl_lightning.members.traces import Snapshot
from fl_lightning.types import ClientData, FineTuning
from fl_lightning.utils.own_generators import kept_states


class FineTuner:
    """Trains the client in the module by the local loss, and leaves nothing behind except the module's entries.

    It has optimizers and services of its own. Of the run's settings those count that say what one step is:
    `accumulate_grad_batches`, `clip_norm`, the precision and the seed. Callbacks are not called, because their hooks
    belong to the rounds. Loggers take nothing, because what they log would lie between the values of the rounds.

    Args:
        local: The local training of the engine.
    """

    def __init__(self, local: LocalTrainer) -> None:
        self._training = local
        self._client = local.client
        self._services = ClientServices()
        # The new object takes the present modes for those in which the user left the modules.
        local.restore_modes()
        self._local = LocalTrainer(
            client=local.client,
            settings=LocalSettings(
                accumulate_grad_batches=local.settings.accumulate_grad_batches,
                clip_norm=local.settings.clip_norm,
                seed=local.settings.seed,
            ),
            services=self._services,
            transfer=local.transfer,
            device=local.device,
            precision=local.precision,
            batch_hooks={},
        )
        self._is_foreign = runs_foreign_code(local.client)

    @contextmanager
    def fine_tuned(self, data: ClientData, tuning: FineTuning) -> Iterator[None]:
        """Context in which the client in the module is fine-tuned and in eval mode.

        The caller has loaded the client, and puts its entries back.

        Args:
            data: The client's data. A client without training samples stays as it is.
            tuning: The settings.
        """
        traces = Snapshot(self._client, with_values=True) if self._is_foreign else None
        try:
            if data.size():
                self._train(data.for_fine_tuning(), tuning)
            self._client.eval()
            yield
        finally:
            if traces is not None:
                traces.undo()

    def _train(self, data: ClientData, tuning: FineTuning) -> None:
        """Train the client in the module.

        Args:
            data: The client's data for fine-tuning.
            tuning: The settings.
        """
        # A module may give out the same optimizer again, which still has the momentum of the last round.
        self._training.builder.forget()
        on_gpu = self._local.device.type == "cuda"
        with (
            torch.enable_grad(),
            isolate_rng(include_cuda=on_gpu),
            kept_states(self._local.own_generators),
            attach_services(self._local.modules, self._services.methods),
            fresh_metrics(parts_that_count(self._client)),
            # The Trainer may be in a test, which must give the values of a fit.
            stage_of(self._client, "training"),
            without_logs(self._client),
        ):
            try:
                self._services.begin(logged=MetricAccumulator())
                self._local.fine_tune(data, self._client.fine_tuning(tuning.phase))
            finally:
                self._services.logged.clear()
                self._services.untoggle_optimizer(None)
                self._local.builder.forget()
                self._client.zero_grad()
