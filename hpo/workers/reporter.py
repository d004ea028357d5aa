"""Commits a trial's reports to the ledger, each with the strategy's decision."""

from __future__ import annotations

import hashlib
import json
import math
import operator
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from hpo.clock import Backoff
from hpo.errors import Unreported
from hpo.ledger import Ledger, checkpoints, transactions
from hpo.ledger.claims import Claim
from hpo.ledger.database.changes import BEAT, Changes
from hpo.ledger.database.json import text
from hpo.ledger.history import unreported
from hpo.ledger.names import MAX_EVENT_KIND, MAX_METRIC, machine_dependent
from hpo.ledger.rows import Connection, NumberedCheckpoint
from hpo.ledger.strategy_history import Unsettled
from hpo.ledger.transactions import TrialReport
from hpo.ledger.views import live as live_queries
from hpo.space.values import plain
from hpo.storage import artifacts, locations
from hpo.storage.home import Home
from hpo.workers.figures import Figures
from hpo.workers.session import StudySession
from hpo.workers.system_metrics import SystemMetrics
from trainer.checkpoint.store import CheckpointStore
from trainer.errors import Fenced, TrainerError
from trainer.report import CONTINUE, CheckpointRef, Outcome, Report, Verdict, numbers
from trainer.runtime.failpoint import failpoint

# Seconds between two looks at the trials that this one waits for. The first two are the bounds of the pause after a
# write to the ledger; the last one is the longest wait for a write.
SHORTEST_WAIT, WRITTEN_WAIT, LONGEST_WAIT = 0.01, 0.05, 0.5
SYSTEM_PERIOD = 1.0  # seconds; measuring after each of many short epochs would cost more than training them


class LedgerReporter:
    """A trainer.report.Reporter that commits to the ledger, one transaction per report.

    It waits for a verdict that depends on other trials as long as `worth_while` of the seconds waited returns True.
    """

    def __init__(
        self,
        ledger: Ledger,
        home: Home,
        opened: StudySession,
        claim: Claim,
        preempted: Callable[[], bool],
        system: SystemMetrics,
        worth_while: Callable[[float], bool] = lambda waited: True,
        figures: Figures | None = None,
    ) -> None:
        self.figures = figures or Figures()
        self._ledger, self._opened, self._claim = ledger, opened, claim
        self._preempted, self._system, self._worth_while = preempted, system, worth_while
        self._read_at = -math.inf
        self._home, self._location = home, locations.of(home, opened.row)
        self._files = home.files(opened.name, claim.number)
        self._verdict = CONTINUE  # the last verdict
        self._heard = False  # True once the metrics that the study judges by have been reported
        self._last_epoch = claim.shape.epochs

    @property
    def preempted(self) -> bool:
        return self._preempted()

    def store(self) -> CheckpointStore:
        """Returns the store of the trial's checkpoints; the committed ones are those in the ledger."""
        return CheckpointStore(
            self._directory(self._claim.number),
            fence=self._claim.fence,
            committed=[self._ref(row) for row in self._claim.committed],
            flagged=[row.path for row in self._claim.committed if row.best],
            config_hash=self._claim.config_hash,
            on_change=self._checkpoints_changed,
            location=self._location,
        )

    def _ref(self, row: NumberedCheckpoint) -> CheckpointRef:
        metrics = {key: float(value) for key, value in row.metrics.items()}  # JSON has "nan" and the like as text
        return CheckpointRef(
            self._directory(row.number) / row.path, row.step, row.epoch, row.sha256, row.size, metrics=metrics
        )

    def _directory(self, number: int) -> Path:
        return self._home.checkpoints(self._opened.name, number)

    def report(self, report: Report) -> Verdict:
        [answer] = commit(self._ledger, [(self, self.checked(report))], wait=True)
        if isinstance(answer, Fenced):
            raise answer
        assert answer is not None
        return answer

    def checked(self, report: Report) -> TrialReport:
        """Returns the report to commit: with plain numbers, and after an epoch with the machine's metrics.

        Raises Fenced, and TrainerError for a value that cannot be stored.
        """
        self._preempted()
        step, fold = _count("step", report.step), _count("fold", report.fold)
        epoch = None if report.epoch is None else _count("epoch", report.epoch)
        self._check_obeyed(step)
        metrics = {_key(key): value for key, value in numbers(report.metrics).items()}
        if epoch is not None and fold == 0 and not self._heard:
            self._check_judged(metrics, epoch)
        system = {} if epoch is None else self._machine()
        return TrialReport(
            self._claim,
            Report(step, {**metrics, **system}, epoch, report.checkpoint, fold),
            self._decider(metrics, epoch, fold),
            self._opened.resolved.strategy.name,
        )

    def _check_judged(self, metrics: Mapping[str, float], epoch: int) -> None:
        """Raises Unreported where an epoch lacks a metric that the study judges by and no trial has ever reported.

        A loop that the user has written may report an epoch in parts, so its first epoch is checked once the second is
        reported. A report with only the trainer's own metrics comes before an evaluation.
        """
        judged = [metric for metric in self._opened.curves.metrics if not machine_dependent(metric)]
        missing = [metric for metric in judged if metric not in metrics]
        if not missing or self._claim.high_step > 0:
            self._heard = True
            return
        if epoch < (2 if self._opened.study.trains_itself else 1):
            return
        reported = sorted((key for key in metrics if not machine_dependent(key)), key=lambda k: k.startswith("train/"))
        evaluated = any(not key.startswith("train/") for key in reported)
        study = self._claim.study_id
        for metric in missing:
            ever = self._ledger.look(lambda c, metric=metric: live_queries.has_reported(c, study, metric))
            if not ever and (evaluated or metric.startswith("train/")):
                raise Unreported(unreported(metric, reported))

    def told(self, answer: Verdict) -> None:
        if answer.kind != "continue":
            self._verdict = answer

    def unsettled(self, connection: Connection, epoch: int) -> Collection[str]:
        """Returns the states of the trials before this one that have neither reached the epoch nor ended."""
        return self._opened.history(connection, self._claim, epoch).unsettled(epoch)

    def makes_way(self, states: Collection[str], waited: float) -> bool:
        """Returns whether to stop waiting for trials in these states.

        It does so if this attempt must leave, or if one of them has no worker, since all would then wait.
        """
        return self.preempted or "waiting" in states or not self._worth_while(waited)

    def obeyed(self, outcome: Outcome) -> Outcome:
        """Returns the outcome to record: preempted for an attempt told to leave, whatever its loop returned."""
        verdict, ended = self._verdict, outcome.kind
        if verdict.kind != "leave" or ended in ("preempted", "lost") or not self._opened.study.trains_itself:
            return outcome
        self.event("leave_ignored", step=verdict.step, ended=ended, error=outcome.error)
        return Outcome("preempted", step=verdict.step or 0)

    def _check_obeyed(self, step: int) -> None:
        """Raises TrainerError for a report after the trial was told to end, which would void the strategy's verdict."""
        verdict = self._verdict
        if verdict.kind != "continue" and verdict.step is not None and step > verdict.step:
            raise TrainerError(
                f"the trial was told to {verdict.kind} at step {verdict.step} and reported step {step}: fit() has to "
                "return the Outcome of the verdict that report() gives."
            )

    def event(self, kind: str, **fields: object) -> None:
        _check_length("event kind", kind, MAX_EVENT_KIND)
        fields, uid = plain(fields), uuid.uuid4().hex
        if "step" in fields:  # a replay after a resume records the same event again
            identity = json.dumps([self._claim.trial_id, kind, fields], sort_keys=True)
            uid = hashlib.sha256(identity.encode()).hexdigest()
        self._ledger.transact(lambda connection: transactions.record(connection, self._claim, kind, fields, uid))

    def artifact(self, path: Path, name: str | None = None) -> None:
        name = name or path.name
        stored = artifacts.store(self._files, self._claim.fence, path, name, self._location)
        failpoint("artifact.after_store")
        try:
            self.event("artifact", path=name, stored=stored)
        finally:
            self.sweep_files()

    def tag(self, key: str, value: str) -> None:
        self._ledger.transact(lambda connection: transactions.tag(connection, self._claim, {key: value}))

    def sweep_files(self) -> None:
        """Removes files of this and earlier attempts that no event names or that a later file has replaced."""
        if self._location.entries(self._files):
            kept = self._ledger.look(lambda connection: artifacts.artifacts(connection, self._claim.trial_id))
            artifacts.sweep(self._files, self._claim.fence, kept.values(), self._location)

    def _machine(self) -> dict[str, float]:
        """Returns the machine's metrics, with an attempt's first epoch and then at most once a SYSTEM_PERIOD."""
        now = time.monotonic()
        if now < self._read_at + SYSTEM_PERIOD:
            return {}
        self._read_at = now
        measured = self._system.read()
        if untold := self._system.untold():
            self.event("gpu_not_measured", step=0, reason=untold)
        return measured

    def _decider(self, metrics: Mapping[str, float], epoch: int | None, fold: int) -> transactions.Decide | None:
        strategy, opened, claim = self._opened.resolved.strategy, self._opened, self._claim
        judged = opened.curves.metrics
        if epoch is None or fold != 0 or not strategy.wants(epoch) or not metrics.keys() >= set(judged):
            return None
        if epoch >= self._last_epoch:
            return None  # the training is over

        def decide(connection: Connection) -> Verdict | None:
            history = opened.history(connection, claim, epoch)
            try:
                return opened.resolved.decide(history) if history.told else CONTINUE
            except Unsettled:
                return None

        return decide

    def _checkpoints_changed(self, changes: Mapping[str, Mapping[str, object]]) -> set[str]:
        return self._ledger.transact(lambda c: checkpoints.change(c, self._claim, changes))


def commit(
    ledger: Ledger, asking: Sequence[tuple[LedgerReporter, TrialReport]], wait: bool
) -> Sequence[Verdict | Fenced | None]:
    """Commits reports of different trials, lowest numbers first, in one transaction.

    Returns the answer to each; None if the verdict depends on trials that have not reached its epoch. With `wait`
    it waits until one report has an answer.
    """
    reports, figures = [report for _, report in asking], asking[0][0].figures
    failpoint("worker.before_report_commit")
    with figures.reporting(len(reports)):
        answers: Sequence[Verdict | Fenced | None] = ledger.transact(lambda c: transactions.commit(c, reports))
    failpoint("worker.after_report_commit")
    if wait and all(answer is None for answer in answers):
        with (
            figures.waiting_at_a_rung(),
            closing(Changes(ledger, BEAT)) as changes,  # reports, which it waits for, notify nobody
        ):
            answers = _awaited(ledger, asking, changes)
    for (reporter, _), answer in zip(asking, answers, strict=True):
        if isinstance(answer, Verdict):
            reporter.told(answer)
    return answers


def _awaited(
    ledger: Ledger, asking: Sequence[tuple[LedgerReporter, TrialReport]], changes: Changes
) -> Sequence[Verdict | Fenced | None]:
    """Returns the answers once a trial has one or is to leave; None for the trials that still wait for others."""
    reports = [report for _, report in asking]
    begun, backoff = time.monotonic(), Backoff(SHORTEST_WAIT, WRITTEN_WAIT)
    while True:
        behind = ledger.look(lambda connection: [r.unsettled(connection, t.report.epoch or 0) for r, t in asking])
        waited = time.monotonic() - begun
        leaving = [bool(of) and _makes_way(r, of, waited) for (r, _), of in zip(asking, behind, strict=True)]
        if not all(behind):
            answers = ledger.transact(lambda connection: transactions.commit(connection, reports))
            if any(answer is not None for answer in answers):
                return answers
        elif any(leaving):
            return [
                go if isinstance(go, Fenced) else Verdict("leave", trial.report.step) if go else None
                for trial, go in zip(reports, leaving, strict=True)
            ]
        else:
            time.sleep(backoff.seconds)
            changes.wait(LONGEST_WAIT)
            backoff.grow()


def _makes_way(reporter: LedgerReporter, states: Collection[str], waited: float) -> bool | Fenced:
    """Returns whether to stop waiting for trials in these states; Fenced if another attempt has the trial."""
    try:
        return reporter.makes_way(states, waited)
    except Fenced as error:
        return error


def _count(what: str, value: int) -> int:
    """Returns `value` as a plain int. Raises TrainerError if it does not fit into a column of every database."""
    number = operator.index(value)
    if not 0 <= number < 2**31:
        raise TrainerError(f"{what} {number} cannot be reported: it must be from 0 to {2**31 - 1}.")
    return number


def _key(key: str) -> str:
    _check_length("metric name", key, MAX_METRIC)
    if text(key) != key:
        raise TrainerError(f"metric name {key!r} cannot be stored: leave out NUL and halves of surrogate pairs.")
    return key


def _check_length(what: str, value: str, longest: int) -> None:
    if not 0 < len(value) <= longest:
        shown = f"{value[:40]!r}... of {len(value)} characters" if value else repr(value)
        raise TrainerError(f"{what} {shown} cannot be stored: give it 1 to {longest} characters.")
