"""Reads from the ledger what every part of a report is computed from, in one transaction."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hpo.errors import HpoError
from hpo.ledger import ends, queries, report_queries, tags, verify_queries
from hpo.search.ranking import placed
from hpo.space.config import flatten
from hpo.space.objective import hold_out_of

if TYPE_CHECKING:
    from hpo.ledger.rows import Connection, RowMapping

POWER = "system/gpu_power_w"


@dataclass(frozen=True)
class Snapshot:
    """A study as its ledger has it at `read_at`. Mappings are by the id of a trial, but `power`, which is by number."""

    read_at: float
    study: RowMapping
    status: queries.Status
    trials: Sequence[Mapping[str, Any]]  # by number
    configs: Mapping[int, Mapping[str, Any]]  # flat
    judged: Mapping[int, queries.Judged]
    stops: Mapping[int, str]
    attempts: Mapping[int, Sequence[RowMapping]]  # by fence
    power: Mapping[int, float]  # watts, the mean over a trial
    befell: Sequence[RowMapping]  # drift and changes of the environment, in their order
    replays: int  # reports that a later attempt has made with another value
    digest: str
    tags: Mapping[int, Mapping[str, str]]  # by number

    @property
    def name(self) -> str:
        return self.study["name"]

    @property
    def spec(self) -> Mapping[str, Any]:
        return self.study["spec"]

    @property
    def objectives(self) -> list[Mapping[str, Any]]:
        return self.spec["objectives"]

    @property
    def metrics(self) -> list[str]:
        return [one["metric"] for one in self.objectives]

    @property
    def hold_outs(self) -> dict[str, str]:
        """Objective -> the metric held out beside it, of those that some trial has a value of."""
        known = {key for at in self.judged.values() for key in at.metrics}
        return {metric: held for metric in self.metrics if (held := hold_out_of(metric)) in known and held}

    @property
    def space(self) -> Mapping[str, Mapping[str, Any]]:
        """Path -> its dimension as it is declared; empty for a study that the ledger has no space of."""
        return self.study["identity"].get("space", {})

    @cached_property
    def placed(self) -> Mapping[int, tuple[int, int]]:
        """Number -> the front and the place, both from 0, of each complete trial that has all values, best first."""
        complete = {t["number"]: t["values"] for t in self.trials if t["state"] == "complete" and valued(t)}
        return placed(self.objectives, complete)

    def planned(self, trial: Mapping[str, Any]) -> int | None:
        """The epoch to which a trial was to train, a fold being one; None where its configuration has no epochs."""
        config = self.configs.get(trial["id"], {})
        folds = config.get("train.folds") or 1
        return folds if folds > 1 else config.get("train.num_epochs")


def valued(trial: Mapping[str, Any]) -> bool:
    """Whether a trial has a value for every objective."""
    return bool(trial["values"]) and None not in trial["values"]


def read(connection: Connection, name: str, *, digest: bool = True) -> Snapshot:
    """The study as it stands now; without its digest on request, for which every value is read.

    Raises StudyError where the ledger has none of that name.
    """
    of = part(connection, name)
    attempts = verify_queries.attempts_by_trial(connection, of.study["id"])
    return replace(
        of,
        attempts={id_: sorted(rows, key=lambda row: row["fence"]) for id_, rows in attempts.items()},
        power=report_queries.means(connection, of.study["id"], POWER),
        befell=report_queries.study_events(connection, of.study["id"], ("drift", "environment")),
        replays=report_queries.count_events(connection, of.study["id"], "replay_differs"),
        digest=queries.digest(connection, of.study) if digest else "",
    )


def part(connection: Connection, name: str, numbers: Sequence[int] = ()) -> Snapshot:
    """What there is of the trials of these numbers, or of all, without attempts and what befell the study."""
    study = queries.study_row(connection, name)
    trials = queries.trial_rows(connection, study["id"], numbers)
    configs = queries.configs(connection, [trial["id"] for trial in trials])
    return Snapshot(
        read_at=time.time(),
        study=study,
        status=queries.status(connection, name),
        trials=trials,
        configs={number: flatten(config) for number, config in configs.items()},
        judged=queries.judged(connection, study, [trial for trial in trials if trial["values"]]),
        stops=ends.stop_reasons(connection, study["id"], [trial["id"] for trial in trials] if numbers else ()),
        attempts={},
        power={},
        befell=(),
        replays=0,
        digest="",
        tags=tags.given(connection, study["id"]),
    )


def reason(error: HpoError) -> str:
    """Why a part could not be computed, as a clause."""
    return str(error).rstrip(".")
