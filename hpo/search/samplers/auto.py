"""Holds the sampler `auto`, which chooses one of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from hpo.search.samplers.base import Proposal, Sampler, TrialRecord, is_open
from hpo.search.samplers.deduplicate import FEW as VALUES
from hpo.search.samplers.deduplicate import is_few
from hpo.search.samplers.registry import Kind, bare, sampler_spec
from hpo.space.objective import Objective
from hpo.text import counted

if TYPE_CHECKING:
    from hpo.space.space import Space

FEW, MANY = 500, 250  # trials up to which freeze-thaw's model, or TPE for several objectives, proposes
QUICK = 10  # trials: a study with no more of them ends before a model has learned from any


def plan(space: Space, trials: int | None) -> dict[str, int]:
    """Returns a new study's plan, from its space, its budget of trials and the installation; the study keeps it.

    {"grid": n}   the study has trials for each of its n configurations, so each is tried
    {"qmc": n}    the first n trials spread evenly, as there are no more and no priors say where to begin
    {"tpe": 0}    from trial 0 on tpe replaces freeze-thaw, whose model needs PyTorch, which is not installed
    """
    without = {} if find_spec("torch") else {"tpe": 0}
    if trials is None:
        return without
    if is_few(space) and (size := space.grid(VALUES).size) <= trials:
        return {"grid": size}
    return without | ({"qmc": trials} if trials <= QUICK and len(space) and not space.has_priors else {})


def choice(objectives: int, number: int, warm: bool = False, planned: Mapping[str, int] | None = None) -> str:
    """Returns the sampler of a trial.

    It depends on the trial's number, the number of objectives, the study's `plan`, and on `warm`: whether the study was
    warm-started from trials without curves.

    planned                      grid, or qmc for its first trials
    one objective                freeze-thaw, a model of curves and configurations, up to trial 500, then tpe
    ... warm without curves      tpe
    ... begun without PyTorch    tpe
    several objectives           tpe up to trial 250, then nsga2, nsga3 from four on

    For several objectives it follows OptunaHub's AutoSampler, but counts trials asked instead of complete ones and uses
    no Gaussian process. The freeze-thaw model is dropped late because its asks take longer with every trial.
    """
    if planned and "grid" in planned:
        return "grid"
    if planned and number < planned.get("qmc", 0):
        return "qmc"
    if objectives > 1:
        return "tpe" if number < MANY else "nsga2" if objectives < 4 else "nsga3"
    return "tpe" if warm or number >= (planned or {}).get("tpe", FEW) else "freeze-thaw"


def rule(objectives: int, warm: bool, planned: Mapping[str, int] | None = None) -> str:
    """Returns the rule of `choice` for one study in words, with its reason."""
    if planned and "grid" in planned:
        return f"grid, since there are {counted(planned['grid'], 'configuration')}, and trials for each of them"
    first, then = (choice(objectives, number, warm, planned) for number in (QUICK, max(FEW, MANY)))
    later = first if first == then else f"{first} up to trial {MANY if objectives > 1 else FEW}, then {then}"
    if objectives == 1 and planned and "tpe" in planned:
        later += ", since the study was begun without PyTorch, which freeze-thaw needs"
    if planned and (count := planned.get("qmc")):
        return f"qmc for {counted(count, 'trial')}, too few for a model, then {later}"
    return later


def without_curves(earlier: Sequence[TrialRecord]) -> bool:
    """Returns whether a warm start has trials but no curves, as in studies begun before curves were kept."""
    return bool(earlier) and not any(record.curve for record in earlier)


class Auto:
    """Asks the sampler that `choice` names; that sampler learns from every trial, whichever sampler proposed it."""

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int) -> None:
        self._space, self._objectives, self._seed = space, objectives, seed
        self._records: dict[int, TrialRecord] = {}
        self._earlier: Sequence[TrialRecord] = ()
        self._name = ""
        self._chosen: Sampler | None = None
        self._planned: Mapping[str, int] = {}
        self._versions: Mapping[str, int] = {}

    def follow(self, planned: Mapping[str, int], versions: Mapping[str, int]) -> None:
        """Sets the study's `plan` to choose by, and the versions of the samplers."""
        self._planned, self._versions = planned, versions

    def warm(self, records: Sequence[TrialRecord]) -> None:
        """Passes trials of another study to every sampler with a model."""
        self._earlier = records

    def adopt(self, record: TrialRecord) -> None:
        self._records[record.number] = record
        if self._chosen is not None:
            self._chosen.adopt(record)

    def tell(self, record: TrialRecord) -> None:
        self._records[record.number] = record
        if self._chosen is not None:
            self._chosen.tell(record)

    def ask(self, number: int) -> Proposal:
        name = choice(len(self._objectives), number, without_curves(self._earlier), self._planned)
        index = number % self._planned["grid"] if name == "grid" else number  # past its end the grid repeats
        proposal = self._sampler(name).ask(index)
        self._records[number] = TrialRecord(
            number,
            "running",
            proposal.coordinates,
            trial_attrs=proposal.trial_attrs,
            study_attrs=proposal.study_attrs,
        )
        return proposal

    def exhausted(self, number: int) -> str:
        return ""

    def _sampler(self, name: str) -> Sampler:
        """Returns the sampler of this name, with all trials that this one knows."""
        if self._chosen is None or name != self._name:
            spec = sampler_spec({"name": name, "points": VALUES} if name == "grid" else name)
            earlier = self._earlier if Kind.of(name).warms else ()
            sampler = bare(spec, self._space, self._objectives, self._seed, earlier, versions=self._versions)
            self._name, self._chosen = name, sampler
            for record in self._records.values():
                (self._chosen.adopt if is_open(record) else self._chosen.tell)(record)
        return self._chosen
