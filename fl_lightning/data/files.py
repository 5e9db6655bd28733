"""Fingerprints of files, which tell which samples the files hold without reading all of them."""

import hashlib
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PUBLISHED = "published"
"""Fingerprint of samples that the class and the other arguments name, wherever the samples lie."""

MOST_FILES = 1000
"""Number of files that are all read. Of more, or of larger ones, `NUM_READ` files are read at both ends."""

MOST_BYTES = 2**25
"""Bytes of files that are all read."""

NUM_READ = 64
"""Number of files that are read of a large folder, at even distances in the order of their names."""

END_BYTES = 2**16
"""Bytes that are read at each end of a file of a large folder."""


def files_digest(root: str | Path) -> str | None:
    """Return a digest of the names, sizes and contents of the files below a folder, or None without such a folder.

    The contents of a large folder count by some of its files. A file that cannot be read counts by its name.

    Args:
        root: The folder.
    """
    folder = Path(root).expanduser()
    if not folder.is_dir():
        return None
    sizes = sizes_below(folder)
    lines = [f"{name} {size}" for name, size in sizes.items()]
    digest = hashlib.sha256("\n".join(lines).encode())
    for content in contents(folder, sizes):
        digest.update(content)
    return f"sha256 {digest.hexdigest()[:12]}"


def sizes_below(folder: Path) -> dict[str, int]:
    """Return the sizes of all files below a folder by their names, in the order of the names. A lost link has none.

    Args:
        folder: The folder.
    """
    sizes: dict[str, int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent) / name
            size = -1
            with suppress(OSError):
                size = path.stat().st_size
            sizes[path.relative_to(folder).as_posix()] = size
    return dict(sorted(sizes.items()))


def contents(folder: Path, sizes: dict[str, int]) -> Iterator[bytes]:
    """Give the contents of the files below a folder: all of a small one, the ends of some files of a large one.

    Args:
        folder: The folder.
        sizes: Sizes of the files by name.
    """
    names = list(sizes)
    is_small = len(names) <= MOST_FILES and sum(sizes.values()) <= MOST_BYTES
    if not is_small:
        step = max(1, len(names) // NUM_READ)
        names = names[::step]
    for name in names:
        # A pipe or a device would not end.
        if not (folder / name).is_file():
            continue
        with suppress(OSError), (folder / name).open("rb") as file:
            if is_small:
                yield file.read()
                continue
            yield file.read(END_BYTES)
            file.seek(max(0, sizes[name] - END_BYTES))
            yield file.read(END_BYTES)
