"""Defines the contract of samplers, which choose what to try next.

A sampler lives in the driver and can be rebuilt from the ledger at any time: `ask` is a function of the study's seed,
the trial's number, and the trials told and open, but not of the order in which the sampler learned of them. Every ask
has its own seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from hpo.space.objective import Objective
    from hpo.space.space import Space


ORIGIN = "origin"  # a key of trial_attrs: the source of a proposal, in words


@dataclass(frozen=True)
class TrialRecord:
    """A trial in the form that samplers receive; plain JSON from the ledger.

    state        a state of hpo.space.trial_state
    coordinates  of the space's current dimensions; a trial older than a change of the space may lack some
    values       one per objective, in the objective's own direction; None if it is missing. With several objectives a
                 paused trial has the values of its rung
    curve        (epoch, value), in the objective's own direction, ascending; empty with several objectives
    violations   one per constraint: how far the trial is beyond its bounds, 0 or less if it keeps to them
    parent       the number of the trial that it continues from
    untried      whether its configuration counts as never tried: the trial was lost, or failed before the user fixed
                 the cause
    """

    number: int
    state: str
    coordinates: Mapping[str, Any]
    values: tuple[float | None, ...] | None = None
    curve: Sequence[tuple[int, float]] = ()
    trial_attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    study_attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    violations: tuple[float, ...] = ()
    parent: int | None = None
    untried: bool = False

    def open(self) -> TrialRecord:
        """Returns the trial as it was before it was told: running, with its curve so far but no outcome."""
        return replace(self, state="running", values=None, violations=())


@dataclass(frozen=True)
class Proposal:
    """A coordinate for every dimension, and the data about the ask that the ledger keeps.

    `seed` is the seed of the ask and `draw` counts its draws from 0. The attributes are the sampler's own data about
    the trial and about the study, plain JSON. The trial begins from the newest checkpoint of trial `parent`.
    """

    coordinates: dict[str, Any]
    seed: int
    draw: int = 0
    trial_attrs: dict[str, Any] = field(default_factory=dict[str, Any])
    study_attrs: dict[str, Any] = field(default_factory=dict[str, Any])
    parent: int | None = None


class Sampler(Protocol):
    """Proposes trials. They are adopted, told and asked in any order; each number is asked or adopted before the next
    ask."""

    def adopt(self, record: TrialRecord) -> None:
        """Adopts an open trial that an earlier driver asked for and that has not been told."""
        ...

    def tell(self, record: TrialRecord) -> None:
        """Learns that a trial has ended, and how, or that it has paused."""
        ...

    def ask(self, number: int) -> Proposal: ...

    def exhausted(self, number: int) -> str:
        """Returns a clause that says why nothing is left to try from `number` on; empty if something is left."""
        ...


class BaseSampler:
    """The base of a sampler of your own, which is named as `module:Class` (docs/guide/extend.md).

    It is built by `Class(space, objectives, seed, **options)`. It implements `ask` as `Sampler` describes it, and
    `tell` and `adopt` if it learns from trials. Class attributes declare its abilities:

    options  its options, each a whole number from 1, with their defaults
    several  whether it takes several objectives
    warms    whether it takes trials of another study, by `warm(records)`
    """

    options: ClassVar[Mapping[str, int]] = {}
    several: ClassVar[bool] = True
    warms: ClassVar[bool] = False

    def __init__(self, space: Space, objectives: Sequence[Objective], seed: int) -> None:
        self.space, self.objectives, self.seed = space, objectives, seed

    def adopt(self, record: TrialRecord) -> None:
        """Adopts an open trial; by default does nothing."""

    def tell(self, record: TrialRecord) -> None:
        """Learns how a trial ended; by default does nothing."""

    def exhausted(self, number: int) -> str:
        return ""


def ask_seed(study_seed: int, number: int, draw: int = 0) -> int:
    """Returns the seed of one ask: 63 bits of a sha256, so that it fits a signed column."""
    digest = sha256(f"{study_seed}:{number}:{draw}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def is_scored(record: TrialRecord) -> bool:
    """Returns whether a trial has a finite value for every objective."""
    return bool(record.values) and all(value is not None and math.isfinite(value) for value in record.values or ())


def is_open(record: TrialRecord) -> bool:
    """Returns whether a trial is neither over nor paused."""
    return record.state in ("waiting", "running")


def reached(record: TrialRecord, objectives: int) -> tuple[float, ...] | None:
    """Returns a trial's values, or None if it has none or is valueless.

    With one objective, a pruned or paused trial has the last finite value of its curve.
    """
    stopped = record.state in ("pruned", "paused")
    if is_valueless(record, objectives):
        return None
    if record.state in ("complete", "infeasible") or (stopped and objectives > 1):
        return tuple(value for value in record.values or () if value is not None) if is_scored(record) else None
    if not stopped:
        return None
    return next(((value,) for _, value in reversed(record.curve) if math.isfinite(value)), None)


def is_valueless(record: TrialRecord, objectives: int) -> bool:
    """Returns whether a trial's configuration made it end without a value.

    That includes a trial stopped on a value that is not finite; it counts like an infeasible one.
    """
    if record.state == "pruned" and objectives == 1:
        return bool(record.curve) and not math.isfinite(record.curve[-1][1])
    return record.state in ("complete", "infeasible", "pruned") and not is_scored(record)


def is_broken(record: TrialRecord) -> bool:
    """Returns whether a trial breaks a constraint."""
    return any(violation > 0 for violation in record.violations)
