"""Commands about what is kept beside the ledger: ui, verify, sync."""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import asdict
from typing import Annotated

import typer

from hpo import text
from hpo.cli import completion
from hpo.cli.facts import notes, print_json
from hpo.cli.options import AllStudiesOption, HomeOption, JsonOption, StorageOption, TrackingOption
from hpo.errors import Busy, HpoError, StudyError, UserError
from hpo.terminal import print

app = typer.Typer()


@app.command()
def ui(
    study: AllStudiesOption = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="The port on 127.0.0.1.")] = 5000,
    browser: Annotated[bool, typer.Option("--open", help="Open a browser too.")] = False,
    optuna: Annotated[bool, typer.Option("--optuna", help="Serve optuna-dashboard's pages instead, live.")] = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Serve MLflow's pages: each study's trials, best first."""
    from hpo.storage.home import Home
    from hpo.storage.lookup import own_first
    from hpo.tracking.ui import serve, serve_optuna

    rows = own_first(home, storage, study)
    if optuna:
        if not rows:
            raise UserError(f"{Home.at(home).root} holds no study: begin one with `hpo run`.")
        raise typer.Exit(serve_optuna(Home.at(home), storage, study, port, open_browser=browser))
    raise typer.Exit(serve(Home.at(home), tracking_uri, port, open_browser=browser, studies=rows))


@app.command()
def verify(
    study: AllStudiesOption = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Check a home against itself: ledger, MLflow, checkpoints. Exits 1 on any difference."""
    from hpo.storage.home import Home
    from hpo.verify import verify as check

    at = Home.at(home)
    report = check(at, storage or at.storage, tracking_uri, study)
    print_json(report) if as_json else print(report.describe())
    raise typer.Exit(1 if report.differences else 0)


@app.command()
def sync(
    study: Annotated[
        str | None,
        typer.Option(
            "--study", help="The study's name; by default all of the home's.", autocompletion=completion.studies
        ),
    ] = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Send trackers what they missed while they were away."""
    from hpo.storage.lookup import open_ledger, study_names
    from hpo.tracking import mirror_process
    from hpo.tracking.base import Unreachable
    from hpo.tracking.trackers import called, open_tracker, trackers_of
    from hpo.tracking.uri import tracker_name

    ledger, at = open_ledger(home, storage)
    drained, failed = [], list[HpoError]()
    for name in study_names(ledger, study):
        for uri in trackers_of(ledger, name, at, tracking_uri):
            tracker = tracker_name(uri)
            try:
                with notes(as_json), at.keeping(), closing(open_tracker(uri, at.artifacts)) as opened:
                    result = mirror_process.drain(ledger, opened, name, at)
                    place = "MLflow" if opened.keeps_files else called(tracker)
            except (Busy, Unreachable, StudyError) as error:  # the others are sent all the same
                failed.append(error)
                missing = mirror_process.behind(ledger, tracker, name)
                drained.append({"study": name, "tracker": tracker, "sent": 0, "behind": missing, "why": str(error)})
                continue
            drained.append({"study": name, "tracker": tracker} | asdict(result))
            if as_json:
                continue
            sent = text.tally({"batches": result.sent})
            print(f"{name}: " + (mirror_process.lag(result, tracker) or f"{place} has everything ({sent} sent)."))
    if as_json:
        print_json(drained)
    for error in failed[:-1]:
        print(f"error: {error}", file=sys.stderr)
    if failed:
        raise failed[-1]
    if any(one["behind"] for one in drained):
        raise typer.Exit(1)
