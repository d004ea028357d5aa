"""Computes what decides a study's results, by component, and how two such identities differ: drift."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.declaration import behaviour, code_digest, release_0_1
from hpo.declaration.environment import deciding_versions
from hpo.errors import DriftError
from hpo.version import VERSION

if TYPE_CHECKING:
    from hpo.declaration.resolved import ResolvedStudy
    from hpo.declaration.study import Study

MAX_CLAUSES = 6  # of one message
_MISSING = object()
_LOADED = ("code", "versions", "behaviour", "modified")  # what stays in a process that has loaded it
# The name of an entry where a component is a mapping.
_ENTRIES = {"config": "{}", "space": "dimension {}", "data": "the content of {}", "code": "the code of {}"}
_ENTRIES |= {"rules": "rule {!r}"}

_DIGESTS = (code_digest.FORM, code_digest.STUDYS)
_UNNAMED = {"": "the study", ".": "its package"}


def identity(resolved: ResolvedStudy) -> dict[str, Any]:
    """Returns all that decides a study's results, by component: hashes, values, or mappings of either."""
    return resolved.study.identity() | resolved.spec.identity() | _here(resolved.study, resolved.spec.behaviour)


def _here(study: Study, parts: Iterable[str]) -> dict[str, Any]:
    """Returns what this process brings along: the code it has loaded, and the versions of the libraries below that."""
    changed = _modified()
    areas = {area: changed[area] for area in behaviour.areas(parts) if area in changed}
    brought = {"code": study.code_sha256(), "versions": deciding_versions()}
    return brought | ({"modified": areas} if areas else {})


@cache
def _modified() -> dict[str, str]:
    """Returns the modified areas of the code that this process has loaded, whatever the disk holds by now."""
    return code_digest.modified()


def load_installed() -> None:
    """Reads what identities need of this installation, so that forks of this process have it."""
    _modified()


def check_worker(row: Mapping[str, Any], study: Study, *, data: bool = True) -> None:
    """Raise DriftError unless a worker that has loaded `study` would train it as its driver does.

    `row` is the study's row. Where the driver was allowed to drift, so are its workers. `data` compares the data too,
    which takes as long as reading all of it.
    """
    if row["environment"].get("allow_drift"):
        return
    stored = release_0_1.translated(row["identity"])
    versions: Mapping[str, int] = stored["behaviour"]
    here = _here(study, versions) | {"behaviour": behaviour.settle(versions, versions)}
    here |= {"data": study.data_sha256()} if data else {}
    keys = [key for key in (*here, "modified") if key in stored]
    here = {key: value for key, value in here.items() if key in (*keys, "modified")}
    if changed := drift({key: stored[key] for key in keys}, here, study.code):
        raise DriftError(
            f"this worker cannot train study {row['name']!r} of {row['environment'].get('host')}: here "
            f"{'; '.join(changed)}: give it the driver's code, data and versions, or drive with --allow-drift."
        )


def check_loaded(old: Mapping[str, Any], row: Mapping[str, Any]) -> None:
    """Raise DriftError if a study whose row was `old` is now driven with other code than a worker loaded then."""
    before, now = ({key: one["identity"].get(key) for key in _LOADED} for one in (old, row))
    changed = drift(before, now)
    if changed:
        raise DriftError(
            f"study {row['name']!r} is driven on with other code than this worker has loaded: {'; '.join(changed)}: "
            "start the worker again."
        )


def drift(
    old: Mapping[str, Any], new: Mapping[str, Any], code: Callable[[], Mapping[str, Path]] = dict[str, Path]
) -> list[str]:
    """What differs, a clause each: `the code of mlp.py changed`, `train.num_epochs changed from 3 to 5`.

    `code` says where the parts of the code lie, by label.
    """
    old = release_0_1.translated(old)
    if old == new:
        return []
    keys = sorted(old.keys() | new.keys())
    names = _UNNAMED | {label: _beside(place) for label, place in code().items()}
    clauses = list(dict.fromkeys(clause for key in keys for clause in _clauses(key, old, new, names)))
    more = len(clauses) - MAX_CLAUSES
    return [*clauses[:MAX_CLAUSES], f"{more} more changed"] if more > 1 else clauses


def _beside(place: Path) -> str:
    return str(place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else place)


def _clauses(key: str, old: Mapping[str, Any], new: Mapping[str, Any], names: Mapping[str, str]) -> Iterator[str]:
    before, after = old.get(key, _MISSING), new.get(key, _MISSING)
    if before == after:
        return
    if key == "behaviour":
        yield from _behaviour({} if before is _MISSING else before, {} if after is _MISSING else after)
    elif key == "modified":
        yield from _modifications({} if before is _MISSING else before, {} if after is _MISSING else after)
    elif key in _ENTRIES and isinstance(before, Mapping) and isinstance(after, Mapping):
        for path in sorted(before.keys() | after.keys()):
            what = _ENTRIES[key].format(names.get(path, path) if key == "code" else path)
            yield from _changed(what, before.get(path, _MISSING), after.get(path, _MISSING))
    elif any(isinstance(value, Mapping) for value in (before, after)):
        yield f"the {key} changed"
    else:
        yield from _changed(key, before, after)


def _behaviour(before: Mapping[str, int], after: Mapping[str, int]) -> Iterator[str]:
    """Yields the parts whose version changed; a part that only one side uses shows in another component."""
    for part in sorted(before.keys() & after.keys()):
        if before[part] != after[part]:
            yield behaviour.clause(part, before[part], after[part])


def _modifications(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    """Yields the areas whose code has changed in a way that no golden file has shown to be harmless."""
    for area in sorted(before.keys() | after.keys()):
        if before.get(area) == after.get(area):
            continue
        code = f"the code of {area if area.startswith('study') else f'the {area}'}"
        if area in after:
            yield f"{code} is modified: `make golden` would show whether it behaves as in release {VERSION}"
        else:
            yield f"{code} was modified when the study began, and is that of release {VERSION} here"


def _changed(what: str, before: Any, after: Any) -> Iterator[str]:
    if before == after or (isinstance(before, str) and isinstance(after, str) and code_digest.same(before, after)):
        return
    if any(isinstance(value, str) and (len(value) == 64 or value.startswith(_DIGESTS)) for value in (before, after)):
        yield f"{what if what.startswith('the ') else f'the {what}'} changed"
    elif before is _MISSING or after is _MISSING:
        yield f"{what} is {'new' if before is _MISSING else 'gone'}"
    else:
        yield f"{what} changed from {_shown(before)} to {_shown(after)}"


def _shown(value: Any) -> str:
    """Returns a dimension as it is declared, a text as it is, and anything else as JSON."""
    if isinstance(value, Mapping) and "type" in value:
        options = [f"{key}={item!r}" for key, item in value.items() if key != "type" and item not in (None, {}, False)]
        return f"{value['type']}({', '.join(options)})"
    return value if isinstance(value, str) and value else json.dumps(value)
