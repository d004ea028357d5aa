"""Reads from the ledger, in one transaction, what the parts of a report are computed from."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hpo.errors import HpoError
from hpo.ledger import queries, tags
from hpo.ledger.rows import AttemptRow, EventRow, StudyRow
from hpo.ledger.stored_spec import ObjectiveJson, StoredSpec
from hpo.ledger.views import ends, finished
from hpo.ledger.views import report as report_queries
from hpo.ledger.views import verify as verify_queries
from hpo.search.ranking import placed
from hpo.space.config import flatten
from hpo.space.objective import hold_out_of

if TYPE_CHECKING:
    from hpo.ledger.rows import Connection

POWER = "system/gpu_power_w"
LOST, REPLAYED = "worker_lost", "replay_differs"  # events


@dataclass(frozen=True)
class Snapshot:
    """A study in its ledger at `read_at`. Mappings are by trial id, except `power` and `tags`, which are by number."""

    read_at: float
    study: StudyRow
    status: queries.Status
    trials: Sequence[finished.JudgedTrial]  # by number
    configs: Mapping[int, Mapping[str, Any]]  # flat
    judged: Mapping[int, queries.Judged]
    stops: Mapping[int, str]
    attempts: Mapping[int, Sequence[AttemptRow]]  # by fence
    removed_attempts: Sequence[Sequence[AttemptRow]]  # those of removed trials, a sequence each
    power: Mapping[int, float]  # watts, the mean over a trial
    befell: Sequence[EventRow]  # drift and changes of the environment, in their order
    mishaps: Sequence[EventRow]  # of trials: LOST, and REPLAYED for each report that an attempt made with another value
    digest: str
    tags: Mapping[int, Mapping[str, str]]  # by number

    @property
    def name(self) -> str:
        return self.study.name

    @property
    def spec(self) -> StoredSpec:
        return self.study.spec

    @property
    def objectives(self) -> list[ObjectiveJson]:
        return self.spec.objectives

    @property
    def asked(self) -> int:
        """Returns the number of trials that the budget counts, including removed ones."""
        return sum(self.status.trials.values())

    @property
    def metrics(self) -> list[str]:
        return [objective["metric"] for objective in self.objectives]

    @property
    def hold_outs(self) -> dict[str, str]:
        """Returns objective -> the metric held out beside it, for those with a value in some trial."""
        known = {key for at in self.judged.values() for key in at.metrics}
        return {metric: beside for metric in self.metrics if (beside := hold_out_of(metric)) in known and beside}

    @property
    def space(self) -> Mapping[str, Mapping[str, Any]]:
        """Returns path -> its dimension as declared; empty for a study whose space the ledger does not have."""
        return self.study.identity.get("space", {})

    @cached_property
    def placed(self) -> Mapping[int, tuple[int, int]]:
        """Returns number -> front and place, both from 0, of each complete trial that has all values, best first."""
        complete = {t.number: t.values for t in self.trials if t.values and t.is_whole and valued(t)}
        return placed(self.objectives, complete)

    def befell_trials(self, kind: str) -> list[tuple[int | None, EventRow]]:
        """Returns each mishap of this kind and the number of its trial, which is None for a removed trial."""
        numbers = {trial.id: trial.number for trial in self.trials}
        return [(numbers.get(event.trial_id or 0), event) for event in self.mishaps if event.kind == kind]

    def planned(self, trial: finished.JudgedTrial) -> int | None:
        """Returns the epoch that a trial was to reach, counting a fold as an epoch; None if its configuration has
        none."""
        config = self.configs.get(trial.id, {})
        folds = config.get("train.folds") or 1
        return folds if folds > 1 else config.get("train.num_epochs")


def valued(trial: finished.JudgedTrial) -> bool:
    """Returns whether a trial has a value for every objective."""
    return trial.values is not None and None not in trial.values and trial.values != []


def read(connection: Connection, name: str, *, digest: bool = True) -> Snapshot:
    """Returns the study as it is now. Without `digest` it is much faster, since the digest reads every value.

    Raises StudyError if the ledger has no study of that name.
    """
    contents = part(connection, name)
    attempts = verify_queries.attempts_by_trial(connection, contents.study.id)
    tries = {id_: sorted(rows, key=lambda row: row.fence) for id_, rows in attempts.items()}
    shown = [trial.id for trial in contents.trials]
    return replace(
        contents,
        attempts={id_: tries.pop(id_) for id_ in shown if id_ in tries},
        removed_attempts=list(tries.values()),
        power=report_queries.means(connection, contents.study.id, POWER),
        befell=report_queries.study_events(connection, contents.study.id, ("drift", "environment")),
        mishaps=report_queries.trial_events(connection, contents.study.id, (LOST, REPLAYED)),
        digest=queries.digest(connection, contents.study) if digest else "",
    )


def part(connection: Connection, name: str, numbers: Sequence[int] = ()) -> Snapshot:
    """Returns the snapshot of the trials of these numbers, with their attempts, or of all without attempts; neither has
    events of the study."""
    study = queries.study_row(connection, name)
    trials = finished.trial_rows(connection, study, numbers)
    configs = queries.configs(connection, [trial.id for trial in trials])
    return Snapshot(
        read_at=time.time(),
        study=study,
        status=queries.status(connection, name),
        trials=trials,
        configs={number: flatten(config) for number, config in configs.items()},
        judged=finished.judged(connection, study, [trial for trial in trials if trial.values]),
        stops=ends.stop_reasons(connection, study.id, [trial.id for trial in trials] if numbers else ()),
        attempts=verify_queries.attempts_by_trial(connection, study.id, numbers) if numbers else {},
        removed_attempts=(),
        power={},
        befell=(),
        mishaps=(),
        digest="",
        tags=tags.given(connection, study.id),
    )


def reason(error: HpoError) -> str:
    """Returns the error as a clause about why a part could not be computed."""
    return str(error).rstrip(".")
