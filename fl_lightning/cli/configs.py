"""`fl-lightning configs`: the configuration files that come with the package, which `-c` finds by name."""

import re
import shutil
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

from fl_lightning.cli.plain_parser import PlainParser
from fl_lightning.utils.suggestions import nearest
from fl_lightning.utils.text import printable

PROG = "fl-lightning configs"
PACKAGE = Path(__file__).parents[1]
PLACES = (PACKAGE / "configs", PACKAGE.parent / "configs")
HOME = next((folder for folder in PLACES if folder.is_dir()), PLACES[0])
"""Folder of the files: within the package once it is installed, beside it in a clone and in an unpacked sdist."""

SMALL_PREFIX = "experiment/digits_"
"""Beginning of the names of small experiments, one for each method."""


def config_names() -> list[str]:
    """Return the names of all files: folder and stem, such as `experiment/digits_fedntd`."""
    return sorted(path.relative_to(HOME).with_suffix("").as_posix() for path in HOME.rglob("*.yaml"))


def path_of(name: str) -> Path:
    """Return the path of the file that has a name."""
    return HOME / f"{name}.yaml"


def small_experiment(stem: str) -> list[str]:
    """Return the names of the files of a method's small experiment.

    It is a file of its own, or FedAvg's experiment with the method's file.

    >>> small_experiment("knfu"), small_experiment("moon")
    (['experiment/digits_knfu'], ['experiment/digits_fedavg', 'method/moon'])
    """
    own = f"{SMALL_PREFIX}{stem}"
    if own in config_names():
        return [own]
    return [f"{SMALL_PREFIX}fedavg", f"method/{stem}"]


def all_names() -> list[str]:
    """Return the names that `-c` finds: those of all files, and of the small experiments without a file."""
    files = config_names()
    methods = [name.removeprefix("method/") for name in files if name.startswith("method/")]
    small = [f"{SMALL_PREFIX}{stem}" for stem in methods]
    return sorted({*files, *small})


def locate(asked: str) -> list[Path]:
    """Find a configuration: the user's own file, or the files of the package that a name stands for.

    Args:
        asked: A path, with or without `.yaml`. For files of the package also the name
            (`experiment/digits_fedntd`) or the path in a clone.

    Returns:
        The paths of the files, in the order in which they are merged.

    Raises:
        ValueError: There is no such file.
    """
    for path in (Path(asked), Path(f"{asked}.yaml")):
        if path.is_file():
            return [path]
    return [path_of(name) for name in shipped(asked)]


def shipped(asked: str) -> list[str]:
    """Return the names of the files of the package that a name, or a path in a clone, stands for.

    It is one file, except for the small experiment of a method that has none of its own.

    Raises:
        ValueError: The package has no such file.

    >>> shipped("configs/experiment/digits_fedntd.yaml"), shipped("experiment/digits_moon")
    (['experiment/digits_fedntd'], ['experiment/digits_fedavg', 'method/moon'])
    """
    name = config_name(asked)
    known = config_names()
    if name in known:
        return [name]
    if name.startswith(SMALL_PREFIX):
        parts = small_experiment(name.removeprefix(SMALL_PREFIX))
        if set(parts) <= set(known):
            return parts
    stem = name.rpartition("/")[2]
    names = all_names()
    same_stem = [other for other in names if other.rpartition("/")[2] == stem]
    close = same_stem[0] if same_stem else nearest(name, names)
    suggested = "" if close is None else f"; the nearest is {close}"
    raise ValueError(
        f"there is no file {asked}, and no configuration of that name comes with the package{suggested}; "
        f"{PROG} lists all names"
    )


def config_name(asked: str) -> str:
    """Return the name of a file of the package, given the name or the path in a clone."""
    return asked.removeprefix("./").removeprefix("configs/").removesuffix(".yaml")


def title(name: str) -> str:
    """Return the first sentence of the comment that a file begins with."""
    lines = path_of(name).read_text(encoding="utf-8").splitlines()
    comment = takewhile(lambda line: line.startswith("#"), lines)
    text = " ".join(line.removeprefix("#").strip() for line in comment)
    return re.split(r"(?<=\.)\s", text)[0]


def copy(chosen: Sequence[str], folder: Path) -> None:
    """Copy files into their sub-folders of a folder.

    Args:
        chosen: Names of the files.
        folder: The folder, which is made if it does not exist.

    Raises:
        FileExistsError: One of the files exists in the folder. Nothing is copied.
    """
    targets = {name: folder / f"{name}.yaml" for name in chosen}
    for target in targets.values():
        if target.exists():
            raise FileExistsError(
                f"{PROG} replaces no file, and {target} exists; name another folder or move the file away"
            )
    for name, target in targets.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path_of(name), target)
    files = "1 file" if len(targets) == 1 else f"{len(targets)} files"
    print(printable(f"{files} copied to {folder}"))


def run(argv: list[str]) -> None:
    """List, print or copy files.

    Args:
        argv: Options of the command.

    Raises:
        SystemExit: With 2 for a wrong option, with 0 after the help.
        ValueError: There is no such file.
    """
    description = "List the configuration files that come with the package, print or copy them."
    parser = PlainParser(PROG, description=description)
    parser.add_argument("name", nargs="?", help="print this one, or list those of this folder")
    parser.add_argument("--copy", metavar="DIR", type=Path, help="copy them, or the named one, into this folder")
    options = parser.parse_args(argv)
    listed = config_names()
    asked = (options.name or "").rstrip("/")
    if asked:
        listed = [name for name in listed if name.startswith(f"{asked}/")]
    chosen = listed or shipped(asked)
    if options.copy:
        copy(chosen, options.copy)
    elif listed:
        width = max(len(name) for name in listed)
        for name in listed:
            print(f"{name:{width}}  {title(name)}")
    elif len(chosen) == 1:
        print(path_of(chosen[0]).read_text(encoding="utf-8"), end="")
    else:
        print(f"# {asked} is these files, merged in this order: -c {' -c '.join(chosen)}")
        for name in chosen:
            print(f"\n# --- {name}.yaml ---")
            print(path_of(name).read_text(encoding="utf-8"), end="")
