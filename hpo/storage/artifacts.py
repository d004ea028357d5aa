"""Stores the files that a trial hands over at files/<study>/<trial>/f<fence>.<random>/<name>, each in its own
directory.

A file is stored and synced before the event that names it is committed, and is never overwritten: an attempt that has
lost its trial changes no visible file. The last committed file of a name is shown.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from hpo.errors import HomeError, UserError
from hpo.ledger import Ledger, queries, transactions
from hpo.ledger.rows import Connection
from hpo.ledger.views import files as file_queries
from hpo.storage.home import Home
from trainer.checkpoint.location import DISK, Disk
from trainer.files.durable import sync

_OWN = re.compile(r"f(\d+)\.[0-9a-f]{32}")


def stored(fields: Mapping[str, Any]) -> str:
    """Returns the path of an event's artifact below the trial's files; older ledgers store it under its name."""
    return fields.get("stored", fields["path"])


def shown(events: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Returns name -> stored path from the `fields` of a trial's artifact events, in their order; the last ones win."""
    return {fields["path"]: stored(fields) for fields in events}


def artifacts(connection: Connection, trial_id: int) -> dict[str, str]:
    """Returns `shown` of all files that the trial has handed over."""
    return shown(file_queries.artifacts(connection, trial_id))


def of_study(connection: Connection, study_id: int) -> dict[str, str]:
    """Returns `shown` of the files of the whole study."""
    return shown(file_queries.artifacts_of_study(connection, study_id))


def store(root: Path, fence: int, source: Path, name: str, location: Disk = DISK) -> str:
    """Copies `source` durably to `location`, below `root`, under `name`; returns its path relative to `root`."""
    if not (root / name).resolve().is_relative_to(root.resolve()):
        raise UserError(f"artifact name {name!r} leads out of the trial's files: give a relative path without '..'.")
    where = f"f{fence}.{uuid.uuid4().hex}/{name}"
    target = root / where
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    sync(target)
    for parent in target.parents:
        sync(parent)
        if parent == root.parent:
            break
    location.share(target)
    _tidy(root, where)
    return where


def attach(
    ledger: Ledger, root: Path, trial_id: int, fence: int, files: Mapping[str, Path], location: Disk = DISK
) -> None:
    """Replaces files of a trial by `files`, by name, from outside its attempts.

    `fence` is the trial's fence when the files were made. Raises UserError if another attempt has begun since, whose
    sweep may have removed them. They are stored under the next fence, which protects them from the sweep of a running
    attempt.
    """
    before = ledger.look(lambda connection: artifacts(connection, trial_id))
    stored = {name: store(root, fence + 1, source, name, location) for name, source in files.items()}
    events = {uuid.uuid4().hex: {"path": name, "stored": where} for name, where in stored.items()}
    if not ledger.transact(lambda connection: transactions.attach(connection, trial_id, fence, events)):
        _remove(root, stored.values(), location)
        raise UserError("the trial has been taken by another attempt meanwhile: run the diagnosis again.")
    _remove(root, [where for name, where in before.items() if name in files], location)


def leave(ledger: Ledger, root: Path, study_id: int, files: Mapping[str, Path]) -> None:
    """Replaces files of the study itself by `files`, by name."""
    before = ledger.look(lambda connection: of_study(connection, study_id))
    stored = {name: store(root, 0, source, name) for name, source in files.items()}
    uids = {name: uuid.uuid4().hex for name in stored}

    def body(connection: Connection) -> None:
        for name, where in stored.items():
            transactions.note(connection, study_id, "artifact", {"path": name, "stored": where}, uids[name])

    ledger.transact(body)
    _remove(root, [where for name, where in before.items() if name in files])


def leave_in_home(
    ledger: Ledger, home: Home, study: str, files: Mapping[str, Path], elsewhere: str, *, below: str = ""
) -> None:
    """Stores `files` with the study, below the directory `below`, and publishes them among its plots.

    Raises HomeError if the home cannot be written; its text ends with `elsewhere`, the option that writes the files
    elsewhere.
    """
    study_id = ledger.look(lambda connection: queries.study_row(connection, study).id)
    try:
        leave(ledger, home.files(study, None), study_id, {f"{below}{name}": path for name, path in files.items()})
        publish(home.plots(study), files)
    except OSError as error:
        why = error.strerror or error
        raise HomeError(f"home {home.root} cannot be written ({why}): {elsewhere} writes elsewhere.") from error


def publish(directory: Path, files: Mapping[str, Path]) -> None:
    """Copies `files` into `directory` by name, replacing older ones, for people; nothing depends on the copies."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, source in files.items():
        partial = directory / f"{name}.tmp"
        shutil.copyfile(source, partial)
        partial.replace(directory / name)


def _remove(root: Path, stored: Iterable[str], location: Disk = DISK) -> None:
    for where in stored:
        location.remove(root / where)
        _tidy(root, where)


def _tidy(root: Path, where: str) -> None:
    """Removes the empty directories of a file."""
    for parent in Path(where).parents[:-1]:
        if (root / parent).is_dir() and not any((root / parent).iterdir()):
            (root / parent).rmdir()


def sweep(root: Path, fence: int, kept: Collection[str], location: Disk = DISK) -> None:
    """Removes what is not `kept` from attempts up to `fence`: files that no event names or that are no longer shown."""
    below = {str(path.relative_to(root)) for path in root.rglob("*")} | location.files(root)
    for where in sorted(below, reverse=True):  # the contents of a directory come before it
        path, attempt = root / where, _OWN.fullmatch(Path(where).parts[0])
        if (attempt and int(attempt[1]) > fence) or where in kept:
            continue
        if not path.is_dir():
            location.remove(path)
        elif not any(path.iterdir()):
            path.rmdir()
