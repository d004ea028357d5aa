"""Checks which options a study may have under a scheduler of Ray Tune."""

from __future__ import annotations

from dataclasses import replace

from hpo.declaration.budget import Budget
from hpo.declaration.goal import Goal
from hpo.door import option
from hpo.driver.executor_options import Ours
from hpo.driver.request import RunRequest
from hpo.errors import UserError
from hpo.text import spelled


class Tunes(Ours):
    """Lets Ray Tune decide, by its scheduler, for a number of trials."""

    driver = "hpo.ray_tune.driver:TuneDriver"
    finishes = False

    def narrowed(self, request: RunRequest) -> RunRequest:
        search, budget = request.search, request.budget
        taken_over = {
            option("strategy"): search.strategy not in (None, "none"),
            option("order", "ordered"): search.order == "ordered",
            option("epochs"): budget.epochs,
            option("time"): budget.seconds,
        }
        for flag in (flag for flag, is_set in taken_over.items() if is_set):
            raise _taken_over(flag)
        return replace(request, search=replace(search, strategy="none", order="async"))

    def check(self, name: str, stored: Budget, goal: Goal) -> None:
        if stored.epochs or stored.seconds:
            bound = option("epochs", stored.epochs) if stored.epochs else option("time", spelled(stored.seconds or 0))
            raise UserError(
                f"study {name!r} was begun with {bound}, which Ray Tune does not keep to: go on with another "
                f"{option('executor')}, or start another study by {option('name')} with {option('trials')}."
            )
        if goal:
            raise _taken_over(goal.flag)

    def max_bytes(self, given: int | None, stored: int | None) -> int | None:
        if given:
            raise UserError(
                f"{option('max_bytes')} has no effect under {option('executor', 'ray-tune')}, which keeps checkpoints "
                "itself."
            )
        return None


def _taken_over(flag: str) -> UserError:
    return UserError(
        f"{flag} with {option('executor', 'ray-tune')}: there Ray Tune decides, by {option('scheduler')} and "
        f"{option('trials')}."
    )
