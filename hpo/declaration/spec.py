"""Specifies a study as its row stores it: all that a process needs to take part in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hpo.search.samplers.registry import sampler_spec
from hpo.search.strategies.base import make_strategy
from hpo.space.hashing import json_sha256


class StudySpec(BaseModel):
    """All that a process needs to take part in a study, as the ledger stores it: plain JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reference: str
    name: str
    overrides: dict[str, Any] = Field(default_factory=dict)
    sampler: str
    sampler_options: dict[str, int] = Field(default_factory=dict)
    strategy: dict[str, Any]
    order: Literal["ordered", "async"] = "ordered"
    window: int = Field(ge=1)
    seed: int = 0
    objectives: list[dict[str, Any]]
    constraints: list[dict[str, Any]] = Field(default_factory=list)
    metrics: list[str]
    tier: int | None = None
    enqueue: list[dict[str, Any]] = Field(default_factory=list)  # parameters to be tried first
    warm_start: str | None = None  # the study that `earlier` is of
    earlier: list[dict[str, Any]] = Field(
        default_factory=list
    )  # complete trials, as hpo.driver.warm_start has found them
    behaviour: dict[str, int] = Field(default_factory=dict[str, int])  # part -> version: hpo.declaration.behaviour
    planned: dict[str, int] = Field(default_factory=dict[str, int])  # for sampler auto: hpo.search.samplers.auto.plan
    listed: list[dict[str, Any]] = Field(default_factory=list)  # if any, just these are trained: {"label", "params"}
    listed_of: str | None = None  # the study they come from
    imported: dict[str, Any] | None = None  # where another tool's trials come from: hpo.interchange.record.Origin

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StudySpec:
        return cls.model_validate(data)

    def sampling(self) -> dict[str, Any]:
        """The sampler's specification, every option spelled out."""
        return sampler_spec({"name": self.sampler, **self.sampler_options})

    def identity(self) -> dict[str, Any]:
        """Returns the components of the study's identity that the command line and the platform's versions decide."""
        strategy = json.dumps(make_strategy(self.strategy).model_dump(), sort_keys=True)
        sampler = json.dumps(self.sampling(), sort_keys=True)
        parts: dict[str, Any] = {"sampler": sampler, "strategy": strategy, "order": self.order}
        parts |= {"window": str(self.window)} if self.order == "ordered" else {}  # else it only says how many at a time
        begun = {"enqueued configurations": self.enqueue, "trials of the warm start": self.earlier}
        begun |= {"study of the listed configurations": self.listed_of}  # not the list itself, which grows at its end
        parts |= {"seed": str(self.seed), "behaviour": dict(self.behaviour)}
        return parts | {what: json_sha256(value) for what, value in begun.items() if value}
