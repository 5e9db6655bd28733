"""`fl-lightning --print_shtab SHELL`: a script with which bash, zsh or tcsh complete the command line."""

import argparse
from collections.abc import Sequence
from contextlib import suppress

from pytorch_lightning.cli import LightningArgumentParser, LightningCLI

from fl_lightning.cli import configs
from fl_lightning.cli.adopt_files import FROM
from fl_lightning.cli.classes import OPTIONS, arguments, subclass_names
from fl_lightning.cli.errors import PROG
from fl_lightning.cli.methods import printed_names
from fl_lightning.cli.new import KINDS
from fl_lightning.cli.parser import CommandParser
from fl_lightning.cli.parser_only import BuiltError, ParserOnly

SHELLS = ("bash", "zsh", "tcsh")

BASH_BY_LEVEL = r"""
# the next level of an option only: --model.<Tab> has --model.client, and --model.client.<Tab> what is below
_fl_lightning_by_level() {
  local word="${COMP_WORDS[COMP_CWORD]}" reply rest
  local -A levels=()
  _shtab_fl_lightning
  [[ $word == --* ]] || return 0
  for reply in "${COMPREPLY[@]}"; do
    rest="${reply#"$word"}"
    [[ $rest == *.* ]] && reply="$word${rest%%.*}."
    levels["$reply"]=1
  done
  COMPREPLY=("${!levels[@]}")
  [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *. ]] && compopt -o nospace 2>/dev/null
  return 0
}
complete -o bashdefault -F _fl_lightning_by_level fl-lightning
"""
"""Bash completion by level, which takes the place of shtab's, that lists all 200 options at once."""

ZSH_BY_LEVEL = r"""
# the next level of an option only: --model.<Tab> has --model.client, and --model.client.<Tab> what is below
_fl_lightning_by_level() {
  if (( CURRENT < 3 )) || [[ $PREFIX != --* || $PREFIX == *=* ]]; then
    _shtab_fl_lightning "$@"
    return
  fi
  local spec option rest array="_shtab_fl_lightning_${words[2]}_options"
  local -aU options levels
  for spec in "${(@P)array}"; do
    option=${${spec#\(*\)}%%\[*}
    rest=${option#$PREFIX}
    if [[ $option == $PREFIX*.* && $rest == *.* ]]; then
      levels+=("$PREFIX${rest%%.*}.")
    elif [[ $option == --* ]]; then
      options+=("$option")
    fi
  done
  compadd -S '' -- $levels
  compadd -- $options
}

"""
"""The same for zsh, before the end of shtab's script, which names the function to call."""

ZSH_END = "typeset -A opt_args"


METHODS = ("methods", "baseline")
"""Options of `compare` that take methods."""


OF_A_FIT = {"split": "write the folders of a federation's parties", "partition": "describe a split of samples"}
"""Commands that take the options of a fit, and a folder."""


class OptionsOnly(ParserOnly):
    """The command line up to its parsers.

    Args:
        parsers: a list that is filled with one of each command.
    """

    def __init__(self, parsers: list[LightningArgumentParser]) -> None:
        self.parsers = parsers
        super().__init__([])

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        self.parsers.append(parser)


def options_of(parser: LightningArgumentParser) -> list[str]:
    """Return the options of a command, with the arguments of every class that one of them may name."""
    keys = [str(key) for key, _ in parser.get_defaults().items()]
    given = (key.removesuffix(".class_path") for key in keys if ".init_args." not in key)
    nested = (f"{option}.{name}" for option, base in OPTIONS.items() for name in arguments(base))
    return list(dict.fromkeys([*given, *nested]))


def add_own_options(command: argparse.ArgumentParser, name: str) -> None:
    """Add the options that a command has besides those of a fit and `--output`.

    Args:
        command: The parser of the command.
        name: Name of the command.
    """
    if name == "partition":
        command.add_argument("--round", type=int)


def whole_parser(parsers_of_commands: Sequence[CommandParser]) -> argparse.ArgumentParser:
    """Build a parser of argparse's that has all commands and options.

    jsonargparse's own scripts follow the arguments of classes, and a client may hold a client: they would not end.

    Args:
        parsers_of_commands: of commands that do not run a federation by themselves.
    """
    import shtab  # noqa: PLC0415 - an extra

    top = argparse.ArgumentParser(PROG)
    top.add_argument("--version", action="store_true")
    top.add_argument("--print_shtab", choices=SHELLS)
    commands = top.add_subparsers()
    parsers: list[LightningArgumentParser] = []
    with suppress(BuiltError):
        OptionsOnly(parsers)
    of_command = dict(zip(LightningCLI.subcommands(), parsers, strict=True))
    of_command |= dict.fromkeys(OF_A_FIT, of_command["fit"])
    for name, parser in of_command.items():
        command = commands.add_parser(name, help=OF_A_FIT.get(name) or parser.description)
        command.add_argument("-c", "--config", choices=configs.config_names())
        if name in ("fit", *OF_A_FIT):
            command.add_argument(f"--{FROM}").complete = shtab.FILE  # type: ignore[attr-defined]
        if name in OF_A_FIT:
            command.add_argument("--output").complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            add_own_options(command, name)
        else:
            command.add_argument("--print_config", action="store_true")
        for option in options_of(parser):
            if option.endswith(("_path", "initial_weights")):
                command.add_argument(f"--{option}").complete = shtab.FILE  # type: ignore[attr-defined]
            elif option != "config":
                names = subclass_names(OPTIONS[option]) if option in OPTIONS else None
                command.add_argument(f"--{option}", choices=names)
    commands.add_parser("methods", help="list all methods").add_argument("--output", choices=("md", "csv", "json"))
    shown = commands.add_parser("configs", help="list the configuration files of the package")
    shown.add_argument("name", nargs="?", choices=configs.config_names())
    shown.add_argument("--copy").complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    check = commands.add_parser("check", help="look for damage in checkpoints")
    check.add_argument("paths", nargs="+").complete = shtab.FILE  # type: ignore[attr-defined]
    new = commands.add_parser("new", help="write a class that runs, with its YAML and its test")
    new.add_argument("kind", choices=list(KINDS))
    new.add_argument("name")
    new.add_argument("--output").complete = shtab.DIRECTORY  # type: ignore[attr-defined]
    methods = list(printed_names().values())
    experiments = [name.removeprefix("papers/") for name in configs.config_names() if name.count("/") == 2]
    for made in parsers_of_commands:
        command = commands.add_parser(made.prog.split()[-1], help=made.description)
        for option in vars(made.get_defaults()):
            if option == "names":
                command.add_argument(option, nargs="*", choices=experiments)
            elif option in ("runs", "output"):
                word = option if option == "runs" else f"--{option}"
                command.add_argument(word).complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            else:
                names = configs.config_names() if option == "config" else methods if option in METHODS else None
                command.add_argument(f"--{option}", choices=names, nargs="*" if option == "methods" else None)
    return top


def run(argv: list[str], *parsers: CommandParser) -> None:
    """Print the script.

    Args:
        argv: the shell.
        parsers: of further commands.

    Raises:
        ValueError: it is none of `SHELLS`.
        ModuleNotFoundError: the extra is not installed.
    """
    if argv[:1] not in [[shell] for shell in SHELLS]:
        raise ValueError(f"--print_shtab must be one of {', '.join(SHELLS)}, got {' '.join(argv[:1]) or 'nothing'}")
    try:
        import shtab  # noqa: PLC0415 - an extra
    except ModuleNotFoundError:
        raise ModuleNotFoundError("--print_shtab needs shtab: pip install 'fl_lightning[shtab]'") from None
    script, end, tail = shtab.complete(whole_parser(parsers), argv[0]).rpartition(ZSH_END if argv[0] == "zsh" else "\0")
    by_level = ZSH_BY_LEVEL + end + tail.replace("_shtab_fl_lightning", "_fl_lightning_by_level") if end else tail
    print(script + by_level + (BASH_BY_LEVEL if argv[0] == "bash" else ""))
