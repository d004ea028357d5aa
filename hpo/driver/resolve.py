"""Resolves each option of a study: from the request, else from the stored study, else from the declaration."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hpo.declaration import behaviour, compatibility, default_densities
from hpo.declaration.budget import Budget
from hpo.declaration.enqueue import within
from hpo.declaration.loading import is_another
from hpo.declaration.resolved import ResolvedStudy
from hpo.declaration.search_preset import new_overrides, of_search_alone
from hpo.declaration.spec import StudySpec
from hpo.declaration.study import Study
from hpo.door import option
from hpo.driver.request import RunRequest, SearchRequest, StudyRequest
from hpo.driver.stored import Stored, declaration, declaration_of, read_study, with_lessons
from hpo.errors import DriftError, UserError
from hpo.ledger import Ledger
from hpo.search import confirming
from hpo.search.finishing import FINISHES
from hpo.search.own_part import is_own
from hpo.search.promotion.base import promoting
from hpo.search.samplers import auto
from hpo.search.samplers.registry import SAMPLERS, sampler_spec
from hpo.search.strategies.base import Strategy
from hpo.search.strategies.registry import STRATEGIES, complete, default, make_strategy
from hpo.space.assignments import NO_PRESET
from hpo.space.config import flatten
from hpo.workers.executors.placement import one_of

ORDERS = ("ordered", "async")
WINDOW = 4  # trials open at a time, at least


@dataclass(frozen=True)
class Declared:
    """A declaration with a run's configuration.

    source     the declaration as it was loaded
    bare       the same with the dimensions of its tier
    study      the same with overrides and enqueued configurations
    overrides  the values set in this run or when the study began
    notices    notices for the user about where the study begins
    """

    source: Study
    bare: Study
    study: Study
    tier: int | None
    overrides: Mapping[str, Any]
    notices: tuple[str, ...] = ()


def configured(request: RunRequest, stored: Stored, source: Study) -> Declared:
    """Returns the declaration with the values that the request, else the ledger, sets."""
    spec, lower, search = stored.spec, stored.lower, request.search
    tier = request.study.tier or (spec.tier if spec else None)
    enqueue = spec.enqueue if spec and search.enqueue is None else search.enqueue
    bare = source
    if tier is not None:
        bare = source.upto(tier)
        enqueue = None if enqueue is None else within(enqueue, source.space, bare.space)
    overrides = _overrides(request.study, source, spec or (lower.spec if lower else None))
    try:
        study, notices = bare.configure(overrides, enqueue), stored.notices
    except UserError as error:
        if spec and is_another(spec.reference, source.reference):
            raise DriftError(
                f"study {spec.name!r} of this ledger is that of {spec.reference}, and {source.reference} declares "
                f"another one: give this one a name of its own by {option('name', 'NAME')}."
            ) from error
        by_default = "preset" in overrides and "preset" not in request.study.overrides and spec is None
        if by_default and _refusal(bare, {**overrides, "preset": NO_PRESET}, enqueue) != str(error):
            without = option("overrides", f"preset={NO_PRESET}")
            raise UserError(f"{error} Or search without the preset {source.search_preset} by {without}.") from error
        raise
    if lower and not spec:
        entry = lower.entry(study) if search.enqueue is None and search.learn_from is None else None
        study = study if entry is None else bare.configure(overrides, [entry])
        notices = (*notices, lower.notice(entry is not None))
    return Declared(source, bare, study, tier, overrides, notices)


def _refusal(study: Study, overrides: Mapping[str, object], enqueue: Sequence[Mapping[str, object]] | None) -> str:
    """Returns the error with which a study cannot be configured so; empty if it can."""
    try:
        study.configure(overrides, enqueue)
    except UserError as error:
        return str(error)
    return ""


def resolve(request: RunRequest, stored: Stored, declared: Declared, workers: int) -> ResolvedStudy:
    """Returns the study with each option from the request, else from the stored study, else from the declaration."""
    search, begun = request.search, stored.spec
    study = declared.study
    enqueue = [dict(entry) for entry in study.enqueue]
    requested = search.strategy and _specified(search.strategy, begun.strategy if begun else {}, study.strategy)
    chosen = requested or (begun.strategy if begun else _declared_strategy(study))
    made = make_strategy(chosen)
    if requested or not begun:  # a study that has begun with these rungs keeps them
        compatibility.rungs(chosen)
    # Folds are not epochs: one fold says nothing about how long the others take.
    parts = study.shape.parts
    settle = partial(complete, epochs=study.shape.epochs if parts == 1 else math.inf, parts=parts)
    strategy = settle(requested) if requested else None
    promotes = compatibility.promotes_freely(made, _order(search, begun))
    defaults = begun or _new_spec(stored.name, study, settle(chosen), workers, promotes=promotes)
    values = _declared_values(study) | {"tier": declared.tier, "enqueue": enqueue, "strategy": strategy}
    values |= {"seed": search.seed, "finish": search.finish, "confirm": search.confirm} | _listed(request)
    values |= _pace(request, study, made, promotes=promotes, asked=bool(strategy))
    values |= _sampler(search, begun, study, made)
    spec = defaults.model_copy(update={key: value for key, value in values.items() if value is not None})
    spec = spec.model_copy(update=_guides(study, spec, begun, request.budget.trials))
    if stored.lessons is not None:
        spec = stored.lessons.taken(spec)
    warm, learned = bool(spec.earlier), bool(spec.knowledge)
    used = behaviour.parts_of(
        study, spec.sampler, spec.strategy, warm=warm, learned=learned, guided=bool(spec.densities)
    )
    versions = behaviour.settle(used, begun.behaviour if begun else None)
    resolved = ResolvedStudy(study, spec.model_copy(update={"behaviour": versions}))
    compatibility.check(resolved)
    return resolved


def declare(
    request: RunRequest, ledger: Ledger | None, workers: int, tell: Callable[[str], None] = lambda notice: None
) -> ResolvedStudy:
    """Returns the resolved study, with or without a ledger, for callers that drive it by hand.

    `tell` is called with each notice.
    """
    check_names(request.search)
    source = declaration(request, ledger)
    stored = read_study(ledger, request, source)
    declared = configured(request, stored, source or begun_declaration(stored))
    stored = with_lessons(ledger, request, stored, declared.study)
    resolved = resolve(request, stored, declared, workers)
    for notice in (*declared.notices, *lessons(request, stored, resolved)):
        tell(notice)
    return resolved


def begun_declaration(stored: Stored) -> Study:
    """Returns the declaration of the stored study."""
    assert stored.spec is not None
    return declaration_of(stored.spec)


def check_names(search: SearchRequest) -> None:
    """Raises UserError if the sampler, strategy, order or a phase after the search does not exist."""
    for name, value, known in (
        ("sampler", search.sampler, SAMPLERS),
        ("strategy", search.strategy, STRATEGIES),
        ("order", search.order, ORDERS),
        ("finish", search.finish, FINISHES),
    ):
        if (named := _name(value)) is not None and not (is_own(named) and name in ("sampler", "strategy")):
            one_of(name, named, tuple(known))
    if search.confirm is not None:
        confirming.parse(search.confirm)


def lessons(request: RunRequest, stored: Stored, resolved: ResolvedStudy) -> tuple[str, ...]:
    """Returns notices about what guides a study as it begins: earlier studies and densities."""
    learned = () if stored.lessons is None else stored.lessons.notices(resolved, request.budget.trials)
    guided = "" if stored.spec else default_densities.notice(resolved.spec.densities)
    return (*learned, guided) if guided else learned


def _new_spec(name: str, study: Study, strategy: Mapping[str, Any], workers: int, *, promotes: bool) -> StudySpec:
    at_once = max(1, workers) * study.shape.lanes
    return StudySpec(
        reference=study.reference,
        name=name,
        **_sampling(study.sampler),
        strategy=dict(strategy),
        order="async" if promotes else "ordered",
        window=at_once if promotes else max(WINDOW, 2 * at_once),
        finish=study.finish,
        confirm=study.confirm,
        objectives=[objective.to_json() for objective in study.objectives],
        constraints=[bound.to_json() for bound in study.constraints],
        metrics=list(study.metrics),
    )


def _declared_strategy(study: Study) -> Mapping[str, object]:
    """Returns the strategy that the study declares, or the default for its trials."""
    return study.strategy or default(study.shape.parts, [objective.metric for objective in study.objectives])


def _declared_values(study: Study) -> dict[str, Any]:
    """Returns the values that the specification takes from the declaration whenever a study is driven."""
    return {
        "reference": study.reference,
        "overrides": dict(study.overrides),
        "of_search_alone": of_search_alone(study),
        "metrics": list(study.metrics),
        "read_when": dict(study.read_when),
        "objectives": [objective.to_json() for objective in study.objectives],
        "constraints": [bound.to_json() for bound in study.constraints],
    }


def _listed(request: RunRequest) -> dict[str, Any]:
    study = request.study
    return {"listed": [dict(entry) for entry in study.listed], "listed_of": study.listed_of} if study.listed else {}


def _pace(request: RunRequest, study: Study, made: Strategy, *, promotes: bool, asked: bool) -> dict[str, Any]:
    """Returns the order and the window, from the request or as the strategy requires."""
    search, workers = request.search, request.placement.workers
    pace: dict[str, Any] = {"order": "async" if asked and promotes else search.order, "window": search.window}
    if promotes and search.window is None and workers is not None:
        pace["window"] = max(1, workers) * study.shape.lanes
    budget = Budget(request.budget.trials, request.budget.epochs)
    return pace | compatibility.generations(made, study, search.order, search.window, budget)


def _guides(study: Study, spec: StudySpec, begun: StudySpec | None, trials: int | None) -> dict[str, Any]:
    """Returns the densities that a study follows by default, and the plan of sampler auto for one that begins."""
    densities = default_densities.settle(study, spec, begun)
    if spec.sampler != "auto" or begun is not None:
        return {"densities": densities}
    planned = auto.plan(study.space.following(densities), None if spec.earlier else trials)
    return {"densities": {} if "grid" in planned else densities, "planned": planned}


def _order(search: SearchRequest, begun: StudySpec | None) -> str | None:
    """Returns the order as given, or that of a study whose trials pause already."""
    return search.order or (begun.order if begun and promoting(begun.strategy) else None)


def _sampler(search: SearchRequest, begun: StudySpec | None, study: Study, made: Strategy) -> dict[str, Any]:
    """Returns the sampler of the strategy or of the request; empty if the sampler stays as it is."""
    brought = compatibility.sampler(made, _name(search.sampler))
    if brought:
        return _sampling(sampler_spec(brought))
    if search.sampler is None:
        return {}
    return _sampling(sampler_spec(_specified(search.sampler, begun.sampling() if begun else {}, study.sampler)))


def _overrides(requested: StudyRequest, source: Study, stored: StudySpec | None) -> dict[str, object]:
    """Returns the requested overrides merged over the stored ones; a requested preset replaces all stored ones.

    A new search has those of the declared preset; a list's are complete.
    """
    overrides = flatten(requested.overrides)
    if stored is None:
        return overrides if requested.listed else new_overrides(source, overrides)
    return overrides if "preset" in overrides else {**stored.overrides, **overrides}


def _sampling(spec: Mapping[str, object]) -> dict[str, Any]:
    """Returns a sampler's specification as fields of StudySpec."""
    return {"sampler": spec["name"], "sampler_options": {key: spec[key] for key in spec if key != "name"}}


def _name(asked: str | Mapping[str, Any] | None) -> str | None:
    """Returns the name of a sampler or strategy that is requested by name or with its options."""
    return asked["name"] if isinstance(asked, Mapping) else asked


def _specified(asked: str | Mapping[str, object], *known: Mapping[str, object]) -> dict[str, Any]:
    """Returns a sampler or strategy with its options: those of the mapping, or of the first entry of that name in
    `known`."""
    if isinstance(asked, Mapping):
        return dict(asked)
    return dict(next((spec for spec in known if spec.get("name") == asked), {"name": asked}))
