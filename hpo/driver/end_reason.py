"""Explains why a study ended early, and names the command that continues it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence

from hpo.declaration.budget import Budget
from hpo.declaration.goal import Goal, GoalWatch
from hpo.door import option
from hpo.driver.failure_streak import FailureStreak
from hpo.driver.trial_rows import has_value, trained
from hpo.ledger.rows import Connection, StudyRow
from hpo.ledger.views import driver as driver_queries
from hpo.space.trial_state import TERMINAL_STATES
from hpo.text import command, counted, spelled


def of_stopped(connection: Connection, study: StudyRow) -> str:
    """Returns why the study is `stopped`, from its trials in the ledger, in the words of the driver that stopped it."""
    rows, name, budget = driver_queries.all_rows(connection, study.id), study.name, Budget.of(study)
    over = {row.number: row for row in rows if row.state in TERMINAL_STATES}
    forgiven = driver_queries.forgiven(connection, study.id)
    streak = FailureStreak(budget, forgiven).ahead([row.number for row in rows], over)
    used = sum(row.outcome != "lost" for row in rows)
    scored = any(map(has_value, rows))
    remedy = mend(name, budget, used, map(trained, rows), scored=scored)
    return ended(connection, study.id, name, len(rows), scored, remedy, streak, goal_of(connection, study))[1]


def ended(
    connection: Connection,
    study_id: int,
    study: str,
    asked: int,
    scored: bool,
    again: str,
    streak: FailureStreak,
    goal: GoalWatch,
) -> tuple[str, str]:
    """Returns the state of a study with nothing left to train, and why; the reason is empty if its budget is used."""
    if streak.full:
        return "stopped", streak.explain(again)
    reason = without_best(connection, study_id, study, asked, scored, again) if asked else ""
    return ("stopped", reason) if reason else ("complete", goal.explain(study))


def goal_of(connection: Connection, study: StudyRow) -> GoalWatch:
    """Returns the goal of a study, judged by its trials in the order in which the sampler was told of them."""
    by_position = {row.told: row for row in driver_queries.all_rows(connection, study.id) if row.told is not None}
    in_order = [by_position[position] for position in sorted(by_position)]
    return GoalWatch(Goal.of(study.environment), study.spec.objectives, in_order)


def time_used_up(study: str, given: float, used: float) -> str:
    total = spelled(math.ceil(max(used, given) + given))  # the time used counts, and more than asked
    more = f"`{command(f'resume --study {study} --time {total}')}` goes on"
    return f"the time of {spelled(given)} is used up: {more} from the last checkpoints."


def only_paused(study: str, paused: int) -> str:
    resumes = command(f"resume --study {study}")
    are = f"{counted(paused, 'trial')} {'is' if paused == 1 else 'are'} paused"
    return f"{are} and nothing else can be trained: once they wait again, `{resumes}` goes on."


def nothing_left(asked: int, why: str) -> str:
    return (
        f"it ends after {counted(asked, 'trial')}, as {why}: for more, search otherwise in a study of another "
        f"{option('name')}."
    )


def without_best(connection: Connection, study_id: int, study: str, asked: int, scored: bool, again: str) -> str:
    """Returns why a study has no best trial after `asked` trials; empty if it has one.

    Without `scored` no trial has a value. `again` says how the study continues once its code is corrected.
    """
    if driver_queries.any_waits(connection, study_id):
        return ""  # the best of these is trained to its end by itself
    if not scored:
        return nothing_scored(study, asked, again, driver_queries.outcomes(connection, study_id))
    if driver_queries.complete(connection, study_id):
        return ""
    failed = driver_queries.failed(connection, study_id)
    return none_complete(study, failed, again) if failed else none_whole(study, asked)


_ALIKE = (  # ends that all trials may share and that correcting the code would not change
    ("refused", "has a configuration that can be", "state how its fields are related by rules, or search elsewhere"),
    ("infeasible", "is feasible", "loosen the constraints, or search where they hold"),
    ("out_of_memory", "fits into memory", "search smaller models and batches"),
    ("nonfinite", "gave a finite value", "search lower learning rates, or whatever keeps the training stable"),
)


def nothing_scored(study: str, asked: int, again: str, outcomes: Collection[str]) -> str:
    why, none = command(f"show 0 --study {study}"), f"none of {counted(asked, 'trial')}"
    for outcome, text, fix in _ALIKE:
        if outcomes == {outcome}:
            return f"{none} {text}, `{why}` says why: {fix}, in a study of another {option('name')}."
    return f"{none} gave a value, `{why}` says why: {again}"


def none_whole(study: str, asked: int) -> str:
    shows, more = command(f"compare --study {study}"), command(f"resume --study {study} --trials {2 * asked}")
    return (
        f"no trial is complete: of {counted(asked, 'trial')} each was pruned, `{shows}` shows them; "
        f"`{more}` goes on, and `{option('strategy', 'none')} {option('name', 'NAME')}` lets a study's trials train "
        "to their end."
    )


def none_complete(study: str, failed: Sequence[int], again: str) -> str:
    why = command(f"show {failed[0]} --study {study}")
    return f"no trial is complete, and {counted(len(failed), 'trial')} failed, `{why}` says why: {again}"


def mend(study: str, budget: Budget, trials: int, epochs: Iterable[float], *, scored: bool) -> str:
    """Returns how a study continues once its code is corrected.

    Failed trials count against the budget, so it may have to be raised. If no trial is `scored`, a changed declaration
    begins the study anew. `epochs` are those of each trial, infinite for an open trial whose epochs are unknown.
    """
    more, trained = "", sum(count for count in epochs if count < math.inf)
    for flag, bound, used in (("trials", budget.trials, trials), ("epochs", budget.epochs, trained)):
        if bound is not None and used >= bound:
            more += f" --{flag} {2 * bound}"
    if not scored:
        anew, on = command(f"resume --study {study}"), command(f"resume --study {study}{more}")
        if not more:
            return f"correct the study, then `{anew}` goes on, or starts over if its declaration has changed."
        return f"correct the study, then `{anew}` starts it over; if the cause was elsewhere, `{on}` goes on."
    resumes = command(f"resume --study {study} --allow-drift{more}")
    return f"correct the study, then `{resumes}` goes on; to set another option, run it under another {option('name')}."
