"""The contract of a tracker: where the ledger is mirrored for people to look at.

A tracker is never asked what is true. It is told, possibly several times, since the cursor that says how far it has
come is committed to the ledger after the tracker has taken what it was sent. So every call is idempotent: the same
run, point, parameter or file sent again changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from hpo.errors import HpoError

Status = Literal["RUNNING", "SCHEDULED", "FINISHED", "KILLED", "FAILED"]


PROMOTED = "hpo.promoted"  # a tag of a model: the name under which it is registered


class Unreachable(HpoError):
    """The tracker does not answer, or cannot store anything now: keep what was to be sent and try again later."""


class Refused(HpoError):
    """The tracker will not take this for one run, such as one that was deleted there; the other runs can go on."""


class Point(NamedTuple):
    """One value of a metric; `timestamp` in milliseconds since the epoch."""

    key: str
    step: int
    timestamp: int
    value: float


@dataclass(frozen=True)
class Run:
    """What opens a run. `uid` names it for ever and is how it is found again; `started_at` in milliseconds."""

    uid: str
    name: str
    started_at: int
    tags: Mapping[str, str] = field(default_factory=dict)
    source: str = ""  # the study's reference
    commit: str = ""  # of the study's code, where it is known


@dataclass(frozen=True)
class Dataset:
    """A data file that a run has read: its `name` and `digest`, the field of the configuration that names it, where it
    lay, and what else is known of it, as JSON."""

    name: str
    digest: str
    field: str
    place: str
    profile: str


@dataclass(frozen=True)
class Model:
    """A kept checkpoint of a run that has ended, to be opened as a model.

    `name` is unique in its run, `files` become its artifacts and `texts` beside them; `points` are metrics of the
    run's own, which the model shows too.
    """

    name: str
    step: int
    tags: Mapping[str, str]
    points: Sequence[Point] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True)
class Batch:
    """What is sent to a run at once.

    `texts` and `files` are artifacts by name: a text, and a finished file or directory, linked rather than copied
    where that is possible. `removed` are names of artifacts to take away, `removed_models` of models, `removed_tags` of
    tags. `values` are a trial's by objective, and `violations` how far it is beyond the bounds of each constraint, once
    they are known. `ended_at` in milliseconds.
    """

    points: Sequence[Point] = ()
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
    datasets: Sequence[Dataset] = ()
    removed: Sequence[str] = ()
    models: Sequence[Model] = ()
    removed_models: Sequence[str] = ()
    removed_tags: Sequence[str] = ()
    values: Sequence[float] = ()
    violations: Mapping[str, float] = field(default_factory=dict)
    status: Status | None = None
    ended_at: int | None = None


@dataclass(frozen=True)
class RunView:
    """A run as the tracker has it."""

    run_id: str
    uid: str
    status: str
    ended_at: int | None
    tags: Mapping[str, str]
    params: Mapping[str, str]
    keys: frozenset[str]  # of its metrics
    datasets: frozenset[tuple[str, str]] = frozenset()  # name and digest of each


@dataclass(frozen=True)
class ModelView:
    """A model as the tracker has it; `finished` once all of it was stored."""

    model_id: str
    run_id: str
    name: str
    finished: bool
    tags: Mapping[str, str]
    points: frozenset[Point]


class Tracker(Protocol):
    """Every method raises Unreachable when nothing can be sent, Refused when only this run cannot be."""

    name: str  # the tracker's URI without credentials; names its cursors in the ledger
    keeps_files: bool  # else it leaves artifacts and models out

    def open_study(self, study: str, run: Run) -> str:
        """Create the run of a study named `study`; its id. Look for it with `find` first."""
        ...

    def describe(self, study: str, tags: Mapping[str, str]) -> None:
        """Set tags of what holds the runs of a study, such as what its page shows first."""
        ...

    def open_trial(self, parent: str, run: Run) -> str:
        """Create the run of a trial under the study's run `parent`; its id. Look for it with `find` first."""
        ...

    def find(self, study: str, uid: str, *, children: bool = False) -> list[RunView]:
        """Every run that stands under `uid`, or, with `children`, under `uid/...`."""
        ...

    def send(self, run_id: str, batch: Batch) -> None:
        """Store all of `batch`, the status last."""
        ...

    def flush(self) -> None:
        """Have all that was sent on the disk, or wherever it is kept; what was sent before may be lost until then
        where the machine dies, though not where this process does."""
        ...

    def discard(self, run_id: str) -> None:
        """Delete a run that another one stands for, and its models."""
        ...

    def remove(self, study: str, uid: str) -> None:
        """Remove every run that stands under `uid` or `uid/...`, its models and files, and what held them if nothing
        else is in it. What another study of that name has stays."""
        ...

    def points(self, runs: Sequence[RunView]) -> Iterator[tuple[str, Point]]:
        """(run id, point) for every point stored."""
        ...

    def digests(self, run_id: str) -> dict[str, str]:
        """Name -> sha256 of every artifact file of a run."""
        ...

    def models(self, study: str) -> list[ModelView]:
        """The models of every run of a study."""
        ...

    def model_digests(self, model_id: str) -> dict[str, str]:
        """Name -> sha256 of every artifact file of a model."""
        ...

    def close(self) -> None: ...
