"""The command that shows who did what: log."""

from __future__ import annotations

from dataclasses import asdict
from datetime import datetime
from typing import Annotated

import typer

from hpo.cli import completion
from hpo.cli.json_output import print_json
from hpo.cli.options import MOST, HomeOption, JsonOption, StorageOption
from hpo.terminal import print

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
