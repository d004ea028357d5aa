"""Wraps a sampler whose space has rules that are not kept to by construction: what breaks one is drawn anew."""

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

DRAWS = 100  # of one ask, at most


class RejectingSampler:
    """Where a proposal of `sampler` breaks a rule, the fields of that rule, and of those that share a field with it,
    are drawn anew, uniformly or around their priors, up to `DRAWS` times.

    Of a sampler with a model the draw that keeps to the rules and lies nearest to its proposal takes its place
    (`near`); of one without the first, which is rejection sampling. What the user has enqueued, in `queue`, is left as
    it is. A proposal in whose place nothing was found stays: its trial ends as infeasible. All is a function of the
    study's seed, the trial's number and the proposal.
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
        given = self._queue[number].keys() if number < len(self._queue) else ()
        draw, coordinates = redrawn(self._space, proposal.coordinates, self._seed, number, given, self._near)
        if not draw:
            return proposal
        proposal = replace(proposal, coordinates=coordinates, draw=draw)
        kept = proposal.trial_attrs, proposal.study_attrs
        self._sampler.adopt(TrialRecord(number, "running", coordinates, None, (), *kept))
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
    """The number of the draw, from 1, and coordinates that keep to all rules, where those `given` stay as they are; 0
    and the same coordinates where these keep to them, or nothing was found."""
    paths = [path for path in space.broken(coordinates) if path not in given]
    found: list[tuple[int, dict[str, Any]]] = []
    for draw in range(1, DRAWS + 1) if paths else ():
        random = Random(ask_seed(seed, number, draw))
        drawn = {**coordinates, **{path: space.dimensions[path].guided(random.random()) for path in paths}}
        if not space.fault(space.decode(drawn)):
            found.append((draw, drawn))
            if not near:
                break
    return min(found, key=lambda one: (distance(space, one[1], coordinates), one[0]), default=(0, coordinates))
