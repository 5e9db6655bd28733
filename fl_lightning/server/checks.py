"""Trainer settings that would break the meaning of a round are refused at start, each with the right one."""

from collections.abc import Mapping
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import ModelCheckpoint, StochasticWeightAveraging

from fl_lightning.strategy import ClientParallelStrategy

SWA = (
    "StochasticWeightAveraging averages what one optimizer goes through, and adds an epoch for BatchNorm, which would "
    "be a round; leave it out, or take FedEXP, which averages the last two rounds"
)


def check_trainer(trainer: Trainer) -> None:
    """Refuse what cannot be had.

    Raises:
        ValueError: naming the setting, its value and what to set instead.
    """
    overfit = getattr(trainer, "overfit_batches", 0)
    processes, strategy = trainer.num_devices * trainer.num_nodes, trainer.strategy
    rules: list[tuple[bool, str]] = [
        (
            processes > 1 and not isinstance(strategy, ClientParallelStrategy),
            f"clients, not batches, are spread over processes: trainer.strategy must be client_parallel, got "
            f"{type(strategy).__name__} with {processes} devices; set that strategy or trainer.devices=1",
        ),
        (
            trainer.gradient_clip_val is not None,
            f"the clients' gradients are clipped by model.clip_norm, not by trainer.gradient_clip_val="
            f"{trainer.gradient_clip_val}; set model.clip_norm",
        ),
        (
            trainer.accumulate_grad_batches != 1,
            f"the clients' gradients are accumulated by model.accumulate_grad_batches, not by "
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}; set the model's",
        ),
        (
            trainer.limit_train_batches not in (1, 1.0) and not trainer.fast_dev_run,  # type: ignore[attr-defined]
            f"a round is one batch and cannot be cut: trainer.limit_train_batches must stay unset, got "
            f"{trainer.limit_train_batches}; use data.participation or model.max_local_steps for less work a round",
        ),
        (
            isinstance(trainer.val_check_interval, float) and trainer.val_check_interval < 1,
            f"the global model exists once a round: trainer.val_check_interval must be 1.0, got "
            f"{trainer.val_check_interval}; use trainer.check_val_every_n_epoch to evaluate less often",
        ),
        (
            bool(overfit),
            f"trainer.overfit_batches={overfit} has no meaning in a federation; use a source with "
            f"fewer samples, or model.max_local_steps",
        ),
        (
            trainer.precision in ("bf16-true", "16-true", "transformer-engine", "transformer-engine-float16"),
            f"weights in half precision cannot take a small update: trainer.precision={trainer.precision} is refused; "
            f"use bf16-mixed",
        ),
    ]
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ModelCheckpoint):
            rules += _checkpoint_rules(callback)
        if isinstance(callback, StochasticWeightAveraging):
            rules.append((True, SWA))
    for broken, sentence in rules:
        if broken:
            raise ValueError(sentence)


def _checkpoint_rules(callback: Any) -> list[tuple[bool, str]]:
    key = callback.state_key
    return [
        (
            "'train_time_interval': None" not in key,
            "ModelCheckpoint(train_time_interval=…) never writes in a federation; use every_n_epochs (rounds)",
        ),
        (
            "'every_n_train_steps': 0" not in key,
            "ModelCheckpoint(every_n_train_steps=…) counts batches, of which a round has one; use every_n_epochs "
            "(rounds)",
        ),
    ]


def check_entries(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Refuse the checkpoint of another net with one sentence in place of torch's list.

    Raises:
        ValueError: naming an entry that is not in both, or has another shape.
    """
    for name in sorted(set(own) | set(saved)):
        here, there = getattr(own.get(name), "shape", None), getattr(saved.get(name), "shape", None)
        if here != there:
            raise ValueError(
                f"the checkpoint must be of the same client and aggregator, but entry {name!r} has shape "
                f"{there and tuple(there)} in it and {here and tuple(here)} here; give the configuration it was "
                f"made with"
            )
