"""Declares the version of each part of the platform that decides a study's results, and which parts a study uses.

A part is a sampler, a strategy, an optimizer, a schedule, a stage of the trainer, a rule of the space or a bundled
study. Its version rises when the same configuration, data and seed would give other results. Prose, names, new parts
and moved modules change no version, so a release that changes only those continues every study.

A study's row stores the versions of the parts that it uses (`StudySpec.behaviour`). `tests/golden/behaviour.json` holds
a digest of the results of each version of each part; `make golden ACCEPT=1` refuses another digest under the same
version.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpo.declaration import content
from hpo.declaration.bundled import BUNDLED
from hpo.search.samplers.deduplicate import is_few
from hpo.search.samplers.registry import SAMPLERS
from hpo.search.strategies.registry import STRATEGIES
from hpo.space.config import as_json, flatten
from hpo.space.dimensions import Choice
from trainer.config import TrainConfig
from trainer.config.optim import OPTIMIZERS
from trainer.config.schedule import OWN_FIELDS as SCHEDULES

if TYPE_CHECKING:
    from hpo.declaration.study import Study

# Release -> the day on which its version was set; docs/releases.md describes what each of them changed.
RELEASES = {"0.1.0": "2026-11-26", "0.2.0": "2026-11-27"}


@dataclass(frozen=True)
class Change:
    """A part's step to `version`: the release that made it and its visible effect.

    Also records whether this release can still run the previous version, so that studies which began with it continue
    with it.
    """

    part: str
    version: int
    release: str
    what: str
    keeps_previous: bool


_ROUNDED = "it rounds what it proposes to 8 significant digits, so that every processor proposes the same"
_COMPARES = f"{_ROUNDED}; it also searches by comparisons alone"
_REFERENCE = (
    "it computes its reference without dropout, and drops nothing out in the base model unless model.base_dropout says "
    "so; special tokens that a record spells are text, and those of a template stand in data.template"
)
_RECORDS = "it takes special tokens that a record spells for text; those of a template stand in data.template"
_KNOWN = "it tries no configuration that the earlier study has tried while there are others"
_DOCUMENTS = "it takes special tokens that a document spells for text"
CHANGES = (
    *(
        Change(part, 2, "0.2.0", _ROUNDED, keeps_previous=True)
        for part in ("sampler tpe", "sampler gp", "sampler cmaes", "sampler freeze-thaw", "sampler bohb")
    ),
    Change("warm start", 2, "0.2.0", _KNOWN, keeps_previous=True),
    Change("strategy pb2", 2, "0.2.0", _COMPARES, keeps_previous=True),
    Change("study dpo", 2, "0.2.0", _REFERENCE, keeps_previous=False),
    Change("study lora", 2, "0.2.0", _RECORDS, keeps_previous=False),
    Change("study gpt", 2, "0.2.0", _DOCUMENTS, keeps_previous=False),
)

_TRAINING = ("step", "data order", "seeding", "checkpoint", "losses", "metrics", "data", "precision")
# Stages that a study uses if one of these fields is searched or differs from the default.
_STAGES = {
    "gradients": ("train.gradients", "train.clip"),
    "averaging": ("train.average",),
    "initialization": ("train.init",),
    "early stopping": ("train.early_stopping",),
    "rollback": ("train.rollback",),
    "batch growth": ("train.batch_growth",),
    "folds": ("train.folds", "train.seeds"),
    "lanes": ("train.lanes",),
    "ranks": ("train.parallel",),
}
_WRAPPERS = ("lookahead", "sam")
_SPACE = (
    "space decoding",
    "space priors",
    "space densities",
    "space rules",
    "space duplicates",
    "warm start",
    "learning",
    "search seeds",
)


def parts() -> list[str]:
    """Returns the names of all parts that have a version."""
    stages = (*_TRAINING, *_STAGES, *_WRAPPERS)
    return [
        *_SPACE,
        *(f"sampler {name}" for name in SAMPLERS),
        *(f"strategy {name}" for name in STRATEGIES),
        *(f"optimizer {name}" for name in OPTIMIZERS),
        *(f"schedule {name}" for name in SCHEDULES),
        *(f"trainer {stage}" for stage in stages),
        *(f"study {name}" for name in BUNDLED),
    ]


def version(part: str) -> int:
    """Returns the version that new studies get."""
    return max((change.version for change in CHANGES if change.part == part), default=1)


def runnable(part: str) -> list[int]:
    """Returns the versions of a part that this release can run, ascending."""
    newest = version(part)
    kept = [change.version - 1 for change in CHANGES if change.part == part and change.keeps_previous]
    return [*sorted(number for number in kept if number < newest), newest]


def settle(used: Iterable[str], stored: Mapping[str, int] | None) -> dict[str, int]:
    """Returns the version with which a study runs each part that it uses.

    `stored` are the versions in the study's row: None for a new study, empty if release 0.1.0 began it, all of whose
    parts have version 1. A stored version is kept while this release can run it.
    """
    if stored is None:
        return {part: version(part) for part in used}
    begun = {part: stored.get(part, version(part) if stored else 1) for part in used}
    return {part: number if number in runnable(part) else version(part) for part, number in begun.items()}


def clause(part: str, before: int, now: int) -> str:
    """Returns a clause about how a part changed between two versions, and since which release."""
    if before > now:
        return f"{part} has version {before}, and this release knows versions up to {version(part)}"
    steps = [change for change in CHANGES if change.part == part and before < change.version <= now]
    since = "; ".join(f"since release {change.release} {change.what}" for change in steps)
    return f"{part} changed from version {before} to {now} ({since})" if since else f"{part} changed"


def areas(used: Iterable[str]) -> list[str]:
    """Returns the areas of the code that contain these parts: `trainer`, `search`, or a bundled study."""
    return sorted({_area(part) for part in used})


def _area(part: str) -> str:
    kind = part.partition(" ")[0]
    if kind == "study":
        return part
    return "trainer" if kind in ("trainer", "optimizer", "schedule") else "search"


def parts_of(
    study: Study,
    sampler: str,
    strategy: Mapping[str, Any],
    *,
    warm: bool = False,
    learned: bool = False,
    guided: bool = False,
) -> list[str]:
    """Returns the parts that a study uses under a sampler and a strategy's specification.

    `warm` tells whether it is a warm start, `learned` whether it has learned from earlier studies, `guided` whether it
    follows densities by default.
    """
    used = {"space decoding", "search seeds", *_samplers(sampler, len(study.objectives)), *_strategies(strategy)}
    space = study.space
    guided = guided or any(dimension.like for dimension in space.dimensions.values())
    used |= {"space priors"} if guided or space.has_priors or study.enqueue else set()
    used |= {"space densities"} if guided else set()
    used |= {"space rules"} if space.rejects else set()
    used |= {"space duplicates"} if is_few(space) else set()
    used |= {"warm start"} if warm else set()
    used |= {"learning"} if learned else set()
    used |= {f"study {name}" for name in content.bundled_studies(study)}
    if isinstance(train := getattr(study.config, "train", None), TrainConfig):
        used |= set(_trainer(study, train))
    return [part for part in parts() if part in used]


def _samplers(name: str, objectives: int) -> Iterator[str]:
    yield f"sampler {name}"
    if name == "auto":
        chosen = ("freeze-thaw", "tpe") if objectives == 1 else ("tpe", "nsga2" if objectives < 4 else "nsga3")
        yield from (f"sampler {choice}" for choice in (*chosen, "grid", "qmc"))


def _strategies(spec: Mapping[str, object]) -> Iterator[str]:
    yield f"strategy {spec['name']}"
    if isinstance(inner := spec.get("strategy"), Mapping):  # `patient` wraps another strategy
        yield from _strategies(inner)


def _trainer(study: Study, train: TrainConfig) -> Iterator[str]:
    yield from (f"trainer {stage}" for stage in _TRAINING)
    for kind, path in (("optimizer", "train.optim.name"), ("schedule", "train.schedule.name")):
        yield from (f"{kind} {name}" for name in values_of(study, path))  # a user's own has no version
    wrappers = set(values_of(study, "train.optim.wrap"))
    wrappers |= {"lookahead"} if "ranger" in values_of(study, "train.optim.name") else set()
    yield from (f"trainer {wrapper}" for wrapper in wrappers)
    configured, default = (flatten({"train": as_json(config)}) for config in (train, TrainConfig()))
    changed = {path for path in configured.keys() | default.keys() if configured.get(path) != default.get(path)}
    for stage, fields in _STAGES.items():
        if any(f"{path}.".startswith(f"{field}.") for field in fields for path in {*changed, *study.space.paths}):
            yield f"trainer {stage}"


def values_of(study: Study, path: str) -> list[Any]:
    """Returns the values that a field has in the trials of a study."""
    dimension = study.space.dimensions.get(path)
    return [*dimension.options] if isinstance(dimension, Choice) else [flatten(as_json(study.config)).get(path)]
