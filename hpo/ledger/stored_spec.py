"""Defines the JSON in the row of a study: its specification, and the environment in which it was driven last."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Required, TypedDict


class ObjectiveJson(TypedDict):
    """An objective, as a specification stores it."""

    metric: str
    direction: Literal["minimize", "maximize"]
    select: Literal["last", "best"]


class Environment(TypedDict, total=False):
    """The last driver of a study, and the machine it ran on; `hpo.driver.open` writes it."""

    host: Required[str]
    home: Required[str]
    platform: str
    python: str
    versions: Mapping[str, str | None]
    git: Mapping[str, Any] | None
    data: Mapping[str, Any]
    tracking_uri: Required[str]
    trackers: Sequence[str]
    alerts: Sequence[str]
    checkpoints: str  # the URL of a bucket
    max_bytes: int
    allow_drift: bool
    executor: str
    workers: int
    cpus_per_worker: float
    gpus_per_worker: float
    scheduler: str
    target: float
    patience: int
    removed_from: Sequence[str]  # the host and the home from which the study is being removed


@dataclass(frozen=True, slots=True)
class StoredSpec:
    """A study's specification as its row holds it; fields that an earlier release did not write have their defaults.

    `json` is all of it; `hpo.declaration.spec.StudySpec` documents each field, and validates it.
    """

    json: Mapping[str, Any]
    reference: str = ""
    name: str = ""
    overrides: dict[str, Any] = field(default_factory=dict[str, Any])
    of_search_alone: Mapping[str, object] = field(default_factory=dict[str, object])
    sampler: str = ""
    strategy: Mapping[str, Any] = field(default_factory=lambda: {"name": "none"})
    order: str = "ordered"
    window: int = 1
    seed: int = 0
    objectives: list[ObjectiveJson] = field(default_factory=list[ObjectiveJson])
    constraints: list[Mapping[str, Any]] = field(default_factory=list[Mapping[str, Any]])
    metrics: list[str] = field(default_factory=list[str])
    confirm: str = "none"
    earlier: Sequence[Mapping[str, Any]] = ()
    planned: Mapping[str, int] = field(default_factory=dict[str, int])
    listed: Sequence[Mapping[str, Any]] = ()
    listed_of: str | None = None
    read_when: Mapping[str, str] = field(default_factory=dict[str, str])
    imported: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, json: Mapping[str, Any]) -> StoredSpec:
        return cls(json, **{name: json[name] for name in _SPECIFIED if name in json})


_SPECIFIED = tuple(entry.name for entry in fields(StoredSpec))[1:]
