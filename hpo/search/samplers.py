"""What to try next: random, grid, quasi-Monte-Carlo and TPE behind one contract.

A sampler lives in the driver and can be rebuilt from the ledger at any time: `ask` is a function of the study's seed,
the trial's number, the trials told and the trials open, never of how the sampler came to know them. Every ask has a
seed of its own. Optuna is imported only where a TPE sampler is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol

from hpo.config import near
from hpo.errors import UserError

if TYPE_CHECKING:
    from hpo.space import Space
    from hpo.study import Objective

SAMPLERS = ("tpe", "random", "qmc", "grid")


@dataclass(frozen=True)
class TrialRecord:
    """A trial as a sampler knows it; plain JSON from the ledger.

    state    a state of hpo.ledger.tables
    values   one per objective, in the objectives' own direction; None where none stands
    curve    (epoch, value of the first objective), in its own direction, ascending
    """

    number: int
    state: str
    coordinates: Mapping[str, Any]
    values: tuple[float | None, ...] | None = None
    curve: Sequence[tuple[int, float]] = ()
    trial_attrs: Mapping[str, Any] = field(default_factory=dict)
    study_attrs: Mapping[str, Any] = field(default_factory=dict)

    def open(self) -> TrialRecord:
        """The same trial before it was told: asked, nothing known of how it went."""
        return replace(self, state="running", values=None, curve=())


@dataclass(frozen=True)
class Proposal:
    """What to try: a coordinate for every dimension, and what the ledger keeps of the ask.

    `seed` made it, `draw` counts the draws of one number (0 is the first); the attributes are the sampler's own
    system attributes of the trial and of the study, plain JSON.
    """

    coordinates: dict[str, Any]
    seed: int
    draw: int = 0
    trial_attrs: dict[str, Any] = field(default_factory=dict)
    study_attrs: dict[str, Any] = field(default_factory=dict)


class Sampler(Protocol):
    """Trials are adopted, told and asked in any order, each number once asked or adopted before the next ask."""

    def adopt(self, record: TrialRecord) -> None:
        """Take in an open trial: asked by an earlier driver and not told."""
        ...

    def tell(self, record: TrialRecord) -> None:
        """Take in how a trial ended, or that it paused."""
        ...

    def ask(self, number: int) -> Proposal: ...

    def exhausted(self, number: int) -> bool:
        """Whether there is nothing left to try from `number` on."""
        ...


def ask_seed(study_seed: int, number: int, draw: int = 0) -> int:
    """The seed of one ask, 63 bits of a sha256, so that it fits a signed column."""
    digest = sha256(f"{study_seed}:{number}:{draw}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def make_sampler(
    name: str,
    space: Space,
    objectives: Sequence[Objective],
    seed: int,
    options: Mapping[str, Any] | None = None,
) -> Sampler:
    """The sampler of that name. Raises UserError for an unknown name or option.

    Options: `points` (grid) for dimensions without steps of their own; `n_startup_trials` (tpe), the random
    trials before its model is used.
    """
    if name not in SAMPLERS:
        raise UserError(
            f"unknown sampler {name!r}: choose one of {', '.join(SAMPLERS)}{near(str(name), SAMPLERS) or '.'}"
        )
    options = dict(options or {})
    known = {"grid": ["points"], "tpe": ["n_startup_trials"]}.get(name, [])
    for option, value in options.items():
        if option not in known:
            has = f"it has {', '.join(known) or 'none'}"
            raise UserError(f"sampler {name!r} has no option {option!r}; {has}{near(option, known) or '.'}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UserError(f"sampler {name!r}: {option}={value!r} must be a whole number from 1.")
    if name == "tpe":
        from hpo.search.tpe import Tpe

        return Tpe(space, objectives, seed, **options)
    return {"random": Random, "qmc": Qmc, "grid": Grid}[name](space, seed, **options)


class _Memoryless:
    """A sampler whose proposal is a function of (study seed, trial number) alone."""

    def __init__(self, space: Space, seed: int) -> None:
        self._space, self._seed = space, seed

    def adopt(self, record: TrialRecord) -> None:
        pass

    def tell(self, record: TrialRecord) -> None:
        pass

    def exhausted(self, number: int) -> bool:
        return False


class Random(_Memoryless):
    """Independent and uniform in the unit cube: log-uniform where a dimension is logarithmic."""

    def ask(self, number: int) -> Proposal:
        from numpy.random import default_rng

        seed = ask_seed(self._seed, number)
        return Proposal(self._space.from_unit(default_rng(seed).random(len(self._space)).tolist()), seed)


class Qmc(_Memoryless):
    """Point `number` of one scrambled Sobol sequence (Owen 1998); the scramble is the study's, never reseeded."""

    def __init__(self, space: Space, seed: int) -> None:
        super().__init__(space, seed)
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

    def __init__(self, space: Space, seed: int, points: int = 5) -> None:
        super().__init__(space, seed)
        self._points = points

    def ask(self, number: int) -> Proposal:
        return Proposal(self._space.grid(number, self._points), ask_seed(self._seed, number))

    def exhausted(self, number: int) -> bool:
        return number >= self._space.grid_size(self._points)


def is_scored(record: TrialRecord) -> bool:
    """Whether a trial has a finite value for every objective."""
    return bool(record.values) and all(value is not None and math.isfinite(value) for value in record.values or ())
