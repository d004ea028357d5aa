"""Runs a study and shows its progress, for commands and for `hpo.run`."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from typing import Any, NoReturn

from hpo.display.console import Console
from hpo.display.finishing import confirming_phase, end_phase, reserved, sent
from hpo.display.live import View
from hpo.driver.beside import HandedOver
from hpo.driver.request import RunRequest, RunResult
from hpo.driver.run import damage_of_ledger, run
from hpo.driver.signals import leave
from hpo.ledger import Ledger, queries
from hpo.space.config import flatten
from hpo.terminal import number_of
from hpo.text import command
from hpo.tracking import mirror_process
from hpo.tracking.mlflow.damage import damage_of
from hpo.tracking.uri import tracker_name, tracking_uri_of
from hpo.workers.prepared import Prepared


def watched(
    request: RunRequest,
    console: Console,
    begun: Callable[[], None] = lambda: None,
    at_once: Callable[[int], NoReturn] = leave,
    prepared: Prepared | None = None,
) -> tuple[RunResult, View]:
    """Runs a study and the phases after its search and shows all on `console`; returns the result and its view.

    begun     called once the study is open and workers are about to begin
    at_once   called with the number of a second signal, which ends everything
    prepared  the process that will fork the workers, if it has been started
    """
    phase: list[RunResult] = []
    with closing(HandedOver()) as over:

        def run_phase(asked: RunRequest) -> RunResult:
            phase.append(_watched(asked, console, begun, at_once, prepared, over)[0])
            return phase[-1]

        result, view = _watched(request, console, begun, at_once, prepared, over)
        if result.finishes:
            result = end_phase(request, result, console, run_phase)
        if result.confirms and result.signal is None:
            result = confirming_phase(request, result, console, run_phase)
        return sent(request, result, console, over, begun=bool(phase)), view


def _watched(
    request: RunRequest,
    console: Console,
    begun: Callable[[], None],
    at_once: Callable[[int], NoReturn],
    prepared: Prepared | None,
    over: HandedOver,
) -> tuple[RunResult, View]:
    since = time.monotonic()
    views: list[View] = []
    ledgers: list[Ledger] = []

    def watch(ledger: Ledger, name: str, workers: int) -> Any:
        begun()
        ledgers.append(ledger)
        overrides = flatten(request.study.overrides) if request.study.reference else None
        views.append(View(ledger, name, console, workers=workers, given=overrides, since=since).start())
        return views[0].tick

    try:
        result = run(request, watch, at_once, prepared, over=over, reserve=reserved)
    except KeyboardInterrupt as stopped:  # before workers begin or after they have left; else the driver handles it
        if not views:
            raise
        result = _left(ledgers[0], views[0].progress.name, request, number_of(stopped))
    finally:
        for view in views:
            view.stop()
        for ledger in ledgers:
            ledger.close()
    return result, views[0]


def _left(ledger: Ledger, name: str, request: RunRequest, number: int) -> RunResult:
    """Returns the result of a run that was interrupted before its workers began or after they had left."""
    with ledger.read() as connection:
        state = queries.study_row(connection, name).state
    uri = tracking_uri_of(ledger, name, request.home, request.notify.tracking_uri)
    behind = mirror_process.behind(ledger, tracker_name(uri), name)
    damaged = damage_of(uri) or damage_of_ledger(ledger) if behind else ""
    if state == "open":
        return RunResult(name, "interrupted", "", behind, number, damaged)
    reason = f"its failures have ended the study: `{command(f'compare --study {name}')}` shows them."
    return RunResult(name, state, reason if state == "stopped" else "", behind, None, damaged)
