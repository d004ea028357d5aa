"""The commands for several people on one ledger: log, quota."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Annotated

import typer

from hpo.cli import completion
from hpo.cli.json_output import print_json
from hpo.cli.options import MOST, HomeOption, JsonOption, StorageOption
from hpo.errors import UserError
from hpo.terminal import print

LONGEST = 250  # characters of a person's name

app = typer.Typer()


@app.command()
def log(
    study: Annotated[
        str | None,
        typer.Option(
            "--study",
            help="The study's name, also of a deleted one.  [default: all studies]",
            autocompletion=completion.studies,
        ),
    ] = None,
    last: Annotated[int, typer.Option("--last", min=1, max=MOST, help="Show so many entries.")] = 20,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """Show who ran, stopped, deleted, promoted or tagged what."""
    from hpo.ledger import audit
    from hpo.storage.lookup import open_ledger

    ledger, _ = open_ledger(home, storage)
    with ledger.read() as connection:
        rows = audit.entries(connection, study, last)
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    for row in rows:
        at = datetime.fromtimestamp(row.at).astimezone().isoformat(sep=" ", timespec="seconds")
        role = f" as {row.role}" if row.role else ""
        print(f"{at}  {row.user}@{row.host}{role}  {row.action} {row.study}: {row.command}")
    if not rows:
        print(f"nothing is recorded{f' of a study {study!r}' if study else ''}.")


@app.command()
def quota(
    person: Annotated[
        str, typer.Argument(help="A role of PostgreSQL, or a user of the system.  [default: show all quotas]")
    ] = "",
    trials: Annotated[
        int | None, typer.Option("--trials", min=1, help="Let their studies train so many trials at a time.")
    ] = None,
    max_bytes: Annotated[
        str | None,
        typer.Option("--max-bytes", metavar="10GB", help="Begin no trial while their checkpoints take more than this."),
    ] = None,
    none: Annotated[bool, typer.Option("--none", help="Remove the person's quota.")] = False,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """Show or set what the studies of a person may use at a time."""
    from hpo.declaration.budget import parse_size
    from hpo.ledger import quotas
    from hpo.storage.lookup import open_ledger

    bounds = trials, parse_size(max_bytes) if max_bytes else None
    changes = bounds != (None, None) or none
    if changes and not person:
        raise UserError("a quota is somebody's: name the person first, such as `hpo quota ann --trials 8`.")
    if len(person) > LONGEST:
        raise UserError(f"a name of {len(person)} characters is nobody's: names have {LONGEST} at most.")
    if none and bounds != (None, None):
        raise UserError("--none removes the quota that the other options would set: give one or the other.")
    ledger, _ = open_ledger(home, storage)
    if changes:
        ledger.transact(lambda connection: quotas.put(connection, quotas.Quota(person, *bounds)))
    with ledger.read() as connection:
        rows = [row for row in quotas.all_quotas(connection) if person in ("", row.person)]
        uses = {row.person: quotas.used(connection, row.person) for row in rows}
    if as_json:
        print_json([asdict(row) | {"used": asdict(uses[row.person])} for row in rows])
        return
    for row in rows:
        print(f"{row.person}: {', '.join(quotas.described(row, uses[row.person]))}")
    if not rows:
        print(f"{person or 'nobody'} has {'no' if person else 'a'} quota.")
