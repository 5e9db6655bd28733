"""`fl-lightning`: entry point of the command line, which prints errors as one sentence."""

import os
import re
import select
import shutil
import signal
import sys
import textwrap
import threading
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from fl_lightning.cli.output import any_encoding

PROG = "fl-lightning"
HELP = Path(__file__).with_name("cli") / "help.txt"
RUN_HELP = HELP.with_name("help_fit.txt")
RUNS = ("fit", "validate", "test", "predict")
"""Commands that run a federation."""

ASKS_HELP = ("-h", "--help")
ASKS_ALL_OPTIONS = (["-h", "all"], ["--help", "all"])
"""Words after a command that runs a federation, by which it shows all of its options."""

SECOND_COLUMN = re.compile(r"(?<=\S) {2,}(?=\S)")
LEAST_COLUMN = 30
"""Characters that the second column of a help text needs beside the first."""

COMMANDS = {
    "methods": "cli.methods",
    "new": "cli.new",
    "configs": "cli.configs",
    "check": "cli.check",
    "split": "cli.split",
    "partition": "cli.partition",
    "compare": "experiments.compare",
    "reproduce": "experiments.reproduce",
    "report": "cli.report",
    "--print_shtab": "cli.completion",
}
"""Modules, slow to import, that run the commands besides LightningCLI's."""

WITHOUT_HELP = ("check", "split")
"""Commands without a parser of their own, which show the help of all commands."""

COMPLETED = ("compare", "reproduce", "report")
"""Commands whose own parsers tell `--print_shtab` their options."""


def main(args: list[str] | None = None) -> None:
    """Run a command.

    Args:
        args: Arguments of the command line. None: those of the process.

    Raises:
        SystemExit: The command fails. The code is 2 for a wrong option, 1 for what a run cannot do, 130 after Ctrl-C.
    """
    try:
        run_and_flush(args)
    except BrokenPipeError:
        if not reader_is_gone():
            raise
        # A program that SIGPIPE ends has this code.
        sys.exit(141)


def run_and_flush(args: list[str] | None) -> None:
    """Run a command, with the arguments of `main`, and flush its output however it ends."""
    try:
        with any_encoding():
            run_command(args)
    finally:
        # A program that was started with its output closed has no stdout.
        if sys.stdout is not None:
            sys.stdout.flush()


def reader_is_gone() -> bool:
    """Return True if nobody reads the output any more (`| head`), and throw away the rest of the output then."""
    try:
        out = sys.stdout.fileno()
    except (OSError, ValueError):
        # The output is no file.
        return False
    poll = select.poll()
    poll.register(out, select.POLLERR)
    gone = bool(poll.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out)
    return gone


def run_command(args: list[str] | None) -> None:
    """Run a command, with the arguments of `main`."""
    argv = sys.argv[1:] if args is None else args
    text = help_for(argv)
    if text is not None:
        print(fitted(text.read_text(encoding="utf-8")), end="")
        return
    if argv[0] == "--version":
        print(PROG, version("fl_lightning"))
        return
    if asks_all_options(argv):
        args = argv[:2]
    argv = split_option(argv)
    # As with `python -m`: the user's own classes lie in the working folder.
    sys.path.append(os.getcwd())
    handler = signal.getsignal(signal.SIGINT)
    try:
        if argv[0] in COMMANDS:
            run_module(argv[0], argv[1:])
        else:
            run_lightning_cli(args)
    except KeyboardInterrupt as stop:
        end_interrupted(stop)
    except BrokenPipeError:
        # As a rule this is the output's, which `main` looks at.
        raise
    except Exception as error:
        if os.environ.get("FL_LIGHTNING_DEBUG") or not is_the_users(error):
            raise
        end_failed(error)
    finally:
        sys.path.remove(os.getcwd())
        if threading.current_thread() is threading.main_thread():
            # Lightning ignores Ctrl-C once it has seen one.
            signal.signal(signal.SIGINT, handler)


def run_module(command: str, argv: list[str]) -> None:
    """Run a command that has a module of its own.

    Args:
        command: One of `COMMANDS`.
        argv: The words after the command.
    """
    module = import_module(f"fl_lightning.{COMMANDS[command]}")
    if command != "--print_shtab":
        module.run(argv)
        return
    parsers = [import_module(f"fl_lightning.{COMMANDS[name]}").command_parser() for name in COMPLETED]
    module.run(argv, parsers=parsers)


def run_lightning_cli(args: list[str] | None) -> None:
    """Run a command of LightningCLI, with the arguments of `main`."""
    from fl_lightning.cli.console import quiet_lightning  # noqa: PLC0415
    from fl_lightning.cli.main import FederatedCLI  # noqa: PLC0415

    with quiet_lightning():
        FederatedCLI(args)


def split_option(argv: list[str]) -> list[str]:
    """Split an option that stands for a command from its value.

    >>> split_option(["--print_shtab=bash"]), split_option(["fit", "--a=1"])
    (['--print_shtab', 'bash'], ['fit', '--a=1'])
    """
    name, is_option, value = argv[0].partition("=")
    if is_option and name in COMMANDS:
        return [name, value, *argv[1:]]
    return argv


def help_for(argv: list[str]) -> Path | None:
    """Return the file of the short help that a command asks for. None: it asks for no help, or for all options."""
    if not argv or argv[0] in ASKS_HELP:
        return HELP
    asks = any(flag in argv for flag in ASKS_HELP)
    if asks and argv[0] in WITHOUT_HELP:
        return HELP
    if asks and argv[0] in RUNS and not asks_all_options(argv):
        return RUN_HELP
    return None


def asks_all_options(argv: list[str]) -> bool:
    """Return True for a command such as `fit --help all`, which shows all options of a run."""
    return argv[0] in RUNS and argv[1:] in ASKS_ALL_OPTIONS


def fitted(text: str) -> str:
    """Break the lines of a help text that are too long for the terminal.

    Args:
        text: Lines, with two spaces or more before the second column of a line that has one.
    """
    columns = shutil.get_terminal_size().columns
    lines: list[str] = []
    for line in text.splitlines():
        if len(line) <= columns:
            lines.append(line)
        else:
            lines += broken(line, columns)
    return "\n".join(lines) + "\n"


def broken(line: str, columns: int) -> list[str]:
    """Break a line of a help text: the second column within itself if it has room, else below the first.

    Args:
        line: The line, longer than the terminal is wide.
        columns: Width of the terminal in characters.
    """
    first, *others = SECOND_COLUMN.split(line, maxsplit=1)
    second = others[0] if others else ""
    place = len(line) - len(second)
    if second and columns - place >= LEAST_COLUMN:
        return textwrap.wrap(second, columns, initial_indent=line[:place], subsequent_indent=" " * place)
    margin = " " * (len(first) - len(first.lstrip()))
    below = f"{margin}    "
    return [
        *textwrap.wrap(first.strip(), columns, initial_indent=margin, subsequent_indent=margin),
        *textwrap.wrap(second, columns, initial_indent=below, subsequent_indent=below),
    ]


def end_interrupted(stop: KeyboardInterrupt) -> NoReturn:
    """End the process after Ctrl-C. Of several processes of a run, rank 0 prints the sentence.

    Args:
        stop: The interrupt, which may hold a sentence.
    """
    is_of_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    rank = os.environ.get("RANK" if is_of_torchrun else "LOCAL_RANK")
    if int(rank or 0):
        sys.exit(130)
    fail(str(stop) or "interrupted", 130)


def end_failed(error: Exception) -> NoReturn:
    """End the process after an error of the user's input. It is printed unless another process of the run did.

    Args:
        error: The error.
    """
    if getattr(error, "reported", False):
        sys.exit(1)
    from fl_lightning.cli.errors import sentence_of  # noqa: PLC0415

    fail(sentence_of(error), 1, keep="\n")


def fail(sentence: str, code: int, keep: str = "") -> NoReturn:
    """Print the error as the last line, and end the process.

    Args:
        sentence: Sentence of the error.
        code: Exit code of the process.
        keep: Characters that stay, such as the ends of the lines of a list.
    """
    from fl_lightning.utils.text import printable  # noqa: PLC0415

    sys.stdout.flush()
    sys.stderr.write(f"{PROG}: error: {printable(sentence, keep)}\n")
    sys.exit(code)


def is_the_users(error: Exception) -> bool:
    """Return True if a check raised the error about the user's input. Another error is a bug, with its traceback."""
    from lightning_fabric.utilities.exceptions import MisconfigurationException  # noqa: PLC0415

    from fl_lightning.distributed import RemoteError  # noqa: PLC0415
    from fl_lightning.members.faults import FaultError  # noqa: PLC0415
    from fl_lightning.utils.tracebacks import raised_by_check  # noqa: PLC0415

    if isinstance(error, FaultError | RemoteError):
        return True
    kinds = ValueError | TypeError | OSError | RuntimeError | ModuleNotFoundError | MisconfigurationException
    return isinstance(error, kinds) and raised_by_check(error)


if __name__ == "__main__":
    main()
