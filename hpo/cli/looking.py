"""Commands that look and change nothing: watch, doctor."""

from __future__ import annotations

from typing import Annotated

import typer

from hpo.cli.facts import print_json
from hpo.cli.options import INTERRUPTED, HomeOption, JsonOption, StorageOption, StudyOption, TrackingOption

app = typer.Typer()


@app.command()
def watch(
    study: StudyOption = None,
    once: Annotated[bool, typer.Option("--once", help="Show it as it stands, and end.")] = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """Show a study that another process runs, until it ends. Ctrl-C ends the show alone."""
    from rich.console import Console

    from hpo.cli import onlooker
    from hpo.storage.lookup import open_study

    ledger, name, _ = open_study(home, storage, study)
    console = Console()
    try:
        state = (onlooker.once if once else onlooker.follow)(ledger, name, console)
    except KeyboardInterrupt:
        console.print("the study goes on without being watched.")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        ledger.close()
    raise typer.Exit(1 if state == "stopped" else 0)


@app.command()
def doctor(
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """What is installed here, and what would fail, with the fix. Exits 1 if something would."""
    from itertools import groupby

    from hpo.doctor import examine
    from hpo.storage.home import Home
    from hpo.text import counted

    findings, failing = [], 0
    for area, group in groupby(examine(Home.at(home), storage, tracking_uri), lambda one: one.area):
        if not as_json:
            print(area)
        for one in group:
            findings.append(one)
            failing += one.level == "fails"
            if not as_json:
                print(one.describe(), flush=True)
    if as_json:
        print_json({"fails": failing, "findings": findings})
    else:
        print(f"{counted(failing, 'thing')} would fail." if failing else "nothing would fail.")
    raise typer.Exit(1 if failing else 0)
