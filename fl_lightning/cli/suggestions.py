"""Suggestions for a wrong option: the one of the same meaning first, else the one of the nearest spelling."""

from collections.abc import Iterable
from difflib import get_close_matches

from fl_lightning.cli.classes import OPTIONS, arguments
from fl_lightning.utils.text import folded

OTHER_WORDS = {
    "seed_everything": "seed random_seed random_state",
    "trainer.max_epochs": "rounds num_rounds n_rounds max_rounds global_rounds global_epochs epochs",
    "trainer.devices": "gpus num_gpus processes num_processes",
    "trainer.accelerator": "device cuda",
    "trainer.logger": "loggers wandb tensorboard",
    "model.local_epochs": "local_ep num_local_epochs epochs_per_round client_epochs",
    "model.max_local_steps": "local_steps num_local_steps local_iterations",
    "model.client": "method algorithm algo module fl_method",
    "model.client.optimizer": "optim local_optimizer client_optimizer",
    "model.client.optimizer.lr": "learning_rate local_lr client_lr",
    "model.client.net": "architecture arch backbone",
    "model.server_optimizer.lr": "server_lr global_lr eta_g",
    "model.clip_norm": "gradient_clip_val clip max_grad_norm",
    "data.num_clients": "clients n_clients num_users n_parties",
    "data.participation": "fraction frac fraction_fit sample_ratio join_ratio cohort_size",
    "data.batch_size": "local_bs bs train_batch_size",
    "data.partition.alpha": "dirichlet_alpha concentration non_iid heterogeneity",
    "data.partition": "split partitioner partitioning",
    "data.source": "dataset data datamodule",
    "ckpt_path": "checkpoint ckpt resume resume_from resume_from_checkpoint",
    "config": "configs config_file cfg yaml",
}
"""Words of other programs and papers for the options of this one."""

OF_FIT = tuple(option for option in OTHER_WORDS if "." in option)
"""Those that commands which run experiments take, too."""

MEANT = {word: option for option, words in OTHER_WORDS.items() for word in words.split()}


def meant(name: str, options: Iterable[str]) -> str | None:
    """Find the option that stands for a name in other programs, or that takes an argument of this name.

    Args:
        name: of the unknown option.
        options: of the parser.

    >>> meant("seed", ["seed_everything"]), meant("trainer.rounds", ["trainer.max_epochs"])
    ('seed_everything', 'trainer.max_epochs')
    >>> meant("model.lr", ["model.client"]), meant("data.alpha", ["data.partition"])
    ('model.client.optimizer.lr', 'data.partition.alpha')
    """
    known = set(options)
    word = name.rpartition(".")[2]
    by_word = [MEANT[word]] if word in MEANT else []
    same_word = sorted((option for option in known if option.rpartition(".")[2] == word), key=len)
    group = name.partition(".")[0] if "." in name else ""
    by_argument = [f"{option}.{word}" for option, base in OPTIONS.items() if word in arguments(base)]
    for option in (*by_word, *same_word, *(option for option in by_argument if option.startswith(group))):
        parts = option.split(".")
        ways = {*parts, *(".".join(parts[:k]) for k in range(1, len(parts) + 1))}  # a class's parser knows one part
        if option != name and ways & known:
            return option
    return None


def nearest(name: str, names: Iterable[str]) -> str:
    """Name the one of `names` that is it but for case, or is spelt most like it, or alone begins so, else nothing.

    >>> nearest("FedNtd", ["FedBN", "FedNTD"]), nearest("median", ["GeometricMedian", "MedianAggregator"])
    ("; the nearest is 'FedNTD'", "; the nearest is 'MedianAggregator'")
    """
    spelt = {folded(known): known for known in names}
    word = folded(name)
    begin = [known for known in spelt if len(word) > 2 and known.startswith(word)]
    close = [word] if word in spelt else get_close_matches(word, list(spelt), 1) or begin * (len(begin) == 1)
    return "".join(f"; the nearest is {spelt[near]!r}" for near in close)
