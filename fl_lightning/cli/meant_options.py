"""Suggestions for a wrong option, by what its name means in other programs and papers."""

from collections.abc import Iterable

from fl_lightning.cli.classes import OPTIONS, arguments
from fl_lightning.utils.suggestions import MEANT, OTHER_WORDS

OF_FIT = tuple(option for option in OTHER_WORDS if "." in option)
"""The options that the commands for experiments take too, because they belong to the runs."""


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
    same_word = [option for option in known if option.rpartition(".")[2] == word]
    found += sorted(same_word, key=lambda option: (len(option), option))
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
