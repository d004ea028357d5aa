"""Holds the commands that only read: status, watch, serve, doctor."""

from __future__ import annotations

from contextlib import closing
from typing import Annotated

import typer

from hpo.cli.commands import INTERRUPTED
from hpo.cli.json_output import print_json
from hpo.cli.options import (
    HomeOption,
    JsonOption,
    StorageOption,
    StudyOption,
    TrackingOption,
)
from hpo.cli.service_options import LogFormatOption, ProbesOption
from hpo.terminal import print

app = typer.Typer()


@app.command()
def status(
    study: StudyOption = None, as_json: JsonOption = False, home: HomeOption = ".hpo", storage: StorageOption = None
) -> None:
    """Show the progress of a study, or of several in a line each.

    If the home holds one search, its progress comes first, and each study derived from it has a line.
    """
    from hpo.analysis.results.forecast import forecast_of
    from hpo.analysis.results.idle import idle
    from hpo.analysis.results.status import after, describe, facts_of, line
    from hpo.ledger import queries
    from hpo.ledger.views import workers as worker_queries
    from hpo.storage.lookup import open_studies

    ledger, names, at = open_studies(home, storage, study)
    with ledger.read() as connection:
        derived = queries.derived(connection)
        searches = [name for name in names if study or derived.get(name) not in names]
        if as_json:
            rows = [facts_of(connection, name, at) for name in searches]
            print_json(rows if len(rows) > 1 else rows[0])
            return
        statuses = {name: queries.status(connection, name) for name in names}
        if len(searches) == 1:
            status_of, row = statuses.pop(searches[0]), queries.study_row(connection, searches[0])
            waits = idle(connection, row.id, status_of.state == "running")
            print(describe(status_of, waits, worker_queries.fused(connection, row.id), forecast_of(connection, row)))
            for text in after(connection, status_of, at):
                print(text)
    for status_of in statuses.values():
        print(line(status_of))


@app.command()
def watch(
    study: StudyOption = None,
    once: Annotated[bool, typer.Option("--once", help="Show the current state and exit.")] = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """Show a running study until it ends. Ctrl-C ends only this view."""
    from hpo.cli import live_status
    from hpo.display.console import Console
    from hpo.storage.lookup import open_study

    ledger, name, _ = open_study(home, storage, study)
    console = Console()
    try:
        state = (live_status.once if once else live_status.follow)(ledger, name, console)
    except KeyboardInterrupt:
        console.print("the study goes on without being watched.")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        ledger.close()
    raise typer.Exit(1 if state == "stopped" else 0)


@app.command()
def serve(
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port of the pages.")] = 5001,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allowed-host", metavar="NAME", help="Host name that browsers may use behind a proxy.  May be repeated."
        ),
    ] = None,
    root_path: Annotated[
        str, typer.Option("--root-path", metavar="PATH", help="Path below which a proxy shows the pages.")
    ] = "",
    mlflow: Annotated[
        str | None,
        typer.Option("--mlflow", metavar="URL", help="Address of `hpo ui`; each trial then links to its run."),
    ] = None,
    browser: Annotated[bool, typer.Option("--open", help="Also open a browser.")] = False,
    metrics: Annotated[
        bool, typer.Option("--metrics", help="Also serve /metrics for Prometheus, with the token in metrics.token.")
    ] = False,
    probes: ProbesOption = None,
    log_format: LogFormatOption = "text",
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
) -> None:
    """Serve live pages of studies, their reports and trials. They change nothing."""
    from hpo.analysis.serve import pages

    pages.check_installed()
    from hpo.analysis.serve.server import serve as serve_pages
    from hpo.ledger import Ledger
    from hpo.storage.home import Home
    from hpo.storage.probes import answering

    at = Home.at(home)
    with (
        closing(Ledger(storage or at.storage, create=False, read_only=True)) as ledger,
        answering(probes, ledger),
    ):
        code = serve_pages(
            ledger,
            at,
            host=host,
            port=port,
            allowed=allowed_host or (),
            prefix=root_path,
            mlflow=mlflow,
            metrics=metrics,
            open_browser=browser,
        )
    raise typer.Exit(code)


@app.command()
def doctor(
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Show what is installed and what would fail, with the fix. Exits 1 on failures."""
    from itertools import groupby

    from hpo.doctor import examine
    from hpo.storage.home import Home
    from hpo.text import counted

    findings, failing = [], 0
    for area, group in groupby(examine(Home.at(home), storage, tracking_uri), lambda finding: finding.area):
        if not as_json:
            print(area)
        for finding in group:
            findings.append(finding)
            failing += finding.level == "fails"
            if not as_json:
                print(finding.describe(), flush=True)
    if as_json:
        print_json({"fails": failing, "findings": findings})
    else:
        print(f"{counted(failing, 'thing')} would fail." if failing else "nothing would fail.")
    raise typer.Exit(1 if failing else 0)
