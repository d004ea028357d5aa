"""The command that deletes a study: rm."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated

import typer

from hpo.cli import completion
from hpo.cli.facts import print_json
from hpo.cli.options import HomeOption, JsonOption, StorageOption, TrackingOption
from hpo.errors import UserError
from hpo.terminal import print

app = typer.Typer()


def asked() -> bool:
    """Whether somebody is there to be asked."""
    return sys.stdin is not None and sys.stdin.isatty()


@app.command()
def rm(
    study: Annotated[str, typer.Option("--study", help="The study's name.", autocompletion=completion.studies)],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go; delete nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    leave_mlflow: Annotated[
        bool, typer.Option("--leave-mlflow", help="Leave its runs in MLflow, such as on a server that is gone.")
    ] = False,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Delete a study, its files and its runs in MLflow. Refused while it is driven."""
    from hpo.declaration.naming import check_name
    from hpo.driver import removal
    from hpo.ledger import promotions, queries
    from hpo.storage.lookup import open_ledger

    ledger, at = open_ledger(home, storage)
    contents = removal.contents(ledger, at, check_name(study))
    if not leave_mlflow:
        promotions.check_none(ledger.look(lambda c: promotions.standing(c, queries.study_row(c, study)["id"])), study)
    found = contents.describe(leave_mlflow=leave_mlflow)
    if not yes and not dry_run:
        if as_json or not asked():
            raise UserError(f"{found}: give --yes to delete it, since nobody can be asked here.")
        print(found)
        if not typer.confirm("delete all of it for good?"):
            print("nothing is deleted.")
            raise typer.Exit(1)
    if not dry_run:
        removal.remove(ledger, at, study, tracking_uri, leave_mlflow=leave_mlflow)
    if as_json:
        print_json(asdict(contents) | {"deleted": not dry_run})
    else:
        print(f"{'would delete' if dry_run else 'deleted'} {found}")
