"""Suggestions for a name that is not known: other words for settings, and the nearest spelling."""

from collections.abc import Iterable
from difflib import get_close_matches

from fl_lightning.utils.text import folded

OTHER_WORDS = {
    "seed_everything": "seed random_seed random_state",
    "trainer.max_epochs": "rounds num_rounds n_rounds max_rounds global_rounds global_epochs epochs num_epochs",
    "trainer.devices": "gpus num_gpus processes num_processes",
    "trainer.accelerator": "device cuda",
    "trainer.logger": "loggers wandb tensorboard",
    "model.local_epochs": "local_ep num_local_epochs epochs_per_round client_epochs",
    "model.max_local_steps": "local_steps num_local_steps local_iterations",
    "model.client": "method algorithm algo module fl_method",
    "model.client.optimizer": "optim local_optimizer client_optimizer",
    "model.client.optimizer.lr": "learning_rate local_lr client_lr",
    "model.client.net": "architecture arch backbone network",
    "model.server_optimizer.lr": "server_lr global_lr eta_g",
    "model.clip_norm": "gradient_clip_val clip max_grad_norm",
    "data.num_clients": "clients n_clients num_users n_parties",
    "data.participation": "fraction frac fraction_fit sample_ratio join_ratio",
    "data.cohort_size": "clients_per_round num_clients_per_round num_selected_clients",
    "data.batch_size": "local_bs bs train_batch_size",
    "data.partition.alpha": "dirichlet_alpha concentration non_iid heterogeneity",
    "data.partition": "split partitioner partitioning",
    "data.source": "dataset datasets data datamodule train_dataset test_dataset",
    "ckpt_path": "checkpoint ckpt resume resume_from resume_from_checkpoint",
    "config": "configs config_file cfg yaml",
}
"""The settings by their options on the command line, with the words for them in other programs and papers."""


def options_by_word() -> dict[str, str]:
    """Return the option that each of the other words stands for."""
    options: dict[str, str] = {}
    for option, words in OTHER_WORDS.items():
        options.update(dict.fromkeys(words.split(), option))
    return options


MEANT = options_by_word()
"""The option that each of the other words stands for."""


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the known name that was probably meant.

    The name differs in case, hyphens and underscores only, or has the nearest spelling, or is the only name with this
    beginning of three letters or more.

    Args:
        name: The unknown name.
        names: The known names.

    Returns:
        The known name. None means that no known name is near.

    >>> nearest("FedNtd", ["FedBN", "FedNTD"]), nearest("median", ["GeometricMedian", "MedianAggregator"])
    ('FedNTD', 'MedianAggregator')
    """
    by_spelling = {folded(known): known for known in names}
    word = folded(name)
    if word in by_spelling:
        return by_spelling[word]
    close = get_close_matches(word, list(by_spelling), n=1)
    if close:
        return by_spelling[close[0]]
    longer = [known for known in by_spelling if known.startswith(word)]
    if len(word) > 2 and len(longer) == 1:
        return by_spelling[longer[0]]
    return None


def suggestion(name: str, names: Iterable[str]) -> str:
    """Return the end of a sentence that suggests the nearest name. It is empty if no known name is near.

    Args:
        name: The unknown name.
        names: The known names.

    >>> suggestion("FedNtd", ["FedBN", "FedNTD"]), suggestion("x", ["FedBN", "FedNTD"])
    ("; the nearest is 'FedNTD'", '')
    """
    near = nearest(name, names)
    return "" if near is None else f"; the nearest is {near!r}"
