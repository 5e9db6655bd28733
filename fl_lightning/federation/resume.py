"""Complete a round whose end was cut off, when a run continues from a checkpoint.

Lightning marks a round as evaluated once its training is over. A checkpoint that was saved between
the training and the evaluation of a round therefore continues with the next round, and the hooks
of the evaluation have to be called here.
"""

from itertools import islice

import torch
from pytorch_lightning import LightningModule

from fl_lightning.data import FederatedDataModule
from fl_lightning.federation.recorder import Recorder
from fl_lightning.utils.settings import as_list


def catch_up(loop: LightningModule, data: FederatedDataModule, recorder: Recorder) -> None:
    """Complete the row of an unfinished round, which no logger has yet.

    Calls those of the loop's hooks `on_train_batch_end`, validation hooks and `on_train_epoch_end`
    that are due and that Lightning does not call. The hooks of callbacks are not called.

    Args:
        loop: The `FederatedLoop`.
        data: The data module of the run.
        recorder: The loop's recorder. The values of its row are put into `trainer.callback_metrics`,
            which no checkpoint holds.
    """
    round_idx = recorder.pending_round
    trainer = loop.trainer
    if round_idx is None:
        return
    if round_idx > trainer.current_epoch or not trainer.global_step:
        return  # The row is of an earlier run of this loop.
    loop.on_train_batch_end(None, None, 0)
    every = trainer.check_val_every_n_epoch or int(trainer.val_check_interval)
    evaluation_is_due = (round_idx + 1) % every == 0
    if recorder.evaluated_rounds <= round_idx and trainer.enable_validation and evaluation_is_due:
        validate(loop, data)
    values = {key: torch.tensor(value) for key, value in recorder.round_metrics.items()}
    trainer.callback_metrics.update(values)
    if round_idx < trainer.current_epoch:
        loop.on_train_epoch_end()


def validate(loop: LightningModule, data: FederatedDataModule) -> None:
    """Call the loop's validation hooks in the Trainer's order, without the callbacks' hooks."""
    strategy = loop.trainer.strategy
    limit = loop.trainer.limit_val_batches
    modes = [(module, module.training) for module in loop.modules()]
    with torch.no_grad():
        loop.on_validation_model_eval()
        loop.on_validation_start()
        loop.on_validation_epoch_start()
        for loader_idx, loader in enumerate(as_list(data.val_dataloader())):
            num_batches = limit if isinstance(limit, int) else int(limit * len(loader))
            for batch_idx, batch in enumerate(islice(loader, num_batches)):
                converted = strategy.precision_plugin.convert_input(batch)
                moved = strategy.batch_to_device(converted, None, loader_idx)
                loop.on_validation_batch_start(moved, batch_idx, loader_idx)
                outputs = strategy.validation_step(moved, batch_idx, loader_idx)
                loop.on_validation_batch_end(outputs, moved, batch_idx, loader_idx)
        loop.on_validation_epoch_end()
        loop.on_validation_end()
    for module, mode in modes:
        module.training = mode
