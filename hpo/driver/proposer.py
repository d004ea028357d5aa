"""Proposes configurations by a sampler that is rebuilt from the ledger when first needed and kept in step with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from hpo.declaration.resolved import ResolvedStudy
from hpo.declaration.study import Study
from hpo.door import option
from hpo.driver import warm_start
from hpo.errors import UserError
from hpo.ledger import Ledger, transactions
from hpo.ledger.history import Curve, Curves
from hpo.ledger.rows import ProposedTrial
from hpo.ledger.views import driver as driver_queries
from hpo.search.promotion.base import Featuring, KnownRungs, Point, RungView
from hpo.search.samplers import auto
from hpo.search.samplers.base import ORIGIN, Proposal, Sampler, TrialRecord, ask_seed
from hpo.search.samplers.registry import Random, make_sampler
from hpo.search.samplers.rounding import rounded
from hpo.space.hashing import json_sha256
from hpo.space.trial_config import TrialShape
from hpo.text import counted

_SAVE = "have the task save one with each report, as trial.save() does, and"


class LedgerProposer:
    """Proposes the trials of a study.

    `rows` are the existing trials by number, each with its ask (`driver_queries.rows`). The sampler is told the ends of
    the trials in `told`, in that order. Configurations of failed trials numbered below `forgiven` count as untried.
    Where trials pause in order, rows are as the sampler knows them, and trials in `told` may be paused.
    """

    def __init__(
        self,
        ledger: Ledger,
        resolved: ResolvedStudy,
        curves: Curves,
        rows: Mapping[int, ProposedTrial],
        told: Sequence[int],
        forgiven: int,
    ) -> None:
        self._ledger, self._resolved, self._study, self._curves = ledger, resolved, resolved.study, curves
        self._rows, self._known, self._forgiven = rows, told, forgiven

    @cached_property
    def _seed(self) -> int:
        """Returns the sampler's seed.

        Knowledge changes it: the earlier studies may have had the same seed, and their random draws should not recur.
        """
        spec = self._resolved.spec
        return ask_seed(spec.seed, int(json_sha256(spec.knowledge)[:15], 16)) if spec.knowledge else spec.seed

    @cached_property
    def _sampler(self) -> Sampler:
        """Returns the sampler; a study that asks for no more trials never builds it."""
        spec, study = self._resolved.spec, self._study
        sampler = make_sampler(
            spec.sampling(),
            self._resolved.space,
            study.objectives,
            self._seed,
            spec.enqueue,
            warm_start.records(spec.earlier, len(study.constraints)),
            spec.planned,
            spec.behaviour,
            spec.knowledge,
        )
        if strategy := self._resolved.population:
            sampler = strategy.sampler(sampler, self._resolved.space, study.objectives, self._seed, spec.behaviour)
        ended_numbers, rows, known = set(self._known), self._rows, self._known_curves
        records = {n: self._record(rows[n], known.get(n, ())) for n in sorted(rows)}
        for number in sorted(rows.keys() - ended_numbers):
            sampler.adopt(records[number].open())
        for number in self._known:
            sampler.tell(records[number])
        return sampler

    @cached_property
    def _known_curves(self) -> Mapping[int, Curve]:
        """Returns the curves of `rows` that the sampler knows when it is created."""
        curves = self._ledger.look(lambda connection: self._curves.upto(connection, None)) if self._rows else {}
        seen = self._pauses() | dict.fromkeys(self._known, math.inf)
        return {n: [point for point in curves[n][1] if point[0] <= epoch] for n, epoch in seen.items()}

    @cached_property
    def _board(self) -> KnownRungs | None:
        """Returns the sampler's view of the rungs, by which trials are promoted in order; None if promotion uses all
        trials."""
        if not self._resolved.stepped:
            return None
        board, ended_numbers = KnownRungs(self._curves.objectives[0].select == "best"), set(self._known)
        for number in sorted(self._rows):
            state = self._rows[number].state if number in ended_numbers else "running"
            board.put(number, state, self._known_curves.get(number, ()))
        return board

    def _pauses(self) -> dict[int, float]:
        """Returns number -> epoch of the last pause of each open trial, up to which the sampler knows it."""
        if self._resolved.stepped:
            return {number: row.epoch for number, row in self._rows.items()}
        if not self._resolved.promotion:
            return {}
        epochs = self._ledger.look(lambda connection: driver_queries.pauses(connection, self._curves.study_id))
        return {number: epoch for number, epoch in epochs.items() if epoch is not None}

    def rungs(self) -> RungView:
        """Returns the curves and states of all trials, or in ordered mode of the trials that the sampler knows.
        Features of configurations are included if the sampler exposes them."""
        points: Mapping[int, Point] = self._sampler.features() if isinstance(self._sampler, Featuring) else {}
        return self._board.view(points) if self._board else _rungs(self._ledger, self._curves, points)

    def exhausted(self, number: int) -> str:
        return self._sampler.exhausted(number)

    def ask(self, number: int, told: int) -> transactions.Ask:
        """Returns trial `number` in the form that the ledger stores; the sampler knows `told` ends by now."""
        proposal = self._sampler.ask(number)
        if self._board:
            self._board.put(number, "running", ())
        params = self._study.space.decode(proposal.coordinates, self._study.fixed())
        descent = {} if proposal.parent is None else self._descent(number, proposal.parent)
        origin = {} if descent else self._origin(number, proposal)
        proposal = replace(proposal, trial_attrs={**origin, **proposal.trial_attrs})
        return _asked(self._study, number, told, proposal, params, descent)

    def _origin(self, number: int, proposal: Proposal) -> dict[str, str]:
        """Returns the source, in words, of a proposal that does not come from earlier studies."""
        spec, study = self._resolved.spec, self._study
        if number < len(spec.enqueue):
            return {ORIGIN: "enqueued"}
        drawn = Random(self._resolved.space, study.objectives, self._seed).ask(number).coordinates
        name, warm = spec.sampler, auto.without_curves(warm_start.records(spec.earlier))
        if name == "auto":
            name = auto.choice(len(study.objectives), number, warm, spec.planned)
        kinds = study.space.coordinates
        if proposal.coordinates in (drawn, {path: rounded(kinds[path], value) for path, value in drawn.items()}):
            return {ORIGIN: "random"}
        return {ORIGIN: name if name in ("grid", "qmc") else f"model ({name})"}

    def _descent(self, number: int, parent: int) -> dict[str, Any]:
        """Returns the columns of a trial that begins where its parent has ended."""
        where = (self._curves.study_id, parent)
        checkpoint = self._ledger.look(lambda connection: driver_queries.newest_checkpoint(connection, *where))
        if checkpoint is None:
            ever = self._ledger.look(lambda connection: driver_queries.any_saved(connection, *where))
            raise UserError(
                f"trial {number} is to go on from trial {parent}, which has "
                + ("no checkpoint left: put its directory back, or" if ever else "saved no checkpoint: " + _SAVE)
                + f" start another study by {option('name')}."
            )
        progress = {"step": checkpoint.step, "epoch": checkpoint.epoch, "from_epoch": checkpoint.epoch}
        lineage = {"parent": parent, "generation": checkpoint.generation + 1}
        return progress | lineage | {"start": f"{parent}/{checkpoint.path}"}

    def tell(self, row: ProposedTrial) -> None:
        """Learns from a trial that has ended or waits at a rung."""
        curve = self._curve(row)
        self._sampler.tell(self._record(row, curve))
        if self._board:
            self._board.put(row.number, row.state, curve)

    def resume(self, numbers: Sequence[int]) -> None:
        """Marks these paused trials as open again."""
        study_id = self._curves.study_id
        for row in self._ledger.look(lambda connection: driver_queries.rows(connection, study_id, numbers)):
            self.adopt(row)

    def adopt(self, row: ProposedTrial) -> None:
        """Marks a trial as open that this sampler has not proposed, or that continues from its rung."""
        curve = self._curve(row)
        self._sampler.adopt(self._record(row, curve).open())
        if self._board:
            self._board.put(row.number, "running", curve)

    def _curve(self, row: ProposedTrial) -> Curve:
        return self._ledger.look(lambda connection: self._curves.of(connection, row.id))

    def _record(self, row: ProposedTrial, curve: Curve) -> TrialRecord:
        single = len(self._curves.metrics) == 1
        values = row.values
        if row.state == "paused":
            values = None if single or not curve else self._curves.flipped(curve[-1][1])
        return TrialRecord(
            number=row.number,
            state=row.state,
            coordinates=self._study.space.retained(row.coordinates, row.params),
            values=None if values is None else tuple(values),
            curve=[(epoch, self._curves.flipped([loss])) for epoch, loss in curve] if single else (),
            violations=self._violations(row),
            trial_attrs=row.trial_attrs,
            study_attrs=row.study_attrs,
            parent=row.parent,
            untried=row.outcome == "lost" or (row.state == "failed" and row.number < self._forgiven),
        )

    def _violations(self, row: ProposedTrial) -> tuple[float, ...]:
        """Returns the row's violations; without them 0 for each constraint, or 1 if the trial is infeasible."""
        if row.violations is not None:
            return tuple(row.violations)
        return (1.0 if row.state == "infeasible" else 0.0,) * len(self._curves.constraints)


class ListProposer:
    """Proposes the listed configurations, one after another, without learning from results."""

    def __init__(self, ledger: Ledger, resolved: ResolvedStudy, curves: Curves) -> None:
        self._ledger, self._curves = ledger, curves
        self._study, self._spec = resolved.study, resolved.spec

    def rungs(self) -> RungView:
        return _rungs(self._ledger, self._curves, {})

    def exhausted(self, number: int) -> str:
        listed = len(self._spec.listed)
        return f"{counted(listed, 'configuration')} {'is' if listed == 1 else 'are'} listed" if number >= listed else ""

    def ask(self, number: int, told: int) -> transactions.Ask:
        proposal = Proposal({}, ask_seed(self._spec.seed, number))
        return _asked(self._study, number, told, proposal, self._spec.listed[number]["params"])

    def tell(self, row: ProposedTrial) -> None: ...

    def adopt(self, row: ProposedTrial) -> None: ...

    def resume(self, numbers: Sequence[int]) -> None: ...


def make_proposer(
    ledger: Ledger,
    resolved: ResolvedStudy,
    curves: Curves,
    rows: Mapping[int, ProposedTrial],
    known: Sequence[int],
    forgiven: int,
) -> LedgerProposer | ListProposer:
    """Returns the proposer of the study's trials; `known` and `forgiven` are as in `Frontier.replay`."""
    if resolved.spec.listed:
        return ListProposer(ledger, resolved, curves)
    return LedgerProposer(ledger, resolved, curves, rows, known, forgiven)


def _rungs(ledger: Ledger, curves: Curves, points: Mapping[int, Point]) -> RungView:
    ledger.look(lambda connection: curves.refresh(connection, None))
    return RungView(curves.curves, curves.states, points, curves.order, curves.objectives[0].select == "best")


def _asked(
    study: Study,
    number: int,
    told: int,
    proposal: Proposal,
    params: Mapping[str, Any],
    descent: Mapping[str, Any] | None = None,
) -> transactions.Ask:
    resolved, refused = study.resolved(params)
    return transactions.Ask(
        number=number,
        draw=proposal.draw,
        seed=proposal.seed,
        told=told,
        params=params,
        coordinates=proposal.coordinates,
        config=resolved,
        ranks=1 if refused else TrialShape.of(resolved).ranks,
        config_hash=json_sha256(resolved),
        trial_attrs=proposal.trial_attrs,
        study_attrs=proposal.study_attrs,
        descent=descent or {},
        refused=refused,
    )
