"""Runs a study and shows it while it runs, for a command and for `hpo.run`."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any, NoReturn

from hpo.cli.console import Console
from hpo.cli.live import View
from hpo.driver.request import RunRequest, RunResult
from hpo.driver.run import damage_of_ledger, run
from hpo.driver.signals import leave
from hpo.ledger import Ledger, queries
from hpo.space.config import flatten
from hpo.text import command
from hpo.tracking import mirror_process
from hpo.tracking.damage import damage_of
from hpo.tracking.uri import tracker_name, tracking_uri_of
from hpo.workers.prepared import Prepared


def watched(
    request: RunRequest,
    console: Console,
    begun: Callable[[], None] = lambda: None,
    at_once: Callable[[int], NoReturn] = leave,
    prepared: Prepared | None = None,
) -> tuple[RunResult, View]:
    """Run it, with its progress on `console`; how it has ended, and what was shown.

    begun    called once the study is open and workers are about to begin
    at_once  called with the number of a second signal, by which everything is to end
    prepared what will fork the workers, if it has been begun
    """
    views: list[View] = []
    ledgers: list[Ledger] = []

    def watch(ledger: Ledger, name: str, workers: int) -> Any:
        begun()
        ledgers.append(ledger)
        given = flatten(request.overrides) if request.reference else None
        views.append(View(ledger, name, console, workers=workers, given=given).start())
        return views[0].tick

    try:
        result = run(request, watch, at_once, prepared)
    except KeyboardInterrupt:  # before workers begin or after they have left: the driver takes signals between
        if not views:
            raise
        result = _left(ledgers[0], views[0].progress.name, request)
    finally:
        for view in views:
            view.stop()
        for ledger in ledgers:
            ledger.close()
    return result, views[0]


def _left(ledger: Ledger, name: str, request: RunRequest) -> RunResult:
    """How a run that was interrupted before its workers began, or after they had left, has left the study."""
    with ledger.read() as connection:
        state = queries.study_row(connection, name)["state"]
    uri = tracking_uri_of(ledger, name, request.home, request.tracking_uri)
    behind = mirror_process.behind(ledger, tracker_name(uri), name)
    damaged = damage_of(uri) or damage_of_ledger(ledger) if behind else ""
    if state == "open":
        return RunResult(name, "interrupted", "", behind, signal.SIGINT, damaged)
    reason = f"its failures have ended the study: `{command(f'compare --study {name}')}` shows them."
    return RunResult(name, state, reason if state == "stopped" else "", behind, None, damaged)
