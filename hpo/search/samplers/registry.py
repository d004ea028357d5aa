"""Lists the samplers by name, and holds those without a memory: random, grid, quasi-Monte-Carlo. Others load lazily."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hpo.errors import UserError
from hpo.search.own_part import is_own, own_part
from hpo.search.samplers.base import BaseSampler, Proposal, Sampler, TrialRecord, ask_seed
from hpo.search.samplers.deduplicate import DeduplicatingSampler, UnknownSampler, is_few
from hpo.search.samplers.initial import InitialTrialsSampler
from hpo.search.samplers.reject import RejectingSampler
from hpo.search.samplers.rounding import RoundingSampler
from hpo.space import optuna_names
from hpo.space.objective import Objective
from hpo.text import counted, near

if TYPE_CHECKING:
    from hpo.space.space import Space


@dataclass(frozen=True)
class Kind:
    """Declares the options and abilities of a sampler, so that built-in samplers need not be imported to know them.

    place    the path of its class, `module:Class`
    options  its options, each a whole number from `least`, 1 by default, with their defaults
    guided   whether it learns from trials and draws the first ones around priors
    warms    whether it takes trials of another study
    several  whether it takes several objectives
    spread   whether its own first proposals are spread over the space, so that priors replace none of them
    rounded  the version from which it rounds results of floating-point libraries
    slow     the time it takes for each trial, if that is worth announcing
    """

    path: str
    options: Mapping[str, int] = field(default_factory=dict[str, int])
    least: Mapping[str, int] = field(default_factory=dict[str, int])
    guided: bool = False
    warms: bool = False
    several: bool = True
    spread: bool = False
    rounded: int | None = None
    slow: str = ""

    @classmethod
    def of(cls, name: Any) -> Kind:
        """Returns the entry of a sampler by its name or path. Raises UserError for an unknown name."""
        if is_own(name):
            sampler: type[BaseSampler] = own_part("sampler", name, BaseSampler)
            return cls(name, options=sampler.options, warms=sampler.warms, several=sampler.several)
        if name not in SAMPLERS:
            raise UserError(
                f"unknown sampler {name!r}: choose one of {', '.join(SAMPLERS)}, or one of your own by its path, as in "
                f"'my_module:MySampler'{near(str(name), SAMPLERS) or '.'}"
            )
        return SAMPLERS[name]


_STARTS = {"n_startup_trials": 10}  # random trials before the model is used
_GENERATIONS: dict[str, Any] = {"options": {"population_size": 50}, "least": {"population_size": 2}}
_HERE = "hpo.search.samplers."
SAMPLERS = {
    "tpe": Kind(f"{_HERE}tpe:Tpe", _STARTS, guided=True, warms=True, rounded=2),
    "random": Kind(f"{_HERE}registry:Random"),
    "qmc": Kind(f"{_HERE}registry:Qmc", spread=True),
    "grid": Kind(f"{_HERE}registry:Grid", {"points": 5}, spread=True),  # points of dimensions without their own steps
    "gp": Kind(
        f"{_HERE}gp_nsga:Gp",
        _STARTS,
        guided=True,
        warms=True,
        rounded=2,
        slow="2 to 9 s of processor time for each trial from about the tenth on",
    ),
    "cmaes": Kind(f"{_HERE}cmaes:Cmaes", warms=True, several=False, rounded=2),
    "nsga2": Kind(f"{_HERE}gp_nsga:Nsga2", **_GENERATIONS, guided=True, warms=True),
    "nsga3": Kind(f"{_HERE}gp_nsga:Nsga3", **_GENERATIONS, guided=True, warms=True),
    "auto": Kind(f"{_HERE}auto:Auto", guided=True, warms=True),
    "freeze-thaw": Kind("hpo.search.promotion.freeze_thaw:FreezeThawSampler", warms=True, several=False, rounded=2),
    "bohb": Kind(f"{_HERE}rung_tpe:RungTpe", warms=True, rounded=2),
}
_NEW_SINCE = 2  # the version of "warm start" from which configurations of the earlier study are not tried again
WARM = tuple(name for name, kind in SAMPLERS.items() if kind.warms)


def sampler_spec(spec: str | Mapping[str, Any]) -> dict[str, Any]:
    """Returns `{"name": ..., option: value}` with every option, for a name or for such a mapping.

    Raises UserError with the option, its value and the fix.
    """
    if not isinstance(spec, str | Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UserError(optuna_names.specification("sampler", spec))
    options = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = options.pop("name", None)
    kind = Kind.of(name)
    known = kind.options
    for option, value in options.items():
        if option not in known:
            has = f"it has {', '.join(known) or 'none'}"
            raise UserError(f"sampler {name!r} has no option {option!r}; {has}{near(str(option), known) or '.'}")
        least = kind.least.get(option, 1)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
            raise UserError(f"sampler {name!r}: {option}={value!r} must be a whole number from {least}.")
    return {"name": name, **known, **options}


def make_sampler(
    spec: str | Mapping[str, Any],
    space: Space,
    objectives: Sequence[Objective],
    seed: int,
    queue: Sequence[Mapping[str, Any]] = (),
    earlier: Sequence[TrialRecord] = (),
    planned: Mapping[str, int] | None = None,
    versions: Mapping[str, int] | None = None,
    knowledge: Mapping[str, Any] | None = None,
) -> Sampler:
    """Returns the sampler of a specification that `sampler_spec` takes, and raises UserError in the same cases.

    queue     parameters to try first
    earlier   trials of another study; they enter the model of a sampler in WARM and are not proposed again while other
              configurations remain
    planned   the plan for `auto` from the study's space and budget (hpo.search.samplers.auto.plan)
    versions  part -> version by which the study runs it (hpo.declaration.behaviour); by default the newest
    knowledge knowledge from earlier studies (hpo.search.knowledge); a sampler that is not in WARM takes none
    """
    options = sampler_spec(spec)
    name = options["name"]
    sampler = bare(options, space, objectives, seed, earlier, planned if name == "auto" else None, versions or {})
    start = options.get("n_startup_trials") or options.get("population_size") or 10
    kind = Kind.of(name)
    guided = start if space.has_priors and kind.guided else 0
    if queue or guided:
        sampler = InitialTrialsSampler(sampler, Random(space, objectives, seed), space, queue, guided, kind.spread)
    if knowledge:
        from hpo.search.samplers.learned import LearnedSampler

        random = Random(space, objectives, seed)
        sampler = LearnedSampler(sampler, random, space, objectives, seed, len(queue), knowledge)
    if space.rejects:
        sampler = RejectingSampler(sampler, space, seed, queue, near=name not in ("random", "qmc"))
    known = earlier if (versions or {}).get("warm start", math.inf) >= _NEW_SINCE else ()
    if is_few(space):
        return DeduplicatingSampler(sampler, space, seed, len(queue), known)
    return UnknownSampler(sampler, space, seed, len(queue), known) if known else sampler


def bare(
    options: Mapping[str, Any],
    space: Space,
    objectives: Sequence[Objective],
    seed: int,
    earlier: Sequence[TrialRecord] = (),
    planned: Mapping[str, int] | None = None,
    versions: Mapping[str, int] = MappingProxyType({}),
) -> Sampler:
    """Returns the sampler of a complete specification, without the wrappers that `make_sampler` adds."""
    name, arguments = options["name"], {key: value for key, value in options.items() if key != "name"}
    kind = Kind.of(name)
    module, _, attribute = kind.path.partition(":")
    sampler = getattr(import_module(module), attribute)(space, objectives, seed, **arguments)
    if earlier:
        sampler.warm(earlier)
    if name == "auto":
        sampler.follow(planned or {}, versions)
    if kind.rounded is not None and versions.get(f"sampler {name}", math.inf) >= kind.rounded:
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
    """Draws each dimension independently: around its prior if it has one, else uniformly, or log-uniformly for a
    logarithmic dimension."""

    def ask(self, number: int) -> Proposal:
        from numpy.random import default_rng

        seed = ask_seed(self._seed, number)
        return Proposal(self._space.guided(default_rng(seed).random(len(self._space)).tolist()), seed)


class Qmc(_Memoryless):
    """Proposes point `number` of a scrambled Sobol sequence (Owen 1998); the study's seed fixes the scramble."""

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
    """Proposes every combination once, in order; a dimension without steps of its own gets `points` values."""

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int, points: int = 5) -> None:
        super().__init__(space, objectives, seed)
        self._grid = space.grid(points)

    def ask(self, number: int) -> Proposal:
        return Proposal(self._grid.point(number), ask_seed(self._seed, number))

    def exhausted(self, number: int) -> str:
        if not self._grid.ends(number):
            return ""
        return f"the grid has {counted(self._grid.size, 'point')} and no more"
