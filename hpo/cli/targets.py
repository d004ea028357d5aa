"""Checks the path that a command will write, `--to FILE` or `--to DIRECTORY`, before it computes anything.

The flags that `--to` replaces (`--save`, `--out`, `--csv`, `--parquet`) work for one more release. They write as
before, whatever the file's ending, and overwrite existing files.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

import typer

from hpo.errors import UserError
from hpo.storage.target import check_free
from hpo.terminal import print
from trainer.files.paths import expanded

PICTURES = (".png", ".pdf", ".svg")
LAST = "release 0.2"  # the last release with the old flags


def to_option(metavar: str, help: str) -> Any:
    """Returns the option `--to` of a command."""
    return typer.Option("--to", metavar=metavar, help=help)


ForceOption = Annotated[bool, typer.Option("--force", help="Replace an existing file or directory.")]


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
    """Returns the file to write, which ends in one of `endings`, or the `directory`; None if neither is requested.

    A path is a directory if it exists as one, has no ending, or ends in a slash. The value of an `old` flag is not
    checked. Raises UserError as `check_free` does, and for an unknown ending.
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


def _is_directory(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # `check_free` reports it
        return False


def _known(endings: Collection[str], directory: bool) -> str:
    """Returns a clause that names the values that `--to` takes."""
    *first, last = (*endings,) or ("",)
    file = f"a file that ends in {', '.join(first)}{' or ' if first else ''}{last}" if endings else ""
    folder = "a directory: a name without an ending, or one that ends in /" if directory else ""
    return ", or ".join(filter(None, (file, folder)))
