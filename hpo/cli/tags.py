"""The command that tags trials and studies: tag."""

from __future__ import annotations

from typing import Annotated

import typer

from hpo.cli import completion
from hpo.cli.facts import notes, print_json
from hpo.cli.options import MOST, HomeOption, JsonOption, StorageOption, StudyOption, TrackingOption
from hpo.errors import UserError
from hpo.terminal import print

app = typer.Typer()


@app.command()
def tag(
    of: Annotated[
        str,
        typer.Argument(
            metavar="TRIAL",
            help="The trial's number, or `study` for the study itself.",
            autocompletion=completion.trials,
        ),
    ],
    given: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="A new value takes an old one's place.")
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option("--remove", metavar="KEY", help="Take this tag away; may be repeated.")
    ] = None,
    study: StudyOption = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Tag a trial, or a study: in reports, tables and MLflow too. Without a tag, show those there are."""
    from hpo.ledger import queries, tags, trial_queries
    from hpo.space.tags import parsed
    from hpo.storage.lookup import open_study
    from hpo.tracking import mirror_process

    new = parsed(given or ())
    if both := [key for key in remove or () if key in new]:
        raise UserError(f"tag {both[0]!r} is set and removed at once: leave one of them out.")
    if of != "study" and not (of.isdecimal() and len(of) <= len(str(MOST)) and int(of) <= MOST):
        raise UserError(f"{of!r} is no trial: give its number, or `study` for the study itself, then KEY=VALUE.")
    ledger, name, at = open_study(home, storage, study, upgrade=True)
    number = tags.STUDY if of == "study" else int(of)
    shown = "the study" if number == tags.STUDY else f"trial {number}"
    with ledger.read() as connection:
        study_id = queries.study_row(connection, name)["id"]
        if number != tags.STUDY and trial_queries.find_trial(connection, study_id, number) is None:
            raise UserError(f"study {name!r} has no trial {number}: {trial_queries.there(connection, study_id)}.")
        before = tags.given(connection, study_id).get(number, {})
    if absent := [key for key in remove or () if key not in before]:
        there = f"there are {', '.join(before)}" if before else "it has none"
        raise UserError(f"{shown} of study {name!r} has no tag {absent[0]!r}: {there}.")
    changes: dict[str, str | None] = {**new, **dict.fromkeys(remove or ())}
    if ledger.transact(lambda connection: tags.put(connection, study_id, number, changes)):
        with notes(as_json):
            if missing := mirror_process.send(ledger, at, name, tracking_uri):
                print(missing)
    after = {key: value for key, value in sorted({**before, **changes}.items()) if value is not None}
    if as_json:
        print_json({"study": name, "number": None if number == tags.STUDY else number, "tags": after})
    else:
        print(f"{name}, {shown}: {', '.join(f'{key}={value}' for key, value in after.items()) or 'no tags'}")
