"""`fl-lightning --print_shtab SHELL`: a script with which bash, zsh or tcsh complete the command line."""

import argparse
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

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
"""Completes options by level in bash, in place of shtab's function, which lists all 200 options at once."""

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
"""Beginning of the end of shtab's script for zsh."""

METHODS = ("methods", "baseline")
"""Options of `compare` that take methods."""

OF_A_FIT = {"split": "write the folders of a federation's parties", "partition": "describe a split of samples"}
"""Commands that take the options of a fit, and a folder."""


AddCommand = Callable[..., argparse.ArgumentParser]
"""`add_parser` of the commands of an argparse parser."""


class OptionsOnly(ParserOnly):
    """Stops when the parsers of a command line are built.

    Args:
        parsers: A list, to which the parser of each command is added.
    """

    def __init__(self, parsers: list[LightningArgumentParser]) -> None:
        self.parsers = parsers
        super().__init__([])

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        super().add_arguments_to_parser(parser)
        self.parsers.append(parser)


def options_of(parser: LightningArgumentParser) -> list[str]:
    """Return the options of a command, with the arguments of every class that one of them may name."""
    options: list[str] = []
    for key, _ in parser.get_defaults().items():
        if ".init_args." not in str(key):
            options.append(str(key).removesuffix(".class_path"))
    for option, base in OPTIONS.items():
        options += [f"{option}.{name}" for name in arguments(base)]
    return list(dict.fromkeys(options))


def add_files(command: argparse.ArgumentParser, *names: str, **settings: Any) -> None:
    """Add an argument whose value is completed by the names of files."""
    import shtab  # noqa: PLC0415 - an extra

    argument = command.add_argument(*names, **settings)
    argument.complete = shtab.FILE  # type: ignore[attr-defined]


def add_folder(command: argparse.ArgumentParser, name: str) -> None:
    """Add an argument whose value is completed by the names of folders."""
    import shtab  # noqa: PLC0415 - an extra

    command.add_argument(name).complete = shtab.DIRECTORY  # type: ignore[attr-defined]


def whole_parser(parsers_of_commands: Sequence[CommandParser]) -> argparse.ArgumentParser:
    """Build a parser of argparse's that has all commands and options.

    jsonargparse's own scripts follow the arguments of classes, and a client may hold a client: they would not end.

    Args:
        parsers_of_commands: The parsers of commands that do not run a federation by themselves.
    """
    top = argparse.ArgumentParser(PROG)
    top.add_argument("--version", action="store_true")
    top.add_argument("--print_shtab", choices=SHELLS)
    add_command = top.add_subparsers().add_parser
    add_commands_of_a_run(add_command)
    add_plain_commands(add_command)
    for parser in parsers_of_commands:
        add_command_of(add_command, parser)
    return top


def add_commands_of_a_run(add_command: AddCommand) -> None:
    """Add the commands of LightningCLI, and the commands that take the options of a fit."""
    parsers: list[LightningArgumentParser] = []
    with suppress(BuiltError):
        OptionsOnly(parsers)
    of_command = dict(zip(LightningCLI.subcommands(), parsers, strict=True))
    for name, parser in of_command.items():
        command = add_command(name, help=parser.description)
        command.add_argument("-c", "--config", choices=configs.config_names())
        if name == "fit":
            add_files(command, f"--{FROM}")
        command.add_argument("--print_config", action="store_true")
        add_options(command, parser)
    for name, description in OF_A_FIT.items():
        command = add_command(name, help=description)
        command.add_argument("-c", "--config", choices=configs.config_names())
        add_files(command, f"--{FROM}")
        add_folder(command, "--output")
        if name == "partition":
            command.add_argument("--round", type=int)
        add_options(command, of_command["fit"])


def add_options(command: argparse.ArgumentParser, parser: LightningArgumentParser) -> None:
    """Add the options of a command of LightningCLI.

    Args:
        command: The parser to which they are added.
        parser: The command's own parser.
    """
    for option in options_of(parser):
        if option == "config":
            continue
        if option.endswith(("_path", "initial_weights")):
            add_files(command, f"--{option}")
        else:
            names = subclass_names(OPTIONS[option]) if option in OPTIONS else None
            command.add_argument(f"--{option}", choices=names)


def add_plain_commands(add_command: AddCommand) -> None:
    """Add the commands that need neither torch nor Lightning."""
    methods = add_command("methods", help="list all methods")
    methods.add_argument("--output", choices=("md", "csv", "json"))
    shown = add_command("configs", help="list the configuration files of the package")
    shown.add_argument("name", nargs="?", choices=configs.config_names())
    add_folder(shown, "--copy")
    check = add_command("check", help="look for damage in checkpoints")
    add_files(check, "paths", nargs="+")
    new = add_command("new", help="write a class that runs, with its YAML and its test")
    new.add_argument("kind", choices=list(KINDS))
    new.add_argument("name")
    add_folder(new, "--output")


def add_command_of(add_command: AddCommand, parser: CommandParser) -> None:
    """Add a command with a parser of its own, such as `compare`."""
    command = add_command(parser.prog.split()[-1], help=parser.description)
    for option in vars(parser.get_defaults()):
        if option == "names":
            command.add_argument(option, nargs="*", choices=experiment_names())
        elif option == "runs":
            add_folder(command, option)
        elif option == "output":
            add_folder(command, f"--{option}")
        else:
            nargs = "*" if option == "methods" else None
            command.add_argument(f"--{option}", choices=choices_of(option), nargs=nargs)


def experiment_names() -> list[str]:
    """Return the names of the experiments of papers, such as `feded/table1`."""
    names: list[str] = []
    for name in configs.config_names():
        if name.count("/") == 2:
            names.append(name.removeprefix("papers/"))
    return names


def choices_of(option: str) -> list[str] | None:
    """Return the values of an option of `compare`, `reproduce` or `report`. None means any value."""
    if option == "config":
        return configs.config_names()
    if option in METHODS:
        return list(printed_names().values())
    return None


def run(argv: list[str], parsers: Sequence[CommandParser] = ()) -> None:
    """Print the script.

    Args:
        argv: The shell.
        parsers: The parsers of further commands.

    Raises:
        ValueError: The shell is none of `SHELLS`.
        ModuleNotFoundError: The extra is not installed.
    """
    shell = argv[0] if argv else ""
    if shell not in SHELLS:
        raise ValueError(f"--print_shtab must be one of {', '.join(SHELLS)}, got {shell or 'nothing'}")
    try:
        import shtab  # noqa: PLC0415 - an extra
    except ModuleNotFoundError:
        raise ModuleNotFoundError("--print_shtab needs shtab: pip install 'fl_lightning[shtab]'") from None
    script = shtab.complete(whole_parser(parsers), shell)
    if shell == "bash":
        script += BASH_BY_LEVEL
    if shell == "zsh":
        script = by_level_in_zsh(script)
    print(script)


def by_level_in_zsh(script: str) -> str:
    """Return shtab's script for zsh with the function that completes options by level, which its end then calls."""
    beginning, end, tail = script.rpartition(ZSH_END)
    if not end:
        return script
    return beginning + ZSH_BY_LEVEL + end + tail.replace("_shtab_fl_lightning", "_fl_lightning_by_level")
