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
from typing import Any

from hpo.errors import Unreported
from hpo.ledger import Ledger, queries, transactions
from hpo.ledger.changes import Changes
from hpo.ledger.claims import Claim
from hpo.ledger.history import Unsettled, unreported
from hpo.ledger.json import text
from hpo.ledger.names import MAX_EVENT_KIND, MAX_METRIC, machine_dependent
from hpo.ledger.rows import Connection
from hpo.ledger.transactions import TrialReport
from hpo.space.trial_config import TrialShape
from hpo.space.values import plain
from hpo.storage import artifacts, locations
from hpo.storage.home import Home
from hpo.workers.session import StudySession
from hpo.workers.system_metrics import SystemMetrics
from trainer.checkpoint.store import CheckpointStore
from trainer.errors import Fenced, TrainerError
from trainer.report import CONTINUE, CheckpointRef, Outcome, Report, Verdict, numbers
from trainer.runtime.failpoint import failpoint

# Seconds between two looks at the trials that this one waits for: where the ledger is written again and again, and
# where it is not.
SHORTEST_WAIT, WRITTEN_WAIT, LONGEST_WAIT = 0.01, 0.05, 0.5
SYSTEM_PERIOD = 1.0  # seconds: short epochs would cost more to watch than to train


class LedgerReporter:
    """A trainer.report.Reporter that commits to the ledger, one transaction per report.

    Where a verdict has to be waited for, that is done while it is `worth_while` after so many seconds.
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
    ) -> None:
        self._ledger, self._opened, self._claim = ledger, opened, claim
        self._preempted, self._system, self._worth_while = preempted, system, worth_while
        self._read_at = -math.inf
        self._home, self._place = home, locations.place(home, opened.row)
        self._files = home.files(opened.name, claim.number)
        self._told = CONTINUE  # the last verdict
        self._heard = False  # whether what the study judges by has been reported
        self._last_epoch = TrialShape.of(claim.config, claim.changes).epochs

    @property
    def preempted(self) -> bool:
        return self._preempted()

    def store(self) -> CheckpointStore:
        """The trial's checkpoints; the committed ones are those the ledger knows."""
        return CheckpointStore(
            self._directory(self._claim.number),
            fence=self._claim.fence,
            committed=[self._ref(row) for row in self._claim.committed],
            flagged=[row["path"] for row in self._claim.committed if row["best"]],
            config_hash=self._claim.config_hash,
            on_change=self._checkpoints_changed,
            place=self._place,
        )

    def _ref(self, row: Mapping[str, Any]) -> CheckpointRef:
        metrics = {key: float(value) for key, value in row["metrics"].items()}  # not finite: in JSON by its name
        return CheckpointRef(
            self._directory(row["number"]) / row["path"], *(row[key] for key in _STORED), metrics=metrics
        )

    def _directory(self, number: int) -> Path:
        return self._home.checkpoints(self._opened.name, number)

    def report(
        self,
        step: int,
        metrics: Mapping[str, float],
        *,
        epoch: int | None = None,
        fold: int = 0,
        checkpoint: CheckpointRef | None = None,
    ) -> Verdict:
        lane = self.lane(Report(step, metrics, epoch, checkpoint), fold)
        [answer] = commit(self._ledger, [(self, lane)], wait=True)
        if isinstance(answer, Fenced):
            raise answer
        assert answer is not None
        return answer

    def lane(self, report: Report, fold: int = 0) -> TrialReport:
        """The report as it is committed. Raises Fenced."""
        self._preempted()
        step, fold, checkpoint = _count("step", report.step), _count("fold", fold), report.checkpoint
        epoch = None if report.epoch is None else _count("epoch", report.epoch)
        self._check_obeyed(step)
        metrics = {_key(key): value for key, value in numbers(report.metrics).items()}
        if epoch is not None and fold == 0 and not self._heard:
            self._check_judged(metrics, epoch)
        system = {} if epoch is None else self._machine()
        return TrialReport(
            self._claim,
            step,
            {**metrics, **system},
            epoch=epoch,
            fold=fold,
            checkpoint=checkpoint,
            checkpoint_path=checkpoint.path.name if checkpoint else "",
            decide=self._decider(metrics, epoch, fold),
            strategy=self._opened.resolved.strategy.name,
        )

    def _check_judged(self, metrics: Mapping[str, float], epoch: int) -> None:
        """Raise Unreported where an epoch comes without what the study judges by, and no trial has ever reported that.

        A loop of one's own may report an epoch in parts, so that its first one counts once the second is reported. What
        has only the trainer's own metrics comes before an evaluation.
        """
        judged = [one for one in self._opened.curves.metrics if not machine_dependent(one)]
        missing = [one for one in judged if one not in metrics]
        if not missing or self._claim.high_step > 0:
            self._heard = True
            return
        if epoch < (2 if self._opened.study.trains_itself else 1):
            return
        reported = sorted((key for key in metrics if not machine_dependent(key)), key=lambda k: k.startswith("train/"))
        evaluated = any(not key.startswith("train/") for key in reported)
        study = self._claim.study_id
        for one in missing:
            ever = self._ledger.look(lambda connection, one=one: queries.is_reported(connection, study, one))
            if not ever and (evaluated or one.startswith("train/")):
                raise Unreported(unreported(one, reported))

    def told(self, answer: Verdict) -> None:
        if answer.kind != "continue":
            self._told = answer

    def unsettled(self, connection: Connection, lane: TrialReport) -> Collection[str]:
        """The states of the trials before this one that have not come to the report's epoch, nor ended."""
        epoch = lane.epoch or 0
        return self._opened.history(connection, self._claim, epoch).unsettled(epoch)

    def makes_way(self, found: Collection[str], waited: float) -> bool:
        """Whether not to wait for such trials: where this attempt is to leave, and where one of them has no worker,
        lest all wait."""
        return self.preempted or "waiting" in found or not self._worth_while(waited)

    def obeyed(self, outcome: Outcome) -> Outcome:
        """How the attempt has ended. One that was told to leave has left, whatever a loop of one's own made of that."""
        told, ended = self._told, outcome.kind
        if told.kind != "leave" or ended in ("preempted", "lost") or not self._opened.study.trains_itself:
            return outcome
        self.event("leave_ignored", step=told.step, ended=ended, error=outcome.error)
        return Outcome("preempted", step=told.step or 0)

    def _check_obeyed(self, step: int) -> None:
        """A loop that trains on after it was told to end would make its strategy one that ends nothing."""
        told = self._told
        if told.kind != "continue" and told.step is not None and step > told.step:
            raise TrainerError(
                f"the trial was told to {told.kind} at step {told.step} and reported step {step}: fit() has to return "
                "the Outcome of the verdict that report() gives."
            )

    def event(self, kind: str, **fields: Any) -> None:
        _check_length("event kind", kind, MAX_EVENT_KIND)
        fields, uid = plain(fields), uuid.uuid4().hex
        if "step" in fields:  # a replay after a resume tells the same again
            told = json.dumps([self._claim.trial_id, kind, fields], sort_keys=True)
            uid = hashlib.sha256(told.encode()).hexdigest()
        self._ledger.transact(lambda connection: transactions.record(connection, self._claim, kind, fields, uid))

    def artifact(self, path: Path, name: str | None = None) -> None:
        name = name or path.name
        stored = artifacts.store(self._files, self._claim.fence, path, name, self._place)
        failpoint("artifact.after_store")
        try:
            self.event("artifact", path=name, stored=stored)
        finally:
            self.sweep_files()

    def tag(self, key: str, value: str) -> None:
        self._ledger.transact(lambda connection: transactions.tag(connection, self._claim, {key: value}))

    def sweep_files(self) -> None:
        """Remove what this attempt and those before it have stored and no event names, or is shown no more."""
        if self._place.entries(self._files):
            kept = self._ledger.look(lambda connection: artifacts.artifacts(connection, self._claim.trial_id))
            artifacts.sweep(self._files, self._claim.fence, kept.values(), self._place)

    def _machine(self) -> dict[str, float]:
        """What the machine does, with an attempt's first epoch and then no more often than anybody looks."""
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
            return None  # nothing is left to be cut short

        def decide(connection: Connection) -> Verdict | None:
            history = opened.history(connection, claim, epoch)
            try:
                return strategy.decide(history) if history.told else CONTINUE
            except Unsettled:
                return None

        return decide

    def _checkpoints_changed(self, changes: Mapping[str, Mapping[str, Any]]) -> set[str]:
        return self._ledger.transact(lambda c: transactions.set_checkpoints(c, self._claim, changes))


def commit(
    ledger: Ledger, asking: Sequence[tuple[LedgerReporter, TrialReport]], wait: bool
) -> Sequence[Verdict | Fenced | None]:
    """Commit reports of different trials, lowest numbers first, in one transaction; the answer to each, None where the
    verdict depends on trials that have not come so far. With `wait`, that is waited for until one has an answer."""
    lanes = [lane for _, lane in asking]
    failpoint("worker.before_report_commit")
    answers: Sequence[Verdict | Fenced | None] = ledger.transact(lambda c: transactions.commit(c, lanes))
    failpoint("worker.after_report_commit")
    if wait and all(answer is None for answer in answers):
        with closing(Changes(ledger)) as changes:
            answers = _awaited(ledger, asking, changes)
    for (reporter, _), answer in zip(asking, answers, strict=True):
        if isinstance(answer, Verdict):
            reporter.told(answer)
    return answers


def _awaited(
    ledger: Ledger, asking: Sequence[tuple[LedgerReporter, TrialReport]], changes: Changes
) -> Sequence[Verdict | Fenced | None]:
    """The answers once there is one, for which other trials have to come so far; or that all are to leave."""
    lanes = [lane for _, lane in asking]
    begun, pause = time.monotonic(), SHORTEST_WAIT
    while True:
        found = ledger.look(lambda connection: [reporter.unsettled(connection, lane) for reporter, lane in asking])
        waited = time.monotonic() - begun
        leaving = [bool(of) and _makes_way(one, of, waited) for (one, _), of in zip(asking, found, strict=True)]
        if not all(found):
            answers = ledger.transact(lambda connection: transactions.commit(connection, lanes))
            if any(answer is not None for answer in answers):
                return answers
        elif any(leaving):
            told = [Verdict("leave", lane.step) for lane in lanes]
            return [go if isinstance(go, Fenced) else v if go else None for v, go in zip(told, leaving, strict=True)]
        else:
            time.sleep(pause)
            changes.wait(LONGEST_WAIT)
            pause = min(2 * pause, WRITTEN_WAIT)


def _makes_way(reporter: LedgerReporter, found: Collection[str], waited: float) -> bool | Fenced:
    """Whether not to wait for such trials; or that it cannot, since the trial is another's."""
    try:
        return reporter.makes_way(found, waited)
    except Fenced as error:
        return error


_STORED = ("step", "epoch", "sha256", "size")  # columns of a checkpoint's row, as a CheckpointRef has them


def _count(what: str, value: int) -> int:
    """`value` as a plain int; what a column cannot hold is the task's mistake, on every database."""
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
