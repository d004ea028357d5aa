"""Drives a study in front of the user, for the commands that run one."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import typer

from hpo.cli import facts
from hpo.errors import HpoError
from hpo.terminal import print, rewrite

if TYPE_CHECKING:
    from hpo.driver.request import RunRequest, RunResult
    from hpo.workers.prepared import Prepared

SILENCE = 0.2  # seconds that a command may take to begin before it says on a terminal what it does
PIPED_SILENCE = 5.0  # the same elsewhere, where what was said stays


@contextmanager
def starting(
    text: str, stream: Any, after: float = SILENCE, piped_after: float = PIPED_SILENCE
) -> Iterator[Callable[[], None]]:
    """Show `text` after so many seconds, on a terminal until what it gives is called or the block ends."""
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
    """What forks local workers, where they may be asked for: it imports what they need while the command imports what
    drives them, which takes as long."""
    from hpo.workers.prepared import Prepared

    if executor not in (None, "local") or not Prepared.possible():
        yield None
        return
    with closing(Prepared()) as prepared:
        yield prepared


def drive(request: RunRequest, prepared: Prepared | None, *, quiet: bool = False, as_json: bool = False) -> None:
    """Run or resume, and show it; as JSON, show it on standard error and print how it has ended."""
    with (
        starting("reading the study and its data ...", None if quiet else sys.stderr) as begun,
        facts.notes(as_json or quiet),
    ):
        result = _drive(request, prepared, begun)
    if as_json:
        facts.print_json(_ended(request, result))
    if result.signal:
        raise typer.Exit(128 + result.signal)
    if result.state == "stopped":
        raise HpoError(result.reason)


def _ended(request: RunRequest, result: RunResult) -> dict[str, Any]:
    """What `hpo status --json` prints of the study, why the run ended early, and how far MLflow is behind."""
    from hpo.analysis.results.status import facts_of
    from hpo.storage.lookup import open_study

    ledger, name, at = open_study(str(request.home.root), request.storage, result.study)
    with closing(ledger), ledger.read() as connection:
        return facts_of(connection, name, at) | {
            "reason": result.reason,
            "behind": result.behind,
            "damage": result.damage,
        }


def _drive(request: RunRequest, prepared: Prepared | None, begun: Callable[[], None]) -> RunResult:
    from hpo.cli.console import Console
    from hpo.cli.live import summary
    from hpo.cli.watch import watched

    console = Console()
    result, view = watched(request, console, begun, prepared=prepared)
    with _deaf():
        console.print(summary(view.progress, result), markup=False, highlight=False, soft_wrap=True)
        if result.reason and result.state != "stopped" and not result.signal:
            console.print(result.reason, markup=False, highlight=False, soft_wrap=True)
    return result


@contextmanager
def _deaf() -> Iterator[None]:
    """Let Ctrl-C interrupt nothing: the run is over, and how it has ended is its exit code."""
    main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
    try:
        yield
    finally:
        if main:
            signal.signal(signal.SIGINT, before)
