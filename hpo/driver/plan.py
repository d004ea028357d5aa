"""Plans a run from the request, the stored study and the declaration, in this order of precedence. Nothing is read,
written or printed."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hpo.alerts import rules
from hpo.declaration.budget import Budget
from hpo.declaration.goal import NO_GOAL, Goal
from hpo.declaration.resolved import ResolvedStudy
from hpo.door import option
from hpo.driver import cell_versions
from hpo.driver.executor_options import Ours, decides
from hpo.driver.request import LEASE_SECONDS, DriverOptions, RunRequest
from hpo.driver.resolve import Declared, configured, lessons, resolve
from hpo.driver.stored import Stored
from hpo.errors import UserError
from hpo.search.confirming import NONE, SEED, folds_lacking, parse
from hpo.space.config import as_json, flatten
from hpo.text import command, counted
from hpo.tracking.trackers import resolved as resolved_tracker
from hpo.tracking.uri import check_uri, of_rows
from hpo.workers.executors.placement import Placement, PlacementRequest


@dataclass(frozen=True)
class RunPlan:
    """A planned run; `options` lack what depends on this host and the data.

    notices   what the user is told before the study begins
    """

    request: RunRequest
    stored: Stored
    declared: Declared
    resolved: ResolvedStudy
    options: DriverOptions
    notices: tuple[str, ...] = ()

    @property
    def placement(self) -> Placement:
        return self.options.placement


def plan(request: RunRequest, stored: Stored, declared: Declared) -> RunPlan:
    """Returns the plan of the run. Raises UserError for contradictory options."""
    workers = request.placement.with_defaults().workers
    resolved = resolve(request, stored, declared, workers)
    placement = _placement(request, stored)
    decider = decides(placement.executor)
    decider.narrowed(request)  # as the study was driven before, which may be under another executor
    _check_confirm(request, stored, resolved, decider)
    goal = _goal(request, stored, resolved, decider)
    storage, notify = request.storage, request.notify
    kept = storage.max_bytes, stored.environment.get("max_bytes")
    options = DriverOptions(
        home=request.home,
        storage=storage.url,
        tracking_uri=_tracking_uri(request, stored),
        trials=request.budget.trials,
        epochs=request.budget.epochs,
        seconds=request.budget.seconds,
        goal=goal,
        allow_drift=request.study.allow_drift,
        placement=placement,
        max_bytes=decider.max_bytes(*kept),
        trackers=[resolved_tracker(tracker) for tracker in _as_last_time(notify.trackers, stored, "trackers")],
        alerts=_as_last_time(notify.alerts, stored, "alerts"),
        lease_timeout=storage.lease_timeout or _lease_seconds(),
        stored=stored.row,
        declared=cell_versions.declared(declared.source),
    )
    rules.check(rules.parse_all(options.alerts), resolved.spec.to_json())
    notices = (*declared.notices, *lessons(request, stored, resolved))
    return RunPlan(request, stored, declared, resolved, options, notices)


def replanned(planned: RunPlan, request: RunRequest, notice: str) -> RunPlan:
    """Returns the plan with open choices decided, with a notice if there is one."""
    notices = (*planned.notices, notice) if notice else planned.notices
    if request == planned.request:
        return replace(planned, notices=notices)
    declared = configured(request, planned.stored, planned.declared.source)
    resolved = resolve(request, planned.stored, declared, planned.placement.workers)
    return replace(planned, request=request, declared=declared, resolved=resolved, notices=notices)


def _placement(request: RunRequest, stored: Stored) -> Placement:
    """Returns the placement of trials: as given, else that of the last run."""
    last = PlacementRequest.of(stored.environment) if stored.row is not None else PlacementRequest()
    return request.placement.over(last).with_defaults() if stored.row is not None else request.placement.with_defaults()


def _goal(request: RunRequest, stored: Stored, resolved: ResolvedStudy, decider: Ours) -> Goal:
    """Returns the study's goal, which a new study needs if it has no budget."""
    row, budget = stored.row, request.budget
    goal = (Goal.of(row.environment) if row is not None else NO_GOAL).changed(
        budget.target, budget.patience, budget.stop_when
    )
    decider.check(stored.name, Budget.of(row) if row is not None else Budget(), goal)
    goal.check(resolved.spec.objectives, breeds=resolved.spec.strategy["name"] if resolved.population else "")
    if row is None and not (budget.trials or budget.epochs or budget.seconds or goal):
        raise UserError(
            f"study {stored.name!r} is new: say how far it is to go, by {option('trials')}, {option('epochs')}, "
            f"{option('time')}, {option('target')}, {option('patience')} or {option('stop_when')}."
        )
    return goal


def _check_confirm(request: RunRequest, stored: Stored, resolved: ResolvedStudy, decider: Ours) -> None:
    """Raises UserError where the confirming phase that was asked for cannot be."""
    spec, text = resolved.spec, request.search.confirm
    declared = parse(spec.confirm)
    if declared is None or spec.listed:
        return
    shown = option("confirm", spec.confirm)
    if SEED not in flatten(as_json(resolved.study.config)):
        raise UserError(
            f"{shown}: study {spec.name!r} has no field {SEED}, by which a training could be repeated under "
            f"another seed: give the configuration that field, or {option('confirm', NONE)}."
        )
    if lacking := folds_lacking(spec.name, declared, len(resolved.study.folds)):
        raise UserError(f"{shown}: {lacking}.")
    if text is None:
        return
    if resolved.population or not decider.finishes:
        who = "Ray Tune's scheduler" if not decider.finishes else f"strategy {spec.strategy['name']!r}"
        later = f"`{command(f'confirm --study {spec.name}')}`"
        raise UserError(f"{shown}: no phase follows a search by {who}: omit it, and run {later} afterwards.")
    budget = Budget(request.budget.trials).over(Budget.of(stored.row) if stored.row is not None else Budget())
    if budget.trials is not None and budget.trials < declared.trials:
        fewer = option("confirm", str(replace(declared, trials=budget.trials)))
        raise UserError(
            f"{shown}: study {spec.name!r} has {counted(budget.trials, 'trial')}, and {declared.trials} are to be "
            f"confirmed: give {option('trials', declared.trials)} or more, or {fewer}."
        )


def _as_last_time(given: Sequence[str] | None, stored: Stored, option: str) -> Sequence[str]:
    """Returns an option that may be given several times: as given, else as in the last run; `none` alone removes it."""
    if given is None:
        return stored.environment.get(option, [])
    return [] if [*given] == ["none"] else given


def _tracking_uri(request: RunRequest, stored: Stored) -> str:
    """Returns the tracking URI: as given, else the one the study began with, else the home's."""
    if uri := request.notify.tracking_uri:
        check_uri(uri)
        return uri
    return request.home.tracking_uri if stored.row is None else of_rows([stored.row], request.home)


def _lease_seconds() -> float:
    text = os.environ.get("HPO_LEASE_SECONDS", str(LEASE_SECONDS))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise UserError(f"HPO_LEASE_SECONDS={text!r} is not a time: give seconds, more than 0, or leave it unset.")
    return seconds
