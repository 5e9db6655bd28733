"""`fl-lightning`: entry point of the command line, which prints errors as one sentence."""

import os
import select
import signal
import sys
import threading
from importlib import import_module
from importlib.metadata import version
from typing import Any, NoReturn

PROG = "fl-lightning"
HELP = """\
usage: fl-lightning {fit,validate,test,predict} [-c CONFIG ...] [--OPTION VALUE ...]
       fl-lightning methods [--output {md,csv,json}]
       fl-lightning configs [NAME] [--copy DIR]
       fl-lightning check PATH ...
       fl-lightning compare -c BASE --methods NAME ... --seeds SEED ... --output FOLDER [--set NAME=V1,V2 ...]
       fl-lightning figure [PAPER/NUMBER] [-c CONFIG ...] [--output FOLDER] [--format {png,svg,pdf} ...]
       fl-lightning report RUN ... [--output FOLDER] [--format {html,svg,png,pdf} ...]

Federated learning on PyTorch Lightning. One epoch of the Trainer is one communication round.

commands:
  fit        run the federation; continue one with --ckpt_path last
  validate   evaluate a checkpoint as it is evaluated every round (--ckpt_path best)
  test       evaluate a checkpoint on the test split
  predict    write the outputs of a checkpoint's model to predictions.pt
  methods    list all methods: what each sends, keeps and goes with (--output md, csv or json)
  configs    list the configuration files that come with the package, print one, or copy them
  compare    methods × seeds × settings: all runs, and their tables
  figure     a figure of one of the papers: runs what it needs on small data and draws it; without a name: list all
  report     one run or several as a page with tables and figures
  check      say whether checkpoints, or all of a folder and below, are as they were written

options of the commands that run a federation:
  -c CONFIG             a YAML file, or the name of one of the package's; several are merged, the later one wins
  --model.client NAME   what every client trains: FedAvg, FedProx, FedNTD or the path of any LightningModule
  --data.NAME VALUE     source, num_clients, partition, participation, batch_size, ...
  --trainer.NAME VALUE  of pytorch_lightning.Trainer; max_epochs is the number of rounds
  --print_config        print the merged configuration and stop
  --help                list every option of a command; --model.client.help NAME those of a class
  --version             print the version and stop
  --print_shtab SHELL   instead of a command: print the script with which bash, zsh or tcsh complete the options

examples:
  fl-lightning fit -c experiment/digits_fedntd
  fl-lightning fit --model.client FedNTD --model.client.beta 0.3 --trainer.max_epochs 20
  fl-lightning fit -c method/fedprox -c data/cifar10 -c trainer/gpu
  fl-lightning test -c experiment/digits_fedntd --ckpt_path last

A fit leaves runs/<config>/<n>/ with config.yaml, metrics.csv, checkpoints, pictures and TensorBoard events.
FL_LIGHTNING_DEBUG=1 shows the traceback of every error.
"""
COMMANDS = {
    "methods": "cli.methods",
    "configs": "cli.configs",
    "check": "cli.check",
    "compare": "cli.compare",
    "figure": "papers.command",
    "report": "cli.report",
    "--print_shtab": "cli.completion",
}
"""Modules, slow to import, that run the commands besides LightningCLI's."""

COMPLETED = ("compare", "figure", "report")
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
            command(args)
        finally:
            if sys.stdout is not None:  # as in a program that was started with its output closed
                sys.stdout.flush()
    except BrokenPipeError:
        if not reader_is_gone():
            raise
        sys.exit(141)  # as of a program that SIGPIPE ends


def reader_is_gone() -> bool:
    """True where nobody reads the output any more (`| head`); what is left of it is then thrown away."""
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


def command(args: list[str] | None) -> None:
    """Run a command, as `main`."""
    argv = sys.argv[1:] if args is None else args
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP, end="")
        return
    if argv[0] == "--version":
        print(PROG, version("fl_lightning"))
        return
    sys.path.append(os.getcwd())  # as with `python -m`: the user's own classes lie in the working folder
    handler = signal.getsignal(signal.SIGINT)
    try:
        if argv[0] in COMMANDS:
            parsers = [module_of(name).command_parser() for name in COMPLETED if argv[0] == "--print_shtab"]
            module_of(argv[0]).run(argv[1:], *parsers)
            return
        from fl_lightning.cli.console import quiet_lightning  # noqa: PLC0415
        from fl_lightning.cli.main import FederatedCLI  # noqa: PLC0415

        with quiet_lightning():
            FederatedCLI(args)
    except KeyboardInterrupt as stop:
        if int(os.environ.get("LOCAL_RANK") or 0):  # rank 0 says it
            sys.exit(130)
        fail(str(stop) or "interrupted", 130)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and reader_is_gone():
            sys.exit(141)
        if os.environ.get("FL_LIGHTNING_DEBUG") or not is_the_users(error):
            raise
        if getattr(error, "reported", False):  # by another process of the run
            sys.exit(1)
        from fl_lightning.cli.errors import one_line  # noqa: PLC0415

        fail(one_line(str(error)), 1)
    finally:
        sys.path.remove(os.getcwd())
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, handler)  # Lightning ignores Ctrl-C once it has seen one


def module_of(name: str) -> Any:
    """Import the module that runs a command."""
    return import_module(f"fl_lightning.{COMMANDS[name]}")


def fail(sentence: str, code: int) -> NoReturn:
    """Print the error as the last line, and end the process."""
    from fl_lightning.utils.text import printable  # noqa: PLC0415

    sys.stdout.flush()
    sys.stderr.write(f"{PROG}: error: {printable(sentence)}\n")
    sys.exit(code)


def is_the_users(error: Exception) -> bool:
    """True for an error that a check raised about the user's input; anything else is a bug and keeps its traceback."""
    from lightning_fabric.utilities.exceptions import MisconfigurationException  # noqa: PLC0415

    from fl_lightning.distributed import RemoteError  # noqa: PLC0415
    from fl_lightning.members.faults import FaultError  # noqa: PLC0415
    from fl_lightning.utils.tracebacks import raised_by_check  # noqa: PLC0415

    if isinstance(error, FaultError | RemoteError):
        return True
    if not isinstance(
        error, ValueError | TypeError | OSError | RuntimeError | ModuleNotFoundError | MisconfigurationException
    ):
        return False
    return raised_by_check(error)


if __name__ == "__main__":
    main()
