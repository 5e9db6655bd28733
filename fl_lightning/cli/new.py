"""`fl-lightning new`: writes a method, rule, partition, monitor or module that runs, with its YAML and its test."""

import argparse
import keyword
import re
import sys
from importlib.metadata import packages_distributions
from pathlib import Path
from string import Template

from fl_lightning.cli.plain_parser import PlainParser
from fl_lightning.utils.text import printable

PROG = "fl-lightning new"
HOME = Path(__file__).with_name("templates")
"""Folder of the templates."""

DIGITS = "fl-lightning fit -c experiment/digits_fedavg"
COMPARE = "fl-lightning compare -c experiment/digits_fedavg --seeds 0 1 2 --output comparisons/$stem --methods FedAvg"
KINDS = {
    "method": (f"{DIGITS} -c $stem.yaml", f"{COMPARE} $stem.yaml"),
    "rule": (f"{DIGITS} -c $stem.yaml", f"{COMPARE} FedAvg+$stem.yaml"),
    "partition": (f"{DIGITS} -c $stem.yaml", f"{DIGITS} -c $stem.yaml --data.partition.ratio 0.5"),
    "monitor": (f"{DIGITS} -c $stem.yaml", "fl-lightning report runs --output reports"),
    "module": ("fl-lightning fit -c $stem.yaml", "fl-lightning validate -c $stem.yaml --ckpt_path last"),
}
"""Two commands for each kind of class, besides its test."""


def run(argv: list[str]) -> None:
    """Write the files, and print the commands that run them.

    Args:
        argv: The options of the command.

    Raises:
        SystemExit: The exit status is 2 after a wrong option, 0 after the help.
        ValueError: The name cannot be that of a class.
        FileExistsError: One of the files exists already. Nothing is written then.
    """
    parser = PlainParser(
        PROG,
        description="Write a class that runs, its configuration and its test, and print the commands that run them.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("kind", choices=list(KINDS), help="what to write")
    parser.add_argument("name", help="of the class, such as FedLS")
    parser.add_argument("--output", type=Path, default=Path(), help="folder of the files")
    given = parser.parse_args(argv)
    texts = template_files(given.kind, given.name)
    paths = [given.output / name for name in texts]
    for path in paths:
        if path.exists():
            raise FileExistsError(f"{PROG} replaces no file, and {path} exists; take another name")
    given.output.mkdir(parents=True, exist_ok=True)
    for path, text in zip(paths, texts.values(), strict=True):
        path.write_text(text, encoding="utf-8")
    print(printable(f"{', '.join(map(str, paths))}; to run them in {given.output.resolve()}:"))
    first, second = KINDS[given.kind]
    for command in (first, "python -m pytest test_$stem.py", second):
        print(f"  {Template(command).substitute(stem=given.name.lower())}")


def template_files(kind: str, name: str) -> dict[str, str]:
    """Make the texts of the files, by the names of the files.

    Args:
        kind: What is written, a key of `KINDS`.
        name: Name of the class.

    Raises:
        ValueError: The name cannot be that of a class, or its file would hide an installed module.
    """
    if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII) or keyword.iskeyword(name):
        raise ValueError(f"the name of a class has letters, digits and _, and begins with a letter, got {name!r}")
    if name.islower():
        raise ValueError(f"a class begins with a capital, as its file has the name in lower case: {name.capitalize()}")
    stem = name.lower()
    if stem in sys.stdlib_module_names or stem in packages_distributions():
        raise ValueError(f"{stem}.py would hide the installed module {stem}, got {name}; take another name")
    templates = {
        f"{stem}.py": f"{kind}.py.txt",
        f"{stem}.yaml": f"{kind}.yaml.txt",
        f"test_{stem}.py": f"{kind}_test.py.txt",
    }
    texts: dict[str, str] = {}
    for file, template in templates.items():
        text = (HOME / template).read_text(encoding="utf-8")
        texts[file] = text.replace(f"New{kind.capitalize()}", name).replace(f"new_{kind}", stem)
    return texts
