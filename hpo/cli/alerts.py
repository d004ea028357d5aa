"""The command that tries whether alerts arrive: alert."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer()


@app.command()
def alert(
    targets: Annotated[list[str], typer.Argument(metavar="TARGET...", help="As `hpo run --alert` takes them.")],
) -> None:
    """Send a trial message, to see whether alerts arrive."""
    import datetime

    from hpo.alerts import message, rules, senders

    now, missing = datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds"), 0
    for rule in rules.parse_all(targets):
        try:
            senders.send(rule.target, message.trial_message(now))
        except senders.Undelivered as error:
            missing += 1
            print(f"{rule.target}: not taken: {error}.")
        else:
            print(f"{rule.target}: taken.")
    if missing:
        raise typer.Exit(1)
