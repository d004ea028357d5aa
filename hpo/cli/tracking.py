"""Holds the commands about data kept beside the ledger: ui, verify, sync, repair."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

import typer

from hpo import text
from hpo.cli import completion
from hpo.cli.json_output import notes, print_json
from hpo.cli.options import AllStudiesOption, HomeOption, JsonOption, StorageOption, TrackingOption
from hpo.errors import Busy, HpoError, StudyError, UserError
from hpo.terminal import print
from trainer.quote import in_one_line

if TYPE_CHECKING:
    from hpo.ledger import Ledger
    from hpo.storage.home import Home

app = typer.Typer()
Deletions: TypeAlias = Literal["restore", "leave"]


@app.command()
def ui(
    study: AllStudiesOption = None,
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port on 127.0.0.1.")] = 5000,
    browser: Annotated[bool, typer.Option("--open", help="Also open a browser.")] = False,
    optuna: Annotated[bool, typer.Option("--optuna", help="Serve optuna-dashboard's live pages instead.")] = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Serve MLflow's pages: each study's trials, best first."""
    from hpo.storage.home import Home
    from hpo.storage.lookup import own_first
    from hpo.tracking.ui.serve import serve, serve_optuna

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
    """Check that ledger, MLflow and checkpoints of a home agree. Exits 1 on any difference."""
    from hpo.storage.home import Home
    from hpo.verify import verify as check

    study_home = Home.at(home)
    report = check(study_home, storage or study_home.storage, tracking_uri, study)
    print_json(report) if as_json else print(report.describe())
    raise typer.Exit(1 if report.differences else 0)


@app.command()
def sync(
    study: Annotated[
        str | None,
        typer.Option(
            "--study", help="The study's name.  [default: all studies of the home]", autocompletion=completion.studies
        ),
    ] = None,
    deleted: Annotated[
        Deletions | None,
        typer.Option(
            "--deleted",
            help="restore runs that were deleted in the tracker, or leave them deleted.  [default: restore]",
        ),
    ] = None,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Send trackers what they missed; restore what was deleted."""
    from hpo.storage.lookup import open_ledger, study_names

    ledger, at = open_ledger(home, storage)
    results = [_send(ledger, at, name, tracking_uri, deleted, as_json) for name in study_names(ledger, study)]
    if as_json:
        print_json([facts for result in results for facts in result.facts])
    _report_unsent(results)


@app.command()
def repair(
    study: AllStudiesOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be changed; change nothing.")] = False,
    as_json: JsonOption = False,
    home: HomeOption = ".hpo",
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
) -> None:
    """Make files and MLflow agree with a restored ledger.

    Checkpoints that were lost are forgotten, too.
    """
    from hpo.clock import SystemClock
    from hpo.ledger import leases, queries
    from hpo.ledger.process_id import Process
    from hpo.storage.gc import LEASE_TIMEOUT
    from hpo.storage.lookup import open_ledger, study_names
    from hpo.storage.reconcile import reconcile

    ledger, at = open_ledger(home, storage)
    changes: dict[str, list[str]] = {}
    results: list[_Sent] = []
    for name in study_names(ledger, study):
        row = ledger.look(lambda connection, name=name: queries.study_row(connection, name))
        if dry_run:
            changes[name] = reconcile(ledger, at, row, None, thorough=True)
            continue
        lease = leases.acquire(ledger, f"driver:{row.id}", name, Process.current(), SystemClock(), LEASE_TIMEOUT)
        try:
            with at.keeping():
                changes[name] = reconcile(ledger, at, row, lease, thorough=True)
        finally:
            lease.release()
        results.append(_send(ledger, at, name, tracking_uri, None, as_json))
    if as_json:
        print_json([{"study": name, "dry_run": dry_run, "changes": lines} for name, lines in changes.items()])
    for name, lines in () if as_json else changes.items():
        print(f"{name}: {'would repair' if dry_run else 'repaired'} {text.counted(len(lines), 'difference')}")
        for line in lines:
            print(f"  {line}")
    _report_unsent(results)


@dataclass
class _Sent:
    """The result of sending one study: the facts for each tracker, and the errors that kept it from serving one."""

    facts: list[Mapping[str, object]] = field(default_factory=list[Mapping[str, object]])
    failed: list[HpoError] = field(default_factory=list[HpoError])


def _send(
    ledger: Ledger, at: Home, name: str, tracking_uri: str | None, deleted: Deletions | None, as_json: bool
) -> _Sent:
    """Sends a study's trackers what they lack; the others are still served if one of them fails."""
    from hpo.ledger import queries
    from hpo.tracking import mirror_process
    from hpo.tracking.base import Unreachable
    from hpo.tracking.repair import repair
    from hpo.tracking.trackers import called, open_tracker, trackers_of
    from hpo.tracking.uri import tracker_name

    row, sent = ledger.look(lambda connection: queries.study_row(connection, name)), _Sent()
    for uri in trackers_of(ledger, name, at, tracking_uri):
        tracker = tracker_name(uri)
        try:
            opening = open_tracker(uri, artifacts=at.artifacts, reference=row.spec.reference)
            with notes(as_json), at.keeping(), closing(opening) as opened:
                result = mirror_process.drain(
                    ledger, opened, name, at, repairing=partial(repair, ledger, opened, home=at, deleted=deleted)
                )
                shown_name = "MLflow" if opened.keeps_files else called(tracker)
        except (Busy, Unreachable, StudyError) as error:
            sent.failed.append(error)
            result = mirror_process.DrainResult(0, mirror_process.behind(ledger, tracker, name), str(error))
            sent.facts.append({"study": name, "tracker": tracker} | asdict(result))
            continue
        sent.facts.append({"study": name, "tracker": tracker} | asdict(result))
        for clause in () if as_json else result.repaired:
            print(f"{name}: {clause}.")
        if not as_json:
            batches = text.tally({"batches": result.sent})
            print(
                f"{name}: " + (mirror_process.lag(result, tracker) or f"{shown_name} has everything ({batches} sent).")
            )
    return sent


def _report_unsent(results: Sequence[_Sent]) -> None:
    """Ends the command with an error or exit code 1 if a tracker lacks something."""
    failed = [error for result in results for error in result.failed]
    for error in failed[:-1]:
        print(f"error: {in_one_line(str(error))}", file=sys.stderr)
    if failed:
        raise failed[-1]
    if any(facts["behind"] for result in results for facts in result.facts):
        raise typer.Exit(1)
