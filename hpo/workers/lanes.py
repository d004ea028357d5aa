"""Trains several of a worker's trials as lanes of one model: their choice, claims, reports and ends."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpo.declaration.preflight import lacking
from hpo.declaration.study import Study
from hpo.errors import HpoError, SpaceError, UserError
from hpo.ledger.claims import Claim, claim_alike, join, open_trials
from hpo.ledger.rows import Connection
from hpo.ledger.transactions import TrialReport
from hpo.space.config import apply, as_json, from_json
from hpo.space.paths import check_path
from hpo.workers.attempt import config_of, outcome_of, task_of
from hpo.workers.held_trial import HeldTrial, Holder, TrialLeases
from hpo.workers.process import WorkerProcess
from hpo.workers.reporter import LedgerReporter, commit
from hpo.workers.session import StudySession
from trainer.config.lanes import shared
from trainer.errors import CheckpointError, ConfigError, Fenced, is_stop
from trainer.report import Outcome, Report
from trainer.runtime.threads import limited

if TYPE_CHECKING:
    from trainer.lanes.group import Answer, Group
    from trainer.lanes.lane import Lane


def fields_of(study: Study) -> tuple[str, ...]:
    """Returns the fields in `lane_fields` of the study's task.

    Raises ConfigError for one that the configuration lacks.
    """
    task = study.task_class()
    fields = getattr(task, "lane_fields", ())
    if isinstance(fields, str):
        raise ConfigError(f"lane_fields of {task.__name__} is a text: give a tuple, ({fields!r},).")
    for path in fields:
        try:
            check_path(type(study.config), path)
        except SpaceError as error:
            raise ConfigError(f"lane_fields of {task.__name__}: {error}") from error
    return tuple(fields)


class LaneGroup:
    """The trials that a worker trains together, from the first claimed one until none is left.

    Each epoch, ended lanes make room for similar waiting trials of the study. If this process is at fault, and not a
    trial, all lanes are saved and released before the error is raised.
    """

    def __init__(self, holder: Holder, worker_id: str, process: WorkerProcess, first: Claim) -> None:
        self._leaves, self._holder = holder.leaving, replace(holder, leaving=self._leaving)
        self._ledger, self._worker_id, self._process, self._first = holder.ledger, worker_id, process, first
        self.taken = 0  # trials
        self._id = uuid.uuid4().hex
        self._trials: dict[Lane, HeldTrial] = {}
        self._fenced: Fenced | None = None  # of the last lane that was lost
        self._fault: Exception | None = None  # why all lanes are given up
        self._group: Group | None = None

    def train(self, opening: Callable[[], StudySession]) -> None:
        first = self._first
        with TrialLeases(self._ledger, f"trial {first.number} and its group", first.lease_seconds) as self.leases:
            trial = self._hold(first)
            try:
                self._opened = opening()
            except (CheckpointError, UserError) as error:
                trial.give_back(error)
                raise
            self._train_from(trial)
        if (error := self._fault or self._fenced) is not None:
            raise error

    def _train_from(self, first: HeldTrial) -> None:
        """Trains the first trial, and those that join it."""
        from trainer.lanes.group import Group  # imports torch's function transforms, which few need

        claim = first.claim
        with ExitStack() as stack:
            stack.enter_context(self._process.trial(claim.study_id, claim.number))
            try:
                self._fields = fields_of(self._opened.study)
                config = config_of(self._opened.study, claim)
                self._key = self._key_of(claim.config, claim.changes)
                self._ledger.transact(lambda c: join(c, claim, self._id))
                stack.enter_context(limited(config.train.num_threads))
                self._group = group = stack.enter_context(Group(config.train, self._commit))
            except BaseException as error:
                if is_stop(error):
                    raise
                self._begin(first)
                self._end(first, error)
                return
            claimed = [first, *self._more(group.room - 1)]
            while claimed or group.lanes:
                for trial in claimed:
                    self._admit(group, trial, config if trial is first else None)
                for lane, how in group.advance():
                    self._end(self._trials.pop(lane), how)
                claimed = self._more(group.room)

    def _hold(self, claim: Claim) -> HeldTrial:
        return HeldTrial(self._holder, claim, self.leases)

    def _begin(self, trial: HeldTrial) -> LedgerReporter:
        self.taken += 1
        return trial.begin(self._opened, ", as one of several lanes")

    def _key_of(self, config: Mapping[str, object], changes: Mapping[str, object]) -> str:
        """Returns the key that trials of a group share."""
        if changes:
            config = as_json(apply(from_json(type(self._opened.study.config), config), changes))
        return json.dumps(shared(config, self._fields), sort_keys=True)

    def _more(self, room: int) -> list[HeldTrial]:
        """Claims similar waiting trials, as many as there is room for and this worker's share allows."""
        if room < 1 or self._first.isolated or self._leaving() or not self._holder.worth_while(0.0):
            return []
        opened, token, worker = self._opened, uuid.uuid4().hex, self._worker_id
        waiting, training = self._ledger.look(lambda connection: open_trials(connection, opened.id))
        workers = opened.row.environment.get("workers") or 1
        share = -(-(waiting + training) // workers)  # so that no worker stands idle
        room = min(room, waiting, share - len(self.leases))
        if room < 1:
            return []
        # At a rung a trial waits for those before it, and would wait for one that this group skips.
        in_order = opened.resolved.spec.order == "ordered" and opened.resolved.strategy.name != "none"

        def alike(config: Mapping[str, object], changes: Mapping[str, object]) -> bool:
            return self._key_of(config, changes) == self._key

        def body(connection: Connection) -> list[Claim]:
            return claim_alike(connection, worker, token, opened.id, self._id, room, alike, in_order)

        # Their leases are renewed from here on, since the last one waits while the first is made.
        return [self._hold(claim) for claim in self._ledger.transact(body)]

    def _admit(self, group: Group, trial: HeldTrial, config: Any) -> None:
        """Makes a lane of the trial; `config` is its configuration, if it has been read."""
        study, claim = self._opened.study, trial.claim
        reporter = self._begin(trial)
        try:
            with group.apart():
                config = config or config_of(study, claim)
                task = task_of(study, self._holder.home, config)
                if lack := lacking(task, claim.shape):
                    raise ConfigError(lack)
                reporter.sweep_files()
                self._trials[group.admit(task, config.train, reporter, reporter.store())] = trial
        except BaseException as error:
            if is_stop(error):
                raise
            self._end(trial, error)

    def _commit(self, reports: Sequence[tuple[Any, Report]], wait: bool) -> list[Answer]:
        answers: list[Answer] = [None] * len(reports)
        asking: list[tuple[int, LedgerReporter, TrialReport]] = []
        for index, (reporter, report) in enumerate(reports):
            try:
                asking.append((index, reporter, reporter.checked(report)))
            except Exception as error:
                answers[index] = error
        asking.sort(key=lambda entry: entry[2].claim.number)  # a rung compares with lower numbers
        wait = wait and len(asking) == len(reports)
        for (index, _, _), answer in zip(asking, self._committed([entry[1:] for entry in asking], wait), strict=True):
            answers[index] = answer
        return answers

    def _committed(self, asking: Sequence[tuple[LedgerReporter, TrialReport]], wait: bool) -> Sequence[Answer]:
        """Returns the answer to each report, or its error. After an error each report is committed by itself, so that
        only that trial ends."""
        try:
            return commit(self._ledger, asking, wait) if asking else ()
        except HpoError:
            raise
        except Exception as error:
            if len(asking) == 1:
                return [error]
            return [answer for entry in asking for answer in self._committed([entry], wait=False)]

    def _end(self, trial: HeldTrial, how: Outcome | BaseException) -> None:
        """Ends the attempt with its outcome, or with its error."""
        try:
            try:
                outcome = how if isinstance(how, Outcome) else outcome_of(how)
            except (CheckpointError, UserError) as error:  # it waits for another worker, as the others will
                self._fault = self._fault or error
                trial.give_back(error)
            else:
                trial.finish(outcome)
        except Fenced as error:
            self._fenced = error
            trial.sweep(trial.reporter.store())
        except Exception as error:
            self._fault = self._fault or error
        trial.release()

    def _leaving(self) -> bool:
        spent = self._group is not None and self._group.lasting and not self._process.shared
        return bool(spent) or self._fault is not None or self._leaves()
