"""The command that tags trials and studies: tag."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hpo.cli import completion
from hpo.cli.json_output import notes, print_json
from hpo.cli.options import MOST, HomeOption, JsonOption, StorageOption, StudyOption, TrackingOption
from hpo.errors import UserError
from hpo.terminal import print

if TYPE_CHECKING:
    from hpo.ledger.rows import Connection

app = typer.Typer()


@app.command()
def tag(
    of: Annotated[
        str,
        typer.Argument(
            metavar="TRIAL",
            help="Number of the trial, or `study` for the study itself.",
            autocompletion=completion.trials,
        ),
    ],
    given: Annotated[
        list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Tags to set; a new value replaces an old one.")
    ] = None,
    remove: Annotated[
        list[str] | None, typer.Option("--remove", metavar="KEY", help="Remove this tag.  May be repeated.")
    ] = None,
    study: StudyOption = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Tag a trial, or a study: in reports, tables and MLflow too. Without a tag, shows the existing ones."""
    from hpo.ledger import audit, queries, removed, tags
    from hpo.ledger.views import trial as trial_queries
    from hpo.space.tags import parsed
    from hpo.storage.lookup import open_study
    from hpo.tracking import mirror_process

    new = parsed(given or ())
    if both := [key for key in remove or () if key in new]:
        raise UserError(f"tag {both[0]!r} is set and removed at once: leave one of them out.")
    if of != "study" and not (of.isdecimal() and len(of) <= len(str(MOST)) and int(of) <= MOST):
        raise UserError(f"{of!r} is not a trial: give its number, or `study` for the study itself, then KEY=VALUE.")
    ledger, name, study_home = open_study(home, storage, study, upgrade=True)
    number = tags.STUDY if of == "study" else int(of)
    shown = "the study" if number == tags.STUDY else f"trial {number}"
    with ledger.read() as connection:
        row = queries.study_row(connection, name)
        study_id = row.id
        if number != tags.STUDY and trial_queries.find_trial(connection, study_id, number) is None:
            raise UserError(f"study {name!r} has no trial {number}: {trial_queries.there(connection, study_id)}.")
        if number != tags.STUDY:
            removed.check_shown(connection, row, number, "nothing shows its tags any more")
        before = tags.given(connection, study_id).get(number, {})
    if absent := [key for key in remove or () if key not in before]:
        present = f"there are {', '.join(before)}" if before else "it has none"
        raise UserError(f"{shown} of study {name!r} has no tag {absent[0]!r}: {present}.")
    changes: dict[str, str | None] = {**new, **dict.fromkeys(remove or ())}
    entry = audit.Entry(name, "tag")

    def put(connection: Connection) -> bool:
        changed = tags.put(connection, study_id, number, changes)
        if changed:
            entry.write(connection)
        return changed

    if ledger.transact(put):
        with notes(as_json):
            if missing := mirror_process.send(ledger, study_home, name, tracking_uri):
                print(missing)
    after = {key: value for key, value in sorted({**before, **changes}.items()) if value is not None}
    if as_json:
        print_json({"study": name, "number": None if number == tags.STUDY else number, "tags": after})
    else:
        print(f"{name}, {shown}: {', '.join(f'{key}={value}' for key, value in after.items()) or 'no tags'}")
