"""Suggestions for a wrong option: the option of the same meaning, or the option of the nearest spelling."""

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
"""The options of the command line, with the words for them in other programs and papers."""

OF_FIT = tuple(option for option in OTHER_WORDS if "." in option)
"""The options that the commands for experiments take too, because they belong to the runs."""

MEANT: dict[str, str] = {}
"""The option that each of the other words stands for."""

for _option, _words in OTHER_WORDS.items():
    MEANT.update(dict.fromkeys(_words.split(), _option))


def meant(name: str, options: Iterable[str]) -> str | None:
    """Find the option that an unknown name stands for.

    The options are tried in this order: the option for which other programs use the name, an option whose last part is
    the name, and an option whose class takes an argument of this name.

    Args:
        name: The unknown option.
        options: The options of the parser.

    Returns:
        The option. None means that the name stands for no option of the parser.

    >>> meant("seed", ["seed_everything"]), meant("trainer.rounds", ["trainer.max_epochs"])
    ('seed_everything', 'trainer.max_epochs')
    >>> meant("model.lr", ["model.client"]), meant("data.alpha", ["data.partition"])
    ('model.client.optimizer.lr', 'data.partition.alpha')
    """
    known = set(options)
    for option in candidates(name, known):
        if option != name and leads_to(option, known):
            return option
    return None


def candidates(name: str, known: Iterable[str]) -> list[str]:
    """List the options that a name may stand for, the likeliest first.

    Args:
        name: The unknown option.
        known: The options of the parser.
    """
    group = name.partition(".")[0] if "." in name else ""
    word = name.rpartition(".")[2]
    found = [MEANT[word]] if word in MEANT else []
    found += sorted((option for option in known if option.rpartition(".")[2] == word), key=len)
    for option, base in OPTIONS.items():
        if option.startswith(group) and word in arguments(base):
            found.append(f"{option}.{word}")
    return found


def leads_to(option: str, known: set[str]) -> bool:
    """Return True if a parser knows an option, a part of it, or a beginning of it.

    The parser of a class knows an option by its last part. A parser of a command knows the option of the class whose
    argument the option is.

    Args:
        option: The whole option.
        known: The options of the parser.
    """
    parts = option.split(".")
    beginnings = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return not known.isdisjoint(beginnings.union(parts))


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the end of a sentence that suggests the name which was probably meant. It is empty if there is none.

    The suggested name differs in case, hyphens and underscores only, or has the nearest spelling, or is the only name
    with this beginning.

    Args:
        name: The unknown name.
        names: The known names.

    >>> nearest("FedNtd", ["FedBN", "FedNTD"]), nearest("median", ["GeometricMedian", "MedianAggregator"])
    ("; the nearest is 'FedNTD'", "; the nearest is 'MedianAggregator'")
    """
    by_spelling = {folded(known): known for known in names}
    word = folded(name)
    found = None
    if word in by_spelling:
        found = word
    elif close := get_close_matches(word, list(by_spelling), n=1):
        found = close[0]
    elif len(word) > 2:
        longer = [known for known in by_spelling if known.startswith(word)]
        found = longer[0] if len(longer) == 1 else None
    return "" if found is None else f"; the nearest is {by_spelling[found]!r}"
