"""Holds weights of the terms of a loss over a run, in phases. For a study's own configuration; torch-free."""

from __future__ import annotations

from itertools import pairwise

from pydantic import Field, model_validator

from trainer.config.fields import Frozen, NonNegative, Share


class Phase(Frozen):
    """Weights of the terms from `start` on, a share of the run."""

    start: Share = 0.0
    weights: dict[str, NonNegative]


class LossWeights(Frozen):
    """Weights by phase, each times its factor in `scale`, which a search may vary: `loss.scale.rank_ic`.

    At the start of a phase the weights move linearly from the previous ones to its own, over the share `blend` of the
    run: 0 is a jump. A term that a phase omits has the weight 0.
    """

    phases: tuple[Phase, ...]
    scale: dict[str, NonNegative] = Field(default_factory=dict)
    blend: Share = 0.0

    @model_validator(mode="after")
    def _fits(self) -> LossWeights:
        starts = [phase.start for phase in self.phases]
        if not starts or starts[0] != 0 or starts != sorted(set(starts)):
            raise ValueError(f"phases start at {starts}: let the first start at 0 and each later than the one before.")
        if any(self.blend > end - start for start, end in pairwise([*starts, 1.0][1:])):
            raise ValueError(f"blend {self.blend} is longer than a phase; the phases start at {starts}: shorten it.")
        if unknown := self.scale.keys() - self.terms:
            raise ValueError(f"scale of {min(unknown)!r}, which no phase weighs: give one of {', '.join(self.terms)}.")
        for phase in self.phases:
            if not any(weight * self.scale.get(term, 1.0) > 0 for term, weight in phase.weights.items()):
                raise ValueError(f"the phase from {phase.start} on has no term with a weight above 0: raise one.")
        return self

    @property
    def terms(self) -> tuple[str, ...]:
        """Returns all terms that have a weight in some phase."""
        return tuple(dict.fromkeys(term for phase in self.phases for term in phase.weights))

    def at(self, progress: float) -> dict[str, float]:
        """Returns the weights above 0 at `progress`, the share of the run that is done (`Task.progress`)."""
        i = max(i for i, phase in enumerate(self.phases) if phase.start <= progress)
        now, before = self.phases[i], self.phases[max(i - 1, 0)].weights
        share = min((progress - now.start) / self.blend, 1.0) if self.blend > 0 and i > 0 else 1.0
        mixed = {
            term: share * now.weights.get(term, 0.0) + (1 - share) * before.get(term, 0.0) if share < 1 else weight
            for term, weight in (dict.fromkeys(self.terms, 0.0) | now.weights).items()
        }
        weights = {term: weight * self.scale.get(term, 1.0) for term, weight in mixed.items()}
        return {term: weight for term, weight in weights.items() if weight > 0}
