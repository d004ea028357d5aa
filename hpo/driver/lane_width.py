"""Chooses, when a study begins, how many of its trials train as lanes of one model.

That is the requested number, or one if that many lanes would be slower; with `auto`, the default, a measurement
decides. The number becomes an override of the study, so every resume uses it.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hpo.child_process import NoAnswer, ask
from hpo.declaration.references import load
from hpo.declaration.resolved import ResolvedStudy
from hpo.declaration.spec import StudySpec
from hpo.door import option
from hpo.driver.request import RunRequest
from hpo.errors import SpaceError
from hpo.search.population.base import PopulationStrategy
from hpo.search.samplers.registry import Kind
from hpo.space.config import flatten
from hpo.workers.executors.placement import Placement, elsewhere
from hpo.workers.executors.resources import devices, needs
from hpo.workers.lane_kinds import LEAST, alike, kinds
from hpo.workers.prepared import Prepared
from trainer.config.lanes import LANES
from trainer.redaction import redacted

WIDTHS = (4, 8, 16)  # numbers of lanes that are measured
ON_GPUS = "on a GPU a lane's digits depend on the lanes beside it, so that an interrupted study may end with others"
GAIN = 1.5  # speed-up of a step in lanes over a step alone from which auto fuses trials
SLOWER = 0.9  # speed-up below which a number set by hand is not used
WORTH, WORTH_BY_HAND = 60.0, 10.0  # seconds of a worker's trials below which measuring does not pay off
UNASKED = 15.0  # seconds that a measurement may take if the user did not request lanes
ROUNDS = 4  # rounds of proposals that a sampler with a memory makes at least if the user did not request lanes


def decided(
    request: RunRequest,
    resolved: ResolvedStudy,
    begun: StudySpec | None,
    placement: Placement,
    prepared: Prepared | None = None,
) -> tuple[RunRequest, str]:
    """Returns the request with the study's number of lanes, and a notice for the user.

    The request is unchanged and the notice empty if the study trains on a CPU with the requested number. A study that
    has `begun` keeps its number. `prepared`, if set, forks the process that answers for the task.
    """
    if begun is not None and LANES not in request.study.overrides and not _by_preset(resolved):
        # A preset replaces all overrides.
        lost = "preset" in request.study.overrides and LANES in begun.overrides
        return (_with(request, begun.overrides[LANES]) if lost else request), ""
    requested = resolved.study.shape.train.get("lanes", 1)
    study = _Asking(resolved, request, placement, prepared)
    if begun is None and requested == 1 and _unsaid(resolved):
        number, notice = study.by_default()
        with_lanes = request if number == 1 else _with(request, number)
    else:
        with_lanes, notice = _as_requested(requested, study, begun)
    lanes = requested if with_lanes is request else with_lanes.study.overrides[LANES]
    if begun is None and lanes not in (1, "auto") and study.on_gpus:
        notice = f"{notice}; {ON_GPUS}" if notice else f"{LANES}={requested}: {ON_GPUS}"
    return with_lanes, notice


def _unsaid(resolved: ResolvedStudy) -> bool:
    """Returns whether the trainer supports lanes and neither the study nor the user sets their number."""
    if LANES in resolved.study.overrides or "lanes" not in resolved.study.shape.train:
        return False
    declared: Any = load(resolved.spec.reference).config
    return "lanes" not in declared.train.model_fields_set


def _by_preset(resolved: ResolvedStudy) -> bool:
    study = resolved.study
    return LANES in flatten(study.presets.get(str(study.overrides.get("preset")), {}))


def _with(request: RunRequest, lanes: int) -> RunRequest:
    study = replace(request.study, overrides={**request.study.overrides, LANES: lanes})
    return replace(request, study=study)


def _as_requested(requested: Any, study: _Asking, begun: StudySpec | None) -> tuple[RunRequest, str]:
    before = requested if begun is None else _lanes_of(begun)
    if requested == 1 or (begun is not None and requested == before):
        return study.request, ""
    if study.placement.executor == "ray-tune" and requested != "auto":  # the driver for Ray Tune refuses lanes
        return study.request, ""
    if begun is not None and (
        requested == "auto" or (begun.overrides.get(LANES) == 1 and not study.request.study.allow_drift)
    ):
        lanes, why = before, "as the study began"
    elif requested == "auto":
        lanes, why = study.by_measure()
    else:
        why = "" if begun is not None and before != 1 else study.why_slower(requested)
        lanes = 1 if why else requested
    if lanes == requested:
        return study.request, ""
    return _with(study.request, lanes), f"{LANES}={requested}: {_so(lanes)}, {why}"


def _so(lanes: int) -> str:
    return f"{lanes} lanes" if lanes > 1 else "trials train one by one"


def _lanes_of(begun: StudySpec) -> int:
    """Returns the study's number of lanes, from its overrides or else from its declaration, which is then loaded."""
    return begun.overrides.get(LANES) or ResolvedStudy.stored(begun.to_json()).study.shape.lanes


@dataclass(frozen=True)
class _Asking:
    """A study that begins, and the answers about lanes of a process that imports its task."""

    resolved: ResolvedStudy
    request: RunRequest
    placement: Placement
    prepared: Prepared | None

    @property
    def on_gpus(self) -> bool:
        """Returns whether workers train on GPUs; workers of a cluster do if GPUs are assigned to them."""
        return needs(self.resolved.study).gpu and bool(devices() if self._here else self.placement.resources.gpus)

    @property
    def _here(self) -> bool:
        """Returns whether workers run on this host, so that a measurement here is valid for them."""
        return not elsewhere(self.placement.executor) and self.placement.executor != "ray-tune"

    @property
    def _as_here(self) -> bool:
        """Returns whether a measurement here counts: a cluster's CPUs are assumed to be like this host's."""
        return self._here or not (self.on_gpus or (needs(self.resolved.study).gpu and devices()))

    @property
    def _workers(self) -> int:
        """Returns how many workers train at a time; 1 for a study whose workers all join from elsewhere."""
        return max(1, self.placement.workers)

    @property
    def _share(self) -> float:
        """Returns the number of trials per worker; infinite without a budget of trials or epochs."""
        trials = (
            self.request.budget.trials or (self.request.budget.epochs or math.inf) / self.resolved.study.shape.epochs
        )
        return trials / self._workers

    @property
    def _decides(self) -> str:
        """Returns a clause if the strategy may end trials early, which leaves groups small; empty otherwise."""
        name = self.resolved.strategy.name
        return (
            "" if name == "none" else f"lanes gain where trials train to their ends, and strategy {name} may stop them"
        )

    @property
    def _generations(self) -> bool:
        return isinstance(self.resolved.strategy, PopulationStrategy)

    @property
    def _open(self) -> float:
        """Returns the number of open trials per worker; infinity if the window grows with the lanes."""
        fixed = self.request.search.window is not None or self._generations
        return self.resolved.spec.window / self._workers if fixed else math.inf

    def by_default(self) -> tuple[int, str]:
        """Returns the default number of lanes and a notice, which is empty if nothing was measured.

        Only local workers are measured. The window grows with the lanes, so a sampler with a memory gets fewer lanes if
        there are fewer trials.
        """
        learns = Kind.of(self.resolved.spec.sampler).warms
        unknown = learns and math.isinf(self._share)
        if self.placement.executor != "local" or unknown or (self.request.budget.seconds or math.inf) < WORTH:
            return 1, ""
        widths = self._widths(self._share / (2 * ROUNDS if learns else 1))
        if self._unfit(widths) or self._scattered(widths[-1], self._perhaps):
            return 1, ""
        try:
            answers = self._answers(widths, WORTH, UNASKED)
        except NoAnswer as error:
            return 1, f"{LANES}: {_so(1)}, since lanes could not be measured ({_shown(error)})"
        lanes, why = self._judged(widths, answers)
        return lanes, f"{LANES}=auto, the default: {_so(lanes)}, {why}" if answers["seconds"] else ""

    def by_measure(self) -> tuple[int, str]:
        """Returns the number of lanes for `auto` and the reason."""
        widths = self._widths(self._share)
        if why := self._unfit(widths) or self._apart(widths[-1]):
            return 1, why
        try:
            return self._judged(widths, self._answers(widths, WORTH, None))
        except NoAnswer as error:
            return 1, f"since they could not be measured ({_shown(error)})"

    def _widths(self, most: float) -> list[int]:
        """Returns the numbers of lanes to measure, up to `most`."""
        return [lanes for lanes in WIDTHS if lanes <= min(most, self._open)]

    def _unfit(self, widths: Sequence[int]) -> str:
        """Returns why a study should not be measured, judged without its task; empty otherwise."""
        if not self._here:
            return f"since workers of {self.placement.executor} are not measured from here"
        if not widths:
            return f"since there are fewer than {LEAST} trials for each worker"
        if self._decides:
            return f"since {self._decides}: for {option('strategy', 'none')}"
        try:
            self.resolved.study.configure({**self.resolved.study.overrides, LANES: widths[-1]})
        except SpaceError as error:
            return f"since {error}"
        return ""

    def _judged(self, widths: Sequence[int], answers: Mapping[str, Any]) -> tuple[int, str]:
        """Returns the number of lanes with the quickest step per lane, or 1 if the speed-up is below GAIN, and the
        reason."""
        if why := answers["against"] or answers["busy"]:
            return 1, f"since {why}"
        if why := self._scattered(widths[-1], answers["fields"]):
            return 1, why
        if answers["alone"] < WORTH:
            return 1, f"since a worker's trials take {answers['alone']:.0f} s on their own, less than {WORTH:.0f} s"
        seconds = {int(lanes): float(duration) for lanes, duration in answers["seconds"].items()}
        fused = {k: seconds[of] for k in widths if (of := self._alike(k, seconds, answers["fields"])) > 1}
        if not fused:
            return 1, f"since {answers['full'] or 'no group of trials that are alike could be measured'}"
        quickest = min(fused, key=lambda lanes: fused[lanes])
        gain = seconds[1] / fused[quickest]
        if gain < GAIN:
            return 1, f"since at best a step of {quickest} lanes is {gain:.2f} times as quick, and {GAIN} is asked for"
        return quickest, f"in which a step is {gain:.1f} times as quick as on its own"

    def why_slower(self, lanes: int) -> str:
        """Returns why this many lanes would be slower than single trials; empty otherwise.

        It is empty too if the task does not support lanes: the trials then report that themselves, with the reason.
        """
        if why := self._apart(lanes):
            return why
        if self._open < LEAST:
            window = f"of a window of {self.resolved.spec.window} trials fewer than {LEAST} are left to each worker"
            return f"since {window}: give {option('window', 2 * lanes * self._workers)}"
        if self._decides and not self.on_gpus:
            return f"since {self._decides}: give {option('strategy', 'none')} to have them fused"
        if not self._as_here and not self._perhaps:
            return ""
        try:
            answers = self._answers([lanes] if self._as_here else [], WORTH_BY_HAND, None)
        except NoAnswer:
            return ""
        if answers["against"]:
            return ""
        if why := self._scattered(lanes, answers["fields"]) or (answers["busy"] and f"since {answers['busy']}"):
            return why
        seconds = answers["seconds"]
        slower = seconds.get(str(lanes), 0.0) / seconds["1"] if seconds else 0.0
        return f"since a step of {lanes} takes {slower:.2f} times as long as theirs" if slower * SLOWER > 1 else ""

    @property
    def _perhaps(self) -> list[str]:
        """Returns the dimensions that a task may declare as fields of lanes; only the task knows which it declares."""
        return [path for path in self.resolved.study.space.paths if not path.startswith("train.")]

    def _alike(self, lanes: int, measured: Collection[int], fields: Collection[str]) -> int:
        """Returns the largest measured number of lanes that does not exceed the number of like trials among `lanes`."""
        same_width = alike(self.resolved, lanes, fields)
        return max((width for width in measured if width <= same_width), default=1)

    def _apart(self, lanes: int) -> str:
        """Returns the clause of `_scattered` if it holds whatever the task declares; names the undeclared fields."""
        if not self._scattered(lanes, self._perhaps):
            return ""
        try:
            return self._scattered(lanes, self._answers([], 0.0, None)["fields"])
        except NoAnswer:
            return self._scattered(lanes, self._perhaps)

    def _scattered(self, lanes: int, fields: Collection[str]) -> str:
        """Returns why fewer than LEAST of this many lanes would be alike; empty otherwise.

        `fields` are those that the task adds to the fields in which lanes may differ.
        """
        if alike(self.resolved, lanes, fields) >= LEAST:
            return ""
        others = kinds(self.resolved.study.space, fields)
        if not others:
            return f"since fewer than {LEAST} take longer together"
        its = not all(path.startswith("train.") for path in others)  # some are fields of the task
        named = ", or name in lane_fields what is a dropout rate or a number that loss calculates with" if its else ""
        return (
            f"since they differ in {', '.join(others)}, in which lanes of one model may not: set "
            f"{'it' if len(others) == 1 else 'them'} by {option('overrides')} to have them fused{named}"
        )

    def _answers(self, widths: Sequence[int], worth: float, within: float | None) -> dict[str, Any]:
        """Returns the answers of the study's task about lanes. Raises NoAnswer.

        The task is imported in another process, since the driver does not import torch.
        """
        question = {"spec": self.resolved.spec.to_json(), "home": str(self.request.home.root), "share": self._share}
        question |= {"workers": self._workers if self._here else 1, "widths": [*widths], "worth": worth}
        ask_task = self.prepared.ask if self.prepared is not None else ask
        with tempfile.TemporaryDirectory(prefix="hpo-lanes-") as scratch:  # a process that is killed leaves files here
            words = json.dumps(question | {"scratch": scratch})
            return json.loads(ask_task("hpo.workers.lane_probe", words, within))


def _shown(error: NoAnswer) -> str:
    return redacted(str(error))
