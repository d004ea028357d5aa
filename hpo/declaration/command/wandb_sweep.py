"""Converts a sweep file of Weights & Biases to a command's file, key by key, if the keys mean the same here.

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
_COMMAND = ["${env}", "${interpreter}", "${program}", "${args}"]  # for a file without one
_MACROS = {"${env}": "/usr/bin/env", "${interpreter}": "python"}
_OF_SERVICE = ("project", "entity", "description")  # only affects W&B's pages, not the search
_REFUSED = {
    "run_cap": "give `hpo run --trials {value}` instead",
    "controller": "leave it out, since the driver here decides",
    "imports": "leave it out, and name modules in code:",
    "job": "name the program in command",
    "image_uri": "name the program in command",
    "scheduler": "leave it out: `hpo run --workers` says how many trials run at once",
}
_DISTRIBUTIONS = ("constant", "categorical", "int_uniform", "uniform", "q_uniform", "log_uniform", "log_uniform_values")


def is_sweep(document: Mapping[str, object]) -> bool:
    """Returns whether a file is a W&B sweep: its keys include `method` and `parameters`."""
    return "method" in document and "parameters" in document


def converted(sweep: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the same study with the keys of a command's file.

    A sweep file may also hold keys of a command's file that a sweep lacks, such as `output`. Raises StudyError, naming
    the key, for a setting without an equivalent here.
    """
    keys = {key: value for key, value in sweep.items() if key not in _OF_SERVICE}
    for key, fix in _REFUSED.items():
        if key in keys:
            raise StudyError(
                f"{key}={quoted(keys[key])} of a W&B sweep is not known here: {fix.format(value=keys[key])}."
            )
    method = keys.pop("method")
    if method not in _SAMPLERS:
        raise StudyError(
            f"method={quoted(method)} is none of {', '.join(_SAMPLERS)}{near(str(method), _SAMPLERS) or '.'}"
        )
    space: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    parameters = _mapping("parameters", keys.pop("parameters"))
    for name, parameter in parameters.items():
        where = f"parameters.{name}"
        parameter = _mapping(where, parameter)
        if "value" in parameter or parameter.get("distribution") == "constant":
            _only(where, parameter, "value", "distribution")
            constants[name] = parameter.get("value")
        else:
            space[name] = _dimension(where, parameter)
    converted_keys = {"sampler": _SAMPLERS[method], "space": space, "constants": constants}
    converted_keys |= {"command": _command(keys.pop("command", _COMMAND), keys.pop("program", None))}
    converted_keys |= _metric(keys.pop("metric", None)) | {"strategy": _strategy(keys.pop("early_terminate", None))}
    if clash := [key for key in converted_keys if key in keys]:
        raise StudyError(f"{clash[0]} stands in a W&B sweep, which says that by its own keys: leave it out.")
    return keys | converted_keys


def _mapping(where: str, keys: object) -> Mapping[str, Any]:
    if not isinstance(keys, Mapping):
        raise StudyError(f"{where}={quoted(keys)} must be a mapping, as W&B has it.")
    return keys


def _only(where: str, given: Mapping[str, object], *known: str) -> None:
    if unknown := [key for key in given if key not in known]:
        raise StudyError(
            f"{where}.{unknown[0]}={quoted(given[unknown[0]])} has no equal here: take {', '.join(known)}."
        )


def _command(given: object, program: object) -> list[str]:
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


def _metric(fields: object) -> dict[str, str]:
    if fields is None:
        raise StudyError("metric is missing: write metric: {name: val/loss, goal: minimize}.")
    fields = _mapping("metric", fields)
    _only("metric", fields, "name", "goal")
    goal = fields.get("goal", "minimize")
    if goal not in ("minimize", "maximize"):
        raise StudyError(f"metric.goal={quoted(goal)} must be minimize or maximize.")
    return {goal: fields.get("name", "")}


def _dimension(where: str, one: Mapping[str, object]) -> dict[str, Any]:
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


def _default(one: Mapping[str, object]) -> str:
    """Returns W&B's default distribution: integers if both bounds are integers."""
    bounds = [one.get("min"), one.get("max")]
    return "int_uniform" if all(isinstance(bound, int) for bound in bounds) else "uniform"


def _number(where: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 700:
        raise StudyError(f"{where}={quoted(value)} must be an exponent of e, from -700 to 700.")
    return float(value)


def _strategy(fields: object) -> Any:
    """Returns the strategy of a Hyperband that stops trials, with ASHA's rungs: the best 1/eta go on at each."""
    if fields is None:
        return "none"
    fields = _mapping("early_terminate", fields)
    if fields.get("type") != "hyperband":
        raise StudyError(f"early_terminate.type={quoted(fields.get('type'))} has no equal here: take hyperband.")
    _only("early_terminate", fields, "type", "min_iter", "eta", "max_iter", "s")
    eta, least = fields.get("eta", 3), fields.get("min_iter")
    if least is None:
        top, s = fields.get("max_iter"), fields.get("s", 1)
        if not all(isinstance(number, int) and number > 0 for number in (top, s, eta)) or top % eta**s:
            raise StudyError(
                f"early_terminate: max_iter={top!r}, s={s!r} and eta={eta!r} give no whole first rung, "
                "max_iter / eta ** s: give min_iter."
            )
        return {"name": "asha", "min_epochs": top // eta**s, "eta": eta, "max_epochs": top}
    if clash := [key for key in ("max_iter", "s") if key in fields]:
        raise StudyError(
            f"early_terminate.{clash[0]}={fields[clash[0]]!r} stands beside min_iter: leave one of them out."
        )
    return {"name": "asha", "min_epochs": least, "eta": eta}
