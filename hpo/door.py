"""Spells options and commands for the caller's interface: `--trials 5` on the command line, `trials=5` for callers of
`hpo.run`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

NOTEBOOK = "notebook"  # stands for a file in the reference of a study that only this process knows
_CALLS = ("run", "resume")  # commands that are functions of Python
_SWITCHES = ("allow_drift", "force")
_QUOTES = "''"  # an empty value, as it is typed
_TYPED = {"overrides": "-o", "trackers": "--tracker", "alerts": "--alert", "tags": "--tag"}
_arguments: ContextVar[Collection[str]] = ContextVar("arguments", default=())  # of Python's functions; none: commands


@contextmanager
def of_python(arguments: Collection[str]) -> Iterator[None]:
    """Makes messages within the block name options as these arguments."""
    token = _arguments.set(arguments)
    try:
        yield
    finally:
        _arguments.reset(token)


def option(name: str, value: object = None) -> str:
    """Returns an option, by its name in Python, with its value if it has one.

    >>> option("allow_drift"), option("trials", 5)
    ('--allow-drift', '--trials 5')
    >>> with of_python(["allow_drift", "trials", "time"]):
    ...     option("allow_drift"), option("trials", 5), option("time", "1h"), option("epochs")
    ('allow_drift=True', 'trials=5', "time='1h'", '--epochs')
    """
    if name not in _arguments.get():
        return flag(name) if value is None else f"{flag(name)} {_QUOTES if value == '' else value}"
    if value is None:
        return f"{name}=True" if name in _SWITCHES else f"{name}="
    if name == "overrides":
        path, _, text = str(value).partition("=")
        return f"overrides={{{path!r}: {_literal(text)}}}"
    return f"{name}={_literal(value)}"


def flag(name: str) -> str:
    """Returns an option, by its name in Python, as it is typed."""
    return _TYPED.get(name, f"--{name.replace('_', '-')}")


def typed() -> str:
    """Returns the command that was typed; for callers from Python the program that called."""
    program = shlex.join(sys.argv[:1]) or "python"
    return f"Python, in {program}" if _arguments.get() else shlex.join(["hpo", *sys.argv[1:]])


def step(words: str) -> str:
    """Returns the command `hpo WORDS`, or the call that does the same.

    >>> step("resume --study mlp --trials 9")
    'hpo resume --study mlp --trials 9'
    >>> with of_python(["study", "trials"]):
    ...     step("resume --study mlp --trials 9")
    "hpo.resume('mlp', trials=9)"

    A study declared in a notebook cell is called by its name there.

    >>> with of_python(["study", "seed"]):
    ...     step("run --study notebook:fit --seed 3")
    'hpo.run(fit, seed=3)'
    """
    verb, *rest = shlex.split(words)
    call = _call(verb, rest) if _arguments.get() and verb in _CALLS else None
    return call or f"hpo {words}"


def _call(verb: str, words: list[str]) -> str | None:
    """Returns a call; None if a word does not fit into it."""
    arguments: dict[str, str] = {}
    overrides: list[str] = []
    while words:
        typed = words.pop(0)
        name = typed.lstrip("-").replace("-", "_")
        if name in _SWITCHES:
            arguments[name] = "True"
        elif typed == "-o":
            path, _, value = words.pop(0).partition("=")
            overrides.append(f"{path!r}: {_literal(value)}")
        elif name in _arguments.get() and words:
            arguments[name] = _literal(words.pop(0))
        else:
            return None
    first = [arguments.pop("study")] if "study" in arguments else []
    if first and (declared := first[0].strip("'")).startswith(f"{NOTEBOOK}:"):
        first = [declared.removeprefix(f"{NOTEBOOK}:")]
    rest = [f"{name}={value}" for name, value in arguments.items()]
    rest += [f"overrides={{{', '.join(overrides)}}}"] if overrides else []
    return f"hpo.{verb}({', '.join(first + rest)})"


def _literal(value: object) -> str:
    """Returns a value as Python writes it; a number that was typed as a number."""
    if not isinstance(value, str):
        return repr(value)
    bare = value.strip("'\"")
    try:
        float(bare)
    except ValueError:
        return repr(bare)
    return bare
