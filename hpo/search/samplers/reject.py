"""Wraps a sampler whose proposals may break rules of the space, and redraws the fields of a broken rule."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any

from hpo.search.promotion.base import Featuring, Point
from hpo.search.samplers.base import Proposal, Sampler, TrialRecord, ask_seed
from hpo.search.samplers.deduplicate import distance

if TYPE_CHECKING:
    from hpo.space.space import Space

DRAWS = 100  # at most, per ask


class RejectingSampler:
    """Draws the fields of a broken rule anew, uniformly or around their priors, up to `DRAWS` times.

    Fields of rules that share a field with the broken one are drawn too. With `near`, for a sampler with a model, the
    valid draw nearest to the proposal replaces it; otherwise the first valid draw does, which is rejection sampling.
    Fields that the user has enqueued, in `queue`, keep their values. If no draw is valid, the proposal stays and its
    trial ends as infeasible. The result is a function of the study's seed, the trial's number and the proposal.
    """

    def __init__(
        self, sampler: Sampler, space: Space, seed: int, queue: Sequence[Mapping[str, Any]], near: bool
    ) -> None:
        self._sampler, self._space, self._seed, self._queue, self._near = sampler, space, seed, queue, near

    def adopt(self, record: TrialRecord) -> None:
        self._sampler.adopt(record)

    def tell(self, record: TrialRecord) -> None:
        self._sampler.tell(record)

    def ask(self, number: int) -> Proposal:
        proposal = self._sampler.ask(number)
        enqueued = self._queue[number].keys() if number < len(self._queue) else ()
        draw, coordinates = redrawn(self._space, proposal.coordinates, self._seed, number, enqueued, self._near)
        if not draw:
            return proposal
        proposal = replace(proposal, coordinates=coordinates, draw=draw)
        attributes = proposal.trial_attrs, proposal.study_attrs
        self._sampler.adopt(TrialRecord(number, "running", coordinates, None, (), *attributes))
        return proposal

    def features(self) -> Mapping[int, Point]:
        return self._sampler.features() if isinstance(self._sampler, Featuring) else {}

    def exhausted(self, number: int) -> str:
        return self._sampler.exhausted(number)


def redrawn(
    space: Space,
    coordinates: dict[str, Any],
    seed: int,
    number: int,
    given: Collection[str] = (),
    near: bool = True,
) -> tuple[int, dict[str, Any]]:
    """Returns the number of the draw, from 1, and coordinates that satisfy all rules; those in `given` do not change.

    Returns 0 and the same coordinates if these satisfy the rules, or if no draw does.
    """
    paths = [path for path in space.broken(coordinates) if path not in given]
    valid: list[tuple[int, dict[str, Any]]] = []
    for draw in range(1, DRAWS + 1) if paths else ():
        random = Random(ask_seed(seed, number, draw))
        drawn = {**coordinates, **{path: space.dimensions[path].guided(random.random()) for path in paths}}
        if not space.fault(space.decode(drawn)):
            valid.append((draw, drawn))
            if not near:
                break
    return min(valid, key=lambda pair: (distance(space, pair[1], coordinates), pair[0]), default=(0, coordinates))
