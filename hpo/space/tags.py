"""Checks the tags that people and training functions set on trials and studies: names, and values as text."""

from __future__ import annotations

import math
import posixpath
import re
from collections.abc import Mapping, Sequence

from hpo.errors import UserError
from trainer.quote import quoted

RESERVED = ("hpo.", "mlflow.")  # prefixes of the tags that the platform and its tracker set
MAX_KEY, MAX_VALUE = 250, 5000  # characters that every release of MLflow 3 keeps
_KEY = re.compile(r"[\w\-. :/]+")


def checked(key: object, value: object) -> tuple[str, str]:
    """Returns a tag in its stored form: numbers and booleans as Python writes them. Raises UserError for invalid
    tags."""
    if not isinstance(key, str) or not _KEY.fullmatch(key) or posixpath.normpath(key) != key or key[0] in "./ ":
        raise UserError(
            f"{quoted(key)} cannot name a tag: use letters, digits, '_', '-', '.', ':', ' ' and '/', as in 'team'."
        )
    if key.startswith(RESERVED):
        raise UserError(f"the tag {quoted(key)} is the platform's own, as all that begin with 'hpo.' or 'mlflow.' are.")
    if len(key) > MAX_KEY:
        raise UserError(f"the tag's name {quoted(key)} is longer than {MAX_KEY} characters: shorten it.")
    if not isinstance(value, str | int | float | bool) or (isinstance(value, float) and not math.isfinite(value)):
        raise UserError(f"tag {key}={quoted(value)}: give a text, a finite number or a boolean.")
    text = value if isinstance(value, str) else repr(value)
    if len(text) > MAX_VALUE or not text.strip() or "\0" in text:
        raise UserError(f"tag {key}={quoted(value)}: give a text of 1 to {MAX_VALUE} characters.")
    return key, text


def parsed(given: Sequence[str]) -> dict[str, str]:
    """Reads tags written as KEY=VALUE. Raises UserError for an invalid tag and for a key that is given twice."""
    tags: dict[str, str] = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals:
            raise UserError(f"tag {quoted(pair)} has no value: write KEY=VALUE, such as team=vision.")
        key, text = checked(name, value)
        if key in tags:
            raise UserError(f"tag {quoted(key)} is given twice: leave one of {tags[key]!r} and {text!r} out.")
        tags[key] = text
    return tags


def tags_of(given: Mapping[str, object] | Sequence[str] | None) -> dict[str, str]:
    """Returns tags given as a mapping, or written as KEY=VALUE."""
    if isinstance(given, Mapping):
        return dict(checked(key, value) for key, value in given.items())
    return parsed(given or ())
