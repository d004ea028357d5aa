"""The command that deletes a study, or trials of it: rm."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from hpo.cli import completion
from hpo.cli.json_output import notes, print_json
from hpo.cli.options import MOST, HomeOption, JsonOption, OwnerOption, StorageOption, TrackingOption
from hpo.errors import UserError
from hpo.terminal import print

if TYPE_CHECKING:
    from hpo.ledger import Ledger
    from hpo.storage.home import Home

app = typer.Typer()


def is_terminal() -> bool:
    """Returns whether the user can be asked: standard input is a terminal."""
    return sys.stdin is not None and sys.stdin.isatty()


@app.command()
def rm(
    trials: Annotated[
        list[int] | None,
        typer.Argument(
            metavar="[TRIAL]...",
            help="Trials to remove.  [default: the whole study]",
            min=0,
            max=MOST,
            autocompletion=completion.trials,
        ),
    ] = None,
    *,
    study: Annotated[
        str | None,
        typer.Option(
            "--study",
            help="The study's name; optional with trials if the home holds only one study.",
            autocompletion=completion.studies,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be deleted; delete nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Delete without asking.")] = False,
    as_owner: OwnerOption = False,
    leave_mlflow: Annotated[
        bool, typer.Option("--leave-mlflow", help="Keep the runs in MLflow, for example if its server is gone.")
    ] = False,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Delete a study, or some of its trials, in MLflow too.

    Their checkpoints and files go as well. Fails while the study is driven.
    """
    from hpo.declaration.naming import check_name
    from hpo.driver import removal
    from hpo.ledger import audit, promotions, queries
    from hpo.storage.lookup import open_ledger, open_study

    if trials:
        ledger, name, study_home = open_study(home, storage, study)
        if not dry_run:
            ledger.look(lambda c: audit.check_owner(c, queries.study_row(c, name), as_owner=as_owner))
        _rm_trials(ledger, study_home, name, sorted(set(trials)), tracking_uri, dry_run, yes, leave_mlflow, as_json)
        return
    if study is None:
        raise UserError("give the study to delete by --study NAME, or the numbers of trials to remove.")
    ledger, study_home = open_ledger(home, storage)
    check_name(study)
    contents = removal.contents(ledger, study_home, study)
    if not dry_run:
        ledger.look(lambda c: audit.check_owner(c, queries.study_row(c, study), as_owner=as_owner))
    if not leave_mlflow:
        promotions.check_none(ledger.look(lambda c: promotions.standing(c, queries.study_row(c, study).id)), study)
    description = "\n".join(filter(None, [contents.describe(leave_mlflow=leave_mlflow), contents.staying()]))
    if not dry_run:
        _confirm(description, yes, as_json)
        removal.remove(ledger, study_home, study, tracking_uri, leave_mlflow=leave_mlflow)
    if as_json:
        print_json(asdict(contents) | {"deleted": not dry_run})
    else:
        print(f"{'would delete' if dry_run else 'deleted'} {description}")


def _confirm(description: str, yes: bool, as_json: bool) -> None:
    """Asks the user to confirm the deletion. Raises UserError without a terminal, and Exit if the user declines."""
    if yes:
        return
    if as_json or not is_terminal():
        raise UserError(f"{description.splitlines()[0]}: give --yes to delete it, since nobody can be asked here.")
    print(description)
    if not typer.confirm("delete all of it for good?"):
        print("nothing is deleted.")
        raise typer.Exit(1)


def _rm_trials(
    ledger: Ledger,
    at: Home,
    study: str,
    numbers: list[int],
    tracking_uri: str | None,
    dry_run: bool,
    yes: bool,
    leave_mlflow: bool,
    as_json: bool,
) -> None:
    from hpo.driver import trial_removal
    from hpo.tracking import mirror_process

    contents = trial_removal.contents(ledger, at, study, numbers)
    if not leave_mlflow:
        trial_removal.check_unpromoted(ledger, study, numbers)
    if not dry_run:
        _confirm(contents.describe(), yes, as_json)
        trial_removal.remove(ledger, at, study, numbers, tracking_uri, leave_mlflow=leave_mlflow)
        with notes(as_json):
            if not leave_mlflow and (missing := mirror_process.send(ledger, at, study, tracking_uri)):
                print(missing)
    if as_json:
        print_json(asdict(contents) | {"deleted": not dry_run})
    else:
        print(f"{'would remove' if dry_run else 'removed'} {contents.describe()}")
