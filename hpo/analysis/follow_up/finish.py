"""Plans the end phase of a search: the best stopped trials are trained to their end, in a study of their own.

    while (finishing := planned(ledger, request, study)):
        run(finishing.request)

The next trial is a function of the ledger, so an interrupted phase continues where it was. The study itself stays
unchanged: the sampler does not learn of these trials, and an extended search continues as if there had been none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpo.analysis.follow_up import extend
from hpo.analysis.follow_up.derived_study import RunDefaults, SourceStudy, found, request
from hpo.analysis.results.stopped import Stopped, stopped_ahead
from hpo.declaration.budget import Budget
from hpo.declaration.resolved import ResolvedStudy
from hpo.declaration.study import RESUME_FROM
from hpo.door import option
from hpo.driver.end_reason import time_used_up
from hpo.errors import HpoError
from hpo.ledger import Ledger, queries
from hpo.ledger.finished import num_confirmed, original, phase_of
from hpo.ledger.views import driver as driver_queries
from hpo.ledger.views.trial import attempts_of
from hpo.search import finishing
from hpo.search.confirming import NONE
from hpo.search.finishing import is_within
from hpo.space.trial_config import TrialShape
from hpo.space.trial_state import TERMINAL_STATES
from hpo.text import command

if TYPE_CHECKING:
    from hpo.driver.request import RunRequest
    from hpo.ledger.rows import AskedTrial, Connection, StudyRow


STARTING = 5.0  # seconds until a worker trains, on a busy machine


@dataclass(frozen=True)
class Finishing:
    """A trial that `request` trains to its end; `line` names the trial, where it starts and why."""

    line: str
    request: RunRequest
    notice: str = ""


@dataclass(frozen=True)
class Standing:
    """The state of a study whose search has ended, and of its end phase.

    over      whether the search is complete; it may also have ended by its time alone
    stopped   the stopped trials that are ahead of the study's best trial, best first
    listed    the configurations of the end phase's study
    open      the number of the original of a trial there that has not ended; None if all have
    rest      number -> the epochs that a trial ahead lacks
    searched  the epochs that the search has trained
    spent     the epochs that end phases have trained so far
    trials    the number of trials that this phase, after the newest trial of the search, has begun
    epochs    the bound on both; None for no bound
    seconds   the time that the search has left for the phase; None for no bound
    used      the part of that time that the phase has used
    bound     the time of search and phase together
    """

    over: bool
    stopped: Sequence[Stopped]
    listed: Sequence[Mapping[str, Any]]
    open: int | None
    rest: Mapping[int, float]
    searched: int
    spent: int
    trials: int
    epochs: int | None
    seconds: float | None
    used: float
    bound: float | None

    def next(self) -> Stopped | None:
        """Returns the next trial to train to its end; None if no trial stands ahead or may be trained."""
        tried = {original(entry["label"]) for entry in self.listed}
        for trial in self.stopped:
            rest = self.rest[trial.number]
            if trial.number not in tried and self._is_within(rest):
                return trial
        return None

    def untrained(self) -> list[Stopped]:
        """Returns the stopped trials that the phase has not trained to their end, nor given up: the one that it has
        begun, then the others, best first."""
        ended = {original(entry["label"]) for entry in self.listed} - {self.open}
        trials = [trial for trial in self.stopped if trial.number not in ended]
        return sorted(trials, key=lambda trial: trial.number != self.open)

    def _is_within(self, rest: float) -> bool:
        """Returns whether the phase and the budget have room for this many epochs. The first trial may exceed the
        budget, as the last trial of a search may."""
        left = math.inf if self.epochs is None or not self.trials else self.epochs - self.searched - self.spent
        return rest <= left and is_within(rest, self.trials, self.spent, self.searched)


def planned(ledger: Ledger, asked: RunRequest, name: str) -> Finishing | None:
    """Returns the next training of a study's end phase; None if the phase has ended. Raises HpoError if that trial
    cannot be trained, or if the time of the study is used up."""
    standing = ledger.look(lambda connection: _standing(connection, name))
    of_finish = phase_of(name)
    chosen = standing.next() if standing.open is None else None
    if standing.open is None and chosen is None:
        return None
    if standing.seconds is not None and standing.used >= standing.seconds:
        if not standing.over:
            return None  # the run has said that its time is used up
        raise HpoError(time_used_up(name, standing.bound or 0.0, standing.bound or 0.0))
    source = found(ledger, name, complete=False)
    if chosen is None:
        number, listed = standing.open, standing.listed
        line = f"trial {number} goes on to its end in study {of_finish}"
    else:
        number = chosen.number
        new, from_where = extend.entry(ledger, asked.home, source, number, {})
        listed = extend.grown(ledger, of_finish, new)
        values = ", ".join(f"{metric} {value:.6g}" for metric, value in chosen.values.items())
        line = f"{from_where}; ahead of the best when it stopped at epoch {chosen.epoch}: {values}"
    line += f" ({option('finish', 'none')} skips this)"
    return Finishing(line, _request(asked, source, of_finish, listed, standing.seconds))


def _request(
    asked: RunRequest, of: SourceStudy, name: str, listed: Sequence[Mapping[str, Any]], seconds: float | None
) -> RunRequest:
    """Returns the request that trains the listed trials with the options of the study itself."""
    notify = asked.notify
    made = request(
        of, name, listed, RunDefaults(asked.home, asked.placement, asked.storage.storage, notify.tracking_uri)
    )
    placement = replace(made.placement, workers=1)  # one trial at a time, so that the answer does not depend on them
    study = replace(made.study, allow_drift=asked.study.allow_drift)
    budget = replace(made.budget, seconds=seconds)
    storage = replace(made.storage, lease_timeout=asked.storage.lease_timeout)
    shown = replace(made.notify, trackers=notify.trackers, alerts=notify.alerts)
    return replace(made, study=study, budget=budget, placement=placement, storage=storage, notify=shown)


def _standing(connection: Connection, name: str) -> Standing:
    study = queries.study_row(connection, name)
    rows = queries.trial_rows(connection, study.id, removed=True)
    stopped = stopped_ahead(connection, study)
    phase = queries.find_study(connection, phase_of(name))
    if phase and stopped and phase.id < study.id:
        of = phase.name
        deletes = command(f"rm --study {of}")
        raise HpoError(f"study {of!r} belongs to an earlier study {name!r}, which was deleted: `{deletes}`.")
    listed: Sequence[Mapping[str, Any]] = phase.spec.listed if phase else ()
    trials = queries.trial_rows(connection, phase.id, removed=True) if phase else []
    ended_numbers = {trial.number for trial in trials if trial.state in TERMINAL_STATES}
    left_open = [original(entry["label"]) for number, entry in enumerate(listed) if number not in ended_numbers]
    bound, budget = study.max_seconds, Budget.of(study)
    if study.spec.confirm != NONE:
        budget = ResolvedStudy.stored(study.spec.json).searching(budget, num_confirmed(connection, name))
    left = None if bound is None else bound - study.seconds_used
    return Standing(
        over=study.state != "open",
        stopped=stopped,
        listed=listed,
        open=left_open[0] if left_open else None,
        rest=_rest(connection, study, rows, [trial.number for trial in stopped]),
        searched=sum(row.epoch - row.from_epoch for row in rows),
        spent=_spent(connection, study, listed, trials),
        trials=sum(trial.created_at > max(row.created_at for row in rows) for trial in trials),
        epochs=budget.epochs,
        seconds=left,
        used=phase.seconds_used if phase else 0.0,
        bound=bound,
    )


def reserved(connection: Connection, name: str, seconds: float) -> float:
    """Returns how many of a study's `seconds` its end phase has used and may need, at the pace of each trial so far.

    An epoch is added to those that a trial lacks, since trials of the search leave at the end of one.
    A trial that the phase has begun counts in full. So the search of a study that was interrupted in its phase does not
    go on, unless it has more time.
    """
    try:
        standing = _standing(connection, name)
    except HpoError:  # the phase's name is taken, and `planned` says so
        return 0.0
    study = queries.study_row(connection, name)
    ids = {row.number: row.id for row in queries.trial_rows(connection, study.id)}
    costs = (
        (standing.rest[trial.number] + 1) * _pace(connection, ids[trial.number], trial.epoch) + STARTING
        for trial in standing.untrained()
    )
    return standing.used + finishing.reserved(costs, seconds)


def _pace(connection: Connection, trial_id: int, epochs: int) -> float:
    """Returns the seconds that an epoch of a trial has taken, the start of its attempts included."""
    attempts = attempts_of(connection, trial_id)
    return sum((attempt.ended_at or attempt.started_at) - attempt.started_at for attempt in attempts) / max(epochs, 1)


def spent(connection: Connection, study: StudyRow) -> int:
    """Returns how many epochs the end phase of a study has trained."""
    phase = queries.find_study(connection, phase_of(study.name))
    if phase is None or phase.id < study.id:
        return 0
    return _spent(connection, study, phase.spec.listed, queries.trial_rows(connection, phase.id, removed=True))


def seconds(connection: Connection, study: StudyRow) -> float:
    """Returns how long the end phase of a study has been driven."""
    phase = queries.find_study(connection, phase_of(study.name))
    return phase.seconds_used if phase and phase.id > study.id else 0.0


def _rest(
    connection: Connection, study: StudyRow, rows: Sequence[AskedTrial], numbers: Sequence[int]
) -> dict[int, float]:
    """Returns how many epochs each of these trials lacks to its end or, if that is not declared, to the end of the
    longest complete trial."""
    ids = {row.number: row.id for row in rows}
    longest = max((row.epoch for row in rows if row.state == "complete"), default=0)
    configs = queries.configs(connection, [ids[number] for number in numbers])
    rest = dict[int, float]()
    for number in numbers:
        config = configs[ids[number]]
        last = TrialShape.of(config).epochs
        begun = 0 if extend.not_resumable(config, study) else _begun(connection, study, number)
        rest[number] = (last if last < math.inf else longest) - begun
    return rest


def _spent(
    connection: Connection,
    study: StudyRow,
    listed: Sequence[Mapping[str, Any]],
    trials: Sequence[AskedTrial],
) -> int:
    """Returns how many epochs the phase has trained; a trial that failed in its first epoch counts as one."""
    spent = 0
    for trial in trials:
        entry = listed[trial.number]
        number = original(entry["label"]) if RESUME_FROM in entry["params"] else None
        spent += max(trial.epoch - (0 if number is None else _begun(connection, study, number)), 1)
    return spent


def _begun(connection: Connection, study: StudyRow, number: int) -> int:
    """Returns the epoch of a trial's newest kept checkpoint; 0 if it has none."""
    checkpoint = driver_queries.newest_checkpoint(connection, study.id, number)
    return checkpoint.epoch if checkpoint else 0
