"""Keeps the files that a trial hands over: files/<study>/<trial>/f<fence>.<random>/<name>, each in a directory of its
own.

A file is there, synced, before the event that names it is committed, and nothing is ever overwritten: an attempt that
has lost its trial changes nothing that is shown. The last committed file of a name is the one that is shown.
"""

from __future__ import annotations

import re
import shutil
import uuid
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from hpo.errors import HomeError, UserError
from hpo.ledger import Ledger, file_queries, queries, transactions
from hpo.ledger.rows import Connection
from hpo.storage.home import Home
from trainer.checkpoint.location import DISK, Disk
from trainer.files.durable import sync

_OWN = re.compile(r"f(\d+)\.[0-9a-f]{32}")


def stored(fields: Mapping[str, Any]) -> str:
    """Where below the trial's files the artifact of an event lies; older ledgers have it under its name."""
    return fields.get("stored", fields["path"])


def shown(events: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Name -> where it is stored, of the `fields` of a trial's artifact events in their order: the last ones stand."""
    return {fields["path"]: stored(fields) for fields in events}


def artifacts(connection: Connection, trial_id: int) -> dict[str, str]:
    """`shown` of all that the trial has handed over."""
    return shown(file_queries.artifacts(connection, trial_id))


def of_study(connection: Connection, study_id: int) -> dict[str, str]:
    """`shown` of what is of the whole study."""
    return shown(file_queries.artifacts_of_study(connection, study_id))


def store(root: Path, fence: int, source: Path, name: str, place: Disk = DISK) -> str:
    """Copy `source` durably to `place`, below `root`, to be known as `name`; where it is stored, relative to `root`."""
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
    place.share(target)
    _tidy(root, where)
    return where


def attach(
    ledger: Ledger, root: Path, trial_id: int, fence: int, files: Mapping[str, Path], place: Disk = DISK
) -> None:
    """Hand over `files` by name, from outside of the attempts of a trial that had `fence` when they were made, in place
    of those shown by these names. Raises UserError if another attempt has begun since: its sweep may have met them.

    They are stored under the next fence, which keeps them from the sweep of an attempt that is running.
    """
    before = ledger.look(lambda connection: artifacts(connection, trial_id))
    stored = {name: store(root, fence + 1, source, name, place) for name, source in files.items()}
    events = {uuid.uuid4().hex: {"path": name, "stored": where} for name, where in stored.items()}
    if not ledger.transact(lambda connection: transactions.attach(connection, trial_id, fence, events)):
        _remove(root, stored.values(), place)
        raise UserError("the trial has been taken by another attempt meanwhile: run the diagnosis again.")
    _remove(root, [where for name, where in before.items() if name in files], place)


def leave(ledger: Ledger, root: Path, study_id: int, files: Mapping[str, Path]) -> None:
    """Leave `files` by name with the study itself, in place of those shown by these names."""
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
    """Leave `files` with the study, by their names in the directory `below`, and let them be seen among its plots.

    Raises HomeError, which ends in `elsewhere`, the option that writes them elsewhere, where that cannot be written.
    """
    study_id = ledger.look(lambda connection: queries.study_row(connection, study)["id"])
    try:
        leave(ledger, home.files(study, None), study_id, {f"{below}{name}": path for name, path in files.items()})
        publish(home.plots(study), files)
    except OSError as error:
        why = error.strerror or error
        raise HomeError(f"home {home.root} cannot be written ({why}): {elsewhere} writes elsewhere.") from error


def publish(directory: Path, files: Mapping[str, Path]) -> None:
    """Let `files` be seen in `directory` by their names, in place of those that were: a copy for people, of which
    nothing depends."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, source in files.items():
        partial = directory / f"{name}.tmp"
        shutil.copyfile(source, partial)
        partial.replace(directory / name)


def _remove(root: Path, stored: Iterable[str], place: Disk = DISK) -> None:
    for where in stored:
        place.remove(root / where)
        _tidy(root, where)


def _tidy(root: Path, where: str) -> None:
    """Remove the directories of a file that hold nothing any more."""
    for parent in Path(where).parents[:-1]:
        if (root / parent).is_dir() and not any((root / parent).iterdir()):
            (root / parent).rmdir()


def sweep(root: Path, fence: int, kept: Collection[str], place: Disk = DISK) -> None:
    """Remove what is not `kept`, left by attempts up to `fence`: what no event names, and what is shown no more."""
    below = {str(path.relative_to(root)) for path in root.rglob("*")} | place.files(root)
    for where in sorted(below, reverse=True):  # what lies in a directory comes before it
        path, own = root / where, _OWN.fullmatch(Path(where).parts[0])
        if (own and int(own[1]) > fence) or where in kept:
            continue
        if not path.is_dir():
            place.remove(path)
        elif not any(path.iterdir()):
            path.rmdir()
