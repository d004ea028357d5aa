"""Trains a trial on several ranks: the worker keeps the lease and launches them, rank 0 reports for its claim."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import cache
from typing import TYPE_CHECKING, Any

from hpo.declaration.identity import check_worker
from hpo.errors import DriftError, HpoError, StorageError, UserError
from hpo.ledger import Ledger, queries
from hpo.ledger.claims import Claim
from hpo.space.trial_config import TrialShape
from hpo.storage import locations
from hpo.storage.home import Home
from hpo.terminal import print
from hpo.workers.attempt import attempt, outcome_of
from hpo.workers.reporter import LedgerReporter
from hpo.workers.session import StudySession
from hpo.workers.system_metrics import SystemMetrics
from trainer.checkpoint.store import CheckpointStore
from trainer.distributed.member import this
from trainer.distributed.rank import Failure
from trainer.errors import CheckpointError, ConfigError, Fenced
from trainer.report import Outcome

if TYPE_CHECKING:
    from trainer.distributed.launch import RankFailed
    from trainer.distributed.nodes import Meeting

_RANK = "hpo.workers.ranks:rank"  # what each rank calls, by its path
_FAILED = (
    "user_error",
    "bad_config",
    "unreported",
    "out_of_memory",
)  # what one rank may come to while the others wait for it
# What is not the trial's fault, from the narrowest to the widest; by name in what a rank says.
_RAISED = {kind.__name__: kind for kind in (Fenced, CheckpointError, StorageError, DriftError, UserError, HpoError)}


def train(storage: str, home: Home, claim: Claim, leaving: Callable[[], bool]) -> Outcome:
    """Train the trial in processes of its own, watched from here; how it ended, for all ranks.

    `leaving` makes them checkpoint and leave. Raises what `hpo.workers.attempt.attempt` does. A rank that is lost makes
    the outcome `lost`.
    """
    from trainer.distributed.launch import RankFailed, RankLost, launch  # and with it torch's elastic agent

    job = {"home": str(home.root), "claim": asdict(claim)}
    device = claim.config["train"]["device"]
    environ = {"HPO_STORAGE": storage}  # which may hold a password
    try:
        parallel, nodes = TrialShape.of(claim.config).parallel, meeting()
        ended = launch(_RANK, job, parallel, device=device, environ=environ, leaving=leaving, meeting=nodes)
    except RankLost as lost:
        return Outcome("lost", error=str(lost))
    except RankFailed as failed:
        return _failed(failed)
    except ConfigError as error:
        return outcome_of(error)
    return Outcome(**ended[0])


@cache
def meeting() -> Meeting | None:
    """Of the hosts that share each trial's ranks, by HPO_NODES and HPO_RENDEZVOUS; None where this one has all of them.

    Raises UserError.
    """
    count, address = os.environ.get("HPO_NODES", "1"), os.environ.get("HPO_RENDEZVOUS", "")
    if not count.isdigit() or int(count) < 1:
        raise UserError(f"HPO_NODES is {count!r}: give how many hosts share the ranks of a trial, or leave it out.")
    from trainer.distributed.nodes import Meeting

    try:
        return Meeting(int(count), address) if int(count) > 1 else None
    except ConfigError as error:
        raise UserError(f"HPO_NODES is {count} and HPO_RENDEZVOUS {address!r}: {error}") from error


def serve(address: str, storage: str) -> None:
    """What `hpo node` does: start this host's share of each trial's ranks, until a signal."""
    from trainer.distributed.node_server import Server

    asked = False

    def leave(*_: object) -> None:
        nonlocal asked
        asked = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)
    try:
        Server(_RANK, address, {"HPO_STORAGE": storage}, lambda: asked, lambda line: print(line, flush=True)).serve()
    except ConfigError as error:
        raise UserError(str(error)) from error


def _failed(failed: RankFailed) -> Outcome:
    if "raised" in failed.report:
        raise _RAISED[failed.report["raised"]](failed.report["error"])
    report: dict[str, Any] = {"kind": "user_error"} | failed.report
    report["error"] = f"rank {failed.rank}: {report['error']}"
    return Outcome(**report)


def rank(job: Mapping[str, Any]) -> dict[str, Any]:
    """What each rank does: the attempt, as one of several. Called by `trainer.distributed.rank`."""
    claim = Claim(**job["claim"])
    ledger = Ledger(os.environ["HPO_STORAGE"], create=False)
    try:
        row = dict(ledger.look(lambda connection: queries.study_by_id(connection, claim.study_id)))
        home = Home.at(job["home"])
        locations.check(home, row)
        opened = StudySession(row)
        check_worker(row, opened.study, data=False)  # once for each rank and attempt: the worker has read the data
        outcome = _attempt(ledger, home, opened, claim)
    except tuple(_RAISED.values()) as error:
        name = next(name for name, kind in _RAISED.items() if isinstance(error, kind))
        raise Failure({"raised": name, "error": str(error)}) from error
    finally:
        ledger.close()
    if outcome.kind in _FAILED:
        raise Failure(asdict(outcome))
    return asdict(outcome)


def _attempt(ledger: Ledger, home: Home, opened: StudySession, claim: Claim) -> Outcome:
    member = this()
    assert member is not None, "called by trainer.distributed.rank"
    patience = TrialShape.of(claim.config).parallel.timeout / 2  # lest the others, who wait for rank 0, seem to hang
    asked = (ledger, home, opened, claim, lambda: member.page.leaving, SystemMetrics())
    reporter = LedgerReporter(*asked, lambda waited: waited < patience)
    store = reporter.store()
    if member.rank > 0:  # hears rank 0's verdicts, and reads the checkpoints that rank 0 chooses
        store = CheckpointStore(store.directory, claim.fence, place=store.place)
    return attempt(opened.study, home, claim, reporter, store)
