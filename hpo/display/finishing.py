"""Runs the phases that follow a search: stopped trials are trained to their end, then the best ones are confirmed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Protocol

from hpo.display.console import Console
from hpo.driver.beside import HandedOver
from hpo.driver.request import RunRequest, RunResult
from hpo.driver.run import damage_of_ledger
from hpo.errors import HpoError
from hpo.ledger import Ledger
from hpo.ledger.rows import Connection
from hpo.terminal import number_of
from hpo.tracking import mirror_process
from hpo.tracking.mlflow.damage import damage_of
from hpo.tracking.uri import tracking_uri_of

Run = Callable[[RunRequest], RunResult]


class Step(Protocol):
    """A training of a phase; `line` describes it, and `notice`, if any, says how the phase differs from what was
    asked for."""

    @property
    def line(self) -> str: ...

    @property
    def notice(self) -> str: ...

    @property
    def request(self) -> RunRequest: ...


Planned = Callable[[Ledger, RunRequest, str], Step | None]


def end_phase(request: RunRequest, searched: RunResult, console: Console, run: Run) -> RunResult:
    """Trains the trials that `hpo.analysis.follow_up.finish` plans, by `run`, and returns how the study has ended."""
    from hpo.analysis.follow_up import finish

    return _phase(request, searched, console, run, finish.planned, "no stopped trial is trained to its end")


def reserved(connection: Connection, study: str, seconds: float) -> float:
    """Returns the part of a study's `seconds` that its end phase has used and may need."""
    from hpo.analysis.follow_up import finish

    return finish.reserved(connection, study, seconds)


def confirming_phase(request: RunRequest, searched: RunResult, console: Console, run: Run) -> RunResult:
    """Trains the rounds that `hpo.analysis.follow_up.rounds` plans, by `run`, and returns how the study has ended."""
    from hpo.analysis.follow_up import rounds

    return _phase(request, searched, console, run, rounds.phase, "no trial is trained again")


def _phase(
    request: RunRequest, searched: RunResult, console: Console, run: Run, planned: Planned, untrained: str
) -> RunResult:
    """Trains what `planned` returns until that is nothing, or is the same again.

    The search has ended, and its result stays whatever happens in the phase. An interrupted phase leaves the study
    interrupted: the next run of the study continues it. `untrained` begins the sentence on an error.
    """
    last = noticed = None
    with closing(Ledger(request.storage.url, create=False)) as ledger:
        try:
            while (step := planned(ledger, request, searched.study)) and step != last:
                if step.notice not in ("", noticed):
                    _say(console, noticed := step.notice)
                _say(console, step.line)
                ended, last = run(step.request), step
                if ended.signal is not None:
                    return replace(searched, state="interrupted", signal=ended.signal)
                if ended.reason:
                    _say(console, ended.reason)
        except HpoError as error:
            _say(console, f"{untrained}: {error}")
        except KeyboardInterrupt as stopped:
            return replace(searched, state="interrupted", signal=number_of(stopped))
    return searched


def sent(request: RunRequest, result: RunResult, console: Console, over: HandedOver, *, begun: bool) -> RunResult:
    """Lets the mirrors of the search, if `over` holds them, send what the phase has trained and leave. A phase that has
    `begun` changes the study's description in MLflow too, which names its answer."""
    if over.beside is None and not begun:
        return result
    with closing(Ledger(request.storage.url, create=False)) as ledger:
        uri = tracking_uri_of(ledger, result.study, request.home, request.notify.tracking_uri)
        if over.beside is None:  # a search that ended in an earlier run has no mirror
            if lag := mirror_process.send(ledger, request.home, result.study, uri):
                _say(console, lag)
            return result
        left = over.finish(ledger)
        return replace(result, behind=left, damage=damage_of(uri) or damage_of_ledger(ledger) if left else "")


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=not console.is_terminal)
