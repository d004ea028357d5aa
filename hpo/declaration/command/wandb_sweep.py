"""Reads a sweep file of Weights & Biases as a command's file, key by key: what means the same here, and nothing else.

Keys and their meanings: https://docs.wandb.ai/guides/sweeps/sweep-config-keys.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from hpo.errors import StudyError
from hpo.text import near
from trainer.quote import quoted

_SAMPLERS = {"grid": "grid", "random": "random", "bayes": "gp"}  # bayes: a Gaussian process
_COMMAND = ["${env}", "${interpreter}", "${program}", "${args}"]  # where a file has none
_MACROS = {"${env}": "/usr/bin/env", "${interpreter}": "python"}
_OF_SERVICE = ("project", "entity", "description")  # where W&B shows it: nothing of the search
_REFUSED = {
    "run_cap": "give `hpo run --trials {value}` instead",
    "controller": "leave it out, since the driver here decides",
    "imports": "leave it out, and name modules in code:",
    "job": "name the program in command",
    "image_uri": "name the program in command",
    "scheduler": "leave it out: `hpo run --workers` says how many trials run at once",
}
_DISTRIBUTIONS = ("constant", "categorical", "int_uniform", "uniform", "q_uniform", "log_uniform", "log_uniform_values")


def is_sweep(document: Mapping[str, Any]) -> bool:
    """Whether a file is a sweep's: its keys are `method` and `parameters`."""
    return "method" in document and "parameters" in document


def converted(sweep: Mapping[str, Any]) -> dict[str, Any]:
    """The same study with the keys of a command's file. A sweep file may also hold keys of such a file that it lacks
    itself, such as `output`. Raises StudyError, which names the key, for what has no equal here."""
    given = {key: value for key, value in sweep.items() if key not in _OF_SERVICE}
    for key, fix in _REFUSED.items():
        if key in given:
            raise StudyError(
                f"{key}={quoted(given[key])} of a W&B sweep is not known here: {fix.format(value=given[key])}."
            )
    method = given.pop("method")
    if method not in _SAMPLERS:
        raise StudyError(
            f"method={quoted(method)} is none of {', '.join(_SAMPLERS)}{near(str(method), _SAMPLERS) or '.'}"
        )
    space: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    parameters = _mapping("parameters", given.pop("parameters"))
    for name, one in parameters.items():
        where = f"parameters.{name}"
        one = _mapping(where, one)
        if "value" in one or one.get("distribution") == "constant":
            _only(where, one, "value", "distribution")
            constants[name] = one.get("value")
        else:
            space[name] = _dimension(where, one)
    made = {"sampler": _SAMPLERS[method], "space": space, "constants": constants}
    made |= {"command": _command(given.pop("command", _COMMAND), given.pop("program", None))}
    made |= _metric(given.pop("metric", None)) | {"strategy": _strategy(given.pop("early_terminate", None))}
    if clash := [key for key in made if key in given]:
        raise StudyError(f"{clash[0]} stands in a W&B sweep, which says that by its own keys: leave it out.")
    return given | made


def _mapping(where: str, given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise StudyError(f"{where}={quoted(given)} must be a mapping, as W&B has it.")
    return given


def _only(where: str, given: Mapping[str, Any], *known: str) -> None:
    if unknown := [key for key in given if key not in known]:
        raise StudyError(
            f"{where}.{unknown[0]}={quoted(given[unknown[0]])} has no equal here: take {', '.join(known)}."
        )


def _command(given: Any, program: Any) -> list[str]:
    words: list[str] = []
    for word in [given] if isinstance(given, str) else given if isinstance(given, list) else [None]:
        if word == "${program}":
            if not isinstance(program, str):
                raise StudyError(f"program={quoted(program)}: name the script that command calls ${{program}}.")
            words.append(program)
        elif isinstance(word, str) and (word in _MACROS or word == "${args}" or not re.search(r"\$\{", word)):
            words.append(_MACROS.get(word, word))
        else:
            raise StudyError(
                f"command: {quoted(word)} has no equal here: there are ${{env}}, ${{interpreter}}, ${{program}} and "
                "${args}, and {lr} for one parameter."
            )
    return words


def _metric(given: Any) -> dict[str, str]:
    if given is None:
        raise StudyError("metric is missing: write metric: {name: val/loss, goal: minimize}.")
    given = _mapping("metric", given)
    _only("metric", given, "name", "goal")
    goal = given.get("goal", "minimize")
    if goal not in ("minimize", "maximize"):
        raise StudyError(f"metric.goal={quoted(goal)} must be minimize or maximize.")
    return {goal: given.get("name", "")}


def _dimension(where: str, one: Mapping[str, Any]) -> dict[str, Any]:
    if "values" in one:
        _only(where, one, "values", "distribution")
        return {"type": "choice", "options": one["values"]}
    kind = one.get("distribution") or _default(one)
    if kind not in _DISTRIBUTIONS:
        raise StudyError(f"{where}.distribution={quoted(kind)} has no equal here: take {', '.join(_DISTRIBUTIONS)}.")
    _only(where, one, "min", "max", "distribution", *(["q"] if kind == "q_uniform" else []))
    low, high = one.get("min"), one.get("max")
    if kind == "int_uniform":
        return {"type": "int", "low": low, "high": high}
    if kind == "q_uniform":
        return {"type": "float", "low": low, "high": high, "step": one.get("q", 1)}
    if kind == "log_uniform":  # the bounds are exponents
        low, high = (math.exp(_number(f"{where}.{key}", one.get(key))) for key in ("min", "max"))
    return {"type": "float", "low": low, "high": high} | ({"log": True} if kind != "uniform" else {})


def _default(one: Mapping[str, Any]) -> str:
    """W&B's distribution where none is named: of whole numbers where both bounds are."""
    bounds = [one.get("min"), one.get("max")]
    return "int_uniform" if all(isinstance(bound, int) for bound in bounds) else "uniform"


def _number(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 700:
        raise StudyError(f"{where}={quoted(value)} must be an exponent of e, from -700 to 700.")
    return float(value)


def _strategy(given: Any) -> Any:
    """Hyperband that stops trials: its rungs are ASHA's, a trial going on among the best 1/eta at each."""
    if given is None:
        return "none"
    given = _mapping("early_terminate", given)
    if given.get("type") != "hyperband":
        raise StudyError(f"early_terminate.type={quoted(given.get('type'))} has no equal here: take hyperband.")
    _only("early_terminate", given, "type", "min_iter", "eta", "max_iter", "s")
    eta, least = given.get("eta", 3), given.get("min_iter")
    if least is None:
        top, s = given.get("max_iter"), given.get("s", 1)
        if not all(isinstance(one, int) and one > 0 for one in (top, s, eta)) or top % eta**s:
            raise StudyError(
                f"early_terminate: max_iter={top!r}, s={s!r} and eta={eta!r} give no whole first rung, "
                "max_iter / eta ** s: give min_iter."
            )
        return {"name": "asha", "min_epochs": top // eta**s, "eta": eta, "max_epochs": top}
    if clash := [key for key in ("max_iter", "s") if key in given]:
        raise StudyError(
            f"early_terminate.{clash[0]}={given[clash[0]]!r} stands beside min_iter: leave one of them out."
        )
    return {"name": "asha", "min_epochs": least, "eta": eta}
