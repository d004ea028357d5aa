"""Holds the command that backs up a ledger: backup."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Annotated

import typer

from hpo import text
from hpo.cli.json_output import print_json
from hpo.cli.options import AllStudiesOption, HomeOption, JsonOption, StorageOption
from hpo.declaration.budget import parse_time
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
    keep_for: Annotated[
        str | None,
        typer.Option("--keep-for", metavar="7d", help="Let retention keep the backup's checkpoints for so long."),
    ] = None,
    study: AllStudiesOption = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """Copy the ledger while workers write; list what it needs.

    The copy has all studies; the list has the checkpoints and files of those named. With --check, exits 1 if some of
    them are gone. For a ledger of PostgreSQL, --keep-for alone holds the checkpoints, just before `pg_dump`.
    """
    seconds = parse_time(keep_for, "keep_for") if keep_for else 0.0
    if to is None and check is None and keep_for:
        _hold(seconds, study, as_json, home, storage)
    elif (to is None) == (check is None):
        raise UserError("name one directory: --to DIRECTORY makes a backup, --check DIRECTORY checks one.")
    elif check is not None and keep_for:
        raise UserError("--keep-for holds what a backup needs while it is made: give it with --to.")
    elif check is not None:
        _check(check, study, as_json, home)
    elif to is not None:
        _write(to, seconds, study, as_json, home, storage)


def _hold(seconds: float, study: str | None, as_json: bool, home: str, storage: str | None) -> None:
    from hpo.ledger import backup as ledger_copy
    from hpo.storage.lookup import open_ledger, study_names

    ledger, _ = open_ledger(home, storage)
    with closing(ledger):
        if ledger.is_sqlite:
            raise UserError(f"{ledger.shown} is copied by this command: name a directory by --to.")
        names, until = study_names(ledger, study), time.time() + seconds
        count = ledger.transact(lambda connection: ledger_copy.hold(connection, names, until))
    if as_json:
        print_json({"directory": None, "objects": count, "bytes": None})
    else:
        print(f"retention keeps {text.counted(count, 'checkpoint')} until then: now run `pg_dump --format=custom`.")


def _write(directory: Path, keep_for: float, study: str | None, as_json: bool, home: str, storage: str | None) -> None:
    from hpo.storage import backup as backups
    from hpo.storage.lookup import open_ledger, study_names

    ledger, at = open_ledger(home, storage)
    with closing(ledger), at.keeping():
        written = backups.write(ledger, at, study_names(ledger, study), directory, keep_for)
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
