"""Holds the command that tests whether alerts arrive: alert."""

from __future__ import annotations

from typing import Annotated

import typer

from hpo.cli.json_output import print_json
from hpo.cli.options import JsonOption
from hpo.terminal import print

app = typer.Typer()


@app.command()
def alert(
    targets: Annotated[
        list[str], typer.Argument(metavar="TARGET...", help="Targets, written as for `hpo run --alert`.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Send a trial message, to see whether alerts arrive."""
    import datetime

    from hpo.alerts import message, rules, senders
    from hpo.alerts.delivery_errors import Undelivered

    now, tried = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds"), []
    for rule in rules.parse_all(targets):
        error = None
        try:
            senders.send(rule.target, message.trial_message(now))
        except Undelivered as undelivered:
            error = str(undelivered)
        tried.append({"target": str(rule.target), "error": error})
        if not as_json:
            print(f"{rule.target}: not taken: {error}." if error else f"{rule.target}: taken.")
    if as_json:
        print_json(tried)
    if any(attempt["error"] for attempt in tried):
        raise typer.Exit(1)
