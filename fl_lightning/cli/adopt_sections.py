"""The sections of a file of LightningCLI, and the settings of a federation that become of them."""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.cli import LightningCLI

from fl_lightning.cli.adopt_files import references
from fl_lightning.cli.adopt_trainer import read_trainer
from fl_lightning.cli.adoption import Adoption, with_known_paths

SECTIONS = ("model", "data", "optimizer", "lr_scheduler")
"""Sections of LightningCLI that are a class. The option of the same name gives the class to a section without one."""

OTHER_ARGUMENTS = ("config", "verbose", "return_predictions", "weights_only")
"""Arguments of LightningCLI's commands that say nothing of a new fit."""


def read_sections(adoption: Adoption, content: Mapping[str, Any]) -> None:
    """Find an answer for each setting of a file.

    Args:
        adoption: The adoption, which collects the answers.
        content: The content of the file.
    """
    for name, text in references(content):
        adoption.refusals.append(
            f"{name} must name a value of the file or a variable that is set (${{oc.env:NAME}}), got {text}; write "
            f"the value into a copy of it"
        )
    sections = sections_of_fit(adoption, content)
    adoption.is_saved = is_saved(sections.get("trainer"))
    for name, reader in READERS.items():
        reader(adoption, sections.pop(name, None))
    for name, value in sections.items():
        if value is None:
            continue
        if name in OTHER_ARGUMENTS:
            adoption.notes.append(f"{name}: dropped; it is an argument of another command")
        else:
            adoption.refusals.append(
                f"{name} must be a section of LightningCLI, got an argument that the program adds itself; remove "
                f"it from a copy of the file, and write a callback under trainer.callbacks"
            )


def sections_of_fit(adoption: Adoption, content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the command `fit`, whose section a file for several commands has."""
    commands = LightningCLI.subcommands().keys()
    sections: dict[str, Any] = {}
    for name, value in content.items():
        if name in commands:
            if name != "fit":
                adoption.notes.append(f"{name}: dropped; it is the section of another command")
        elif name != "subcommand":
            sections[name] = value
    return {**sections, **(content.get("fit") or {})}


def is_saved(trainer: Any) -> bool:
    """Return True for the section of a Trainer as LightningCLI saves it, with most of its settings."""
    settings = inspect.signature(Trainer.__init__).parameters.keys()
    return isinstance(trainer, dict) and len(settings & trainer.keys()) > len(settings) // 2


def read_model(adoption: Adoption, value: Any) -> None:
    """Make the module of a section the module of FedAvg, whose class options and files may change."""
    module = adoption.section("model", value)
    if module is not None:
        adoption.put("model.client.class_path", "fl_lightning.methods.FedAvg")
        adoption.put("model.client.init_args.module", module)
        adoption.notes.append("model: moved to model.client, as the module that FedAvg trains")
        tell_of_class(adoption, "model", module)
    elif value is None and "model.client" not in adoption.given:
        adoption.refusals.append(
            "model must be the LightningModule that clients train, got none; add --model CLASS, the import path of the "
            "class that the program gives LightningCLI"
        )


def read_data(adoption: Adoption, value: Any) -> None:
    """Make the data module of a section the source of the clients' samples."""
    source = adoption.section("data", value)
    if source is not None:
        adoption.put("data.source", source)
        adoption.notes.append("data: moved to data.source, whose training samples are divided among the clients")
        tell_of_class(adoption, "data", source)
    elif value is None and "data.source" not in adoption.given:
        adoption.refusals.append(
            "data must be the data that are divided, got none (loaders of a LightningModule are not called); add "
            "--data CLASS, the import path of a LightningDataModule"
        )


def tell_of_class(adoption: Adoption, section: str, content: Mapping[str, Any]) -> None:
    """Tell of the options of a section's class that may have changed, and of arguments that the program links."""
    adoption.check_options(section, content)
    adoption.tell_linked(section, content)


def read_optimizer(adoption: Adoption, value: Any) -> None:
    """Give the client the optimizer of a section."""
    optimizer = adoption.section("optimizer", value)
    if optimizer is not None:
        adoption.put("model.client.init_args.optimizer", with_known_paths(adoption, "optimizer", optimizer))
        adoption.notes.append("optimizer: moved to model.client.optimizer, in place of configure_optimizers")


def read_scheduler(adoption: Adoption, value: Any) -> None:
    """Give the client the scheduler of a section, if it has an optimizer of a section."""
    scheduler = adoption.section("lr_scheduler", value)
    if scheduler is None:
        return
    client = adoption.settings.get("model", {}).get("client", {}).get("init_args", {})
    if "optimizer" not in client and "model.client.optimizer" not in adoption.given:
        adoption.notes.append("lr_scheduler: dropped; LightningCLI uses it with a section optimizer only")
        return
    adoption.put("model.client.init_args.lr_scheduler", with_known_paths(adoption, "lr_scheduler", scheduler))
    adoption.notes.append("lr_scheduler: moved to model.client.lr_scheduler")


def read_seed(adoption: Adoption, value: Any) -> None:
    """Keep the seed."""
    if value is not None:
        adoption.put("seed_everything", value)


def read_checkpoint(adoption: Adoption, value: Any) -> None:
    """Start from the weights of a checkpoint, whose fit a federation cannot continue."""
    if value is None:
        return
    if {"ckpt_path", "model.initial_weights"} & set(adoption.given):
        adoption.notes.append("ckpt_path: dropped; the command line names other weights")
    elif Path(str(value)).is_file():
        adoption.put("model.initial_weights", value)
        adoption.notes.append("ckpt_path: moved to model.initial_weights; its epoch and optimizers are not continued")
    else:
        adoption.refusals.append(
            f"ckpt_path must be a file, from whose weights the federation starts, got {value}; add "
            f"--model.initial_weights FILE"
        )


READERS: dict[str, Callable[[Adoption, Any], None]] = {
    "seed_everything": read_seed,
    "model": read_model,
    "data": read_data,
    "optimizer": read_optimizer,
    "lr_scheduler": read_scheduler,
    "trainer": read_trainer,
    "ckpt_path": read_checkpoint,
}
"""Readers of the sections of LightningCLI, in an order in which each finds what it asks for."""
