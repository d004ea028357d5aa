"""Copies files that a task saves in its own format into `files/` of a checkpoint, byte by byte. Torch-free."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from trainer.errors import CheckpointError, TrainerError
from trainer.files.durable import sync

FILES = "files"  # the directory within a checkpoint
_LONGEST = 255  # bytes of a name, on common file systems

Source = str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]]


def found(source: Source) -> dict[str, Path]:
    """Returns name below `FILES` -> file.

    The source is a directory (with all its contents), one file, or a mapping of names to files. Links are followed, and
    their targets copied. Raises TrainerError, since the task is at fault, without any file, or for a file that is
    missing, not regular or badly named.
    """
    if isinstance(source, Mapping):
        files = {str(name): Path(path) for name, path in source.items()}
    elif (root := Path(source)).is_dir():
        files = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if not path.is_dir()}
    else:
        files = {root.name: root}
    if not files:
        raise TrainerError(f"there is nothing to save in {source}: write the files first.")
    for name, path in files.items():
        if not is_name(name):
            raise TrainerError(_no_name(name))
        try:
            kind = path.stat().st_mode
        except OSError as error:
            raise TrainerError(f"{path} cannot be saved ({error.strerror}): write it first.") from error
        if not stat.S_ISREG(kind):
            directory = "a directory: give the names of its files, or it alone"
            problem = directory if stat.S_ISDIR(kind) else "not a regular file"
            raise TrainerError(f"{path} cannot be saved: it is {problem}.")
    return files


def is_name(name: str) -> bool:
    """Returns True if `name` is a normalized relative path without `..`."""
    parts = PurePosixPath(name).parts
    plain = bool(parts) and "/".join(parts) == name and not name.startswith("/") and "\0" not in name
    return plain and ".." not in parts and all(len(part.encode()) <= _LONGEST for part in parts)


def check_name(name: str) -> None:
    """Raises CheckpointError unless `is_name`."""
    if not is_name(name):
        raise CheckpointError(_no_name(name))


def _no_name(name: str) -> str:
    return f"{name[:80]!r} cannot name a file of a checkpoint: give a relative path such as 'model.json'."


def copy(files: Mapping[str, Path], directory: Path) -> Iterable[str]:
    """Copies the files into the existing `directory`, and syncs them and their directories.

    Returns their names below `directory`. Raises OSError.
    """
    if not files:
        return []
    root = directory / FILES
    made = {root}
    for name, source in files.items():
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        made.update(parent for parent in target.parents if parent.is_relative_to(root))
        shutil.copyfile(source, target)
        sync(target)
    for parent in sorted(made, reverse=True):
        sync(parent)
    return [f"{FILES}/{name}" for name in files]


def of_manifest(names: Iterable[str]) -> list[str]:
    """Returns the files of a checkpoint that were copied whole, by the names under which they were saved."""
    return [name.removeprefix(f"{FILES}/") for name in names if name.startswith(f"{FILES}/")]


def stage(source: Path, target: Path) -> None:
    """Gives a file a second name, which outlives the first; copies the file if the file system has no links."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)
