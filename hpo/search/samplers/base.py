"""The contract of samplers: what to try next.

A sampler lives in the driver and can be rebuilt from the ledger at any time: `ask` is a function of the study's seed,
the trial's number, the trials told and the trials open, never of how the sampler came to know them. Every ask has a
seed of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any, Protocol


@dataclass(frozen=True)
class TrialRecord:
    """A trial as a sampler knows it; plain JSON from the ledger.

    state        a state of hpo.space.trial_state
    coordinates  of the space's dimensions, as they are now; a trial older than a change of the space may lack some
    values       one per objective, in the objectives' own direction; None where none stands. With several objectives
                 of a paused trial those of its rung
    curve        (epoch, value), in the objective's own direction, ascending; empty with several objectives
    violations   one per constraint: how far beyond its bounds the trial is, 0 or less where it keeps to them
    parent       the number of the trial that it goes on from
    untried      whether its configuration counts as never tried: the trial was lost, or failed before the user mended
                 what it failed by
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
        """The same trial before it was told: asked, nothing known of how it went but for its curve so far."""
        return replace(self, state="running", values=None, violations=())


@dataclass(frozen=True)
class Proposal:
    """What to try: a coordinate for every dimension, and what the ledger keeps of the ask.

    `seed` made it, `draw` counts the draws of one number (0 is the first); the attributes are the sampler's own
    system attributes of the trial and of the study, plain JSON. `parent` is the number of the trial from whose newest
    checkpoint it begins.
    """

    coordinates: dict[str, Any]
    seed: int
    draw: int = 0
    trial_attrs: dict[str, Any] = field(default_factory=dict[str, Any])
    study_attrs: dict[str, Any] = field(default_factory=dict[str, Any])
    parent: int | None = None


class Sampler(Protocol):
    """Trials are adopted, told and asked in any order, each number once asked or adopted before the next ask."""

    def adopt(self, record: TrialRecord) -> None:
        """Take in an open trial: asked by an earlier driver and not told."""
        ...

    def tell(self, record: TrialRecord) -> None:
        """Take in how a trial ended, or that it paused."""
        ...

    def ask(self, number: int) -> Proposal: ...

    def exhausted(self, number: int) -> str:
        """Why there is nothing left to try from `number` on, a clause; empty where there is something."""
        ...


def ask_seed(study_seed: int, number: int, draw: int = 0) -> int:
    """The seed of one ask, 63 bits of a sha256, so that it fits a signed column."""
    digest = sha256(f"{study_seed}:{number}:{draw}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def is_scored(record: TrialRecord) -> bool:
    """Whether a trial has a finite value for every objective."""
    return bool(record.values) and all(value is not None and math.isfinite(value) for value in record.values or ())


def is_open(record: TrialRecord) -> bool:
    """Whether a trial is neither over nor paused."""
    return record.state in ("waiting", "running")


def reached(record: TrialRecord, objectives: int) -> tuple[float, ...] | None:
    """What a trial came to: its values or, with one objective, the last finite one of its curve where it was stopped
    or waits. None where there is none, or where it is valueless."""
    stopped = record.state in ("pruned", "paused")
    if is_valueless(record, objectives):
        return None
    if record.state in ("complete", "infeasible") or (stopped and objectives > 1):
        return tuple(value for value in record.values or () if value is not None) if is_scored(record) else None
    if not stopped:
        return None
    return next(((value,) for _, value in reversed(record.curve) if math.isfinite(value)), None)


def is_valueless(record: TrialRecord, objectives: int) -> bool:
    """Whether a trial has ended without a value through its configuration: also one that was stopped on a value that
    is not finite, which counts as the infeasible ones do."""
    if record.state == "pruned" and objectives == 1:
        return bool(record.curve) and not math.isfinite(record.curve[-1][1])
    return record.state in ("complete", "infeasible", "pruned") and not is_scored(record)


def is_broken(record: TrialRecord) -> bool:
    """Whether a trial breaks a constraint."""
    return any(violation > 0 for violation in record.violations)
