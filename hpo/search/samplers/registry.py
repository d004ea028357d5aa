"""The samplers by name, and those without a memory: random, grid, quasi-Monte-Carlo. Others load when asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hpo.errors import UserError
from hpo.search.samplers.base import Proposal, Sampler, TrialRecord, ask_seed
from hpo.search.samplers.deduplicate import DeduplicatingSampler, is_few
from hpo.search.samplers.initial import InitialTrialsSampler
from hpo.search.samplers.reject import RejectingSampler
from hpo.search.samplers.rounding import RoundingSampler
from hpo.space.objective import Objective
from hpo.text import counted, near

if TYPE_CHECKING:
    from hpo.space.space import Space

# name -> its options, each a whole number from 1, with their defaults.
SAMPLERS: dict[str, dict[str, int]] = {
    "tpe": {"n_startup_trials": 10},  # random trials before its model is used
    "random": {},
    "qmc": {},
    "grid": {"points": 5},  # of dimensions without steps of their own
    "gp": {"n_startup_trials": 10},
    "cmaes": {},
    "nsga2": {"population_size": 50},  # trials of a generation, from 2
    "nsga3": {"population_size": 50},
    "auto": {},
    "freeze-thaw": {},
    "bohb": {},
}

MODELS = (
    "tpe",
    "gp",
    "cmaes",
    "nsga2",
    "nsga3",
    "auto",
)  # those that learn from trials, and draw the first around priors
WARM = (*MODELS, "freeze-thaw", "bohb")  # those that take trials of another study
ONE_OBJECTIVE = ("cmaes", "freeze-thaw")  # those that take no more
SLOW_ASKS = {"gp": "2 to 9 s of processor time for each trial from about the tenth on"}  # those worth announcing
_LEAST = {"population_size": 2}
# Samplers that compute with floating-point libraries -> the version from which they round what they propose.
_ROUNDED_SINCE = {"tpe": 2, "gp": 2, "cmaes": 2, "freeze-thaw": 2, "bohb": 2}
_PLACES = {
    "tpe": "hpo.search.samplers.tpe:Tpe",
    "random": "hpo.search.samplers.registry:Random",
    "qmc": "hpo.search.samplers.registry:Qmc",
    "grid": "hpo.search.samplers.registry:Grid",
    "gp": "hpo.search.samplers.gp_nsga:Gp",
    "cmaes": "hpo.search.samplers.cmaes:Cmaes",
    "nsga2": "hpo.search.samplers.gp_nsga:Nsga2",
    "nsga3": "hpo.search.samplers.gp_nsga:Nsga3",
    "auto": "hpo.search.samplers.auto:Auto",
    "freeze-thaw": "hpo.search.promotion.freeze_thaw:FreezeThawSampler",
    "bohb": "hpo.search.samplers.rung_tpe:RungTpe",
}


def sampler_spec(spec: str | Mapping[str, Any]) -> dict[str, Any]:
    """`{"name": ..., option: value}`, every option spelled out, of a name or of such a mapping.

    Raises UserError naming option, value and fix.
    """
    given = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = given.pop("name", None)
    if name not in SAMPLERS:
        raise UserError(
            f"unknown sampler {name!r}: choose one of {', '.join(SAMPLERS)}{near(str(name), SAMPLERS) or '.'}"
        )
    known = SAMPLERS[name]
    for option, value in given.items():
        if option not in known:
            has = f"it has {', '.join(known) or 'none'}"
            raise UserError(f"sampler {name!r} has no option {option!r}; {has}{near(str(option), known) or '.'}")
        least = _LEAST.get(option, 1)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
            raise UserError(f"sampler {name!r}: {option}={value!r} must be a whole number from {least}.")
    return {"name": name, **known, **given}


def make_sampler(
    spec: str | Mapping[str, Any],
    space: Space,
    objectives: Sequence[Objective],
    seed: int,
    queue: Sequence[Mapping[str, Any]] = (),
    earlier: Sequence[TrialRecord] = (),
    planned: Mapping[str, int] | None = None,
    versions: Mapping[str, int] | None = None,
) -> Sampler:
    """Returns the sampler of a specification, as `sampler_spec` takes it. Raises UserError as that does.

    queue     parameters to be tried first
    earlier   trials of another study, which enter the model of a sampler in WARM
    planned   what the study's space and budget decide for `auto` (hpo.search.samplers.auto.plan)
    versions  part -> version by which the study runs it (hpo.declaration.behaviour); the newest where absent
    """
    options = sampler_spec(spec)
    name = options["name"]
    sampler = alone(options, space, objectives, seed, earlier, planned if name == "auto" else None, versions or {})
    start = options.get("n_startup_trials") or options.get("population_size") or 10
    guided = start if space.has_priors and name in MODELS and name != "cmaes" else 0
    if queue or guided:
        sequence = name in ("grid", "qmc")
        sampler = InitialTrialsSampler(sampler, Random(space, objectives, seed), space, queue, guided, sequence)
    if space.rejects:
        sampler = RejectingSampler(sampler, space, seed, queue, near=name not in ("random", "qmc"))
    return DeduplicatingSampler(sampler, space, seed, len(queue)) if is_few(space) else sampler


def alone(
    options: Mapping[str, Any],
    space: Space,
    objectives: Sequence[Objective],
    seed: int,
    earlier: Sequence[TrialRecord] = (),
    planned: Mapping[str, int] | None = None,
    versions: Mapping[str, int] = MappingProxyType({}),
) -> Sampler:
    """Returns the sampler of a whole specification, without what `make_sampler` puts around it."""
    name, own = options["name"], {key: value for key, value in options.items() if key != "name"}
    module, _, attribute = _PLACES[name].partition(":")
    sampler = getattr(import_module(module), attribute)(space, objectives, seed, **own)
    if earlier:
        sampler.warm(earlier)
    if name == "auto":
        sampler.follow(planned or {}, versions)
    if name in _ROUNDED_SINCE and versions.get(f"sampler {name}", math.inf) >= _ROUNDED_SINCE[name]:
        return RoundingSampler(sampler, space)
    return sampler


class _Memoryless:
    """A sampler whose proposal is a function of (study seed, trial number) alone."""

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int) -> None:
        self._space, self._seed = space, seed

    def adopt(self, record: TrialRecord) -> None:
        pass

    def tell(self, record: TrialRecord) -> None:
        pass

    def exhausted(self, number: int) -> str:
        return ""


class Random(_Memoryless):
    """Independent and uniform in the unit cube, log-uniform where a dimension is logarithmic; around its prior where
    a dimension has one."""

    def ask(self, number: int) -> Proposal:
        from numpy.random import default_rng

        seed = ask_seed(self._seed, number)
        return Proposal(self._space.guided(default_rng(seed).random(len(self._space)).tolist()), seed)


class Qmc(_Memoryless):
    """Point `number` of one scrambled Sobol sequence (Owen 1998); the scramble is the study's, never reseeded."""

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int) -> None:
        super().__init__(space, objectives, seed)
        self._engine: Any = None
        self._next = 0

    def ask(self, number: int) -> Proposal:
        seed = ask_seed(self._seed, number)
        if not len(self._space):
            return Proposal({}, seed)
        if self._engine is None or number < self._next:
            from scipy.stats.qmc import Sobol

            self._engine, self._next = Sobol(len(self._space), scramble=True, rng=ask_seed(self._seed, -1)), 0
        if number > self._next:
            self._engine.fast_forward(number - self._next)
        self._next = number + 1
        return Proposal(self._space.from_unit(self._engine.random(1)[0].tolist()), seed)


class Grid(_Memoryless):
    """Every combination once, in order; `points` per dimension that has no steps of its own."""

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int, points: int = 5) -> None:
        super().__init__(space, objectives, seed)
        self._points = points

    def ask(self, number: int) -> Proposal:
        return Proposal(self._space.grid(number, self._points), ask_seed(self._seed, number))

    def exhausted(self, number: int) -> str:
        if not self._space.grid_ends(number, self._points):
            return ""
        return f"the grid has {counted(self._space.grid_size(self._points), 'point')} and no more"
