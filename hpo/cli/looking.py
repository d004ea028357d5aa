"""Commands that look and change nothing: watch, serve, doctor."""

from __future__ import annotations

from typing import Annotated

import typer

from hpo.cli.facts import print_json
from hpo.cli.options import INTERRUPTED, HomeOption, JsonOption, StorageOption, StudyOption, TrackingOption
from hpo.terminal import print

app = typer.Typer()


@app.command()
def watch(
    study: StudyOption = None,
    once: Annotated[bool, typer.Option("--once", help="Show it as it stands, and end.")] = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """Show a study that another process runs, until it ends. Ctrl-C ends the show alone."""
    from hpo.cli import onlooker
    from hpo.cli.console import Console
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
def serve(
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Where the pages are.")] = 5001,
    host: Annotated[str, typer.Option("--host", help="The address to listen at.")] = "127.0.0.1",
    allowed_host: Annotated[
        list[str] | None,
        typer.Option("--allowed-host", metavar="NAME", help="What browsers call it behind a proxy; repeatable."),
    ] = None,
    root_path: Annotated[
        str, typer.Option("--root-path", metavar="PATH", help="Below which path a proxy shows the pages.")
    ] = "",
    mlflow: Annotated[
        str | None,
        typer.Option("--mlflow", metavar="URL", help="Where `hpo ui` runs, for links to it from each trial."),
    ] = None,
    browser: Annotated[bool, typer.Option("--open", help="Open a browser too.")] = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """Serve live pages: studies, their reports, their trials. They show the ledger and change nothing."""
    from hpo.analysis.serve import pages

    pages.check_installed()
    from hpo.analysis.serve.server import serve as serve_pages
    from hpo.ledger import Ledger
    from hpo.storage.home import Home

    at = Home.at(home)
    ledger = Ledger(storage or at.storage, create=False, read_only=True)
    try:
        code = serve_pages(
            ledger,
            at,
            host=host,
            port=port,
            allowed=allowed_host or (),
            prefix=root_path,
            mlflow=mlflow,
            open_browser=browser,
        )
    finally:
        ledger.close()
    raise typer.Exit(code)


@app.command()
def doctor(
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Show what is installed here and what would fail, with the fix. Exits 1 if something would."""
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
