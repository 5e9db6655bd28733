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
        args: in place of those of the process.

    Raises:
        SystemExit: with 2 for a wrong option, 1 for what a run cannot do, 130 after Ctrl-C.
    """
    try:
        try:
            with any_encoding():
                run_command(args)
        finally:
            if sys.stdout is not None:  # as in a program that was started with its output closed
                sys.stdout.flush()
    except BrokenPipeError:
        if not reader_is_gone():
            raise
        sys.exit(141)  # as of a program that SIGPIPE ends


def reader_is_gone() -> bool:
    """Tell whether nobody reads the output any more (`| head`), and throw away what is left of it then."""
    try:
        out = sys.stdout.fileno()
    except (OSError, ValueError):  # no file
        return False
    poll = select.poll()
    poll.register(out, select.POLLERR)
    gone = bool(poll.poll(0))
    if gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out)
    return gone


def run_command(args: list[str] | None) -> None:
    """Run a command, as `main`."""
    argv = sys.argv[1:] if args is None else args
    if text := help_for(argv):
        print(fitted(text.read_text(encoding="utf-8")), end="")
        return
    if argv[0] in RUNS and argv[1:] in ([flag, "all"] for flag in ASKS_HELP):
        args = argv = argv[:2]
    if argv[0] == "--version":
        print(PROG, version("fl_lightning"))
        return
    argv = split_option(argv)
    sys.path.append(os.getcwd())  # as with `python -m`: the user's own classes lie in the working folder
    handler = signal.getsignal(signal.SIGINT)
    try:
        if argv[0] in COMMANDS:
            names = [argv[0], *(COMPLETED if argv[0] == "--print_shtab" else ())]
            asked, *others = (import_module(f"fl_lightning.{COMMANDS[name]}") for name in names)
            asked.run(argv[1:], *(module.command_parser() for module in others))
            return
        from fl_lightning.cli.console import quiet_lightning  # noqa: PLC0415
        from fl_lightning.cli.main import FederatedCLI  # noqa: PLC0415

        with quiet_lightning():
            FederatedCLI(args)
    except KeyboardInterrupt as stop:
        is_of_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        rank = os.environ.get("RANK" if is_of_torchrun else "LOCAL_RANK")
        if int(rank or 0):  # rank 0 says it
            sys.exit(130)
        fail(str(stop) or "interrupted", 130)
    except BrokenPipeError:  # of the output, as a rule
        raise
    except Exception as error:
        if os.environ.get("FL_LIGHTNING_DEBUG") or not is_the_users(error):
            raise
        if getattr(error, "reported", False):  # by another process of the run
            sys.exit(1)
        from fl_lightning.cli.errors import sentence_of  # noqa: PLC0415

        fail(sentence_of(error), 1, keep="\n")
    finally:
        sys.path.remove(os.getcwd())
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)  # Lightning ignores Ctrl-C once it has seen one


def split_option(argv: list[str]) -> list[str]:
    """Split an option that stands for a command from its value.

    >>> split_option(["--print_shtab=bash"]), split_option(["fit", "--a=1"])
    (['--print_shtab', 'bash'], ['fit', '--a=1'])
    """
    name, is_option, value = argv[0].partition("=")
    return [name, value, *argv[1:]] if is_option and name in COMMANDS else argv


def help_for(argv: list[str]) -> Path | None:
    """Choose the short text that a command asks for by `--help`, None for all else, `--help all` among it."""
    if not argv or argv[0] in ASKS_HELP:
        return HELP
    asks = not set(ASKS_HELP).isdisjoint(argv)
    if asks and argv[0] in WITHOUT_HELP:
        return HELP
    return RUN_HELP if asks and argv[0] in RUNS and argv[2:] != ["all"] else None


def fitted(text: str) -> str:
    """Break the lines of a help text that are too long for the terminal, each column within itself where it has room.

    Args:
        text: with two spaces or more before the second column.
    """
    columns = shutil.get_terminal_size().columns
    lines = list[str]()
    for line in text.splitlines():
        first, second = SECOND_COLUMN.split(line, 1) if SECOND_COLUMN.search(line) else (line, "")
        margin = " " * (len(first) - len(first.lstrip()))
        place = len(line) - len(second)
        if len(line) <= columns:
            lines.append(line)
        elif second and columns - place >= LEAST_COLUMN:
            lines += textwrap.wrap(second, columns, initial_indent=line[:place], subsequent_indent=" " * place)
        else:
            lines += textwrap.wrap(first.strip(), columns, initial_indent=margin, subsequent_indent=margin)
            below = f"{margin}    "
            lines += textwrap.wrap(second, columns, initial_indent=below, subsequent_indent=below)
    return "\n".join(lines) + "\n"


def fail(sentence: str, code: int, keep: str = "") -> NoReturn:
    """Print the error as the last line, and end the process.

    Args:
        sentence: of the error.
        code: of the process.
        keep: letters that stay, such as the ends of the lines of a list.
    """
    from fl_lightning.utils.text import printable  # noqa: PLC0415

    sys.stdout.flush()
    sys.stderr.write(f"{PROG}: error: {printable(sentence, keep)}\n")
    sys.exit(code)


def is_the_users(error: Exception) -> bool:
    """Tell whether a check raised the error about the user's input: anything else is a bug with its traceback."""
    from lightning_fabric.utilities.exceptions import MisconfigurationException  # noqa: PLC0415

    from fl_lightning.distributed import RemoteError  # noqa: PLC0415
    from fl_lightning.members.faults import FaultError  # noqa: PLC0415
    from fl_lightning.utils.tracebacks import raised_by_check  # noqa: PLC0415

    kinds = ValueError | TypeError | OSError | RuntimeError | ModuleNotFoundError | MisconfigurationException
    return isinstance(error, FaultError | RemoteError) or (isinstance(error, kinds) and raised_by_check(error))


if __name__ == "__main__":
    main()
