"""Links artifacts on this host: a second name of a file rather than a second copy."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from urllib.parse import unquote, urlsplit

from trainer.files.durable import replacing, sha256, sync


def link(source: Path, target: Path) -> None:
    """Gives a finished file, or every file below a directory, a second name; copies if the file system cannot link."""
    files = [path for path in source.rglob("*") if path.is_file()] if source.is_dir() else [source]
    if not files:
        raise FileNotFoundError(2, os.strerror(2), str(source))
    for path in files:
        _link_file(path, target / path.relative_to(source) if source.is_dir() else target)


def _link_file(source: Path, target: Path) -> None:
    if target.exists() and target.samefile(source):
        return
    with replacing(target) as temporary:
        try:
            os.link(source, temporary)
        except FileNotFoundError:
            raise
        except OSError:  # another file system, or one without hard links
            shutil.copyfile(source, temporary)
            sync(temporary)


def digests(root: Path) -> dict[str, str]:
    """Returns name -> sha256 of every file below a directory."""
    return {str(path.relative_to(root)): sha256(path) for path in sorted(root.rglob("*")) if path.is_file()}


def directory_of(uri: str) -> Path | None:
    """Returns the directory that an artifact URI names, unquoted as MLflow does; None for a server or another store."""
    parts = urlsplit(uri)
    return Path(unquote(parts.path if parts.scheme else uri)) if parts.scheme in ("", "file") else None
