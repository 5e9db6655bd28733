"""Run folders `<root>/<stem>/<n>`, their checkpoints, and the checkpoint that `--ckpt_path` means."""

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities import rank_zero_info, rank_zero_only

from fl_lightning.client.checkpoint_io import collect_orphans, is_below
from fl_lightning.federation.checkpoint import federated
from fl_lightning.federation.configured import flat
from fl_lightning.federation.differences import differences
from fl_lightning.federation.effects import belongs_to_any, is_fixed
from fl_lightning.federation.values import Settings, is_plain
from fl_lightning.runs.checkpoints import CHECKPOINTS, INDEX, indexed
from fl_lightning.runs.loggers import RoundCSVLogger
from fl_lightning.utils.files import loaded, lock_path, read_saved, remove_parts, write_file
from fl_lightning.utils.round_table import reading

NUMBERED = re.compile(r"(\d+)(-.*)?")
"""Name of a run's folder: its number, seed and overrides."""

LONGEST_NAME = 100
"""Largest number of characters of the seed and the overrides in a folder's name."""

CLIENT = "client.ckpt"
DEFAULT_ROOT = "runs"
CONFIG = "config.yaml"
IDENTITY = "identity.json"
"""Name of the file with the identity of a run whose checkpoints were removed."""

Keep = Literal["none", "last", "all"]
"""Checkpoints that stay when a run of a grid is complete."""

LAST = "last.ckpt"

BEST = "best.ckpt"
"""Name of the checkpoint of the best round on the validation split, which an experiment tests once a run is done."""

WITHOUT_USE = ("best-on-test.ckpt", CLIENT, "client-best.ckpt", "client-best-on-test.ckpt")
"""Names of the checkpoints of a run that more rounds of an experiment do not need."""


def stem_of(configs: Sequence[str | Path]) -> str:
    """Name the runs of these configuration files, in any order: by experiments and methods, else by all files.

    The configuration that an earlier run has written names the runs as that run.

    >>> stem_of(["configs/trainer/gpu.yaml", "configs/experiment/digits_fedntd.yaml"])
    'digits_fedntd'
    >>> stem_of(["configs/experiment/digits_fedavg.yaml", "configs/method/fedprox.yaml"])
    'digits_fedavg+fedprox'
    >>> stem_of(["configs/method/fedntd.yaml", "configs/data/cifar10.yaml"]), stem_of([])
    ('cifar10+fedntd', 'fit')
    >>> stem_of(["runs/digits_fedntd/3-seed1/config.yaml"])
    'digits_fedntd'
    """
    paths = [Path(os.path.abspath(config)) for config in configs]
    written = [path for path in paths if path.name == CONFIG and NUMBERED.fullmatch(path.parent.name)]
    if written:
        names = {path.parent.parent.name for path in written}
    else:
        experiments = [path for path in paths if path.parent.name == "experiment"]
        methods = [path for path in paths if path.parent.name == "method"]
        chosen = [*experiments, *methods] if experiments else paths
        names = {path.stem for path in chosen}
    return "+".join(sorted(names)) or "fit"


def parent_of(configs: Sequence[str | Path], root: str | Path | None, *, begins: bool) -> Path:
    """Return the folder of the runs of these configuration files.

    A run that is continued or evaluated lies where its file says: beside the folder of the cells for a cell of an
    experiment, `cells/NAME.yaml`, and around the file for the configuration that a run has written. This holds in any
    working folder. A new run of such a file is none of the experiment's.

    Args:
        configs: The configuration files.
        root: Folder of all runs. None means `DEFAULT_ROOT`.
        begins: Whether a new run begins. Otherwise a run is continued or evaluated.
    """
    parent = Path(root or DEFAULT_ROOT) / stem_of(configs)
    if begins:
        return parent
    homes = {home for home in map(home_of, configs) if home is not None}
    if len(homes) != 1:
        return parent
    (home,) = homes
    is_cell_alone = len(configs) == 1 and root is None and Path(configs[0]).name != CONFIG
    if parent.is_dir() and not is_cell_alone:
        # A new run of these files has been begun here.
        return parent
    return home


def home_of(config: str | Path) -> Path | None:
    """Return the folder of the runs that a file is known to belong to, None for any other file.

    Args:
        config: The path of a configuration file.
    """
    path = Path(os.path.abspath(config))
    runs_of_cell = path.parent.parent / "runs" / path.stem
    if path.parent.name == "cells" and runs_of_cell.is_dir():
        return runs_of_cell
    if path.name == CONFIG and NUMBERED.fullmatch(path.parent.name) and path.is_file():
        return path.parent.parent
    return None


def overrides_of(argv: Sequence[str]) -> str:
    """Name what the command line sets besides the files, without settings that are free, as a part of a folder's name.

    Args:
        argv: Words of the command line.

    >>> overrides_of("fit -c a.yaml --seed_everything 3 --model.client.mu=0.1 --trainer.max_epochs 9".split())
    '-seed3-mu=0.1'
    """
    words: list[str] = []
    for word in argv:
        if word.startswith("--"):
            words += word.split("=", 1)
        else:
            words.append(word)
    parts = []
    for option, value in pairwise([*words, ""]):
        name = option.removeprefix("--")
        if not option.startswith("--") or name in ("config", "from", "help"):
            continue
        setting = name.replace(".init_args", "").removesuffix(".class_path")
        if not is_fixed(setting):
            continue
        _, _, short = setting.rpartition(".")
        text = re.sub(r"[^\w.+]+", "_", short_class(value))
        parts.append(f"seed{text}" if name == "seed_everything" else f"{short}={text}")
    parts.sort(key=lambda part: not part.startswith("seed"))
    suffix = "".join(f"-{part}" for part in parts)
    return suffix[:LONGEST_NAME].rstrip("-_=.")


def short_class(value: str) -> str:
    """Return the name of a class of this package without its module, and any other value as it is."""
    if not value.startswith("fl_lightning."):
        return value
    return value.rpartition(".")[2]


def runs(parent: Path) -> dict[int, Path]:
    """Find the numbered folders in `parent`, by number, lowest first."""
    if not parent.is_dir():
        return {}
    found: list[tuple[int, Path]] = []
    for path in parent.iterdir():
        match = NUMBERED.fullmatch(path.name)
        if match:
            found.append((int(match[1]), path))
    return dict(sorted(found))


def new_run(parent: Path, suffix: str = "") -> Path:
    """Make the folder of the next number. Two runs that start at once get two numbers.

    Only the first of a run's processes makes a folder. The others get `parent`.

    Args:
        parent: Folder of the runs.
        suffix: Text after the number in the folder's name.
    """
    if getattr(rank_zero_only, "rank", 0):
        return parent
    with locked(parent):
        number = max(runs(parent), default=-1) + 1
        run = parent / f"{number}{suffix}"
        run.mkdir()
    return run


@contextmanager
def locked(folder: Path, refusal: str = "") -> Iterator[None]:
    """Make a folder, and keep it for this process within the block.

    Args:
        folder: Folder to lock.
        refusal: Sentence of the error if another process has the folder. An empty sentence waits for the other process.

    Raises:
        ValueError: Another process has the folder, and `refusal` is not empty.
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
        # client.ckpt is no checkpoint of a federation, and another file may be damaged.
        with suppress(ValueError, OSError, KeyError):
            return first_round(path)
    with suppress(ValueError, OSError):
        return max(RoundCSVLogger(run).rows_on_disk(), default=-1) + 1
    return 0


def discard(run: Path) -> None:
    """Remove the folder of a run that keeps neither a checkpoint nor a round's row, and its parent if that is empty.

    The files on disk decide, because another process may have trained the rounds.
    """
    table = RoundCSVLogger(run).path
    has_rows = table.is_file() and table.read_bytes().count(b"\n") >= 2
    if getattr(rank_zero_only, "rank", 0) or has_rows or any(run.glob(f"{CHECKPOINTS}/*.ckpt")):
        return
    shutil.rmtree(run, ignore_errors=True)
    with suppress(OSError):
        run.parent.rmdir()


def take(run: Path) -> int | None:
    """Lock a run's folder for this process, and collect what a killed process has left in it.

    Returns:
        A descriptor that the caller closes at the end. None is a folder that this process does not lock.

    Raises:
        ValueError: Another process writes there, or a link in the folder leads out of it.
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
    link = link_out_of(run)
    if link is not None:
        if descriptor is not None:
            os.close(descriptor)
        raise ValueError(
            f"a run writes and deletes in its folder only, and {link} leads to {link.resolve()}; remove that link "
            f"(model.store.folder moves the clients' files elsewhere)"
        )
    remove_parts(run)
    checkpoints = sorted((run / CHECKPOINTS).glob("*.ckpt"))
    collect_orphans(run / "clients", checkpoints)
    return descriptor


def link_out_of(folder: Path) -> Path | None:
    """Return the first link in a folder that leads out of it, or None without such a link."""
    for path in folder.iterdir():
        if path.is_symlink() and not is_below(path, folder):
            return path
    return None


def find_checkpoint(asked: str, parent: Path, config: Mapping[str, Any], allowed: Sequence[str] = ()) -> Path:
    """Find the file that `--ckpt_path` means: a path, or `last` or `best` of a run.

    The run is the newest run in `parent` that was begun with the same fixed settings, else the newest one whose
    settings differ only as allowed, else the newest run. The newest readable checkpoint of the run replaces a `last`
    that cannot be read.

    Args:
        asked: `last`, `best` or a path.
        parent: Folder of the runs.
        config: The parsed configuration.
        allowed: Names of settings that may differ, each with all settings below it.

    Raises:
        FileNotFoundError: There is no such file, or no run with such a checkpoint.
        ValueError: No checkpoint of the run can be read.
    """
    if asked not in ("last", "best"):
        path = Path(asked).expanduser()
        if not path.is_file():
            raise FileNotFoundError(
                f"--ckpt_path must be last, best or a checkpoint file, got {asked}, which does not exist"
            )
        return path
    candidates: list[Path] = []
    for run in reversed(runs(parent).values()):
        found = checkpoint_of(run, asked)
        if found is not None:
            candidates.append(found)
    if not candidates:
        raise FileNotFoundError(
            f"--ckpt_path {asked} needs a run in {parent} with {CHECKPOINTS}/{asked}*.ckpt, or another checkpoint that "
            f"its {INDEX} names, and there is none; "
            f"leave --ckpt_path out to start a new run, or give the checkpoint's file (compare and reproduce keep "
            f"checkpoints of complete runs with --keep_checkpoints)"
        )
    settings = flat(config)
    found = of_same_settings(candidates, settings)
    if found is None and allowed:
        found = of_same_settings(candidates, settings, allowed)
    path = found or candidates[0]
    return path if asked == "best" else readable(path)


def of_same_settings(checkpoints: Iterable[Path], settings: Settings, allowed: Sequence[str] = ()) -> Path | None:
    """Return the first checkpoint whose run was begun with these fixed settings, or None without such a checkpoint.

    Args:
        checkpoints: Checkpoints, read one after the other.
        settings: Fixed settings by name.
        allowed: Names of settings that may differ.
    """
    for path in checkpoints:
        identity = identity_in(path)
        if identity is None or not identity.get("config"):
            continue
        is_complete = "code" in identity
        changed = differences(identity["config"], settings, only_shared=not is_complete)
        names = [difference.name for difference in changed if not belongs_to_any(difference.name, allowed)]
        if not any(map(is_fixed, names)):
            return path
    return None


def newest_first(run: Path, pattern: str) -> list[Path]:
    """Return the checkpoints of a run whose names match a pattern, the newest first."""
    files = filter(Path.is_file, (run / CHECKPOINTS).glob(pattern))
    return sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)


def identity_in(path: Path) -> dict[str, Settings] | None:
    """Read the settings of a run from its checkpoint, as `RunIdentity.state_dict` gave them, or None if unreadable."""
    # Opening a pipe would wait for its writer.
    if not path.is_file():
        return None
    try:
        settings = loaded(path, mmap=True)["federated"]["settings"]
        identity: dict[str, Settings] = {}
        for part, values in settings.items():
            identity[part] = {name: value for name, value in values.items() if is_plain(value)}
        return identity
    except Exception:
        return None


def identity_of(run: Path) -> dict[str, Settings]:
    """Return the identity of a run from its newest readable checkpoint, else from what is kept of it, else empty."""
    for path in newest_first(run, "*.ckpt"):
        identity = identity_in(path) if path.name != CLIENT else None
        if identity:
            return identity
    kept = run / IDENTITY
    if not kept.is_file():
        return {}
    with reading(kept, "the settings by which a run is known, and cannot be read"):
        return dict(json.loads(kept.read_text(encoding="utf-8")))


def drop_checkpoints(run: Path, keep: Keep) -> None:
    """Remove the checkpoints of a complete run that nobody asked for. The identity of the run stays.

    Args:
        run: Folder of the run.
        keep: What stays: nothing, the last round's checkpoint, with which more rounds continue the run, or all. With
            the last one stays the best one on the validation split, because it may still be the best after more
            rounds. All stay if no checkpoint tells the identity of the run.
    """
    if keep == "all":
        return
    identity = identity_of(run)
    if not identity:
        return
    names = [*WITHOUT_USE]
    if keep == "none":
        write_file(run / IDENTITY, json.dumps(identity, indent=1) + "\n")
        names += [BEST, LAST]
    for name in names:
        (run / CHECKPOINTS / name).unlink(missing_ok=True)
    # What the clients keep between rounds is a part of the checkpoints.
    left = sorted((run / CHECKPOINTS).glob("*.ckpt"))
    if left:
        collect_orphans(run / "clients", left)
    else:
        shutil.rmtree(run / "clients", ignore_errors=True)


def readable(path: Path) -> Path:
    """Return the checkpoint, or the newest readable checkpoint of its run with a message if it cannot be read.

    Raises:
        ValueError: No checkpoint of the run can be read.
    """
    found = newest_first(path.parent.parent, "*.ckpt") if path.parent.name == CHECKPOINTS else []
    others = [other for other in found if other.name != CLIENT and other != path]
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


def run_of(checkpoint: Path, parent: Path) -> Path | None:
    """Return the folder of the run that a checkpoint is of, or None if no run is known to have written it.

    Args:
        checkpoint: The checkpoint.
        parent: Folder of runs, whose indexes may name a checkpoint that lies elsewhere.
    """
    path = checkpoint.resolve()
    run = path.parent.parent
    if path.parent.name == CHECKPOINTS and (run / CONFIG).is_file():
        return run
    for run in reversed(runs(parent).values()):
        for kind in ("last", "best"):
            named = indexed(run, kind)
            if named is not None and named.resolve() == path:
                return run
    return None


def checkpoint_of(run: Path, kind: str) -> Path | None:
    """Return the last or the best checkpoint of a run, in its folder or where its index says. None if there is none.

    Args:
        run: Folder of the run.
        kind: `last` or `best`.
    """
    own = newest_first(run, f"{kind}*.ckpt")
    return own[0] if own else indexed(run, kind)


def first_round(path: Path) -> int:
    """Return the first round whose row a run that continues from this checkpoint will write.

    Raises:
        ValueError: The file is damaged, or is no checkpoint of a federation.
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
        dirpath: Folder of the file.
    """

    def __init__(self, dirpath: str | Path) -> None:
        super().__init__(
            dirpath=dirpath,
            filename=Path(LAST).stem,
            save_on_train_epoch_end=True,
            enable_version_counter=False,
        )


def disk_error(error: OSError, folder: Path) -> str:
    """Describe what is wrong with a file of a run's folder. The text is empty if the error is about another file.

    Args:
        error: Error of the operating system.
        folder: Folder of the run.

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
