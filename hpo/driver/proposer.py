"""Proposes configurations: keeps the sampler in step with the ledger, rebuilt from its rows when first needed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from hpo.declaration.resolved import ResolvedStudy
from hpo.declaration.study import Study
from hpo.driver import warm_start
from hpo.errors import UserError
from hpo.ledger import Ledger, driver_queries, transactions
from hpo.ledger.history import Curve, Curves
from hpo.ledger.rows import RowMapping
from hpo.search.promotion.base import Featuring, Point
from hpo.search.samplers.base import Proposal, Sampler, TrialRecord, ask_seed
from hpo.search.samplers.registry import make_sampler
from hpo.space.hashing import json_sha256
from hpo.space.trial_config import TrialShape
from hpo.text import counted

_SAVE = "have the task save one with each report, as trial.save() does, and"


class LedgerProposer:
    """Asks for trials of a study. `rows` are those there are, by number, each with its ask (`driver_queries.rows`);
    of them the sampler knows the ends of `told`, in that order. Of failed ones below `forgiven` it takes the
    configurations for untried."""

    def __init__(
        self,
        ledger: Ledger,
        resolved: ResolvedStudy,
        curves: Curves,
        rows: Mapping[int, RowMapping],
        told: Sequence[int],
        forgiven: int,
    ) -> None:
        self._ledger, self._resolved, self._study, self._curves = ledger, resolved, resolved.study, curves
        self._rows, self._known, self._forgiven = rows, told, forgiven

    @cached_property
    def _sampler(self) -> Sampler:
        """A study of which nothing is left to be asked never needs it."""
        spec, study = self._resolved.spec, self._study
        sampler = make_sampler(
            spec.sampling(),
            study.space,
            study.objectives,
            spec.seed,
            spec.enqueue,
            warm_start.records(spec.earlier, len(study.constraints)),
            spec.planned,
            spec.behaviour,
        )
        if strategy := self._resolved.population:
            sampler = strategy.sampler(sampler, study.space, study.objectives, spec.seed, spec.behaviour)
        told, rows = set(self._known), self._rows
        curves = self._ledger.look(lambda connection: self._curves.upto(connection, None)) if rows else {}
        seen = self._pauses() | dict.fromkeys(told, math.inf)
        known = {n: [point for point in curves[n][1] if point[0] <= epoch] for n, epoch in seen.items()}
        records = {n: self._record(rows[n], known.get(n, ())) for n in sorted(rows)}
        for number in sorted(rows.keys() - told):
            sampler.adopt(records[number].open())
        for number in self._known:
            sampler.tell(records[number])
        return sampler

    def _pauses(self) -> dict[int, float]:
        """Up to which epoch the sampler knows of trials that are open: what they had when they waited last."""
        if not self._resolved.promotion:
            return {}
        found = self._ledger.look(lambda connection: driver_queries.pauses(connection, self._curves.study_id))
        return {number: epoch for number, epoch in found.items() if epoch is not None}

    def features(self) -> Mapping[int, Point]:
        """Of all trials, where the sampler shows them."""
        return self._sampler.features() if isinstance(self._sampler, Featuring) else {}

    def exhausted(self, number: int) -> str:
        return self._sampler.exhausted(number)

    def ask(self, number: int, told: int) -> transactions.Ask:
        """What to try as trial `number`, as the ledger takes it; `told` ends are known by now."""
        proposal = self._sampler.ask(number)
        params = self._study.space.decode(proposal.coordinates, self._study.fixed())
        descent = {} if proposal.parent is None else self._descent(number, proposal.parent)
        return _asked(self._study, number, told, proposal, params, descent)

    def _descent(self, number: int, parent: int) -> dict[str, Any]:
        """The columns of a trial that begins where its parent has ended."""
        where = (self._curves.study_id, parent)
        found = self._ledger.look(lambda connection: driver_queries.newest_checkpoint(connection, *where))
        if found is None:
            ever = self._ledger.look(lambda connection: driver_queries.any_saved(connection, *where))
            raise UserError(
                f"trial {number} is to go on from trial {parent}, which has "
                + ("no checkpoint left: put its directory back, or" if ever else "saved no checkpoint: " + _SAVE)
                + " start another study by --name."
            )
        at = {"step": found["step"], "epoch": found["epoch"], "from_epoch": found["epoch"]}
        lineage = {"parent": parent, "generation": found["generation"] + 1}
        return at | lineage | {"start": f"{parent}/{found['path']}"}

    def tell(self, row: RowMapping) -> None:
        """A trial has ended, or waits at a rung."""
        self._sampler.tell(self._newest(row))

    def adopt(self, row: RowMapping) -> None:
        """A trial goes on from its rung."""
        self._sampler.adopt(self._newest(row).open())

    def _newest(self, row: RowMapping) -> TrialRecord:
        return self._record(row, self._ledger.look(lambda connection: self._curves.of(connection, row["id"])))

    def _record(self, row: RowMapping, curve: Curve) -> TrialRecord:
        one = len(self._curves.metrics) == 1
        values = row["values"] if one or row["state"] != "paused" or not curve else self._curves.flipped(curve[-1][1])
        return TrialRecord(
            number=row["number"],
            state=row["state"],
            coordinates=self._study.space.retained(row["coordinates"], row["params"]),
            values=None if values is None else tuple(values),
            curve=[(epoch, self._curves.flipped([loss])) for epoch, loss in curve] if one else (),
            violations=self._violations(row),
            trial_attrs=row["trial_attrs"],
            study_attrs=row["study_attrs"],
            parent=row["parent"],
            untried=row["outcome"] == "lost" or (row["state"] == "failed" and row["number"] < self._forgiven),
        )

    def _violations(self, row: RowMapping) -> tuple[float, ...]:
        """Where none stands, those of a trial that keeps to the bounds, or of an infeasible one that breaks each."""
        if row["violations"] is not None:
            return tuple(row["violations"])
        return (1.0 if row["state"] == "infeasible" else 0.0,) * len(self._curves.constraints)


class ListProposer:
    """Asks for the configurations that are listed, one after another; there is nothing to be learned."""

    def __init__(self, resolved: ResolvedStudy) -> None:
        self._study, self._spec = resolved.study, resolved.spec

    def features(self) -> Mapping[int, Point]:
        return {}

    def exhausted(self, number: int) -> str:
        listed = len(self._spec.listed)
        return f"{counted(listed, 'configuration')} {'is' if listed == 1 else 'are'} listed" if number >= listed else ""

    def ask(self, number: int, told: int) -> transactions.Ask:
        proposal = Proposal({}, ask_seed(self._spec.seed, number))
        return _asked(self._study, number, told, proposal, self._spec.listed[number]["params"])

    def tell(self, row: RowMapping) -> None: ...

    def adopt(self, row: RowMapping) -> None: ...


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
