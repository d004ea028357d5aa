"""Writes why a study ended early, and the command that continues it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from hpo.declaration.budget import Budget
from hpo.driver import failure_streak
from hpo.ledger import driver_queries
from hpo.ledger.rows import Connection, RowMapping
from hpo.space.trial_state import TERMINAL_STATES
from hpo.text import command, counted, spelled


def of_stopped(connection: Connection, study: RowMapping) -> str:
    """Why the study is `stopped`, out of its trials in the ledger, as the driver said that left it so."""
    rows, name, budget = driver_queries.all_rows(connection, study["id"]), study["name"], Budget.of(dict(study))
    ended = {row["number"]: row for row in rows if row["state"] in TERMINAL_STATES}
    forgiven = failure_streak.forgiven(connection, study["id"])
    streak = failure_streak.FailureStreak(budget, forgiven).ahead([row["number"] for row in rows], ended)
    used = sum(row["outcome"] != "lost" for row in rows)
    scored = any(map(has_value, rows))
    again = mend(name, budget, used, map(driver_queries.trained, rows), scored=scored)
    if streak.full:
        return streak.explain(again)
    return without_best(connection, study["id"], name, len(rows), scored, again)


def time_used_up(study: str, given: float, used: float) -> str:
    total = spelled(math.ceil(max(used, given) + given))  # the time used counts, and more than asked
    more = f"`{command(f'resume --study {study} --time {total}')}` goes on"
    return f"the time of {spelled(given)} is used up: {more} from the last checkpoints."


def only_paused(study: str, paused: int) -> str:
    again = command(f"resume --study {study}")
    are = f"{counted(paused, 'trial')} {'is' if paused == 1 else 'are'} paused"
    return f"{are} and nothing else can be trained: once they wait again, `{again}` goes on."


def nothing_left(asked: int, why: str) -> str:
    return (
        f"it ends after {counted(asked, 'trial')}, as {why}: for more, search otherwise in a study of another --name."
    )


def has_value(row: RowMapping) -> bool:
    """Whether a trial that has ended has a value; one that was stopped where its loss was not finite has none."""
    return row["state"] in ("complete", "pruned") and row["values"] is not None


def without_best(connection: Connection, study_id: int, study: str, asked: int, scored: bool, again: str) -> str:
    """Why a study has no best trial after so many, of which one has a value or, if not `scored`, none; else empty.

    `again` says how the study goes on whose code is to be mended."""
    if not scored:
        return nothing_scored(study, asked, again, driver_queries.outcomes(connection, study_id))
    if driver_queries.complete(connection, study_id):
        return ""
    failed = driver_queries.failed(connection, study_id)
    return none_complete(study, failed, again) if failed else none_whole(study, asked)


_ALIKE = (  # what all trials may have come to that no mend of the code would change
    ("refused", "has a configuration that can be", "state how its fields are related by rules, or search elsewhere"),
    ("infeasible", "is feasible", "loosen the constraints, or search where they hold"),
    ("out_of_memory", "fits into memory", "search smaller models and batches"),
    ("nonfinite", "gave a finite value", "search lower learning rates, or whatever keeps the training stable"),
)


def nothing_scored(study: str, asked: int, again: str, outcomes: Collection[str]) -> str:
    why, none = command(f"show 0 --study {study}"), f"none of {counted(asked, 'trial')}"
    for outcome, what, mend in _ALIKE:
        if outcomes == {outcome}:
            return f"{none} {what}, `{why}` says why: {mend}, in a study of another --name."
    return f"{none} gave a value, `{why}` says why: {again}"


def none_whole(study: str, asked: int) -> str:
    shows, more = command(f"compare --study {study}"), command(f"resume --study {study} --trials {2 * asked}")
    return (
        f"no trial is complete: of {counted(asked, 'trial')} each was pruned, `{shows}` shows them; "
        f"`{more}` goes on, and `--strategy none --name NAME` lets a study's trials train to their end."
    )


def none_complete(study: str, failed: Sequence[int], again: str) -> str:
    why = command(f"show {failed[0]} --study {study}")
    return f"no trial is complete, and {counted(len(failed), 'trial')} failed, `{why}` says why: {again}"


def mend(study: str, budget: Budget, trials: int, epochs: Iterable[float], *, scored: bool) -> str:
    """How a study goes on whose code is to be mended; what failed has used up the budget, since it counts, unless no
    trial is `scored`, when a changed declaration begins anew. `epochs` are those of each trial, infinite where an open
    one's cannot be told."""
    more, trained = "", sum(one for one in epochs if one < math.inf)
    for flag, given, gone in (("trials", budget.trials, trials), ("epochs", budget.epochs, trained)):
        if given is not None and gone >= given:
            more += f" --{flag} {2 * given}"
    if not scored:
        anew, on = command(f"resume --study {study}"), command(f"resume --study {study}{more}")
        return f"mend the study, then `{anew}` begins it anew; where the cause lay outside of it, `{on}` goes on."
    again = command(f"resume --study {study} --allow-drift{more}")
    return f"mend the study, then `{again}` goes on; to set another option, run it under another --name."
