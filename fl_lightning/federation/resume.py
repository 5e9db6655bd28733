"""Complete a round whose end was cut off, when a run continues from a checkpoint.

Lightning marks a round as evaluated once its training is over. A checkpoint that was saved between the training
and the evaluation of a round therefore continues with the next round. The functions here call the hooks of the
missing evaluation.
"""

from itertools import islice
from typing import Any

import torch
from pytorch_lightning import LightningModule

from fl_lightning.data import FederatedDataModule
from fl_lightning.federation.recorder import Recorder
from fl_lightning.metrics.history import by_all_names
from fl_lightning.utils.settings import as_list


def catch_up(loop: Any, data: FederatedDataModule, recorder: Recorder) -> None:
    """Complete the row of an unfinished round, which no logger has yet.

    The function calls the hooks of the loop that are due and that Lightning does not call: `on_train_batch_end`,
    the hooks of the validation and `on_train_epoch_end`. It does not call the hooks of callbacks of the Trainer. A
    callback that writes the values of the clients is asked to complete its table.

    Args:
        loop: The `FederatedLoop`.
        data: The data module of the run.
        recorder: The recorder of the loop. The values of its row go to `trainer.callback_metrics`, which no
            checkpoint holds.
    """
    round_idx = recorder.pending_round
    trainer = loop.trainer
    if round_idx is None:
        return
    is_of_earlier_run = round_idx > trainer.current_epoch or not trainer.global_step
    if is_of_earlier_run:
        return
    loop.on_train_batch_end(None, None, 0)
    interval = trainer.check_val_every_n_epoch or int(trainer.val_check_interval)
    evaluation_is_due = (round_idx + 1) % interval == 0
    is_evaluated = recorder.evaluated_rounds > round_idx
    if evaluation_is_due and trainer.enable_validation and not is_evaluated:
        validate(loop, data)
    row = by_all_names(recorder.round_metrics)
    loop.fresh_values.know(row, round_idx)
    values = {key: torch.tensor(value) for key, value in row.items()}
    trainer.callback_metrics.update(values)
    if round_idx < trainer.current_epoch:
        loop.on_train_epoch_end()
        for callback in trainer.callbacks:
            if getattr(callback, "writes_client_values", False):
                callback.complete_round(loop, round_idx)


def validate(loop: LightningModule, data: FederatedDataModule) -> None:
    """Call the validation hooks of the loop in the order of the Trainer, without the hooks of callbacks."""
    strategy = loop.trainer.strategy
    limit = loop.trainer.limit_val_batches
    modes = [(module, module.training) for module in loop.modules()]
    with torch.no_grad():
        loop.on_validation_model_eval()
        loop.on_validation_start()
        loop.on_validation_epoch_start()
        loaders = as_list(data.val_dataloader())
        for loader_idx, loader in enumerate(loaders):
            # As in Lightning, hooks are given the index only if there are several loaders.
            index = [loader_idx] if len(loaders) > 1 else []
            num_batches = limit if isinstance(limit, int) else int(limit * len(loader))
            for batch_idx, batch in enumerate(islice(loader, num_batches)):
                converted = strategy.precision_plugin.convert_input(batch)
                moved = strategy.batch_to_device(converted, None, loader_idx)
                loop.on_validation_batch_start(moved, batch_idx, *index)  # style: ok, as Lightning calls it
                outputs = strategy.validation_step(moved, batch_idx, loader_idx)
                # A subclass may give the arguments of a hook other names.
                loop.on_validation_batch_end(outputs, moved, batch_idx, *index)  # style: ok, as Lightning calls it
        loop.on_validation_epoch_end()
        loop.on_validation_end()
    for module, mode in modes:
        module.training = mode
