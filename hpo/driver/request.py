"""Holds the request that a driver carries out, its options and its result."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from hpo.declaration import enqueue as enqueued
from hpo.declaration.budget import Budget, parse_size, parse_time
from hpo.declaration.goal import NO_GOAL, Goal
from hpo.door import option
from hpo.errors import UserError
from hpo.ledger.rows import Connection, StudyRow
from hpo.space.assignments import assignments, overrides
from hpo.space.config import flatten
from hpo.space.tags import tags_of
from hpo.storage.home import Home
from hpo.workers.executors.placement import INLINE, Placement, PlacementRequest
from hpo.workers.executors.resources import Resources
from hpo.workers.prepared import Prepared
from trainer.files import outage

LEASE_SECONDS = 30.0
OUTAGE_SECONDS = 900.0
AUTO, NONE = "auto", "none"  # instead of the names of studies to learn from
_COUNTS = ("trials", "epochs", "workers", "window")

Reserve = Callable[[Connection, str, float], float]


def reserves_nothing(connection: Connection, study: str, seconds: float) -> float:
    """Reserves no time for an end phase."""
    return 0.0


@dataclass(frozen=True)
class DriverOptions:
    """The options of a driver. None of them changes the study's digest, except those that bound the study.

    trials, epochs, seconds   the budget; None keeps the earlier one
    goal                      ends the study before its budget is used up
    data                      the study's report on its data
    declared                  the digest of each field of a declaration in a notebook's cell
    placement                 where trials run and in how many processes; a resume uses the same one
    checkpoints               the URL of the checkpoints' bucket; empty for the home
    max_bytes                 the size that the study's checkpoints may have; None for no bound
    trackers                  trackers besides MLflow, each as `tensorboard:DIR`
    alerts                    the rules for sending alerts
    prepared                  the process that forks workers on this host; None: workers are spawned
    stored                    the study's row as the plan has read it; None if there was none or it was not read
    reserve                   returns, of a study and its seconds, those that its end phase has used and may need
    """

    home: Home
    storage: str
    tracking_uri: str
    trials: int | None = None
    epochs: int | None = None
    seconds: float | None = None
    goal: Goal = NO_GOAL
    allow_drift: bool = False
    data: Mapping[str, Any] | None = None
    declared: Mapping[str, str] = field(default_factory=dict[str, str])
    placement: Placement = INLINE
    checkpoints: str = ""
    max_bytes: int | None = None
    trackers: Sequence[str] = ()
    alerts: Sequence[str] = ()
    lease_timeout: float = LEASE_SECONDS
    prepared: Prepared | None = None
    stored: StudyRow | None = None
    reserve: Reserve = reserves_nothing

    @property
    def budget(self) -> Budget:
        return Budget(self.trials, self.epochs, self.seconds)


@dataclass(frozen=True)
class StudyRequest:
    """The study to run and its settings.

    reference    its declaration, a name or a file; None for the one stored in the ledger
    overrides    path -> value, or text to be parsed by the field's type
    one_by_one   the paths of `overrides` that no file sets; some trial must read each
    listed       configurations {"label", "params"} of the study `listed_of`, trained instead of sampled ones
    """

    reference: str | None = None
    name: str | None = None
    tier: int | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict[str, Any])
    one_by_one: Collection[str] = ()
    listed: Sequence[Mapping[str, Any]] = ()
    listed_of: str | None = None
    allow_drift: bool = False


@dataclass(frozen=True)
class BudgetRequest:
    """The bounds of the study. A `target`, `patience` or `stop_when` of "none" removes an earlier one."""

    trials: int | None = None
    epochs: int | None = None
    seconds: float | None = None
    target: float | str | None = None
    patience: int | str | None = None
    stop_when: str | None = None


@dataclass(frozen=True)
class SearchRequest:
    """The search's settings.

    A sampler or strategy is a name, which takes the options stored or declared for it, or {"name": ..., option: value}.
    `finish` sets whether an end phase trains the best stopped trials to their end, `confirm` how many of the best
    trials train again, and under how many seeds.
    """

    sampler: str | Mapping[str, Any] | None = None
    strategy: str | Mapping[str, Any] | None = None
    order: str | None = None
    window: int | None = None
    seed: int | None = None
    finish: str | None = None
    confirm: str | None = None
    enqueue: Sequence[Mapping[str, Any]] | None = None
    learn_from: Sequence[str] | None = None  # the names of earlier studies, or auto or none


@dataclass(frozen=True)
class StorageRequest:
    """The places to write to; `checkpoints` is the URL of a bucket, `max_bytes` the size that checkpoints may have."""

    home: Home
    storage: str | None = None
    checkpoints: str | None = None
    max_bytes: int | None = None
    lease_timeout: float | None = None

    @property
    def url(self) -> str:
        """Returns the ledger's URL."""
        return self.storage or self.home.storage


@dataclass(frozen=True)
class NotifyRequest:
    """The study's trackers, alerts and tags; `tags` are added to those that it has."""

    tracking_uri: str | None = None
    trackers: Sequence[str] | None = None  # besides MLflow
    alerts: Sequence[str] | None = None
    tags: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class RunRequest:
    """The user's request. None stands for the value stored in the ledger, else the declaration's, else the default."""

    study: StudyRequest
    budget: BudgetRequest
    placement: PlacementRequest
    search: SearchRequest
    storage: StorageRequest
    notify: NotifyRequest

    @property
    def home(self) -> Home:
        return self.storage.home


_PARTS = {
    "study": StudyRequest,
    "budget": BudgetRequest,
    "placement": PlacementRequest,
    "search": SearchRequest,
    "storage": StorageRequest,
    "notify": NotifyRequest,
}


def request_of(home: Home | str | os.PathLike[str] | None, reference: str | None = None, **options: Any) -> RunRequest:
    """Returns the request for the options of `hpo run`, each under its name in Python.

    Values may be Python's or as typed: a time and a size may be numbers or text; tags, overrides and configurations to
    try may be mappings or text. Raises UserError for a value that cannot be parsed.
    """
    for name in _COUNTS:
        least = 0 if name == "workers" else 1
        if (value := options.get(name)) is not None and (type(value) is not int or value < least):
            raise UserError(field=name, value=value, fix=f"give a whole number from {least}")
    if (time := options.pop("time", None)) is not None:
        options["seconds"] = parse_time(str(time))
    if isinstance(size := options.get("max_bytes"), str):
        options["max_bytes"] = parse_size(size)
    if "cpus_per_worker" in options or "gpus_per_worker" in options:
        options["resources"] = Resources(options.pop("cpus_per_worker", None), options.pop("gpus_per_worker", None))
    assigned = options.get("overrides")
    values = flatten(assigned) if isinstance(assigned, Mapping) else assignments(assigned)  # pyright: ignore[reportUnknownArgumentType]
    options = {"one_by_one": tuple(values)} | options
    options["overrides"] = overrides(options.pop("config", None), values)
    options["enqueue"] = _entries(options.get("enqueue"))
    options["tags"] = tags_of(options.get("tags"))
    options["learn_from"] = _teachers(options.pop("learn_from", None), options.pop("warm_start", None))
    options |= {"home": home if isinstance(home, Home) else Home.at(home), "reference": reference}
    parts: dict[str, Any] = {}
    for part, kind in _PARTS.items():
        names = {part_field.name for part_field in fields(kind)}
        parts[part] = kind(**{name: options.pop(name) for name in names & options.keys()})
    if options:
        raise TypeError(f"request_of() got unexpected options {', '.join(options)}")
    return RunRequest(**parts)


def _entries(given: Sequence[Mapping[str, object] | str | os.PathLike[str]] | None) -> list[Mapping[str, Any]] | None:
    """Returns the configurations to try first; an entry that is a path is read as a file of them."""
    if given is None:
        return None
    return [
        entry
        for source in given
        for entry in ([source] if isinstance(source, Mapping) else enqueued.read([Path(source)]))
    ]


def _teachers(learn_from: str | Sequence[str] | None, warm_start: str | None) -> list[str] | None:
    """Returns the studies to learn from, under either name of the option; names may be separated by commas."""
    if learn_from is not None and warm_start is not None:
        raise UserError(
            f"{option('warm_start', warm_start)} is another name of {option('learn_from', warm_start)}: give one of "
            "them."
        )
    if warm_start is not None:
        learn_from = warm_start
    if learn_from is None:
        return None
    parts = [
        part.strip()
        for text in ([learn_from] if isinstance(learn_from, str) else learn_from)
        for part in text.split(",")
    ]
    names = list(dict.fromkeys(part for part in parts if part))
    if not names:
        text = learn_from if isinstance(learn_from, str) else ",".join(learn_from)
        raise UserError(field="learn_from", value=text, fix="give auto, none, or the names of studies")
    if len(names) > 1 and (word := next((name for name in names if name in (AUTO, NONE)), "")):
        raise UserError(
            f"{option('learn_from', ','.join(names))}: {word} stands alone: give it, or the names of studies."
        )
    return names


@dataclass(frozen=True)
class RunResult:
    """The end of a run.

    state     complete, stopped or interrupted
    behind    the number of rows that MLflow does not have yet
    signal    the signal that interrupted the run; None if the study ended all the same
    damage    damage of MLflow's database or of the ledger, where MLflow is behind
    finishes  whether an end phase may follow
    confirms  whether a confirming phase may follow
    """

    study: str
    state: str
    reason: str
    behind: int
    signal: int | None
    damage: str = ""
    finishes: bool = False
    confirms: bool = False


def waiting(seconds: str | float | None = None) -> AbstractContextManager[None]:
    """Returns a context in which this process and the workers that it starts wait `seconds` for an outage.

    If it is None, an outer block decides, or HPO_OUTAGE_WAIT, or OUTAGE_SECONDS. Raises UserError.
    """
    if seconds is None and outage.is_set():
        return nullcontext()
    text = os.environ.get("HPO_OUTAGE_WAIT") if seconds is None else str(seconds)
    return outage.waiting(parse_time(text, "outage_wait", zero=True) if text else OUTAGE_SECONDS)
