"""The names and sizes of files, which tell which samples the files hold without reading the samples."""

import hashlib
import os
from pathlib import Path

PUBLISHED = "published"
"""Fingerprint of samples that the class and the other arguments name, wherever the samples lie."""


def files_digest(root: str | Path) -> str | None:
    """Return a digest of the names and sizes of all files below a folder, or None if there is no such folder.

    Args:
        root: The folder.
    """
    folder = Path(root).expanduser()
    if not folder.is_dir():
        return None
    lines: list[str] = []
    for parent, _, names in os.walk(folder):
        for name in names:
            path = Path(parent) / name
            lines.append(f"{path.relative_to(folder).as_posix()} {path.stat().st_size}")
    digest = hashlib.sha256("\n".join(sorted(lines)).encode())
    return f"sha256 {digest.hexdigest()[:12]}"
