"""Drives a study and shows its progress, for the commands that run one."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import typer

from hpo.cli import json_output
from hpo.errors import StudyStopped
from hpo.terminal import print, rewrite

if TYPE_CHECKING:
    from hpo.driver.request import RunRequest, RunResult
    from hpo.workers.prepared import Prepared

SILENCE = 0.2  # seconds that a command may take to begin before a terminal shows what it does
PIPED_SILENCE = 5.0  # the same for other streams, where the text cannot be erased


@contextmanager
def starting(
    text: str, stream: Any, after: float = SILENCE, piped_after: float = PIPED_SILENCE
) -> Iterator[Callable[[], None]]:
    """Shows `text` after `after` seconds, or after `piped_after` if the stream is not a terminal.

    A terminal shows it until the block ends or calls the function that this yields.
    """
    lock, ended, shown = threading.Lock(), threading.Event(), threading.Event()
    terminal = stream is not None and stream.isatty()

    def show() -> None:
        with lock:
            if not ended.is_set():
                shown.set()
                print(text, end="" if terminal else "\n", file=stream, flush=True)

    def end() -> None:
        with lock:
            if terminal and shown.is_set() and not ended.is_set():
                rewrite("", stream)
            ended.set()

    timer = threading.Timer(after if terminal else piped_after, show)
    timer.daemon = True
    if stream is not None:
        timer.start()
    try:
        yield end
    finally:
        timer.cancel()
        end()


@contextmanager
def preparing(executor: str | None) -> Iterator[Prepared | None]:
    """Yields the process that forks local workers; None if the study has none or they cannot be forked.

    It imports the workers' packages while the command imports the driver's.
    """
    from hpo.workers.prepared import Prepared

    if executor not in (None, "local") or not Prepared.possible():
        yield None
        return
    with closing(Prepared()) as prepared:
        yield prepared


def drive(
    request: RunRequest,
    prepared: Prepared | None,
    *,
    quiet: bool = False,
    as_json: bool = False,
    concludes: bool = True,
) -> None:
    """Runs or resumes a study and shows it; with `as_json` shows it on standard error and prints the result.

    Raises StudyStopped if the study has ended without a result.

    concludes  whether nothing follows; else the summary of a study whose trials are all complete is left out
    """
    with (
        starting("reading the study and its data ...", None if quiet else sys.stderr) as begun,
        json_output.notes(as_json or quiet),
    ):
        result = _drive(request, prepared, begun, concludes=concludes)
    if as_json:
        json_output.print_json(_ended(request, result))
    if result.signal:
        raise typer.Exit(128 + result.signal)
    if result.state == "stopped":
        raise StudyStopped(result.reason)


def _ended(request: RunRequest, result: RunResult) -> dict[str, Any]:
    """Returns the facts of `hpo status --json`, the reason for an early end, and how far MLflow lags."""
    from hpo.analysis.results.status import facts_of
    from hpo.storage.lookup import open_study

    ledger, name, study_home = open_study(str(request.home.root), request.storage.storage, result.study)
    with closing(ledger), ledger.read() as connection:
        return facts_of(connection, name, study_home) | {
            "reason": result.reason,
            "behind": result.behind,
            "damage": result.damage,
        }


def _drive(request: RunRequest, prepared: Prepared | None, begun: Callable[[], None], *, concludes: bool) -> RunResult:
    from hpo.display.console import Console
    from hpo.display.summary import summary
    from hpo.display.watch import watched

    console = Console()
    result, view = watched(request, console, begun, prepared=prepared)
    failed = any(trial.state == "failed" for trial in view.progress.trials.values())
    if not (concludes or failed or result.behind or result.reason) and result.state == "complete":
        return result
    with _deaf():
        console.print(summary(view.progress, result, view.seconds), markup=False, highlight=False, soft_wrap=True)
        if result.reason and result.state != "stopped" and not result.signal:
            console.print(result.reason, markup=False, highlight=False, soft_wrap=True)
    return result


@contextmanager
def _deaf() -> Iterator[None]:
    """Ignores Ctrl-C: the run is over, and the exit code says how it ended."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGINT, before)
