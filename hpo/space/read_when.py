"""Checks which fields of a configuration are read only under a condition, as a study declares them by `read_when`.

{"data.limit": "data.path != None", "data.graph.*": "model.graph == True"}: a condition is a rule (hpo.space.rules), and
a path that ends in `.*` stands for all fields below it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from hpo.errors import SpaceError
from hpo.space.paths import check_path
from hpo.space.rules import Rule, parsed

MOST = 4096  # the most combinations of values that are tried; a condition with more counts as met
SHOWN = 2  # the most fields of a condition that a sentence repeats
_BELOW = ".*"


@dataclass(frozen=True)
class ReadWhen:
    """A condition: the fields of `pattern` are read only while `rule` holds."""

    pattern: str
    rule: Rule

    def covers(self, path: str) -> bool:
        if self.pattern.endswith(_BELOW):
            return path.startswith(self.pattern.removesuffix("*"))
        return path == self.pattern

    def is_met(self, possible: Callable[[str], Sequence[Any] | None]) -> bool:
        """Returns whether some trial meets the condition; `possible` returns the values of a field, or None for any."""
        values = [possible(path) for path in self.rule.paths]
        if None in values:
            return True
        combinations = itertools.islice(
            itertools.product(*(possible_values or () for possible_values in values)), MOST + 1
        )
        tried = [dict(zip(self.rule.paths, combination, strict=True)) for combination in combinations]
        return len(tried) > MOST or any(not self.rule.fault(combination) for combination in tried)

    def clause(self, values: Mapping[str, Any], overrides: Collection[str]) -> str:
        """Returns `is read only with data.path != '', and data.path is '' here`; for a long condition `is not read with
        loss.phase='1'`, by its fields among the `overrides`, else by the first that it names."""
        if len(self.rule.paths) <= SHOWN:
            here = ", ".join(f"{path} is {values.get(path)!r}" for path in self.rule.paths)
            return f"is read only with {self.rule.text}, and {here} here"
        named = [path for path in self.rule.paths if path in overrides] or self.rule.paths[:1]
        return f"is not read with {', '.join(f'{path}={values.get(path)!r}' for path in named)}"


def conditions(read_when: Mapping[str, str]) -> list[ReadWhen]:
    """Returns the conditions that a study declares. Raises SpaceError for a text that is not a condition."""
    declared: list[ReadWhen] = []
    for pattern, text in read_when.items():
        try:
            declared.append(ReadWhen(pattern, parsed(text)))
        except SpaceError as error:
            raise SpaceError(f"read_when[{pattern!r}]: {error}") from error
    return declared


def check(where: str, read_when: Mapping[str, str], config_type: type[BaseModel]) -> None:
    """Raises SpaceError, which begins with `where`, unless `read_when` maps fields to conditions on fields."""
    if not isinstance(read_when, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise SpaceError(f"{where}: read_when={read_when!r} must map fields to conditions.")
    try:
        for condition in conditions(read_when):
            for path in (condition.pattern.removesuffix(_BELOW), *condition.rule.paths):
                check_path(config_type, path)
    except SpaceError as error:
        raise SpaceError(f"{where}: {error}") from error


def unread(
    paths: Sequence[str], declared: Sequence[ReadWhen], possible: Callable[[str], Sequence[Any] | None]
) -> Iterator[tuple[str, ReadWhen]]:
    """Yields each of `paths` that no trial reads, with the first condition that no trial meets."""
    for path in paths:
        unmet = (condition for condition in declared if condition.covers(path) and not condition.is_met(possible))
        if (condition := next(unmet, None)) is not None:
            yield path, condition
