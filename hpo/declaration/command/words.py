"""The words of a command: `{lr}` in them stands for a value, and the word `${args}` for all parameters."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from hpo.errors import StudyError
from hpo.text import near

ALL = "${args}"  # a word of its own, which becomes `--name=value` for each parameter and constant
# A place; or `{{name}}`, which stands for `{name}` itself; or `${name}`, which is a shell's.
_NAME = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_PLACE = re.compile(rf"\{{\{{(?P<meant>{_NAME})\}}\}}|\$\{{(?P<shells>[\w.]*)\}}|\{{(?P<name>{_NAME})\}}")
# What can stand in a place besides the parameters, and what it is.
OWN_PLACES = ("python", "checkpoint", "directory", "seed", "number", "epoch", "step", "num_epochs")


def split(command: str | Sequence[str], where: str) -> list[str]:
    """The words of a command that is written as one text, as a shell would split it; no shell runs it. Raises
    StudyError."""
    if not isinstance(command, str):
        words = list(command)
    else:
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise StudyError(f"{where}={command!r}: {error}; close the quotation, or write a list of words.") from error
    if not words or not words[0]:
        raise StudyError(
            f"{where} is empty: write the program and its arguments, such as 'python train.py --lr={{lr}}'."
        )
    return words


def check(words: Iterable[str], known: Collection[str], where: str) -> None:
    """Raise StudyError for a place that nothing fills."""
    for word in words:
        for match in _PLACE.finditer(word):
            if match[0] == ALL and word != ALL:
                raise StudyError(f"{where}: {ALL} in {word!r} must be a word of its own, since it becomes several.")
            if match["shells"] in known:
                raise StudyError(f"{where}: {match[0]} in {word!r} is for a shell: write {match[0][1:]}.")
            if (name := match["name"]) and name not in known and _is_place(name, known):
                raise StudyError(
                    f"{where}: nothing fills {match[0]!r} in {word!r}{near(name, known) or ','} "
                    f"there are {', '.join(known)}; braces that are meant are doubled: '{{{{{name}}}}}'."
                )


def filled(words: Iterable[str], values: Mapping[str, Any], params: Mapping[str, Any]) -> list[str]:
    """The words with their places filled; a value never becomes several words."""
    found: list[str] = []
    for word in words:
        if word == ALL:
            found += [f"--{name}={as_text(value)}" for name, value in params.items()]
        else:
            found.append(_PLACE.sub(lambda match: _stands_for(match, values), word))
    return found


def _stands_for(match: re.Match[str], values: Mapping[str, Any]) -> str:
    if match["name"] in values:
        return as_text(values[match["name"]])
    return f"{{{match['meant']}}}" if match["meant"] and _is_place(match["meant"], values) else match[0]


def _is_place(name: str, known: Iterable[str]) -> bool:
    """Returns False for a name with dots none of whose sections is known: braces around it are the program's own."""
    section, dot, _ = name.partition(".")
    return not dot or any(other.startswith(f"{section}.") for other in known)


def as_text(value: Any) -> str:
    """A value as an argument: a text as it is, numbers in full, `True`, `False` and `None` as in Python, else JSON."""
    if isinstance(value, str):
        return value
    return repr(value) if value is None or isinstance(value, bool | int | float) else json.dumps(value)
