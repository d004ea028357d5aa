"""Fills the words of a command: `{lr}` in them stands for a value, and the word `${args}` for all parameters."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence

from hpo.errors import StudyError
from hpo.text import near

ALL = "${args}"  # a whole word, which becomes `--name=value` for each parameter and constant
# A place; or `{{name}}`, which stands for `{name}` itself; or `${name}`, which is for a shell.
_NAME = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_PLACEHOLDER = re.compile(rf"\{{\{{(?P<meant>{_NAME})\}}\}}|\$\{{(?P<shells>[\w.]*)\}}|\{{(?P<name>{_NAME})\}}")
# The places besides the parameters, and their meanings.
OWN_PLACEHOLDERS = ("python", "checkpoint", "directory", "seed", "number", "epoch", "step", "num_epochs")


def split(command: str | Sequence[str], where: str) -> list[str]:
    """Returns the words of a command written as one text, split as by a shell; no shell runs it. Raises StudyError."""
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
    """Raises StudyError for a placeholder that nothing fills."""
    for word in words:
        for match in _PLACEHOLDER.finditer(word):
            if match[0] == ALL and word != ALL:
                raise StudyError(f"{where}: {ALL} in {word!r} must be a word of its own, since it becomes several.")
            if match["shells"] in known:
                raise StudyError(f"{where}: {match[0]} in {word!r} is for a shell: write {match[0][1:]}.")
            if (name := match["name"]) and name not in known and _is_placeholder(name, known):
                raise StudyError(
                    f"{where}: nothing fills {match[0]!r} in {word!r}{near(name, known) or ','} "
                    f"there are {', '.join(known)}; braces that are meant are doubled: '{{{{{name}}}}}'."
                )


def used_names(texts: Iterable[str], known: Iterable[str]) -> set[str]:
    """Returns the names among `known` that have a placeholder in the texts; all of them if `${args}` is among the
    texts."""
    texts = [*texts]
    named = {match["name"] for text in texts for match in _PLACEHOLDER.finditer(text)}
    return {name for name in known if ALL in texts or name in named}


def filled(words: Iterable[str], values: Mapping[str, object], params: Mapping[str, object]) -> list[str]:
    """Returns the words with their placeholders filled; a value never becomes several words."""
    filled_words: list[str] = []
    for word in words:
        if word == ALL:
            filled_words += [f"--{name}={as_text(value)}" for name, value in params.items()]
        else:
            filled_words.append(_PLACEHOLDER.sub(lambda match: _stands_for(match, values), word))
    return filled_words


def _stands_for(match: re.Match[str], values: Mapping[str, object]) -> str:
    if match["name"] in values:
        return as_text(values[match["name"]])
    return f"{{{match['meant']}}}" if match["meant"] and _is_placeholder(match["meant"], values) else match[0]


def _is_placeholder(name: str, known: Iterable[str]) -> bool:
    """Returns False for a name with dots if none of its sections is known: its braces belong to the program."""
    section, dot, _ = name.partition(".")
    return not dot or any(known_name.startswith(f"{section}.") for known_name in known)


def as_text(value: object) -> str:
    """Returns a value as an argument: texts unchanged, numbers in full, `True`, `False` and `None` as in Python, else
    JSON."""
    if isinstance(value, str):
        return value
    return repr(value) if value is None or isinstance(value, bool | int | float) else json.dumps(value)
