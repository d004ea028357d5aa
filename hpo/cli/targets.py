"""Checks where a command is to write, `--to FILE` or `--to DIRECTORY`, before it computes anything.

The flags that `--to` replaces (`--save`, `--out`, `--csv`, `--parquet`) are taken for one release: they write what they
wrote, whatever the ending, over what is there.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection
from errno import EACCES
from pathlib import Path
from typing import Annotated, Any

import typer

from hpo.errors import UserError
from hpo.terminal import print
from trainer.files.paths import expanded

PICTURES = (".png", ".pdf", ".svg")
LAST = "release 0.2"  # that takes the old flags


def to_option(metavar: str, help: str) -> Any:
    """Returns the option `--to` of a command."""
    return typer.Option("--to", metavar=metavar, help=help)


ForceOption = Annotated[bool, typer.Option("--force", help="Replace what is there.")]


def _old(flag: str) -> Any:
    def notice(value: str | None) -> str | None:
        if value is not None:
            print(
                f"{flag} is now --to, which replaces nothing without --force; {flag} ends with {LAST}.",
                file=sys.stderr,
            )
        return value

    return typer.Option(flag, hidden=True, callback=notice)


SaveOption = Annotated[str | None, _old("--save")]
OutOption = Annotated[str | None, _old("--out")]
CsvOption = Annotated[str | None, _old("--csv")]
ParquetOption = Annotated[str | None, _old("--parquet")]


def target(
    to: str | None, old: str | None = None, *, endings: Collection[str] = (), directory: bool = False, force: bool
) -> Path | None:
    """Returns the file to write, which ends in one of `endings`, or the `directory`; None where none is asked for.

    A directory has a name without an ending or with a slash at its end, or exists. The value of an `old` flag is not
    checked. Raises UserError as `check_free` does, and for an ending that is not known.
    """
    if old is not None:
        if to is not None:
            raise UserError(f"--to {to} and its old name are both given: leave the old one out.")
        return Path(old)
    if to is None:
        if force:
            raise UserError("--force replaces what --to names: give --to too.")
        return None
    path = expanded(to)
    as_directory = directory and (to.endswith("/") or not path.suffix or _is_directory(path))
    if "://" in to or not (as_directory or path.suffix.lower() in endings):
        why = "this command writes to no URL; " if "://" in to else ""
        raise UserError(f"--to {to}: {why}give {_known(endings, directory)}.")
    check_free(to, directory=as_directory, force=force)
    return path


def check_free(to: str, *, directory: bool = False, force: bool) -> None:
    """Raises UserError where `to` is there already and is not to be replaced, where it is a file and a directory is to
    be written or the other way round, and where the directory that is to hold it is missing or closed."""
    path, kind = expanded(to), "directory" if directory else "file"
    try:
        there, parent = path.exists(), path.absolute().parent
        if there and path.is_dir() != directory:
            raise UserError(f"--to {to} is a {'file: name a directory' if directory else 'directory: name a file'}.")
        if there and not force and (any(path.iterdir()) if directory else path.is_file()):
            replace = "write over it" if directory else "replace it"
            raise UserError(f"--to {to} exists already: name another {kind}, or give --force to {replace}.")
        if not parent.is_dir():
            raise UserError(f"--to {to}: directory {path.parent} does not exist; make it, or name another {kind}.")
        if not os.access(path if there else parent, os.W_OK):
            raise PermissionError(EACCES, os.strerror(EACCES))
    except OSError as error:
        raise UserError(f"--to {to} cannot be written ({error.strerror}): name another {kind}.") from error


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # which `check_free` tells
        return False


def _known(endings: Collection[str], directory: bool) -> str:
    """Returns in words what `--to` takes."""
    *first, last = (*endings,) or ("",)
    file = f"a file that ends in {', '.join(first)}{' or ' if first else ''}{last}" if endings else ""
    place = "a directory: a name without an ending, or one that ends in /" if directory else ""
    return ", or ".join(filter(None, (file, place)))
