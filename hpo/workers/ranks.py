"""Trains a trial on several ranks: the worker keeps the lease and launches them, rank 0 reports for its claim."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpo.declaration.identity import check_worker
from hpo.errors import DriftError, HpoError, StorageAway, StorageError, UserError
from hpo.ledger import Ledger, queries
from hpo.ledger.claims import Claim
from hpo.secret_environment import withheld
from hpo.storage import locations
from hpo.storage.home import Home
from hpo.workers.attempt import attempt, outcome_of
from hpo.workers.nodes import RANK
from hpo.workers.reporter import LedgerReporter
from hpo.workers.session import StudySession
from hpo.workers.system_metrics import SystemMetrics
from trainer.checkpoint.store import CheckpointStore
from trainer.distributed.member import this
from trainer.distributed.rank import Failure
from trainer.errors import CheckpointError, ConfigError, Fenced
from trainer.files import outage
from trainer.files.s3 import Away
from trainer.report import Outcome

if TYPE_CHECKING:
    from trainer.distributed.failures import RankFailed
    from trainer.distributed.nodes import Nodes

_FAILED = (
    "user_error",
    "bad_config",
    "unreported",
    "out_of_memory",
)  # the possible ends of one rank while the others wait for it
# Errors that are not the trial's fault, from the narrowest to the widest, by their names in a rank's answer.
_KINDS = (Fenced, Away, CheckpointError, StorageAway, StorageError, DriftError, UserError, HpoError)
_RAISED = {kind.__name__: kind for kind in _KINDS}


def train(storage: str, home: Home, claim: Claim, leaving: Callable[[], bool], nodes: Nodes | None) -> Outcome:
    """Trains the trial in its own processes, on `nodes` if there are several; returns its end, for all ranks.

    `leaving` makes them checkpoint and leave. Raises the errors of `hpo.workers.attempt.attempt`. A rank that is lost
    makes the outcome `lost`.
    """
    from trainer.distributed.failures import RankFailed, RankLost
    from trainer.distributed.launch import launch

    job = {"home": str(home.root), "claim": asdict(claim)}
    device = claim.config["train"]["device"]
    environ = {"HPO_STORAGE": storage, **outage.environ()}  # the URL may hold a password
    try:
        launched = launch(RANK, job, claim.shape.parallel, device=device, environ=environ, leaving=leaving, nodes=nodes)
    except RankLost as lost:
        return Outcome("lost", error=str(lost))
    except RankFailed as failed:
        return _failed(failed)
    except ConfigError as error:
        return outcome_of(error)
    return Outcome(**launched[0])


def _failed(failed: RankFailed) -> Outcome:
    if "raised" in failed.report:
        raise _RAISED[failed.report["raised"]](failed.report["error"])
    report: dict[str, Any] = {"kind": "user_error"} | failed.report
    report["error"] = f"rank {failed.rank}: {report['error']}"
    return Outcome(**report)


def rank(job: Mapping[str, Any]) -> dict[str, Any]:
    """Runs one rank of the attempt. `trainer.distributed.rank` calls it."""
    ledger = Ledger(os.environ["HPO_STORAGE"], create=False)
    with withheld():
        return _rank(ledger, job["home"], Claim.of(job["claim"]))


def _rank(ledger: Ledger, directory: str, claim: Claim) -> dict[str, Any]:
    try:
        home = Home.at(directory)
        row = ledger.look(lambda connection: queries.study_by_id(connection, claim.study_id))
        locations.check(home, row)
        opened = StudySession(row)
        # Once per rank and attempt: the worker has read the data.
        check_worker(opened.resolved, row.identity, row.environment, data=False)
        outcome = _attempt(ledger, home, opened, claim)
    except tuple(_RAISED.values()) as error:  # pyright: ignore[reportUnknownVariableType]
        name = next(name for name, kind in _RAISED.items() if isinstance(error, kind))
        raise Failure({"raised": name, "error": str(error)}) from error  # pyright: ignore[reportUnknownArgumentType]
    finally:
        ledger.close()
    if outcome.kind in _FAILED:
        raise Failure(asdict(outcome))
    return asdict(outcome)


def _attempt(ledger: Ledger, home: Home, opened: StudySession, claim: Claim) -> Outcome:
    member = this()
    assert member is not None, "called by trainer.distributed.rank"
    patience = claim.shape.parallel.timeout / 2  # so that the ranks which wait for rank 0 do not time out
    arguments = (ledger, home, opened, claim, lambda: member.page.leaving, SystemMetrics())
    reporter = LedgerReporter(*arguments, lambda waited: waited < patience)
    store = reporter.store()
    if member.rank > 0:  # follows rank 0's verdicts, and reads the checkpoints that rank 0 chooses
        store = CheckpointStore(store.directory, claim.fence, location=store.location)
    return attempt(opened.study, home, claim, reporter, store)
