"""Specifies a study as its row stores it: everything that a process needs to take part in it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hpo.errors import StorageError
from hpo.search.finishing import Finish
from hpo.search.own_part import is_own
from hpo.search.samplers.registry import sampler_spec
from hpo.search.strategies.registry import make_strategy
from hpo.space.hashing import json_sha256

# The values that a new field of StudySpec may have where it changes nothing, so that the release before goes on.
_EMPTY = (None, False, 0, "", "none", [], {})


class StudySpec(BaseModel):
    """Everything that a process needs to take part in a study, as the ledger stores it: plain JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reference: str
    name: str
    overrides: dict[str, Any] = Field(default_factory=dict)
    of_search_alone: dict[str, object] = Field(default_factory=dict)  # those that train no best trial alone
    sampler: str
    sampler_options: dict[str, int] = Field(default_factory=dict)
    strategy: dict[str, Any]
    order: Literal["ordered", "async"] = "ordered"
    window: int = Field(ge=1)
    seed: int = 0
    objectives: list[dict[str, Any]]
    constraints: list[dict[str, Any]] = Field(default_factory=list)
    metrics: list[str]
    finish: Finish = "none"  # the end phase; none for studies that began before it existed
    confirm: str = "none"  # the confirming phase, such as 5x3: hpo.search.confirming
    tier: int | None = None
    enqueue: list[dict[str, Any]] = Field(default_factory=list)  # parameters to be tried first
    learn_from: list[str] = Field(default_factory=list[str])  # the earlier studies that `knowledge` comes from
    knowledge: dict[str, Any] = Field(default_factory=dict)  # what they taught: hpo.search.knowledge
    densities: dict[str, str] = Field(default_factory=dict[str, str])  # path -> density that it follows by default
    warm_start: str | None = None  # the study that `earlier` comes from
    earlier: list[dict[str, Any]] = Field(default_factory=list[dict[str, Any]])  # its trials, copied by release 0.2
    behaviour: dict[str, int] = Field(default_factory=dict[str, int])  # part -> version: hpo.declaration.behaviour
    planned: dict[str, int] = Field(default_factory=dict[str, int])  # for sampler auto: hpo.search.samplers.auto.plan
    listed: list[dict[str, Any]] = Field(default_factory=list)  # if any, only these are trained: {"label", "params"}
    listed_of: str | None = None  # the study they come from
    read_when: dict[str, str] = Field(default_factory=dict[str, str])  # as the study declares it
    imported: dict[str, Any] | None = None  # the origin of another tool's trials: hpo.interchange.record.Origin

    def to_json(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, data: Mapping[str, object]) -> StudySpec:
        """Returns the specification in a study's row. A field that a later release has added changes nothing if empty.

        Raises StorageError if such a field has a value.
        """
        added = {name: value for name, value in data.items() if name not in cls.model_fields}
        if unknown := [f"{name}={value!r}" for name, value in sorted(added.items()) if value not in _EMPTY]:
            raise StorageError(
                f"study {data.get('name')!r} was begun by a newer release with {', '.join(unknown)}, which this one "
                "does not know: upgrade hpo."
            )
        return cls.model_validate({name: value for name, value in data.items() if name not in added})

    def sampling(self) -> dict[str, Any]:
        """Returns the sampler's specification with every option."""
        return sampler_spec({"name": self.sampler, **self.sampler_options})

    def own_parts(self) -> list[str]:
        """Returns the paths of the user's own sampler and strategies."""
        names, strategy = [self.sampler], self.strategy
        while isinstance(strategy, Mapping):  # `patient` wraps another strategy
            names, strategy = [*names, strategy["name"]], strategy.get("strategy")
        return [name for name in names if is_own(name)]

    def identity(self) -> dict[str, Any]:
        """Returns the components of the study's identity that the command line and the platform's versions decide."""
        strategy = json.dumps(make_strategy(self.strategy).model_dump(), sort_keys=True)
        sampler = json.dumps(self.sampling(), sort_keys=True)
        parts: dict[str, Any] = {"sampler": sampler, "strategy": strategy, "order": self.order}
        parts |= {"window": str(self.window)} if self.order == "ordered" else {}  # else it limits what runs at once
        begun = {"enqueued configurations": self.enqueue, "trials of the warm start": self.earlier}
        begun |= {"knowledge of earlier studies": self.knowledge}
        begun |= {"densities of good values": self.densities}
        begun |= {"study of the listed configurations": self.listed_of}  # not the list itself, which grows at its end
        parts |= {"seed": str(self.seed), "behaviour": dict(self.behaviour)}
        return parts | {component: json_sha256(value) for component, value in begun.items() if value}
