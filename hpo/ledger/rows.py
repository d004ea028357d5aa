"""Defines the rows that queries return, a frozen dataclass for each kind; `tables` describes their columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from sqlalchemy.engine import Connection as Connection

from hpo.ledger.stored_spec import Environment, StoredSpec
from trainer.report import VerdictKind

StudyState: TypeAlias = Literal["open", "complete", "stopped", "removing"]
TrialState: TypeAlias = Literal["waiting", "running", "paused", "complete", "pruned", "infeasible", "failed"]
CheckpointState: TypeAlias = Literal["kept", "deleted", "damaged"]


@dataclass(frozen=True, slots=True)
class StudyRow:
    """A study; the table `studies` describes its columns."""

    id: int
    name: str
    uid: str
    created_at: float
    state: StudyState
    requested: int
    max_epochs: int | None
    max_seconds: float | None
    seconds_used: float
    spec: StoredSpec
    identity: Mapping[str, Any]
    environment: Environment
    revision: int
    lease_seconds: float

    @classmethod
    def of(cls, row: Mapping[Any, Any]) -> StudyRow:
        columns: dict[str, Any] = {**row, "spec": StoredSpec.of(row["spec"])}
        return cls(**columns)


@dataclass(frozen=True, slots=True)
class TrialRow:
    """A trial; the table `trials` describes its columns."""

    id: int
    study_id: int
    number: int
    state: TrialState
    parent: int | None
    generation: int
    start: str | None
    from_epoch: int
    group: str | None
    ranks: int
    fence: int
    revision: int
    step: int
    epoch: int
    values: list[float] | None
    violations: list[float] | None
    outcome: str | None
    error: str | None
    traceback: str | None
    losses: int
    told: int | None
    created_at: float
    started_at: float | None
    ended_at: float | None

    @property
    def seconds(self) -> float | None:
        """Returns the time from the trial's start to its end; None if either is missing."""
        return None if self.started_at is None or self.ended_at is None else self.ended_at - self.started_at


@dataclass(frozen=True, slots=True)
class AskedTrial(TrialRow):
    """A trial with the parameters of its ask."""

    params: dict[str, Any]
    config_hash: str


@dataclass(frozen=True, slots=True)
class ConfiguredTrial(AskedTrial):
    """A trial with its whole configuration, and the sampler's attributes."""

    config: dict[str, Any]
    trial_attrs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ProposedTrial(TrialRow):
    """A trial with the data that its sampler needs."""

    coordinates: dict[str, Any]
    params: dict[str, Any]
    trial_attrs: dict[str, Any]
    study_attrs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChangedTrial(TrialRow):
    """A trial that has changed since alerts last read it: `was` is its state then, None if it did not exist."""

    params: dict[str, Any]
    config: dict[str, Any]
    was: TrialState | None


@dataclass(frozen=True, slots=True)
class UnsentTrial(TrialRow):
    """A trial whose run lacks something: the tracker has the revision `sent`; `run_id` is None if it has no run."""

    params: dict[str, Any]
    config: dict[str, Any]
    config_hash: str
    seed: int
    sent: int
    run_id: str | None


@dataclass(frozen=True, slots=True)
class ProgressRow:
    """A trial as a plot of the study's progress shows it; `hpo.ledger.views.progress.fresh` explains it."""

    number: int
    state: TrialState
    epoch: int
    from_epoch: int
    parent: int | None
    objectives: list[float] | None
    error: str | None
    undecided: bool
    removed: bool
    params: dict[str, Any]
    num_epochs: int | None
    folds: int | None
    seeds: int | None


@dataclass(frozen=True, slots=True)
class ImportedTrial:
    """A trial that was imported, with the other tool's identification of it."""

    id: int
    number: int
    params: dict[str, Any]
    trial_attrs: dict[str, Any]


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """A checkpoint; the table `checkpoints` describes its columns."""

    id: int
    trial_id: int
    step: int
    epoch: int
    path: str
    sha256: str
    size: int
    state: CheckpointState
    best: int
    metrics: dict[str, float]
    fence: int
    revision: int
    at: float
    held_until: float | None


@dataclass(frozen=True, slots=True)
class NumberedCheckpoint(CheckpointRow):
    """A checkpoint with the number of its trial."""

    number: int


@dataclass(frozen=True, slots=True)
class TrialCheckpoint(NumberedCheckpoint):
    """A checkpoint with the number and the state of its trial."""

    trial_state: TrialState


@dataclass(frozen=True, slots=True)
class ConfiguredCheckpoint(TrialCheckpoint):
    """A checkpoint with the number, the state and the configuration of its trial."""

    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class NewestCheckpoint:
    """The newest checkpoint that a trial keeps, and the generation of the trial."""

    path: str
    step: int
    epoch: int
    generation: int


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """An attempt with the process of its worker; the tables `attempts` and `workers` describe the columns."""

    trial_id: int
    fence: int
    worker_id: str
    claim: str | None
    renewals: int
    from_step: int
    step: int
    outcome: str | None
    started_at: float
    ended_at: float | None
    host: str
    pid: int
    pid_started: str


@dataclass(frozen=True, slots=True)
class WorkedAttempt:
    """An attempt with its executor and the times when its worker became ready and left in good order."""

    trial_id: int
    worker_id: str
    started_at: float
    ended_at: float | None
    executor: str
    ready: float
    left: float | None


@dataclass(frozen=True, slots=True)
class RunningAttempt:
    """A trial that is being trained, with the attempt's renewals and the process of its worker."""

    id: int
    number: int
    fence: int
    revision: int
    renewals: int
    host: str
    pid: int
    pid_started: str


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """The answer of the strategy to a report; the table `decisions` describes its columns."""

    trial_id: int
    step: int
    fold: int
    verdict: VerdictKind
    reason: str
    checkpoint: str | None
    params: dict[str, Any]
    strategy: str
    fence: int
    obeyed: int | None
    revision: int


@dataclass(frozen=True, slots=True)
class EventRow:
    """An event of a study, or of a trial; the table `events` describes its columns."""

    id: int
    study_id: int
    trial_id: int | None
    kind: str
    fields: dict[str, Any]
    revision: int
    uid: str
    at: float


@dataclass(frozen=True, slots=True)
class ValueRow:
    """A reported value, None for NaN; the table `reports` describes its columns."""

    trial_id: int
    step: int
    key: str
    fold: int
    epoch: int | None
    value: float | None
    fence: int
    revision: int
    at: float


@dataclass(frozen=True, slots=True)
class UnsentValue(ValueRow):
    """A reported value that a tracker lacks; `first` if no earlier transaction has closed the step's epoch."""

    first: bool


@dataclass(frozen=True, slots=True)
class MetricKey:
    """A metric that a fold of a trial has reported."""

    trial_id: int
    key: str
    fold: int


@dataclass(frozen=True, slots=True)
class LeaseRow:
    """A lease; the table `leases` describes its columns."""

    name: str
    owner: str | None
    fence: int
    renewals: int
    host: str
    pid: int
    pid_started: str
    since: float
    schema: str | None


@dataclass(frozen=True, slots=True)
class AlertRow:
    """An alert for a target; the table `alerts` describes its columns."""

    id: int
    study_id: int
    target: str
    event: str
    content: dict[str, Any]
    state: str
    message: str | None
    tries: int
    error: str | None
    at: float
