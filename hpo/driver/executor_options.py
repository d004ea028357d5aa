"""Describes which decisions an executor makes itself, and which driver drives a study with it."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from hpo.declaration.budget import Budget
from hpo.declaration.goal import Goal
from hpo.driver.drivers import StudyDriver
from hpo.driver.request import RunRequest

# executor -> the class that replaces `Ours`
_OTHERS = {"ray-tune": "hpo.ray_tune.tune_options:Tunes"}


class Ours:
    """The platform makes all decisions and supports every option."""

    driver = "hpo.driver.loop:Driver"
    finishes = True  # stopped trials may be trained to their end after the search

    def narrowed(self, request: RunRequest) -> RunRequest:
        """Returns the request with the executor's restrictions. Raises UserError for options that it takes over."""
        return request

    def check(self, name: str, stored: Budget, goal: Goal) -> None:
        """Raises UserError if the executor would not respect the study's budget or goal."""

    def max_bytes(self, given: int | None, stored: int | None) -> int | None:
        """Returns the bytes that checkpoints may take. Raises UserError if the executor cannot enforce the limit."""
        return given or stored


def decides(executor: str) -> Ours:
    """Returns the class that describes who decides about trials under the executor."""
    return _made(_OTHERS[executor])() if executor in _OTHERS else Ours()


def driver_of(executor: str) -> Callable[..., StudyDriver]:
    """Returns the driver for the executor; no other driver is imported."""
    return _made(decides(executor).driver)


def _made(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
