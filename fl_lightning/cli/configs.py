"""`fl-lightning configs`: the configuration files that come with the package, which `-c` finds by name."""

import re
import shutil
from itertools import takewhile
from pathlib import Path

from fl_lightning.cli.plain_parser import PlainParser
from fl_lightning.utils.suggestions import nearest
from fl_lightning.utils.text import printable

PROG = "fl-lightning configs"
PACKAGE = Path(__file__).parents[1]
HOME = next((home for home in (PACKAGE / "configs", PACKAGE.parent / "configs") if home.is_dir()), PACKAGE / "configs")
"""Folder of the files: within the package once it is installed, beside it in a clone and in an unpacked sdist."""


def names() -> list[str]:
    """Return the names of all files: folder and stem, such as `experiment/digits_fedntd`."""
    return sorted(path.relative_to(HOME).with_suffix("").as_posix() for path in HOME.rglob("*.yaml"))


def small_experiment(stem: str) -> list[str]:
    """Name the files of a method's small experiment: its own where there is one, else FedAvg's with the method's.

    >>> small_experiment("knfu"), small_experiment("moon")
    (['experiment/digits_knfu'], ['experiment/digits_fedavg', 'method/moon'])
    """
    own = f"experiment/digits_{stem}"
    return [own] if own in names() else ["experiment/digits_fedavg", f"method/{stem}"]


def locate(asked: str) -> Path:
    """Find a configuration file: the user's own, else the package's of that name, where `.yaml` may be left out.

    Args:
        asked: a path; for the package's files also a name (`experiment/digits_fedntd`) or the path in a clone.

    Raises:
        ValueError: there is none.
    """
    for path in (Path(asked), Path(f"{asked}.yaml")):
        if path.is_file():
            return path
    return shipped(asked)


def shipped(asked: str) -> Path:
    """Find a file of the package by its name, or by its path in a clone.

    Raises:
        ValueError: there is none.
    """
    name = asked.removeprefix("./").removeprefix("configs/").removesuffix(".yaml")
    if name in names():
        return HOME / f"{name}.yaml"
    stem = name.rpartition("/")[2]
    same_stem = [known for known in names() if known.rpartition("/")[2] == stem]
    close = same_stem[0] if same_stem else nearest(name, names())
    near = "" if close is None else f"; the nearest is {close}"
    raise ValueError(
        f"there is no file {asked}, and no configuration of that name comes with the package{near}; "
        f"{PROG} lists all names"
    )


def title(name: str) -> str:
    """Return the first sentence of the comment with which a file begins."""
    lines = (HOME / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
    comment = " ".join(line.removeprefix("#").strip() for line in takewhile(lambda line: line[:1] == "#", lines))
    return re.split(r"(?<=\.)\s", comment)[0]


def copy(chosen: list[str], folder: Path) -> None:
    """Copy files into their sub-folders of `folder`.

    Raises:
        FileExistsError: one of them is there already; nothing is copied then.
    """
    targets = {name: folder / f"{name}.yaml" for name in chosen}
    if there := [str(path) for path in targets.values() if path.exists()]:
        raise FileExistsError(f"{PROG} replaces no file, and {there[0]} exists; name another folder or move it away")
    for name, path in targets.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(HOME / f"{name}.yaml", path)
    print(printable(f"{len(targets)} file{'s' * (len(targets) != 1)} copied to {folder}"))


def run(argv: list[str]) -> None:
    """List, print or copy files.

    Args:
        argv: options of the command.

    Raises:
        SystemExit: with 2 for a wrong option, 0 after the help.
        ValueError: there is no such file.
    """
    described = "List the configuration files that come with the package, print or copy them."
    parser = PlainParser(PROG, description=described)
    parser.add_argument("name", nargs="?", help="print this one, or list those of this folder")
    parser.add_argument("--copy", metavar="DIR", type=Path, help="copy them, or the named one, into this folder")
    options = parser.parse_args(argv)
    asked = options.name or ""
    of_folder = [name for name in names() if not asked or name.startswith(f"{asked.rstrip('/')}/")]
    chosen = of_folder or [shipped(asked).relative_to(HOME).with_suffix("").as_posix()]
    if options.copy:
        copy(chosen, options.copy)
    elif of_folder:
        width = max(map(len, chosen))
        print("\n".join(f"{name:{width}}  {title(name)}" for name in chosen))
    else:
        print((HOME / f"{chosen[0]}.yaml").read_text(encoding="utf-8"), end="")
