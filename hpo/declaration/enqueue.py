"""Reads configurations to be tried first, and checks them against the space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpo.door import option
from hpo.errors import SpaceError, UserError
from hpo.space.config import flatten, load_yaml
from hpo.space.space import Space
from hpo.text import near


def read(files: Sequence[str | Path]) -> list[dict[str, Any]]:
    """Returns one configuration per YAML file, as `hpo best --to` writes it.

    Raises UserError with the file and line.
    """
    entries = [flatten(load_yaml(file)) for file in files]
    for file, entry in zip(files, entries, strict=True):
        if not entry:
            raise UserError(
                f"{option('enqueue', file)} holds no value: write one a line, as in `train.optim.lr: 0.01`."
            )
    return entries


def within(entries: Sequence[Mapping[str, Any]], declared: Space, searched: Space) -> list[dict[str, Any]]:
    """Returns the entries without the dimensions that a tier excludes; these keep their configured value."""
    beyond = declared.dimensions.keys() - searched.dimensions.keys()
    return [{path: value for path, value in flatten(entry).items() if path not in beyond} for entry in entries]


def fitting(
    entries: Sequence[Mapping[str, Any]], declared: Space, searched: Space, config: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Returns the entries as parameters of the searched dimensions: path -> JSON value.

    Drops a dimension that is pinned or beyond the tier, which keeps its value, and a field that cannot be searched if
    it has the value of `config`, which is flat. Raises SpaceError naming entry, path and fix.
    """
    return [
        _fit(f"enqueue[{index}]", flatten(entry), declared, searched, config) for index, entry in enumerate(entries)
    ]


def _fit(
    where: str, entry: Mapping[str, object], declared: Space, searched: Space, config: Mapping[str, object]
) -> dict[str, Any]:
    params = {}
    for path, value in entry.items():
        if path in searched.dimensions:
            params[path] = value
        elif path not in declared.dimensions and (path not in config or config[path] != value):
            if path in config:
                raise SpaceError(
                    f"{where} has {path}={value!r}, which is not searched and is {config[path]!r} here: set it by "
                    f"{option('overrides')}."
                )
            raise SpaceError(f"{where}: {path!r} is not a dimension of the space{near(path, declared.paths) or '.'}")
    for path in params:
        for named in sorted(searched.references(path) & searched.dimensions.keys() - params.keys()):
            raise SpaceError(f"{where} has {path}, which depends on {named}: give that too.")
    try:
        searched.encode(params, searched.from_unit([0.5] * len(searched)))
    except SpaceError as error:
        raise SpaceError(f"{where}: {error}") from error
    return params
