"""Defines the contract of a tracker, which shows the ledger to people.

The ledger never reads its facts from a tracker. It may send the same data several times, since the cursor that records
the mirror's progress is committed after the tracker has accepted the data. Every call is therefore idempotent: sending
the same run, point, parameter or file again changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from hpo.errors import HpoError

Status = Literal["RUNNING", "SCHEDULED", "FINISHED", "KILLED", "FAILED"]


PROMOTED = "hpo.promoted"  # the tag of a model that holds the name under which it is registered


class Unreachable(HpoError):
    """Raised when the tracker does not answer or cannot store anything now; the data must be sent again later."""


class Deleted(Unreachable):
    """Raised when somebody has deleted the container of a study's runs in a way that can be undone."""


class Refused(HpoError):
    """Raised when the tracker rejects data of one run, such as a deleted run; other runs are not affected."""


class Point(NamedTuple):
    """One value of a metric; `timestamp` in milliseconds since the epoch."""

    key: str
    step: int
    timestamp: int
    value: float


@dataclass(frozen=True)
class Run:
    """The data that opens a run.

    `uid` identifies it permanently; `started_at` is in milliseconds.
    """

    uid: str
    name: str
    started_at: int
    tags: Mapping[str, str] = field(default_factory=dict[str, str])
    source: str = ""  # the study's reference
    commit: str = ""  # of the study's code, if known


@dataclass(frozen=True)
class Dataset:
    """A data file that a run has read.

    It has a `name`, a `digest`, the `field` of the configuration that names it, its `place`, and its `profile`, which
    is further data about it as JSON.
    """

    name: str
    digest: str
    field: str
    place: str
    profile: str


@dataclass(frozen=True)
class Model:
    """A kept checkpoint of a run that has ended, to be opened as a model.

    `name` is unique in its run. `files` and `texts` become its artifacts; `points` are metrics of the run that the
    model shows too.
    """

    name: str
    step: int
    tags: Mapping[str, str]
    points: Sequence[Point] = ()
    texts: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Mapping[str, Path] = field(default_factory=dict[str, Path])


@dataclass(frozen=True)
class Batch:
    """The data that is sent to a run at once.

    `texts` and `files` are artifacts by name: a text, and a finished file or directory, which is linked rather than
    copied where possible. `removed`, `removed_models` and `removed_tags` name the artifacts, models and tags to remove.
    `ended_at` is in milliseconds.
    """

    points: Sequence[Point] = ()
    params: Mapping[str, str] = field(default_factory=dict[str, str])
    tags: Mapping[str, str] = field(default_factory=dict[str, str])
    texts: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Mapping[str, Path] = field(default_factory=dict[str, Path])
    datasets: Sequence[Dataset] = ()
    removed: Sequence[str] = ()
    models: Sequence[Model] = ()
    removed_models: Sequence[str] = ()
    removed_tags: Sequence[str] = ()
    status: Status | None = None
    ended_at: int | None = None


@dataclass(frozen=True)
class RunView:
    """A run as the tracker stores it."""

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
    """A model as the tracker stores it; `finished` is set once all of it is stored."""

    model_id: str
    run_id: str
    name: str
    finished: bool
    tags: Mapping[str, str]
    points: frozenset[Point]


class Tracker(Protocol):
    """The methods of a tracker.

    Each raises Unreachable if nothing can be sent, Refused if only this run is rejected.
    """

    name: str  # the tracker's URI without credentials; names its cursors in the ledger
    keeps_files: bool  # if False, artifacts and models are not sent

    def open_study(self, study: str, run: Run) -> str:
        """Creates the run of the study named `study` and returns its id. Look for it with `find` first."""
        ...

    def describe(self, study: str, tags: Mapping[str, str]) -> None:
        """Sets tags of the container of a study's runs, such as the text that its page shows first."""
        ...

    def recall(self, study: str, run_id: str) -> str:
        """Finds the container of a study's runs by a recorded run, uses it from then on, and returns its current name.

        Raises Deleted.
        """
        ...

    def restore(self, run_id: str) -> bool:
        """Restores a deleted run and its container; returns False if that is impossible."""
        ...

    def open_trial(self, parent: str, run: Run) -> str:
        """Creates the run of a trial under the study's run `parent` and returns its id.

        Look for it with `find` first.
        """
        ...

    def find(self, study: str, uid: str, *, children: bool = False) -> list[RunView]:
        """Returns every run stored under `uid` or, with `children`, under `uid/...`."""
        ...

    def send(self, run_id: str, batch: Batch) -> None:
        """Stores all of `batch`, the status last."""
        ...

    def flush(self) -> None:
        """Makes everything sent so far durable.

        Until then data may be lost if the machine crashes, but not if only this process does.
        """
        ...

    def discard(self, run_id: str) -> None:
        """Deletes a run that another run replaces, and its models."""
        ...

    def remove(self, study: str, uid: str) -> None:
        """Removes every run under `uid` or `uid/...` with its models and files, and the container if nothing else is in
        it. The runs of another study with that name stay."""
        ...

    def points(self, runs: Sequence[RunView]) -> Iterator[tuple[str, Point]]:
        """Yields (run id, point) for every stored point."""
        ...

    def names(self, run_id: str) -> set[str]:
        """Returns the names of a run's artifact files."""
        ...

    def digests(self, run_id: str) -> dict[str, str]:
        """Returns name -> sha256 of every artifact file of a run."""
        ...

    def models(self, study: str) -> list[ModelView]:
        """Returns the models of every run of a study."""
        ...

    def model_digests(self, model_id: str) -> dict[str, str]:
        """Returns name -> sha256 of every artifact file of a model."""
        ...

    def close(self) -> None: ...
