"""The end of a round behind whose training a run was cut: Lightning takes such a round for evaluated."""

from itertools import islice

import torch
from pytorch_lightning import LightningModule

from fl_lightning.data import FederatedDataModule
from fl_lightning.federation.recorder import Recorder
from fl_lightning.utils.settings import as_list


def catch_up(loop: LightningModule, data: FederatedDataModule, recorder: Recorder) -> None:
    """Complete the row of the round that no logger has yet, where a run is continued in the middle of its end.

    Its hooks `on_train_batch_end` and `on_train_epoch_end` and those of the validation are called, as far as they are
    due and Lightning does not call them; those of callbacks are not.

    Args:
        loop: of the federation.
        data: of the federation.
        recorder: of the loop; its row is then in the Trainer's `callback_metrics`, which no checkpoint holds.
    """
    round_idx, trainer = recorder.pending_round, loop.trainer
    if round_idx is None or round_idx > trainer.current_epoch or not trainer.global_step:
        return  # there is none, or it is of an earlier run of this loop
    loop.on_train_batch_end(None, None, 0)
    every = trainer.check_val_every_n_epoch or int(trainer.val_check_interval)
    if recorder.evaluated_rounds <= round_idx and trainer.enable_validation and (round_idx + 1) % every == 0:
        validate(loop, data)
    trainer.callback_metrics.update({key: torch.tensor(value) for key, value in recorder.round_metrics.items()})
    if round_idx < trainer.current_epoch:
        loop.on_train_epoch_end()


def validate(loop: LightningModule, data: FederatedDataModule) -> None:
    """Call the hooks of a validation as the Trainer does, but for the callbacks'."""
    strategy, limit = loop.trainer.strategy, loop.trainer.limit_val_batches
    modes = [(module, module.training) for module in loop.modules()]
    with torch.no_grad():
        loop.on_validation_model_eval()
        loop.on_validation_start()
        loop.on_validation_epoch_start()
        for loader_idx, loader in enumerate(as_list(data.val_dataloader())):
            most = limit if isinstance(limit, int) else int(limit * len(loader))
            for batch_idx, batch in enumerate(islice(loader, most)):
                place = (batch_idx, loader_idx)
                there = strategy.batch_to_device(strategy.precision_plugin.convert_input(batch), None, loader_idx)
                loop.on_validation_batch_start(there, *place)
                outputs = strategy.validation_step(there, *place)
                loop.on_validation_batch_end(outputs, there, *place)
        loop.on_validation_epoch_end()
        loop.on_validation_end()
    for module, mode in modes:
        module.training = mode
