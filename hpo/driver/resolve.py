"""Settles each option of a run: given, else stored with the study, else declared."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from hpo.declaration import behaviour, compatibility, imported
from hpo.declaration.budget import Budget
from hpo.declaration.enqueue import within
from hpo.declaration.loading import shipped
from hpo.declaration.naming import check_name
from hpo.declaration.references import load
from hpo.declaration.resolved import ResolvedStudy
from hpo.declaration.spec import StudySpec
from hpo.declaration.study import Study
from hpo.driver import warm_start
from hpo.driver.request import RunRequest
from hpo.driver.tiers import below
from hpo.errors import StudyError, UserError
from hpo.ledger import Ledger, queries
from hpo.ledger.removal import check_whole
from hpo.search.samplers import auto
from hpo.search.samplers.registry import SAMPLERS, sampler_spec
from hpo.search.strategies.base import STRATEGIES, make_strategy, settled
from hpo.space.config import flatten
from hpo.terminal import print
from hpo.text import command, counted
from hpo.workers.executors.placement import one_of

ORDERS = ("ordered", "async")
WINDOW = 4  # trials open at a time, at least


def declare(request: RunRequest, ledger: Ledger | None, workers: int) -> ResolvedStudy:
    """The study as asked for: flags, then what the ledger, if any, has stored for its name, then the declaration."""
    for flag, value, known in (
        ("--sampler", request.sampler, SAMPLERS),
        ("--strategy", request.strategy, STRATEGIES),
        ("--order", request.order, ORDERS),
    ):
        if (asked := _name(value)) is not None:
            one_of(flag, asked, tuple(known))
    if request.window is not None and request.window < 1:
        raise UserError(f"--window {request.window}: give 1 or more.")
    study = _load(request.reference, ledger) if request.reference else None
    lower = below(request, study, ledger)
    name = request.name if request.name is not None else lower.name if lower else study.name if study else ""
    check_name(name)
    stored = stored_spec(ledger, name, wanted=study is None) if ledger else None
    if study is None:
        assert stored is not None
        study = load(stored.reference)
    tier = request.tier or (stored.tier if stored else None)
    enqueue = stored.enqueue if stored and request.enqueue is None else request.enqueue
    if tier is not None:
        declared, study = study.space, study.upto(tier)
        enqueue = None if enqueue is None else within(enqueue, declared, study.space)
    overrides = _overrides(request.overrides, stored or (lower.spec if lower else None))
    bare, study = study, study.configure(overrides, enqueue)
    if lower and not stored:
        entry = lower.entry(study) if request.enqueue is None and request.warm_start is None else None
        study = study if entry is None else bare.configure(overrides, [entry])
        print(lower.notice(entry is not None), file=sys.stderr)
    strategy = request.strategy and _specified(request.strategy, stored.strategy if stored else {}, study.strategy)
    chosen = strategy or (stored.strategy if stored else study.strategy)
    made = make_strategy(chosen)
    if strategy or not stored:  # what was begun so goes on
        compatibility.rungs(chosen)
    # A fold is no epoch: one says nothing of how long the others take.
    epochs = study.shape.epochs if study.shape.parts == 1 else math.inf
    strategy = settled(strategy, epochs) if strategy else None
    promotes = compatibility.promotes(made, request.order)
    lanes = study.shape.lanes
    at_once = workers * lanes
    defaults = stored or StudySpec(
        reference=study.reference,
        name=name,
        **_sampling(study.sampler),
        strategy=settled(study.strategy, epochs),
        order="async" if promotes else "ordered",
        window=at_once if promotes else max(WINDOW, 2 * at_once),
        objectives=[objective.to_json() for objective in study.objectives],
        constraints=[one.to_json() for one in study.constraints],
        metrics=list(study.metrics),
    )
    given: dict[str, Any] = {"order": request.order, "window": request.window, "seed": request.seed}
    given |= {"strategy": strategy, "overrides": dict(study.overrides)}
    given |= {"tier": tier, "enqueue": [dict(one) for one in study.enqueue]}
    if request.listed:
        given |= {"listed": [dict(one) for one in request.listed], "listed_of": request.listed_of}
    if strategy and promotes:
        given["order"] = "async"
    if request.warm_start is not None and (stored is None or stored.warm_start != request.warm_start):
        given |= {"warm_start": request.warm_start, "earlier": _earlier(request.warm_start, study, ledger)}
    if promotes and request.window is None and request.workers is not None:
        given["window"] = request.workers * lanes
    given |= {"reference": study.reference, "metrics": list(study.metrics)}
    given |= {"objectives": [objective.to_json() for objective in study.objectives]}
    given |= {"constraints": [one.to_json() for one in study.constraints]}
    if request.sampler is not None:
        sampling = _specified(request.sampler, stored.sampling() if stored else {}, study.sampler)
        given |= _sampling(sampler_spec(sampling))
    budget = Budget(request.trials, request.epochs)
    given |= compatibility.generations(made, study, request.order, request.window, budget)
    if brought := compatibility.sampler(made, _name(request.sampler)):
        given |= _sampling(sampler_spec(brought))
    spec = defaults.model_copy(update={key: value for key, value in given.items() if value is not None})
    if spec.sampler == "auto" and stored is None:
        spec = spec.model_copy(update={"planned": auto.plan(study.space, None if spec.earlier else request.trials)})
    used = behaviour.parts_of(study, spec.sampler, spec.strategy)
    versions = behaviour.settle(used, stored.behaviour if stored else None)
    resolved = ResolvedStudy(study, spec.model_copy(update={"behaviour": versions}))
    compatibility.check(resolved)
    return resolved


def _earlier(name: str, study: Study, ledger: Ledger | None) -> list[dict[str, Any]]:
    if ledger is None:
        raise UserError(f"--warm-start {name}: this home holds no study yet; name the home of that one by --home.")
    earlier, complete = warm_start.found(ledger, name, study)
    whole = sum(one["state"] == "complete" for one in earlier)
    stopped = f", and {len(earlier) - whole} pruned ones" if len(earlier) > whole else ""
    print(f"warm start: {whole} of {counted(complete, 'complete trial')} of study {name}{stopped}", file=sys.stderr)
    return earlier


def _load(reference: str, ledger: Ledger | None) -> Study:
    """The study; one that no declaration has, but the ledger, is to be continued by `hpo resume`."""
    declared = reference.endswith(".py") or reference in shipped()
    if not declared and ledger and (stored := stored_spec(ledger, reference, wanted=False)):
        raise StudyError(
            f"no declaration is called {reference!r}; this ledger has a study of that name from "
            f"{stored.reference}: `{command(f'resume --study {reference}')}` continues it."
        )
    return load(reference)


def _overrides(given: Mapping[str, Any], stored: StudySpec | None) -> dict[str, Any]:
    """What is given, over what was when the study began; a preset, if one is given, takes the place of all of that."""
    given = flatten(given)
    return given if stored is None or "preset" in given else {**stored.overrides, **given}


def _sampling(spec: Mapping[str, Any]) -> dict[str, Any]:
    """A sampler's specification as StudySpec holds it."""
    return {"sampler": spec["name"], "sampler_options": {key: spec[key] for key in spec if key != "name"}}


def begun(ledger: Ledger, name: str) -> bool:
    with ledger.read() as connection:
        return name in queries.study_names(connection)


def stored_spec(ledger: Ledger, name: str, wanted: bool) -> StudySpec | None:
    """What the ledger has for the name; StudyError if there is nothing and it is `wanted`."""
    if not wanted and not begun(ledger, name):
        return None
    with ledger.read() as connection:
        row = queries.study_row(connection, name)
    check_whole(row)
    spec = StudySpec.from_json(row["spec"])
    if spec.imported:
        raise imported.refuse(name)
    return spec


def _name(asked: str | Mapping[str, Any] | None) -> str | None:
    """Returns the name of a sampler or strategy, which may be asked for with its options."""
    return asked["name"] if isinstance(asked, Mapping) else asked


def _specified(asked: str | Mapping[str, Any], *known: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a sampler or strategy with its options: those of a mapping, or of the first in `known` of that name."""
    if isinstance(asked, Mapping):
        return dict(asked)
    return dict(next((spec for spec in known if spec.get("name") == asked), {"name": asked}))
