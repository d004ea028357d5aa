"""Backs up the ledger of a home, with a list of the checkpoints and files that its rows name.

A backup is a directory with `ledger.db`, one snapshot of the ledger, and `objects.json`, which is written last. The
list is read from that same snapshot. The objects themselves stay where they are, and may be gone when the ledger
is restored: `check` names those that are, and `hpo.storage.reconcile` makes the rest agree.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

from hpo.errors import HomeError, StorageError, UserError
from hpo.ledger import Ledger, queries, removed
from hpo.ledger import backup as ledger_copy
from hpo.ledger.database.sqlite_url import url_of
from hpo.ledger.rows import Connection, StudyRow
from hpo.ledger.views import files as file_queries
from hpo.ledger.views import verify as verify_queries
from hpo.storage import artifacts, locations
from hpo.storage.home import PRIVATE, Home
from trainer.checkpoint.manifest import MANIFEST
from trainer.files.durable import sync, write_text
from trainer.files.paths import expanded

LEDGER, OBJECTS = "ledger.db", "objects.json"
VERSION = 1  # of the format of objects.json


@dataclass(frozen=True)
class StoredObject:
    """A checkpoint, or a file that a trial or the study has handed over.

    `path` is relative to the home, and to the study's folder in a bucket. A checkpoint's `sha256` is the digest of its
    manifest, which has the digests of its files. The ledger has neither digest nor size of other files.
    """

    study: str
    trial: int | None
    kind: str  # "checkpoint" or "file"
    path: str
    bytes: int | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class Place:
    """The place of a study's objects: a bucket, or the home if its URL is empty."""

    study: str
    uid: str
    bucket: str


@dataclass(frozen=True)
class Backup:
    """The contents of objects.json."""

    at: float  # seconds since the epoch, just before the snapshot
    ledger_sha256: str
    places: Sequence[Place]
    objects: Sequence[StoredObject]

    @property
    def bytes(self) -> int:
        """Returns the size of the listed checkpoints together."""
        return sum(entry.bytes or 0 for entry in self.objects)

    def text(self) -> str:
        return json.dumps({"version": VERSION} | asdict(self), indent=1) + "\n"


def write(ledger: Ledger, home: Home, names: Sequence[str], directory: Path, keep_for: float = 0.0) -> Backup:
    """Writes a backup of the ledger into a new or empty directory, and lists the objects of the studies named.

    Retention leaves their checkpoints alone for `keep_for` seconds. Raises UserError if the directory is not empty or
    the ledger is not SQLite's, HomeError if writing fails.
    """
    ledger_copy.check_copied_here(ledger)
    directory = expanded(str(directory)).absolute()
    target = directory / LEDGER
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise UserError(f"{directory} is not an empty directory: name a new one for each backup.")
        directory.mkdir(mode=PRIVATE, parents=True, exist_ok=True)
        begun = time.time()
        with ledger.write() if keep_for else nullcontext() as writing:
            if writing is not None:  # nothing is dropped between the hold and the copy
                ledger_copy.hold(writing, names, begun + keep_for)
            ledger_copy.copy(ledger, target)
        with closing(Ledger(url_of(target), create=False)) as copied, copied.read() as connection:
            studies = [queries.study_row(connection, name) for name in names]
            listed = [entry for study in studies for entry in _objects(connection, home, study)]
        ledger_copy.settle(target)
        sync(target)
        places = [Place(study.name, study.uid, locations.url(study)) for study in studies]
        backup = Backup(begun, _sha256(target), places, listed)
        write_text(directory / OBJECTS, backup.text())
    except OSError as error:
        raise HomeError(f"{directory} cannot be written ({error.strerror or error}): name another one.") from error
    return backup


def _objects(connection: Connection, home: Home, study: StudyRow) -> Iterator[StoredObject]:
    """Yields what the study's rows name: checkpoints that are kept, and files that are shown."""

    def below_home(path: Path) -> str:
        return path.relative_to(home.root).as_posix()

    name, gone = study.name, removed.numbers(connection, study.id)
    for row in file_queries.kept_of_study(connection, study.id):
        if row.number not in gone:
            path = below_home(home.checkpoints(name, row.number) / row.path)
            yield StoredObject(name, row.number, "checkpoint", path, row.size, row.sha256)
    handed_over = verify_queries.artifacts_by_trial(connection, study.id)
    for trial in verify_queries.trial_rows(connection, study.id):
        if trial.number not in gone:
            for where in artifacts.shown(handed_over.get(trial.id, ())).values():
                yield StoredObject(name, trial.number, "file", below_home(home.files(name, trial.number) / where))
    for where in artifacts.of_study(connection, study.id).values():
        yield StoredObject(name, None, "file", below_home(home.files(name, None) / where))


def read(directory: Path) -> Backup:
    """Returns the list of a backup whose copy of the ledger is as it was written.

    Raises UserError if the directory holds no complete backup, StorageError if the copy has changed.
    """
    try:
        fields = json.loads((directory / OBJECTS).read_text())
        if fields["version"] != VERSION:
            raise UserError(f"{directory / OBJECTS} has version {fields['version']}, not {VERSION}: use its release.")
        places = [Place(**place) for place in fields["places"]]
        objects = [StoredObject(**entry) for entry in fields["objects"]]
        backup = Backup(fields["at"], fields["ledger_sha256"], places, objects)
        digest = _sha256(directory / LEDGER)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{directory} holds no complete backup: name a directory that `hpo backup` wrote.") from error
    if digest != backup.ledger_sha256:
        raise StorageError(f"{directory / LEDGER} has changed since it was written: restore another backup.")
    return backup


def check(backup: Backup, home: Home, names: Sequence[str]) -> list[StoredObject]:
    """Returns the listed objects of the studies named that are gone from the home or the studies' buckets.

    It only lists files, and reads none. Raises OSError or CheckpointError if they cannot be listed.
    """
    present: dict[str, set[str]] = {}
    for place in backup.places:
        if place.study in names:
            location = locations.at(home, place.bucket, place.study, place.uid)
            roots = home.checkpoints(place.study, 0).parent, home.files(place.study, 0).parent
            paths = {root / path for root in roots for path in location.files(root)}
            # Files of the study itself are in the home of its driver.
            paths |= {home.files(place.study, None) / path for path in _own_files(home, place)}
            present[place.study] = {path.relative_to(home.root).as_posix() for path in paths}
    return [entry for entry in backup.objects if _is_gone(entry, present)]


def _own_files(home: Home, place: Place) -> set[str]:
    return locations.at(home, "", place.study, place.uid).files(home.files(place.study, None))


def _is_gone(entry: StoredObject, present: Mapping[str, set[str]]) -> bool:
    path = f"{entry.path}/{MANIFEST}" if entry.kind == "checkpoint" else entry.path
    return entry.study in present and path not in present[entry.study]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
