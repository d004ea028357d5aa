"""The digests of the parts of the search: samplers, strategies, the decoding of spaces, the wrappers and the seeds.

A part is computed through the entry points that the driver uses, with every option spelled out, so that neither a new
default nor a reworded message changes a digest. Values of trials come from coordinates by arithmetic alone: neither the
decoding of a space nor a library of mathematics has a say in them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from functools import partial
from hashlib import sha256
from typing import Any

import golden_samplers
import golden_space
import golden_strategies

from hpo.search.samplers.base import ask_seed
from hpo.search.samplers.registry import SAMPLERS
from hpo.search.strategies.registry import STRATEGIES


def digests(part_versions: Mapping[str, int] | None = None, only: Collection[str] | None = None) -> dict[str, str]:
    """Returns part -> sha256 of what the part does, of all parts or of those in `only`.

    `part_versions` are the versions that parts run in; the newest ones without them. An earlier version may propose
    values that differ between processors in their last bits, so its floats count to 6 significant digits.
    """
    chosen = {"versions": dict(part_versions)} if part_versions else {}
    parts: dict[str, Callable[[], Any]] = {
        **{f"sampler {name}": partial(golden_samplers.sampler, name, chosen) for name in SAMPLERS},
        "sampler auto": partial(golden_samplers.auto_rule, chosen),
        **{f"strategy {name}": partial(golden_strategies.strategy, name, chosen) for name in STRATEGIES},
        "space decoding": golden_space.decoding,
        "space priors": partial(golden_samplers.priors, chosen),
        "space densities": golden_space.densities,
        "space rules": partial(golden_samplers.rules, chosen),
        "space duplicates": partial(golden_samplers.duplicates, chosen),
        "warm start": partial(golden_samplers.warm_start, chosen),
        "learning": partial(golden_samplers.learning, chosen),
        "search seeds": _seeds,
    }
    number = _to_6_digits if part_versions else float.hex
    return {part: _digest(parts[part](), number) for part in (parts if only is None else only)}


def _seeds() -> Any:
    table = [(0, 0, 0), (0, 1, 0), (1, 0, 0), (0, 0, 1), (7, 250, 3), (2**62, 10**6, 99), (-5, 3, 0), (12, -1, 0)]
    return [ask_seed(*row) for row in table]


def _digest(data: Any, number: Callable[[float], str]) -> str:
    text = json.dumps(_plain(data, number), sort_keys=True, separators=(",", ":"), allow_nan=False)
    return sha256(text.encode()).hexdigest()


def _plain(value: Any, number: Callable[[float], str]) -> Any:
    """Returns plain JSON in which `number` writes every float, and NaN has a name."""
    if isinstance(value, float):
        return ["float", number(value)]
    if isinstance(value, Mapping):
        return {str(key): _plain(inner, number) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, number) for inner in value]
    return value


def _to_6_digits(value: float) -> str:
    return f"{value:.5e}"
