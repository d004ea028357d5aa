"""Settles, where a study begins, how many of its trials train as lanes of one model: as many as were asked for, one
where that would take longer, and what a measurement says for `auto`, which is the default. The number becomes one of
the study's overrides, so that every resume has it."""

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
from hpo.driver.request import RunRequest
from hpo.errors import SpaceError
from hpo.search.population.base import PopulationStrategy
from hpo.search.samplers.registry import WARM
from hpo.space.config import flatten
from hpo.workers.executors.placement import Placement, elsewhere
from hpo.workers.executors.resources import devices, needs
from hpo.workers.lane_kinds import LEAST, alike, kinds
from hpo.workers.prepared import Prepared
from trainer.config.lanes import LANES
from trainer.redaction import redacted

WIDTHS = (4, 8, 16)  # that are measured
ON_GPUS = "on a GPU a lane's digits depend on the lanes beside it, so that an interrupted study may end with others"
GAIN = 1.5  # of a step on its own over that of a lane, from which on auto has trials fused
SLOWER = 0.9  # of the same, below which a number given by hand is not taken
WORTH, WORTH_BY_HAND = 60.0, 10.0  # seconds of a worker's trials: with less a search is over before measuring has paid
UNASKED = 15.0  # seconds that a measurement may take for which nobody has asked
ROUNDS = 4  # of proposals that a sampler with a memory makes at least, where nobody has asked for lanes


def settled(
    request: RunRequest,
    resolved: ResolvedStudy,
    begun: StudySpec | None,
    placement: Placement,
    prepared: Prepared | None = None,
) -> tuple[RunRequest, str]:
    """The request with the number of lanes that the study gets, and what to tell the user of it; as it was, and
    nothing, where that number was asked for and trains on a CPU. A study that has `begun` keeps its number.

    `prepared` forks the process that is asked of the task, if there is one.
    """
    if begun is not None and LANES not in request.overrides and not _by_preset(resolved):
        lost = "preset" in request.overrides and LANES in begun.overrides  # which takes the place of all overrides
        return (_with(request, begun.overrides[LANES]) if lost else request), ""
    asked = resolved.study.shape.train.get("lanes", 1)
    study = _Asking(resolved, request, placement, prepared)
    if begun is None and asked == 1 and _unsaid(resolved):
        lanes, notice = study.by_default()
        settled_so = request if lanes == 1 else _with(request, lanes)
    else:
        settled_so, notice = _as_asked(asked, study, begun)
    if begun is None and settled_so.overrides.get(LANES, asked) not in (1, "auto") and study.on_gpus:
        notice = f"{notice}; {ON_GPUS}" if notice else f"{LANES}={asked}: {ON_GPUS}"
    return settled_so, notice


def _unsaid(resolved: ResolvedStudy) -> bool:
    """Whether neither the study nor the user says anything of lanes, which its trainer has."""
    if LANES in resolved.study.overrides or "lanes" not in resolved.study.shape.train:
        return False
    declared: Any = load(resolved.spec.reference).config
    return "lanes" not in declared.train.model_fields_set


def _by_preset(resolved: ResolvedStudy) -> bool:
    study = resolved.study
    return LANES in flatten(study.presets.get(str(study.overrides.get("preset")), {}))


def _with(request: RunRequest, lanes: int) -> RunRequest:
    return replace(request, overrides={**request.overrides, LANES: lanes})


def _as_asked(asked: Any, study: _Asking, begun: StudySpec | None) -> tuple[RunRequest, str]:
    before = asked if begun is None else _lanes_of(begun)
    if asked == 1 or (begun is not None and asked == before):
        return study.request, ""
    if study.placement.executor == "ray-tune" and asked != "auto":  # whose driver refuses lanes
        return study.request, ""
    if begun is not None and (asked == "auto" or (begun.overrides.get(LANES) == 1 and not study.request.allow_drift)):
        lanes, why = before, "as the study began"
    elif asked == "auto":
        lanes, why = study.by_measure()
    else:
        why = "" if begun is not None and before != 1 else study.why_slower(asked)
        lanes = 1 if why else asked
    if lanes == asked:
        return study.request, ""
    return _with(study.request, lanes), f"{LANES}={asked}: {_so(lanes)}, {why}"


def _so(lanes: int) -> str:
    return f"{lanes} lanes" if lanes > 1 else "trials train one by one"


def _lanes_of(begun: StudySpec) -> int:
    """What it was given, else what its declaration says, which is loaded for it."""
    return begun.overrides.get(LANES) or ResolvedStudy.stored(begun.to_json()).study.shape.lanes


@dataclass(frozen=True)
class _Asking:
    """A study that begins, as it was asked for, and what a process that imports its task says of lanes."""

    resolved: ResolvedStudy
    request: RunRequest
    placement: Placement
    prepared: Prepared | None

    @property
    def on_gpus(self) -> bool:
        """Whether workers train on GPUs: those of a cluster where they are given some."""
        return needs(self.resolved.study).gpu and bool(devices() if self._here else self.placement.resources.gpus)

    @property
    def _here(self) -> bool:
        """Whether what is measured on this host is what workers meet."""
        return not elsewhere(self.placement.executor) and self.placement.executor != "ray-tune"

    @property
    def _as_here(self) -> bool:
        """Whether it is what they may be held to meet: a cluster's processors are taken to be like this host's."""
        return self._here or not (self.on_gpus or (needs(self.resolved.study).gpu and devices()))

    @property
    def _share(self) -> float:
        """Trials of a worker."""
        trials = self.request.trials or (self.request.epochs or math.inf) / self.resolved.study.shape.epochs
        return trials / self.placement.workers

    @property
    def _decides(self) -> str:
        """That a strategy may end trials early, which leaves groups small, in words; else empty."""
        name = self.resolved.strategy.name
        return (
            "" if name == "none" else f"lanes gain where trials train to their ends, and strategy {name} may stop them"
        )

    @property
    def _generations(self) -> bool:
        return isinstance(self.resolved.strategy, PopulationStrategy)

    @property
    def _open(self) -> float:
        """Trials of a worker that may be open at a time, where that does not grow with the lanes."""
        fixed = self.request.window is not None or self._generations
        return self.resolved.spec.window / self.placement.workers if fixed else math.inf

    def by_default(self) -> tuple[int, str]:
        """The number of lanes where nobody has said anything, and what to tell: nothing where nothing was measured.

        Only local workers are measured. The window grows with the lanes, so that a sampler with a memory has fewer
        the fewer trials there are.
        """
        learns = self.resolved.spec.sampler in WARM
        unknown = learns and math.isinf(self._share)
        if self.placement.executor != "local" or unknown or (self.request.seconds or math.inf) < WORTH:
            return 1, ""
        widths = self._widths(self._share / (2 * ROUNDS if learns else 1))
        if self._unfit(widths) or self._scattered(widths[-1], self._perhaps):
            return 1, ""
        try:
            told = self._told(widths, WORTH, UNASKED)
        except NoAnswer as error:
            return 1, f"{LANES}: {_so(1)}, since lanes could not be measured ({_said(error)})"
        lanes, why = self._judged(widths, told)
        return lanes, f"{LANES}=auto, the default: {_so(lanes)}, {why}" if told["seconds"] else ""

    def by_measure(self) -> tuple[int, str]:
        """For `auto`: the number and why."""
        widths = self._widths(self._share)
        if why := self._unfit(widths) or self._apart(widths[-1]):
            return 1, why
        try:
            return self._judged(widths, self._told(widths, WORTH, None))
        except NoAnswer as error:
            return 1, f"since they could not be measured ({_said(error)})"

    def _widths(self, most: float) -> list[int]:
        """Those that may be measured, of `most` lanes at most."""
        return [lanes for lanes in WIDTHS if lanes <= min(most, self._open)]

    def _unfit(self, widths: Sequence[int]) -> str:
        """Why a study that has not asked for a number should have none, as far as that shows without its task."""
        if not self._here:
            return f"since workers of {self.placement.executor} are not measured from here"
        if not widths:
            return f"since there are fewer than {LEAST} trials for each worker"
        if self._decides:
            return f"since {self._decides}: for --strategy none"
        try:
            self.resolved.study.configure({**self.resolved.study.overrides, LANES: widths[-1]})
        except SpaceError as error:
            return f"since {error}"
        return ""

    def _judged(self, widths: Sequence[int], told: Mapping[str, Any]) -> tuple[int, str]:
        """The number of lanes of which one's step is the quickest, 1 unless it is so by GAIN, and why."""
        if why := told["against"] or told["busy"]:
            return 1, f"since {why}"
        if why := self._scattered(widths[-1], told["fields"]):
            return 1, why
        if told["alone"] < WORTH:
            return 1, f"since a worker's trials take {told['alone']:.0f} s on their own, less than {WORTH:.0f} s"
        seconds = {int(lanes): float(one) for lanes, one in told["seconds"].items()}
        fused = {k: seconds[of] for k in widths if (of := self._alike(k, seconds, told["fields"])) > 1}
        if not fused:
            return 1, f"since {told['full'] or 'no group of trials that are alike could be measured'}"
        quickest = min(fused, key=lambda lanes: fused[lanes])
        gain = seconds[1] / fused[quickest]
        if gain < GAIN:
            return 1, f"since at best a step of {quickest} lanes is {gain:.2f} times as quick, and {GAIN} is asked for"
        return quickest, f"in which a step is {gain:.1f} times as quick as on its own"

    def why_slower(self, lanes: int) -> str:
        """Why so many lanes, given by hand, would take longer than trials one by one; else empty.

        Where they cannot be, trials say so in their own words, and what is wrong with the task.
        """
        if why := self._apart(lanes):
            return why
        if self._open < LEAST:
            window = f"of a window of {self.resolved.spec.window} trials fewer than {LEAST} are left to each worker"
            return f"since {window}: give --window {2 * lanes * self.placement.workers}"
        if self._decides and not self.on_gpus:
            return f"since {self._decides}: give --strategy none to have them fused"
        if not self._as_here and not self._perhaps:
            return ""
        try:
            told = self._told([lanes] if self._as_here else [], WORTH_BY_HAND, None)
        except NoAnswer:
            return ""
        if told["against"]:
            return ""
        if why := self._scattered(lanes, told["fields"]) or (told["busy"] and f"since {told['busy']}"):
            return why
        seconds = told["seconds"]
        slower = seconds.get(str(lanes), 0.0) / seconds["1"] if seconds else 0.0
        return f"since a step of {lanes} takes {slower:.2f} times as long as theirs" if slower * SLOWER > 1 else ""

    @property
    def _perhaps(self) -> list[str]:
        """The dimensions that a task may have declared to be fields of lanes: only the task says whether it has."""
        return [path for path in self.resolved.study.space.paths if not path.startswith("train.")]

    def _alike(self, lanes: int, measured: Collection[int], fields: Collection[str]) -> int:
        """The number that was measured which comes nearest to how many of so many lanes are of one kind."""
        each = alike(self.resolved, lanes, fields)
        return max((one for one in measured if one <= each), default=1)

    def _apart(self, lanes: int) -> str:
        """As `_scattered`, where that holds whatever the task declares, with all that it does not declare named."""
        if not self._scattered(lanes, self._perhaps):
            return ""
        try:
            return self._scattered(lanes, self._told([], 0.0, None)["fields"])
        except NoAnswer:
            return self._scattered(lanes, self._perhaps)

    def _scattered(self, lanes: int, fields: Collection[str]) -> str:
        """Why fewer than LEAST of so many lanes would be of one kind, where a task adds these `fields` to what lanes
        may differ in; else empty."""
        if alike(self.resolved, lanes, fields) >= LEAST:
            return ""
        others = kinds(self.resolved.study.space, fields)
        if not others:
            return f"since fewer than {LEAST} take longer together"
        its = not all(path.startswith("train.") for path in others)  # the task's
        named = ", or name in lane_fields what is a dropout rate or a number that loss calculates with" if its else ""
        return (
            f"since they differ in {', '.join(others)}, in which lanes of one model may not: set "
            f"{'it' if len(others) == 1 else 'them'} by -o to have them fused{named}"
        )

    def _told(self, widths: Sequence[int], worth: float, within: float | None) -> dict[str, Any]:
        """What the study's task says of lanes, in a process of its own: the driver imports no torch. Raises
        NoAnswer."""
        question = {"spec": self.resolved.spec.to_json(), "home": str(self.request.home.root), "share": self._share}
        question |= {"workers": self.placement.workers if self._here else 1, "widths": [*widths], "worth": worth}
        asked = self.prepared.ask if self.prepared is not None else ask
        with tempfile.TemporaryDirectory(prefix="hpo-lanes-") as scratch:  # which a process that is killed leaves
            words = json.dumps(question | {"scratch": scratch})
            return json.loads(asked("hpo.workers.lane_probe", words, within))


def _said(error: NoAnswer) -> str:
    return redacted(str(error))
