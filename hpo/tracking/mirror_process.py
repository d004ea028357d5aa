"""Runs the mirror's process, which drains a study from the ledger to a tracker while the study runs.

    python -m hpo.tracking.mirror_process --study NAME --home DIR [--storage URL] [--tracking-uri URI] [--once]

Training never waits for a tracker and never calls one. While the tracker is unreachable the mirror waits and looks
again; `hpo sync` or the next run sends what is still missing when it must leave.

On SIGTERM it sends the rest, then leaves. On a second one it leaves at once.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace

from hpo.child_process import die_with_parent
from hpo.clock import SystemClock
from hpo.errors import Busy, HpoError
from hpo.ledger import Ledger, leases, queries
from hpo.ledger.database.store import PATIENCE
from hpo.ledger.finished import phases_of
from hpo.ledger.process_id import Process
from hpo.storage.home import Home
from hpo.supervised import Leave, SupervisedProcess
from hpo.terminal import print
from hpo.text import command
from hpo.tracking.base import Tracker, Unreachable
from hpo.tracking.lag import DrainResult, behind, lag
from hpo.tracking.mirror import GRACE, LEASE_TIMEOUT, Mirror, drain, forget
from hpo.tracking.mlflow.sqlite import open_mlflow
from hpo.tracking.trackers import kind_of, lease_of, open_tracker
from hpo.tracking.uri import tracker_name, tracking_uri_of
from trainer import redaction

__all__ = ["DrainResult", "behind", "drain", "finish", "forget", "lag", "main", "send", "spawn"]

BEHIND = 4  # exit code of a mirror that left with unsent data, because the tracker did not accept it


def spawn(home: Home, storage: str, tracking_uri: str, study: str) -> SupervisedProcess:
    """Starts the mirror of a study."""
    kind = kind_of(tracking_uri)
    who = f"{kind.replace(':', '.')}.mirror" if kind else "mirror"
    secret = {"HPO_STORAGE": storage, "HPO_TRACKING_URI": tracking_uri}
    what, home_words = f"the mirror to {kind or 'MLflow'}", ["--home", str(home.root)]
    return SupervisedProcess.of("hpo.tracking.mirror_process", home.logs, study, who, what, home_words, **secret)


def finish(
    mirror: SupervisedProcess,
    ledger: Ledger,
    tracking_uri: str,
    study: str,
    tell: Callable[[int], object] = lambda left: None,
) -> int:
    """Lets the mirror send the rest and leave; returns how many transactions the tracker lacks then.

    Frees the lease if its process is dead.
    """

    def left() -> int:
        return behind(ledger, tracker_name(tracking_uri), study)

    # Exit code 0 with unsent data: it was asked to leave before the workers had ended.
    mirror.finish(left, lambda code: code not in (0, BEHIND) or (code == 0 and left() > 0), tell)
    study_id = ledger.look(lambda connection: queries.study_row(connection, study).id)
    leases.free_of_the_dead(ledger, lease_of(study_id, tracking_uri))
    return left()


def send(ledger: Ledger, home: Home, study: str, tracking_uri: str | None) -> str:
    """Sends a command's changes to MLflow; returns why that failed, an empty text if it succeeded."""
    try:
        tracker = open_mlflow(tracking_uri_of(ledger, study, home, tracking_uri), home.artifacts)
        drained = drain(ledger, tracker, study, home)
    except Busy:
        return "the study's mirror sends it to MLflow."
    except Unreachable as error:
        return f"MLflow has not got it ({error}): run `{command('sync')}`."
    tracker.close()
    return lag(drained, tracker.name)


def _run(options: argparse.Namespace, leave: Leave) -> int:
    home = Home.at(options.home)
    ledger = Ledger(options.storage or home.storage, create=False, patience=PATIENCE)
    uri = options.tracking_uri or home.tracking_uri
    clock = SystemClock()
    row = ledger.look(lambda connection: queries.study_row(connection, options.study))
    name, reference = lease_of(row.id, uri), row.spec.reference
    try:
        tracker = leave.until(lambda: open_tracker(uri, home.artifacts, reference=reference), Unreachable)
    except Unreachable as error:
        drained = DrainResult(0, behind(ledger, tracker_name(uri), options.study), str(error))
    else:
        process, study = Process.current(), options.study
        lease = leave.until(lambda: leases.acquire(ledger, name, study, process, clock, LEASE_TIMEOUT), Busy)
        drained = Mirror(ledger, tracker, options.study, home, lease, clock).follow(leave, GRACE, leave.wait)
        lease.release()
        for phase in phases_of(study):
            drained = _with_phase(ledger, tracker, phase, home, drained)
    if text := lag(drained, tracker_name(uri)):
        print(text, flush=True)
    return BEHIND if drained.behind else 0


def _with_phase(ledger: Ledger, tracker: Tracker, phase: str, home: Home, result: DrainResult) -> DrainResult:
    """Sends the trials of a phase after a search, and returns the combined result of both drains."""
    if not ledger.look(lambda connection: queries.find_study(connection, phase)) or not behind(
        ledger, tracker.name, phase
    ):
        return result
    try:
        sent = drain(ledger, tracker, phase, home)
    except Busy:  # a run of its own has its mirror
        return result
    return replace(result, sent=result.sent + sent.sent, behind=result.behind + sent.behind, why=result.why or sent.why)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 once all is sent, BEHIND if something is left, 1 to 3 as in `hpo.errors`."""
    die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m hpo.tracking.mirror_process")
    parser.add_argument("--study", required=True)
    parser.add_argument("--home")
    parser.add_argument("--storage", default=os.environ.get("HPO_STORAGE"))
    parser.add_argument("--tracking-uri", default=os.environ.get("HPO_TRACKING_URI"))
    parser.add_argument("--once", action="store_true", help="send what there is, then leave")
    options = parser.parse_args(argv)
    try:
        with Home.at(options.home).keeping():
            return _run(options, Leave(options.once))
    except HpoError as error:
        print(error, file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    redaction.install(streams=True)
    sys.exit(main())
