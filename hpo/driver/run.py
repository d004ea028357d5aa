"""Runs a study for `hpo run` and `hpo resume`: prepares it, and drives it alongside its mirrors."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import NoReturn

from hpo.declaration.spec import StudySpec
from hpo.door import option
from hpo.driver.beside import Beside, HandedOver
from hpo.driver.drivers import StudyDriver
from hpo.driver.executor_options import decides, driver_of
from hpo.driver.plan import RunPlan
from hpo.driver.prepare import prepare
from hpo.driver.request import DriverOptions, Reserve, RunRequest, RunResult, reserves_nothing
from hpo.driver.signals import Signals, leave
from hpo.errors import HpoError
from hpo.ledger import Ledger, audit, queries, tags
from hpo.ledger.continuing import continuing
from hpo.ledger.rows import Connection
from hpo.ledger.views import verify as verify_queries
from hpo.storage.metrics_json import Results
from hpo.terminal import print
from hpo.tracking.mlflow.client import silence
from hpo.tracking.mlflow.damage import damage_of
from hpo.workers.prepared import Prepared

Watch = Callable[[Ledger, str, int], Callable[[str], None]]


def _on_stderr(notice: str) -> None:
    print(notice, file=sys.stderr)


def run(
    request: RunRequest,
    watch: Watch,
    at_once: Callable[[int], NoReturn] = leave,
    prepared: Prepared | None = None,
    tell: Callable[[str], None] = _on_stderr,
    over: HandedOver | None = None,
    reserve: Reserve = reserves_nothing,
) -> RunResult:
    """Drives the study to its end or its interruption.

    `watch(ledger, name, workers)` returns a function that is called at every tick with a text to show, or "". A second
    signal calls `at_once`; `tell` is called with each notice. The caller that started `prepared` closes it.
    `over` takes the mirrors of a search that an end phase may follow; if it holds them, this run is the phase.
    `reserve` returns the seconds that a study bounded by time alone leaves to its end phase.
    """
    with request.home.keeping(), ExitStack() as ends:
        planned, ledger = prepare(request, prepared, ends)
        if decides(planned.placement.executor).finishes:
            planned = replace(planned, options=replace(planned.options, reserve=reserve))
        return start(planned, ledger or Ledger(request.storage.url), watch, at_once, tell, over)


def start(
    planned: RunPlan,
    ledger: Ledger,
    watch: Watch,
    at_once: Callable[[int], NoReturn],
    tell: Callable[[str], None],
    over: HandedOver | None = None,
) -> RunResult:
    """Drives the study according to its plan."""
    request, spec = planned.request, planned.resolved.spec
    options = replace(planned.options, storage=ledger.url)
    driver = driver_of(planned.placement.executor)(ledger, planned.resolved, options, planned.placement.make())
    driver.acquire()
    try:
        ledger.transact(audit.Entry(spec.name, "run" if options.stored is None else "resume").write)
        if request.notify.tags:
            ledger.transact(lambda connection: _tag(connection, spec.name, request.notify.tags))
        results, show = Results(ledger, spec.name, options.home), watch(ledger, spec.name, planned.placement.workers)
        for notice in filter(None, (*planned.notices, silence(options.tracking_uri))):
            tell(notice)

        def tick(notice: str = "") -> None:
            results.tick()
            show(notice)

        ours = decides(planned.placement.executor).finishes
        may_finish, may_confirm = ours and planned.resolved.finishes, ours and planned.resolved.confirms is not None
        beside = Beside(options, ledger, spec.name, mirrors=over is None or over.beside is None)
        take = over if (may_finish or may_confirm) and over is not None and over.beside is None else None
        result = _drive(driver, beside, ledger, spec, options, tick, results.write, at_once, take)
        if result.signal:
            ledger.transact(audit.Entry(spec.name, "stop").write)
        ended = result.finishes and result.state == "complete"
        finishes = ended or (result.finishes and result.state == "interrupted" and driver.leaves_time)
        return replace(result, finishes=finishes and may_finish, confirms=ended and may_confirm)
    finally:
        driver.release()


def _tag(connection: Connection, name: str, given: Mapping[str, str]) -> None:
    tags.put(connection, queries.study_row(connection, name).id, tags.STUDY, given)


def _drive(
    driver: StudyDriver,
    beside: Beside,
    ledger: Ledger,
    spec: StudySpec,
    options: DriverOptions,
    on_tick: Callable[[str], None],
    write_results: Callable[[], None],
    at_once: Callable[[int], NoReturn],
    over: HandedOver | None,
) -> RunResult:
    if driver.idle:
        state = driver.run()
        write_results()
        if not (beside.behind() or beside.is_held_by_the_dead() or options.alerts):
            on_tick("")
            return RunResult(spec.name, state, driver.reason, 0, None, finishes=True)
    beside.start()
    resumes = ledger.look(lambda connection: continuing(connection, queries.study_row(connection, spec.name)))
    signals = Signals(driver, beside.kill, resumes, at_once)

    def tell(left: int) -> None:
        if left:
            last = "last transaction" if left == 1 else f"last {left} transactions"
            on_tick(f"waiting for MLflow to take the {last}")

    def tick() -> None:
        beside.tick()
        on_tick(signals.untold())

    with signals:
        try:
            state = driver.run(tick)
            write_results()
            if over is not None and (state == "complete" or driver.leaves_time) and signals.first is None:
                over.beside = beside
        finally:  # a mirror that dies with this process would keep its lease
            signals.trained = True
            if over is not None and over.beside is beside:
                beside.hand_over()
                left = 0
            else:
                if left := beside.behind():
                    tell(left)
                left = beside.finish(tell)
    on_tick("")
    damaged = damage_of(options.tracking_uri) or damage_of_ledger(ledger) if left else ""
    interrupted_by = signals.first if state == "interrupted" else None
    unstopped = signals.first is None
    return RunResult(spec.name, state, driver.reason, left, interrupted_by, damaged, finishes=unstopped)


def damage_of_ledger(ledger: Ledger) -> str:
    """Returns a sentence if SQLite, which reads the whole file, finds it damaged; "" if it is sound or not SQLite."""
    try:
        broken = ledger.look(verify_queries.integrity_check) if ledger.is_sqlite else []
    except HpoError as error:
        return str(error)
    fix = f"restore the file from a backup, or choose another {option('home')}."
    return f"the ledger {ledger.shown} is damaged ({' '.join(broken[0].split())[:100]}): {fix}" if broken else ""
