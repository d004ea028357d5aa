"""Holds what a driver is asked to do, and what it returns."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hpo.declaration.budget import Budget
from hpo.storage.home import Home
from hpo.workers.executors.placement import INLINE, Placement
from hpo.workers.executors.resources import NOTHING_SAID, Resources
from hpo.workers.prepared import Prepared

LEASE_SECONDS = 30.0


@dataclass(frozen=True)
class DriverOptions:
    """How to drive, as opposed to what: nothing here changes the study's digest, but for how far it goes.

    trials, epochs, seconds   the budget; None keeps what was asked for before
    data                      the study's report on its data
    placement                 where trials run, and in how many processes; what a resume does again
    checkpoints               the URL of the bucket they go to; empty: into the home
    max_bytes                 what the study's checkpoints may take; None: no bound
    trackers                  where it is shown besides MLflow, as `--tracker` names them
    alerts                    who is told of what, as `--alert` says
    prepared                  the process that forks workers of this host; None: they are spawned
    """

    home: Home
    storage: str
    tracking_uri: str
    trials: int | None = None
    epochs: int | None = None
    seconds: float | None = None
    allow_drift: bool = False
    data: Mapping[str, Any] | None = None
    placement: Placement = INLINE
    checkpoints: str = ""
    max_bytes: int | None = None
    trackers: Sequence[str] = ()
    alerts: Sequence[str] = ()
    lease_timeout: float = LEASE_SECONDS
    prepared: Prepared | None = None

    @property
    def budget(self) -> Budget:
        return Budget(self.trials, self.epochs, self.seconds)


@dataclass(frozen=True)
class RunRequest:
    """Says what the user asks for. None means: what the ledger has stored, else the declaration's, else the default.

    sampler, strategy   a name, whose options are those stored or declared for it, or {"name": ..., option: value}
    overrides           path -> value, or text to be read by the field's type
    one_by_one          the paths of `overrides` that no file sets; some trial has to read each
    """

    home: Home
    reference: str | None = None  # a study's name or file; None: the stored one
    name: str | None = None
    trials: int | None = None
    epochs: int | None = None
    seconds: float | None = None
    executor: str | None = None
    workers: int | None = None
    resources: Resources = NOTHING_SAID
    scheduler: str | None = None  # of Ray Tune's
    sampler: str | Mapping[str, Any] | None = None
    strategy: str | Mapping[str, Any] | None = None
    order: str | None = None
    window: int | None = None
    seed: int | None = None
    tier: int | None = None
    enqueue: Sequence[Mapping[str, Any]] | None = None
    warm_start: str | None = None
    listed: Sequence[Mapping[str, Any]] = ()  # {"label", "params"}: to be trained instead of what a sampler asks for
    listed_of: str | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    one_by_one: Collection[str] = ()
    storage: str | None = None
    checkpoints: str | None = None  # the URL of a bucket
    max_bytes: int | None = None  # what the study's checkpoints may take
    tracking_uri: str | None = None
    trackers: Sequence[str] | None = None  # besides MLflow
    alerts: Sequence[str] | None = None
    tags: Mapping[str, str] = field(default_factory=dict[str, str])  # of the study, beside those that it has
    allow_drift: bool = False
    lease_timeout: float | None = None


@dataclass(frozen=True)
class RunResult:
    """How a run ended: `state` complete, stopped or interrupted; `behind` rows MLflow does not have yet; the `signal`
    that interrupted it, None where the study ended all the same; `damage` of MLflow's database or of the ledger, where
    MLflow is behind."""

    study: str
    state: str
    reason: str
    behind: int
    signal: int | None
    damage: str = ""
