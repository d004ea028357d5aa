"""Parses `--alert`, which names a target and the events to send to it.

    slack:@/run/secrets/slack
    mail:me@example.org on end,failure
    webhook:env:ALERT_URL on best,target=0.1,no_progress=30m

A rule is stored with the study as the user wrote it, so it contains no secret: it names the file or environment
variable that holds the secret.
"""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpo.declaration.budget import parse_time
from hpo.door import option
from hpo.errors import HpoError, UserError
from trainer.quote import quoted
from trainer.redaction import HIDDEN, redacted

# The events, with their descriptions in the help and the guide.
EVENTS = {
    "end": "the study is complete, has stopped or was interrupted",
    "failure": "a trial has failed",
    "lost": "a worker, a data worker or the driver was lost",
    "no_progress": "nothing was reported for a while, by default 1h",
    "disk": "the home's disk, or the space that the study may take, is used up to a share, by default 90%",
    "best": "a trial is better than all before it",
    "target": "the best value has reached one that is given",
    "spike": "the loss has jumped (train.rollback)",
    "nan": "a value, a loss or a gradient was not finite",
    "oom": "memory ran out",
}
BY_DEFAULT = ("end", "failure", "lost", "no_progress", "disk")
_VALUES = {"no_progress": "1h", "disk": "90%"}  # the values of events that are named without one
_URLS = ("webhook", "slack", "discord", "apprise")
_KINDS = (*_URLS, "mail", "command")
_MAX_TARGET = 250  # characters that fit the ledger's column


@dataclass(frozen=True)
class Rule:
    """Sends the events in `on` to `target`, each with its parameter: seconds, a share, a value, or 0 if it has none."""

    target: str
    on: Mapping[str, float]

    @property
    def kind(self) -> str:
        return self.target.partition(":")[0]


def parse(text: str) -> Rule:
    """Returns the rule in `text`, the value of `--alert`. Reads no secret and opens no connection.

    Raises UserError if the text is not a rule.
    """
    before, on, after = text.strip().rpartition(" on ")
    target, events = (before.strip(), after) if on else (after, "")
    try:
        _check_target(target)
        return Rule(target, dict(_event(word.strip()) for word in (events or ",".join(BY_DEFAULT)).split(",")))
    except ValueError as error:
        kind = target.partition(":")[0]
        hidden = kind in _URLS and not _named(target)
        raise UserError(f"{option('alerts', quoted(f'{kind}:{HIDDEN}' if hidden else text))}: {error}.") from error


def parse_all(texts: Sequence[str]) -> list[Rule]:
    """Returns the rules of a study. Raises UserError if two have the same target."""
    rules = [parse(text) for text in texts]
    for rule in rules:
        if sum(rule.target == another.target for another in rules) > 1:
            raise UserError(f"{option('alerts', quoted(rule.target))} is given twice: name all its events in one.")
    return rules


def check(rules: Sequence[Rule], study: Mapping[str, Any]) -> None:
    """Raises UserError if a rule does not fit a study with this specification."""
    if len(study["objectives"]) > 1 and any("target" in rule.on for rule in rules):
        raise UserError(
            f"{option('alerts')} with target: a study of several objectives has no one value; leave target out."
        )


def _check_target(target: str) -> None:
    kind, colon, rest = target.partition(":")
    if kind not in _KINDS or not colon:
        raise ValueError(f"it begins with none of {', '.join(f'{kind}:' for kind in _KINDS)}")
    if len(target) > _MAX_TARGET:
        raise ValueError(f"it has {len(target)} characters, and the ledger keeps {_MAX_TARGET}: put it into a script")
    if redacted(target) != target:
        raise ValueError(
            "it holds a secret, which would be stored with the study: put that into a file, and give @FILE"
        )
    if kind in _URLS and not _named(target):
        raise ValueError(
            f"its address is a secret and is not stored: put it into a file and give {kind}:@FILE, or into the "
            f"environment and give {kind}:env:NAME"
        )
    if kind == "mail" and not all(_is_address(address) for address in rest.split(",")):
        raise ValueError("give the addresses, as mail:me@example.org,you@example.org; HPO_SMTP holds the server")
    if kind == "command":
        _check_program(shlex.split(rest))


def _check_program(words: Sequence[str]) -> None:
    if not words:
        raise ValueError("it names no program")
    if shutil.which(words[0]) is None:
        raise ValueError(f"program {quoted(words[0])} was not found: give its path, or put it on PATH")


def _named(target: str) -> bool:
    """Returns whether the target names a file or variable that holds its address, instead of the address itself."""
    rest = target.partition(":")[2]
    return any(rest.startswith(way) and rest != way for way in ("@", "env:"))


def _is_address(text: str) -> bool:
    name, at, host = text.partition("@")
    return bool(name and at and host) and "@" not in host and text.isprintable() and not set(text) & set(" <>\"'")


def _event(word: str) -> tuple[str, float]:
    name, equals, value = word.partition("=")
    if name not in EVENTS:
        raise ValueError(f"{quoted(name)} is not an event: give some of {', '.join(EVENTS)}")
    if name == "target" and not equals:
        raise ValueError("target needs the value to be reached: give target=0.1, say")
    if equals and name not in ("target", *_VALUES):
        raise ValueError(f"{name} takes no value")
    value = value if equals else _VALUES.get(name, "0")
    try:
        return name, _number(name, value)
    except (ValueError, HpoError) as error:
        fix = {"no_progress": "a time such as 30m or 2h", "disk": "a share such as 90%", "target": "a number"}[name]
        raise ValueError(f"{name}={value} cannot be used: give {fix}") from error


def _number(name: str, value: str) -> float:
    if name == "no_progress":
        return parse_time(value)
    number = float(value.removesuffix("%")) / 100 if name == "disk" else float(value)
    if not math.isfinite(number) or (name == "disk" and not 0 < number <= 1):
        raise ValueError(value)
    return number
