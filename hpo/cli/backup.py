"""Holds the command that backs up a ledger: backup."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from hpo import text
from hpo.cli.json_output import print_json
from hpo.cli.options import AllStudiesOption, HomeOption, JsonOption, StorageOption
from hpo.errors import UserError
from hpo.terminal import print

app = typer.Typer()


@app.command()
def backup(
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIRECTORY", help="A new or empty directory for the backup.")
    ] = None,
    check: Annotated[
        Path | None,
        typer.Option("--check", metavar="DIRECTORY", help="Print what a restore of this backup would not find."),
    ] = None,
    study: AllStudiesOption = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """Copy the ledger while workers write, and list what it needs.

    The copy has all studies; the list has the checkpoints and files of those named. With --check, exits 1 if some of
    them are gone.
    """
    if (to is None) == (check is None):
        raise UserError("name one directory: --to DIRECTORY makes a backup, --check DIRECTORY checks one.")
    if check is not None:
        _check(check, study, as_json, home)
    elif to is not None:
        _write(to, study, as_json, home, storage)


def _write(directory: Path, study: str | None, as_json: bool, home: str, storage: str | None) -> None:
    from hpo.storage import backup as backups
    from hpo.storage.lookup import open_ledger, study_names

    ledger, at = open_ledger(home, storage)
    with closing(ledger), at.keeping():
        written = backups.write(ledger, at, study_names(ledger, study), directory)
    if as_json:
        print_json({"directory": directory, "objects": len(written.objects), "bytes": written.bytes})
    else:
        listed = text.counted(len(written.objects), "object")
        needs = f"needs {listed} of {text.megabytes(written.bytes)}" if written.objects else "needs no other file"
        print(f"{directory} holds the ledger, which {needs}.")


def _check(directory: Path, study: str | None, as_json: bool, home: str) -> None:
    from hpo.storage import backup as backups
    from hpo.storage.home import Home

    read = backups.read(directory)
    listed = [place.study for place in read.places]
    if study and study not in listed:
        raise UserError(f"{directory} lists no study {study!r}: it lists {', '.join(listed) or 'none'}.")
    names = [study] if study else listed
    gone = backups.check(read, Home.at(home), names)
    if as_json:
        print_json({"directory": directory, "objects": len(read.objects), "bytes": read.bytes, "gone": gone})
    else:
        listed = text.counted(len(read.objects), "object")
        print(f"{len(gone)} of {listed} are gone." if gone else f"none of {listed} is gone.")
        for entry in gone:
            print(f"  {entry.study}: {entry.path}")
    raise typer.Exit(1 if gone else 0)
