"""Run folders `<root>/<stem>/<n>`, their checkpoints, and the checkpoint that `--ckpt_path` means."""

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from pytorch_lightning import Trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities import rank_zero_info, rank_zero_only

from fl_lightning.client.checkpoint_io import collect_orphans, is_below
from fl_lightning.federation.checkpoint import federated
from fl_lightning.federation.identity import Settings, differences, flat, is_free, is_plain
from fl_lightning.runs.loggers import RoundCSVLogger
from fl_lightning.utils.files import loaded, lock_path, read_saved, remove_parts

NUMBERED = re.compile(r"(\d+)(-.*)?")
"""Name of a run's folder: its number, seed and overrides."""

LONGEST_NAME = 100
"""Characters of what is added to the number."""

CLIENT = "client.ckpt"
DEFAULT_ROOT = "runs"
CHECKPOINTS = "checkpoints"
CONFIG = "config.yaml"
LAST = "last.ckpt"


def stem_of(configs: Sequence[str | Path]) -> str:
    """Name the runs of these configuration files, in any order: by the experiments, else by all files.

    >>> stem_of(["configs/trainer/gpu.yaml", "configs/experiment/digits_fedntd.yaml"])
    'digits_fedntd'
    >>> stem_of(["configs/method/fedntd.yaml", "configs/data/cifar10.yaml"]), stem_of([])
    ('cifar10+fedntd', 'fit')
    >>> stem_of(["runs/digits_fedntd/3-seed1/config.yaml"])
    'digits_fedntd'
    """
    paths = [Path(os.path.abspath(config)) for config in configs]
    # the configuration that an earlier run has written
    again = [path for path in paths if path.name == CONFIG and NUMBERED.fullmatch(path.parent.name)]
    chosen = again or [path for path in paths if path.parent.name == "experiment"] or paths
    return "+".join(sorted({path.parent.parent.name if again else path.stem for path in chosen})) or "fit"


def overrides_of(argv: Sequence[str]) -> str:
    """Name what the command line sets besides the files, without settings that are free, as a part of a folder's name.

    >>> overrides_of("fit -c a.yaml --seed_everything 3 --model.client.mu=0.1 --trainer.max_epochs 9".split())
    '-seed3-mu=0.1'
    """
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--") else [word])]
    parts = []
    for option, value in pairwise([*words, ""]):
        name = option.removeprefix("--")
        if not option.startswith("--") or name in ("config", "help") or is_free(name):
            continue
        short = name.removesuffix(".class_path").rpartition(".")[2]
        text = re.sub(r"[^\w.+]+", "_", value.rpartition(".")[2] if value.startswith("fl_lightning.") else value)
        parts.append(f"seed{text}" if name == "seed_everything" else f"{short}={text}")
    parts.sort(key=lambda part: not part.startswith("seed"))
    return "".join(f"-{part}" for part in parts)[:LONGEST_NAME].rstrip("-_=.")


def runs(parent: Path) -> dict[int, Path]:
    """Find the numbered folders in `parent`, by number, lowest first."""
    paths = parent.iterdir() if parent.is_dir() else ()
    numbers = {path: NUMBERED.fullmatch(path.name) for path in paths}
    return dict(sorted((int(match[1]), path) for path, match in numbers.items() if match))


def new_run(parent: Path, suffix: str = "") -> Path:
    """Make the folder of the next number (two runs at a time get two).

    Of a run's processes only the first writes; the others get `parent`.

    Args:
        parent: of the runs.
        suffix: of the folder's name.
    """
    if getattr(rank_zero_only, "rank", 0):
        return parent
    with locked(parent):
        run = parent / f"{max(runs(parent), default=-1) + 1}{suffix}"
        run.mkdir()
    return run


@contextmanager
def locked(folder: Path, refusal: str = "") -> Iterator[None]:
    """Make a folder, and keep it for this process within the block.

    Args:
        folder: to be locked.
        refusal: sentence for one that another process has; empty: its end is waited for.

    Raises:
        ValueError: with that sentence.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = lock_path(folder, wait=not refusal)
    except BlockingIOError:
        raise ValueError(refusal) from None
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def rounds_kept(run: Path) -> int:
    """Count the complete rounds of which a run's folder keeps something: in a checkpoint, else in its table."""
    for path in newest_first(run, "*.ckpt"):
        with suppress(ValueError, OSError, KeyError):  # client.ckpt is none of a federation, another may be damaged
            return first_round(path)
    with suppress(ValueError, OSError):
        return max(RoundCSVLogger(run).rows_on_disk(), default=-1) + 1
    return 0


def discard(run: Path) -> None:
    """Remove the folder of a run that keeps neither a checkpoint nor a round's row, and its parent if that is empty.

    What is on disk decides: the rounds may have been those of another process.
    """
    table = RoundCSVLogger(run).path
    empty = not table.is_file() or table.read_bytes().count(b"\n") < 2
    if getattr(rank_zero_only, "rank", 0) or not empty or any(run.glob(f"{CHECKPOINTS}/*.ckpt")):
        return
    shutil.rmtree(run, ignore_errors=True)
    with suppress(OSError):
        run.parent.rmdir()


def take(run: Path) -> int | None:
    """Lock a run's folder for this process, and collect what a killed one has left in it.

    Returns:
        A descriptor, to be closed at the end.

    Raises:
        ValueError: another process writes there, or a link in it leads out of it.
    """
    if getattr(rank_zero_only, "rank", 0):
        return None
    try:
        descriptor = lock_path(run)
    except BlockingIOError:
        raise ValueError(
            f"a run folder has one writer, and {run} is in use by another process; wait for its end, or start a new "
            f"run without --ckpt_path"
        ) from None
    if link := next((path for path in run.iterdir() if path.is_symlink() and not is_below(path, run)), None):
        if descriptor is not None:
            os.close(descriptor)
        raise ValueError(
            f"a run writes and deletes in its folder only, and {link} leads to {link.resolve()}; remove that link "
            f"(model.store.folder moves the clients' files elsewhere)"
        )
    remove_parts(run)
    collect_orphans(run / "clients", sorted((run / CHECKPOINTS).glob("*.ckpt")))
    return descriptor


def find_checkpoint(asked: str, parent: Path, config: Mapping[str, Any]) -> Path:
    """Find the file that `--ckpt_path` means: a path, or `last` or `best` of a run.

    The run is the newest of those in `parent` that were begun with the same fixed settings, else the newest. A `last`
    that cannot be read is replaced by the newest checkpoint of its run that can.

    Args:
        asked: `last`, `best` or a path.
        parent: of the runs.
        config: the parsed configuration.

    Raises:
        FileNotFoundError: naming what was looked for and where.
    """
    if asked not in ("last", "best"):
        path = Path(asked).expanduser()
        if not path.is_file():
            raise FileNotFoundError(
                f"--ckpt_path must be last, best or a checkpoint file, got {asked}, which does not exist"
            )
        return path
    settings = flat(config)
    newest = (newest_first(run, f"{asked}*.ckpt") for run in reversed(runs(parent).values()))
    per_run = [paths for paths in newest if paths]
    if not per_run:
        raise FileNotFoundError(
            f"--ckpt_path {asked} needs a run in {parent} with {CHECKPOINTS}/{asked}*.ckpt, and there is none; "
            f"leave --ckpt_path out to start a new run, or give the checkpoint's file"
        )
    known = ((paths[0], settings_in(paths[0])) for paths in per_run)
    same = (path for path, was in known if was is not None and not differences(was, settings))
    path = next(same, per_run[0][0])
    return path if asked == "best" else readable(path)


def newest_first(run: Path, pattern: str) -> list[Path]:
    """Checkpoints of a run, the one written last first."""
    files = filter(Path.is_file, (run / CHECKPOINTS).glob(pattern))
    return sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)


def settings_in(path: Path) -> Settings | None:
    """Read the fixed settings that a checkpoint's run was begun with, None where it cannot be read."""
    return (identity_in(path) or {}).get("config")


def identity_in(path: Path) -> dict[str, Settings] | None:
    """Read the settings of a checkpoint's run, as `RunIdentity.state_dict` gave them, None where it cannot be read."""
    if not path.is_file():  # a pipe would be waited for
        return None
    try:
        settings = loaded(path, mmap=True)["federated"]["settings"]
        return {part: {n: v for n, v in values.items() if is_plain(v)} for part, values in settings.items()}
    except Exception:
        return None


def readable(path: Path) -> Path:
    """Give the checkpoint, or where it cannot be read the newest of its run that can, and tell so.

    Raises:
        ValueError: none of them can be read.
    """
    others = [other for other in newest_first(path.parent.parent, "*.ckpt") if other.name != CLIENT and other != path]
    for candidate in (path, *others):
        try:
            first_round(candidate)
        except (ValueError, OSError) as error:
            problem = str(error)
        else:
            if candidate != path:
                rank_zero_info(f"{path} cannot be read; the run continues from {candidate}")
            return candidate
    raise ValueError(f"no checkpoint in {path.parent} can be read: {problem}")


def run_of(checkpoint: Path) -> Path | None:
    """Return the run folder that a checkpoint lies in, or None if it lies somewhere else."""
    run = checkpoint.resolve().parent.parent
    return run if checkpoint.resolve().parent.name == CHECKPOINTS and (run / CONFIG).is_file() else None


def first_round(path: Path) -> int:
    """Return the first round whose row a run that continues from this checkpoint will write.

    Raises:
        ValueError: the file is damaged, or no checkpoint of a federation.
    """
    checkpoint = read_saved(path, mmap=True)
    if "federated" not in checkpoint:
        raise ValueError(
            f"--ckpt_path must be a checkpoint of a federation, and {path} is another one; to start from its "
            f"weights set model.initial_weights"
        )
    unwritten = federated(checkpoint, str(path))["recorder"]["pending_round"]
    return int(checkpoint["global_step"] if unwritten is None else unwritten)


class LastCheckpoint(ModelCheckpoint):
    """Writes `last.ckpt` after every round.

    Args:
        dirpath: its folder.
    """

    def __init__(self, dirpath: str | Path) -> None:
        super().__init__(dirpath, Path(LAST).stem, save_on_train_epoch_end=True, enable_version_counter=False)


def run_folder(trainer: Trainer, dirpath: str | Path | None) -> Path | None:
    """Find the folder that a callback writes to: `dirpath`, else that of the Trainer's first logger, else none.

    To be called on all ranks.
    """
    if dirpath is not None:
        return Path(dirpath)
    folder = trainer.log_dir
    if not trainer.loggers or folder is None:
        return None
    logger = trainer.loggers[0]
    if getattr(logger, "log_dir", None) is not None:
        return Path(folder)
    # such a logger's folder is shared by its runs
    return Path(folder, *(str(part) for part in (logger.name, logger.version) if part is not None))


def disk_error(error: OSError, folder: Path) -> str:
    """Describe what is wrong with a file of a run's folder, by nothing where the error is about another file.

    >>> disk_error(OSError(28, "No space left on device", "runs/fit/0/metrics.csv"), Path("runs/fit/0"))[:67]
    'runs/fit/0/metrics.csv cannot be written (No space left on device);'
    """
    if error.errno is None or not isinstance(error.filename, str):
        return ""
    path = Path(error.filename)
    within = Path(folder).resolve()
    if not (path.resolve().is_relative_to(within) or within.is_relative_to(path.resolve())):
        return ""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return (
            f"{path} is gone ({error.strerror}): the run's folder was deleted or moved while it ran; leave it where "
            f"it is until the run ends"
        )
    return (
        f"{path} cannot be written ({error.strerror}); checkpoints that were written before are as they were: make "
        f"space, or give the run a folder that can be written, and continue with --ckpt_path last"
    )
