"""Says what a message says at the command line to a caller from Python: `trials=5` for `--trials 5`.

Messages name options as the commands have them; `hpo.run` and `hpo.resume` pass what they raise through here.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import cache

from hpo.errors import HpoError
from trainer.errors import TrainerError

_SWITCHES = ("allow_drift",)
_CALLS = ("hpo run ", "hpo resume ")  # commands that are functions of the same names
_QUOTED = re.compile(r"`([^`]*)`")
_FLAG = re.compile(
    r"(?<![\w/-])--(?P<name>[a-z][a-z-]*)(?: (?P<value>'[^']*'|[^\s,;)]+?)(?P<end>(?:[:.](?<!\.\.))?(?=[\s,;)]|$)))?"
)


@contextmanager
def named(options: Callable[[], Collection[str]]) -> Iterator[None]:
    """Has what is raised within on purpose name `options`, the arguments that Python has, as such."""
    try:
        yield
    except (HpoError, TrainerError) as error:
        error.args = (in_python(str(error), options()),)
        raise


def in_python(message: str, options: Collection[str]) -> str:
    """The message, in which flags that the function has as arguments are these, and commands that it is are calls.

    >>> in_python("--trials 0: give 1 or more, continue with --allow-drift or `hpo resume --study s --trials 5`.",
    ...     ["study", "trials", "allow_drift"])
    "trials=0: give 1 or more, continue with allow_drift=True or `hpo.resume('s', trials=5)`."
    """
    parts = []
    for place, part in enumerate(_QUOTED.split(message)):
        if place % 2 == 0:
            parts.append(_prose(part, options))
        elif part.startswith(_CALLS):
            parts.append(f"`{_call(part, options)}`")
        else:  # a command that Python has no function for is typed in a terminal
            parts.append(f"`{part}`" if part.startswith("hpo ") else f"`{_prose(part, options)}`")
    return "".join(parts)


def _prose(text: str, options: Collection[str]) -> str:
    def argument(match: re.Match[str]) -> str:
        name, value, end = match["name"].replace("-", "_"), match["value"], match["end"] or ""
        if name not in options:
            return match[0]
        if name in _SWITCHES:
            return f"{name}=True" + match[0].removeprefix(f"--{match['name']}")
        if value is not None and (end == ":" or _is_value(value)):
            return f"{name}={_literal(value)}{end}"
        return f"{name}=" + match[0].removeprefix(f"--{match['name']}")

    return re.sub(r"(?<![\w-])-o\b", "overrides=", _FLAG.sub(argument, text))


def _call(command: str, options: Collection[str]) -> str:
    _, verb, *words = shlex.split(command)
    arguments: dict[str, str] = {}
    overrides: list[str] = []
    while words:
        flag = words.pop(0)
        name = flag.lstrip("-").replace("-", "_")
        if name in _SWITCHES:
            arguments[name] = "True"
        elif flag == "-o":
            path, _, value = words.pop(0).partition("=")
            overrides.append(f"{path!r}: {_literal(value)}")
        elif name in options and words:
            arguments[name] = _literal(words.pop(0))
        else:
            return command  # which has what Python has not
    first = [arguments.pop("study")] if "study" in arguments else []
    rest = [f"{name}={value}" for name, value in arguments.items()]
    rest += [f"overrides={{{', '.join(overrides)}}}"] if overrides else []
    return f"hpo.{verb}({', '.join(first + rest)})"


def _is_value(word: str) -> bool:
    """Whether a word behind a flag is its value, and not how the sentence goes on."""
    return not word[0].islower() or not word.isalnum() or word in _names()


@cache
def _names() -> Collection[str]:
    """Values of options that are plain words."""
    from hpo.driver.resolve import ORDERS
    from hpo.search.samplers.registry import SAMPLERS
    from hpo.search.strategies.base import STRATEGIES
    from hpo.workers.executors.placement import EXECUTORS, SCHEDULERS

    return {*ORDERS, *SAMPLERS, *STRATEGIES, *EXECUTORS, *SCHEDULERS}


def _literal(value: str) -> str:
    """A number as it is, anything else in quotes."""
    bare = value.strip("'\"")
    try:
        float(bare)
    except ValueError:
        return repr(bare)
    return bare
