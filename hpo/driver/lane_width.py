"""Settles, where a study begins, how many of its trials train as lanes of one model: as many as were asked for, one
where too few would be alike, and for `auto` what a measurement says. The number becomes one of the study's overrides,
so that every resume has it."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpo.child_process import NoAnswer, ask
from hpo.declaration.resolved import ResolvedStudy
from hpo.declaration.spec import StudySpec
from hpo.driver.request import RunRequest
from hpo.errors import SpaceError
from hpo.space.space import Space
from hpo.workers.executors.placement import Placement, elsewhere
from hpo.workers.executors.resources import devices, needs
from trainer.config.lanes import LANE_FIELDS
from trainer.redaction import redacted

LANES = "train.lanes"
LEAST = 4  # lanes of a group: fewer take longer together than one after the other (docs/performance.md)
WIDTHS = (4, 8, 16)  # that are measured
ON_GPUS = "on a GPU a lane's digits depend on the lanes beside it, so that an interrupted study may end with others"
GAIN = 1.5  # of a step on its own over that of a lane, from which on auto has trials fused


def settled(
    request: RunRequest, resolved: ResolvedStudy, begun: StudySpec | None, placement: Placement
) -> tuple[RunRequest, str]:
    """The request with the number of lanes that the study gets, and what to tell the user of it; as it was, and
    nothing, where that number was asked for and trains on a CPU. A study that has `begun` keeps its number."""
    asked = resolved.study.shape.train.get("lanes", 1)
    request, notice = _settled(asked, request, resolved, begun, placement)
    if begun is None and request.overrides.get(LANES, asked) not in (1, "auto") and _on_gpus(resolved, placement):
        notice = f"{notice}; {ON_GPUS}" if notice else f"{LANES}={asked}: {ON_GPUS}"
    return request, notice


def _on_gpus(resolved: ResolvedStudy, placement: Placement) -> bool:
    return needs(resolved.study).gpu and not elsewhere(placement.executor) and bool(devices())


def _settled(
    asked: Any, request: RunRequest, resolved: ResolvedStudy, begun: StudySpec | None, placement: Placement
) -> tuple[RunRequest, str]:
    if asked == 1 or (begun is not None and LANES not in request.overrides):  # it has those that it began with
        return request, ""
    before = asked if begun is None else _lanes_of(begun)
    if begun is not None and asked == before:
        return request, ""
    if placement.executor == "ray-tune" and asked != "auto":  # whose driver refuses lanes
        return request, ""
    if asked == "auto":
        lanes, why = (before, "as it began") if begun else _measured(resolved, request, placement)
    else:
        why = "" if begun is not None and before != 1 else _too_few(resolved, asked, request)
        lanes = 1 if why else asked
    if lanes == asked:
        return request, ""
    settled_so = replace(request, overrides={**request.overrides, LANES: lanes})
    so = f"{lanes} lanes" if lanes > 1 else "trials train one by one"
    return settled_so, f"{LANES}={asked}: {so}, {why}"


def _lanes_of(begun: StudySpec) -> int:
    """What it was given, else what its declaration says, which is loaded for it."""
    return begun.overrides.get(LANES) or ResolvedStudy.stored(begun.to_json()).study.shape.lanes


def _too_few(resolved: ResolvedStudy, lanes: int, request: RunRequest) -> str:
    """Why fewer than LEAST of so many lanes would be of one kind; else empty."""
    if (why := _scattered(resolved, lanes, _perhaps(resolved))) or not _perhaps(resolved):
        return why
    try:
        told = _asked(resolved, request, math.inf, ())
    except NoAnswer:
        return ""  # the trials say in their own words what is wrong with the task, and below what it lacks
    return "" if told["against"] else _scattered(resolved, lanes, told["fields"])


def _perhaps(resolved: ResolvedStudy) -> list[str]:
    """The dimensions that a task may have declared to be fields of lanes: only the task says whether it has."""
    return [path for path in resolved.study.space.paths if not path.startswith("train.")]


def _scattered(resolved: ResolvedStudy, lanes: int, fields: Collection[str]) -> str:
    """The same where a task adds these `fields` to what lanes may differ in.

    With rungs in order no group takes a trial beyond a waiting one of another kind (docs/decisions/0036), so all have
    to be of one kind; else kinds share the lanes evenly.
    """
    in_order = resolved.spec.order == "ordered" and resolved.strategy.name != "none"
    others = _kinds(resolved.study.space, (*LANE_FIELDS, *fields))
    kinds = math.prod(others.values())
    if (lanes if kinds == 1 else 0 if in_order else lanes // kinds) >= LEAST:
        return ""
    if not others:
        return f"since fewer than {LEAST} take longer together"
    return (
        f"since they differ in {', '.join(others)}, which is the same for all lanes of a model: set "
        f"{'it' if len(others) == 1 else 'them'} by -o to have them fused"
    )


def _kinds(space: Space, fields: Collection[str]) -> Mapping[str, float]:
    """How many values each dimension has in which lanes may not differ."""
    others = {path: one for path, one in space.dimensions.items() if not _varies(path, fields)}
    return {path: one.count for path, one in others.items() if one.count > 1}


def _varies(path: str, fields: Collection[str]) -> bool:
    return any(path == field or path.startswith(f"{field}.") for field in fields)


def _measured(resolved: ResolvedStudy, request: RunRequest, placement: Placement) -> tuple[int, str]:
    """The number of lanes of which one's step is the quickest, 1 unless it is so by GAIN, and why."""
    if elsewhere(placement.executor) or placement.executor == "ray-tune":
        return 1, f"since workers of {placement.executor} are not measured from here"
    share = (request.trials or math.inf) / placement.workers
    widths = [lanes for lanes in WIDTHS if lanes <= share]
    if not widths:
        return 1, f"since there are fewer than {LEAST} trials for each worker"
    if why := _unfit(resolved, widths[-1]):
        return 1, why
    try:
        told = _asked(resolved, request, share, widths)
    except NoAnswer as error:
        return 1, f"since they could not be measured ({redacted(str(error))})"
    if why := (told["against"] and f"since {told['against']}") or _scattered(resolved, widths[-1], told["fields"]):
        return 1, why
    seconds = {int(lanes): float(one) for lanes, one in told["seconds"].items()}
    seconds = {k: one for k, one in seconds.items() if k == 1 or not _scattered(resolved, k, told["fields"])}
    quickest = min(seconds, key=lambda lanes: seconds[lanes])
    gain = seconds.get(1, 0.0) / seconds[quickest]
    if gain < GAIN:
        return 1, f"since at best a step of {quickest} lanes is {gain:.2f} times as quick, and {GAIN} is asked for"
    return quickest, f"in which a step is {gain:.1f} times as quick as on its own"


def _unfit(resolved: ResolvedStudy, lanes: int) -> str:
    """Why a study that has not asked for lanes should have none, as far as that can be seen without measuring."""
    if resolved.spec.order == "ordered" and resolved.strategy.name != "none":
        return f"since at the rungs of strategy {resolved.strategy.name} lanes wait for each other: for --strategy none"
    try:
        resolved.study.configure({**resolved.study.overrides, LANES: lanes})
    except SpaceError as error:
        return f"since {error}"
    return _scattered(resolved, lanes, _perhaps(resolved))


def _asked(resolved: ResolvedStudy, request: RunRequest, share: float, widths: Sequence[int]) -> dict[str, Any]:
    """What the study's task says of lanes, in a process of its own: the driver imports no torch."""
    question = {"spec": resolved.spec.to_json(), "home": str(request.home.root), "share": share, "widths": [*widths]}
    return json.loads(ask("hpo.workers.lane_probe", json.dumps(question)))
