"""Trains several of a worker's trials as lanes of one model: which fit together, their claims, reports and ends."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from hpo.declaration.preflight import lacking
from hpo.declaration.study import Study
from hpo.errors import HpoError, SpaceError, UserError
from hpo.ledger import Ledger
from hpo.ledger.claims import Claim, claim_alike, fenced, join, open_trials, renewed
from hpo.ledger.leases import Heartbeat
from hpo.ledger.rows import Connection
from hpo.ledger.transactions import TrialReport, committed_paths
from hpo.space.config import apply, as_json, check_path, from_json
from hpo.space.trial_config import TrialShape
from hpo.storage.home import Home
from hpo.workers.attempt import config_of, outcome_of, task_of
from hpo.workers.reporter import LedgerReporter, commit
from hpo.workers.session import StudySession
from hpo.workers.system_metrics import SystemMetrics
from trainer.config.lanes import shared
from trainer.errors import CheckpointError, ConfigError, Fenced, is_stop
from trainer.report import Outcome, Report
from trainer.runtime.failpoint import failpoint
from trainer.runtime.threads import limited

if TYPE_CHECKING:
    from trainer.lanes.group import Answer, Group
    from trainer.lanes.lane import Lane


def fields_of(study: Study) -> tuple[str, ...]:
    """What the study's task names in `lane_fields`. Raises ConfigError where that is none of the configuration."""
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


@dataclass(frozen=True)
class WorkerServices:
    """What a worker lends to a group of lanes."""

    ledger: Ledger
    home: Home
    worker_id: str
    system: SystemMetrics
    leaving: Callable[[], bool]
    worth_while: Callable[[float], bool]
    keep: Callable[[], AbstractContextManager[None]]  # around what changes the process
    finish: Callable[[Claim, Outcome, StudySession | None], Outcome]
    say: Callable[[str], None]


class LaneGroup:
    """The trials that a worker trains together, from the first that it has claimed on until none is left.

    Each epoch lanes that have ended make room for waiting trials of the study that are alike. Where this place is at
    fault, and not a trial, all lanes are saved and given up before that is raised.
    """

    def __init__(self, services: WorkerServices, first: Claim) -> None:
        self._services, self._first = services, first
        self.taken = 0  # trials
        self._id = uuid.uuid4().hex
        self._held = {first.trial_id: first}  # those whose leases are renewed
        self._lost: set[tuple[int, int]] = set()  # trial and fence of those that are another's by now
        self._lanes: dict[Lane, tuple[Claim, LedgerReporter]] = {}
        self._fenced: Fenced | None = None  # the last of the lanes that were lost so
        self._fault: Exception | None = None  # why all of them are given up

    def train(self, opening: Callable[[], StudySession]) -> None:
        from trainer.lanes.group import Group  # torch's function transforms, which few need

        first = self._first
        with Heartbeat(f"trial {first.number} and its group", self._renew, first.lease_seconds / 3) as self._heartbeat:
            try:
                self._opened = opening()
            except (CheckpointError, UserError) as error:
                # This place is at fault, its disk or its home, and not the trial: it waits for another worker.
                self._services.finish(first, Outcome("preempted", error=str(error)), None)
                raise
            with ExitStack() as stack:
                stack.enter_context(self._services.keep())
                try:
                    self._fields = fields_of(self._opened.study)
                    self._key = self._key_of(first.config, first.changes)
                    self._services.ledger.transact(lambda c: join(c, first, self._id))
                    train: Any = self._configured(first.config, first.changes).train
                    stack.enter_context(limited(train.num_threads))
                    group = stack.enter_context(Group(train, self._commit))
                except BaseException as error:
                    if is_stop(error):
                        raise
                    self.taken += 1
                    self._end(first, self._reporter(first), error)
                else:
                    self._train(group)
        if (error := self._fault or self._fenced) is not None:
            raise error

    def _train(self, group: Group) -> None:
        claims = [self._first, *self._more(group.room - 1)]
        while claims or group.lanes:
            for claim in claims:
                self._admit(group, claim)
            for lane, how in group.advance():
                self._end(*self._lanes.pop(lane), how)
            claims = self._more(group.room)

    def _configured(self, config: Mapping[str, Any], changes: Mapping[str, Any]) -> Any:
        return apply(from_json(type(self._opened.study.config), config), changes)

    def _key_of(self, config: Mapping[str, Any], changes: Mapping[str, Any]) -> str:
        """What trials must have in common."""
        config = as_json(self._configured(config, changes)) if changes else config
        return json.dumps(shared(config, self._fields), sort_keys=True)

    def _more(self, room: int) -> list[Claim]:
        """Waiting trials that are alike, as many as there is room for and as are this worker's share."""
        services = self._services
        if room < 1 or self._first.alone or self._leaving() or not services.worth_while(0.0):
            return []
        opened, token, worker = self._opened, uuid.uuid4().hex, services.worker_id
        waiting, training = services.ledger.look(lambda connection: open_trials(connection, opened.id))
        share = -(-(waiting + training) // opened.row["environment"].get("workers", 1))  # lest another one stands idle
        room = min(room, waiting, share - len(self._held))
        if room < 1:
            return []
        # At a rung a trial waits for those before it, and would for one that this group passes over.
        in_order = opened.resolved.spec.order == "ordered" and opened.resolved.strategy.name != "none"

        def alike(config: Mapping[str, Any], changes: Mapping[str, Any]) -> bool:
            return self._key_of(config, changes) == self._key

        def body(connection: Connection) -> list[Claim]:
            return claim_alike(connection, worker, token, opened.id, self._id, room, alike, in_order)

        found = services.ledger.transact(body)
        self._held |= {claim.trial_id: claim for claim in found}  # the last one waits while the first is made
        return found

    def _reporter(self, claim: Claim) -> LedgerReporter:
        services = self._services
        asked = (services.ledger, services.home, self._opened, claim, partial(self._preempted, claim), services.system)
        return LedgerReporter(*asked, services.worth_while)

    def _admit(self, group: Group, claim: Claim) -> None:
        services, opened = self._services, self._opened
        self.taken += 1
        reporter = self._reporter(claim)
        services.say(f"{opened.name}: trial {claim.number} begins, attempt {claim.fence}, as one of several lanes")
        try:
            with group.apart():
                config = config_of(opened.study, claim)
                task = task_of(opened.study, services.home, config)
                if lack := lacking(task, TrialShape.of(claim.config)):
                    raise ConfigError(lack)
                reporter.sweep_files()
                self._lanes[group.admit(task, config.train, reporter, reporter.store())] = claim, reporter
        except BaseException as error:
            if is_stop(error):
                raise
            self._end(claim, reporter, error)

    def _commit(self, reports: Sequence[tuple[Any, Report]], wait: bool) -> list[Answer]:
        answers: list[Answer] = [None] * len(reports)
        asking = []
        for place, (reporter, report) in enumerate(reports):
            try:
                asking.append((place, reporter, reporter.lane(report)))
            except Exception as error:
                answers[place] = error
        asking.sort(key=lambda one: one[2].claim.number)  # a rung compares with lower numbers
        wait = wait and len(asking) == len(reports)
        for (place, _, _), answer in zip(asking, self._committed([one[1:] for one in asking], wait), strict=True):
            answers[place] = answer
        return answers

    def _committed(self, asking: Sequence[tuple[LedgerReporter, TrialReport]], wait: bool) -> Sequence[Answer]:
        """The answer to each, or what it raises: then each is committed by itself, so that it is not of all of them."""
        try:
            return commit(self._services.ledger, asking, wait) if asking else ()
        except HpoError:
            raise
        except Exception as error:
            if len(asking) == 1:
                return [error]
            return [answer for one in asking for answer in self._committed([one], wait=False)]

    def _end(self, claim: Claim, reporter: LedgerReporter, how: Outcome | BaseException) -> None:
        """End the attempt by its outcome, or by what it has raised."""
        try:
            try:
                outcome = how if isinstance(how, Outcome) else outcome_of(how)
            except (CheckpointError, UserError) as error:  # it waits for another worker, as the others will
                self._fault = self._fault or error
                self._services.finish(claim, Outcome("preempted", error=str(error)), None)
            else:
                failpoint("worker.before_finish")
                ended = self._services.finish(claim, outcome, self._opened)
                failpoint("worker.after_finish")
                self._services.say(
                    f"{self._opened.name}: trial {claim.number} {ended.kind}{ended.error and ': '}{ended.error}"
                )
        except Fenced as error:
            self._fenced = error
            known = self._services.ledger.look(lambda connection: committed_paths(connection, claim))
            reporter.store().sweep(known)  # what it has saved and not committed
        except Exception as error:
            self._fault = self._fault or error
        del self._held[claim.trial_id]

    def _renew(self) -> None:
        held = list(self._held.values())

        def body(connection: Connection) -> set[tuple[int, int]]:
            return {(one.trial_id, one.fence) for one in held if not renewed(connection, one)}

        self._lost |= self._services.ledger.transact(body)

    def _preempted(self, claim: Claim) -> bool:
        self._heartbeat.check()
        if (claim.trial_id, claim.fence) in self._lost:
            raise fenced(claim)
        return self._leaving()

    def _leaving(self) -> bool:
        return self._fault is not None or self._services.leaving()
