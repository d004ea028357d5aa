"""Reads configurations that are to be tried first, and checks them against the space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpo.errors import SpaceError, UserError
from hpo.space.config import flatten, load_yaml
from hpo.space.space import Space
from hpo.text import near


def read(files: Sequence[str | Path]) -> list[dict[str, Any]]:
    """One configuration per YAML file, as `hpo best --to` writes it. Raises UserError with the file and line."""
    entries = [flatten(load_yaml(file)) for file in files]
    for file, entry in zip(files, entries, strict=True):
        if not entry:
            raise UserError(f"--enqueue {file} holds no value: write one a line, as in `train.optim.lr: 0.01`.")
    return entries


def within(entries: Sequence[Mapping[str, Any]], declared: Space, searched: Space) -> list[dict[str, Any]]:
    """The entries without the dimensions that a tier leaves out: they keep their value."""
    beyond = declared.dimensions.keys() - searched.dimensions.keys()
    return [{path: value for path, value in flatten(entry).items() if path not in beyond} for entry in entries]


def fitting(
    entries: Sequence[Mapping[str, Any]], declared: Space, searched: Space, config: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """The entries as parameters of the dimensions that are searched: path -> JSON value.

    A dimension that is pinned, or beyond the tier, is left out: it keeps its value. So is a field that is no dimension
    where it has the very value that `config`, flat, gives it. Raises SpaceError naming the entry, the path and the fix.
    """
    return [
        _fit(f"enqueue[{index}]", flatten(entry), declared, searched, config) for index, entry in enumerate(entries)
    ]


def _fit(
    where: str, entry: Mapping[str, Any], declared: Space, searched: Space, config: Mapping[str, Any]
) -> dict[str, Any]:
    params = {}
    for path, value in entry.items():
        if path in searched.dimensions:
            params[path] = value
        elif path not in declared.dimensions and (path not in config or config[path] != value):
            if path in config:
                raise SpaceError(
                    f"{where} has {path}={value!r}, which is not searched and is {config[path]!r} here: set it by -o."
                )
            raise SpaceError(f"{where}: {path!r} is no dimension of the space{near(path, declared.paths) or '.'}")
    for path in params:
        for named in sorted(searched.references(path) & searched.dimensions.keys() - params.keys()):
            raise SpaceError(f"{where} has {path}, which depends on {named}: give that too.")
    try:
        searched.encode(params, searched.from_unit([0.5] * len(searched)))
    except SpaceError as error:
        raise SpaceError(f"{where}: {error}") from error
    return params
