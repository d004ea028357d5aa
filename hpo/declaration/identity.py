"""Computes a study's identity, which decides its results, by component, and the differences of two identities, called
drift."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.declaration import behaviour, code_digest, content, release_0_1
from hpo.declaration.environment import deciding_versions
from hpo.declaration.loading import code_of
from hpo.door import option
from hpo.errors import DriftError
from hpo.version import VERSION

if TYPE_CHECKING:
    from hpo.declaration.resolved import ResolvedStudy
    from hpo.declaration.study import Study

MAX_CLAUSES = 6  # in one message
_MISSING = object()
_LOADED = ("code", "versions", "behaviour", "modified")  # components fixed once a process has loaded them
# The noun for an entry of a component that is a mapping.
_ENTRIES = {"config": "{}", "space": "dimension {}", "data": "the content of {}", "code": "the code of {}"}
_ENTRIES |= {"rules": "rule {!r}"}

_DIGESTS = (code_digest.FORM, code_digest.STUDYS)
_UNNAMED = {"": "the study", ".": "its package"}


def identity(resolved: ResolvedStudy) -> dict[str, Any]:
    """Returns everything that decides a study's results, by component: hashes, values, or mappings of either."""
    study, spec = resolved.study, resolved.spec
    return content.identity(study) | spec.identity() | _here(study, spec.behaviour, spec.own_parts())


def _here(study: Study, parts: Iterable[str], users: Iterable[str]) -> dict[str, Any]:
    """Returns this process's part of the identity: its loaded code and the versions of its libraries.

    The code includes that of the `users` own sampler and strategy.
    """
    changed = _modified()
    areas = {area: changed[area] for area in behaviour.areas(parts) if area in changed}
    code = content.code_sha256(study) | {label: code_digest.of_study(path) for label, path in code_of(users).items()}
    brought = {"code": code, "versions": deciding_versions()}
    return brought | ({"modified": areas} if areas else {})


@cache
def _modified() -> dict[str, str]:
    """Returns the modified areas of the code as this process loaded it, even if the files have changed since."""
    return code_digest.modified()


def load_installed() -> None:
    """Reads the part of identities that depends on the installation, so that forks of this process share it."""
    _modified()


def check_worker(
    resolved: ResolvedStudy, begun: Mapping[str, object], environment: Mapping[str, object], *, data: bool = True
) -> None:
    """Raises DriftError unless a worker that has loaded the study would train it as its driver does.

    `begun` is the identity of the study's row, `environment` how it is driven. If the driver was allowed to drift, so
    are its workers. `data` compares the data too, which takes as long as reading all of it.
    """
    if environment.get("allow_drift"):
        return
    study, stored = resolved.study, release_0_1.translated(begun)
    versions: Mapping[str, int] = stored["behaviour"]
    loaded = _here(study, versions, resolved.spec.own_parts()) | {"behaviour": behaviour.settle(versions, versions)}
    loaded |= {"data": content.data_sha256(study)} if data else {}
    keys = [key for key in (*loaded, "modified") if key in stored]
    loaded = {key: value for key, value in loaded.items() if key in (*keys, "modified")}
    if changed := drift({key: stored[key] for key in keys}, loaded, partial(content.code, study)):
        raise DriftError(
            f"this worker cannot train study {resolved.spec.name!r} of {environment.get('host')}: here "
            f"{'; '.join(changed)}: give it the driver's code, data and versions, or drive with "
            f"{option('allow_drift')}."
        )


def check_loaded(name: str, old: Mapping[str, object], new: Mapping[str, object]) -> None:
    """Raises DriftError if a study whose identity was `old` is now driven with other code than a worker loaded then."""
    before, now = ({key: identity.get(key) for key in _LOADED} for identity in (old, new))
    changed = drift(before, now)
    if changed:
        raise DriftError(
            f"study {name!r} is driven on with other code than this worker has loaded: {'; '.join(changed)}: "
            "start the worker again."
        )


def drift(
    old: Mapping[str, object], new: Mapping[str, object], code: Callable[[], Mapping[str, Path]] = dict[str, Path]
) -> list[str]:
    """Returns a clause for each difference: `the code of mlp.py changed`, `train.num_epochs changed from 3 to 5`.

    `code` returns label -> path of the parts of the code.
    """
    old = release_0_1.translated(old)
    if old == new:
        return []
    keys = sorted(old.keys() | new.keys())
    names = _UNNAMED | {label: _beside(path) for label, path in code().items()}
    clauses = list(dict.fromkeys(clause for key in keys for clause in _clauses(key, old, new, names)))
    more = len(clauses) - MAX_CLAUSES
    return [*clauses[:MAX_CLAUSES], f"{more} more changed"] if more > 1 else clauses


def _beside(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


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
            entry = _ENTRIES[key].format(names.get(path, path) if key == "code" else path)
            yield from _changed(entry, before.get(path, _MISSING), after.get(path, _MISSING))
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
    """Yields the areas whose code has changed without a golden file that shows unchanged results."""
    for area in sorted(before.keys() | after.keys()):
        if before.get(area) == after.get(area):
            continue
        code = f"the code of {area if area.startswith('study') else f'the {area}'}"
        if area in after:
            yield f"{code} is modified: `make golden` would show whether it behaves as in release {VERSION}"
        else:
            yield f"{code} was modified when the study began, and is that of release {VERSION} here"


def _changed(what: str, before: object, after: object) -> Iterator[str]:
    if before == after or (isinstance(before, str) and isinstance(after, str) and code_digest.same(before, after)):
        return
    if any(isinstance(value, str) and (len(value) == 64 or value.startswith(_DIGESTS)) for value in (before, after)):
        yield f"{what if what.startswith('the ') else f'the {what}'} changed"
    elif before is _MISSING or after is _MISSING:
        yield f"{what} is {'new' if before is _MISSING else 'gone'}"
    else:
        yield f"{what} changed from {shown(before)} to {shown(after)}"


def shown(value: object) -> str:
    """Returns a dimension as it is declared, a text as it is, and anything else as JSON."""
    if isinstance(value, Mapping) and "type" in value:
        options = [
            f"{key}={option!r}" for key, option in value.items() if key != "type" and option not in (None, {}, False)
        ]
        return f"{value['type']}({', '.join(options)})"
    return value if isinstance(value, str) and value else json.dumps(value)
