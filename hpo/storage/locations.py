"""Locates a study's checkpoints and its trials' files: in its home, or in a bucket that its row names.

In a bucket, below `<url>/<study>.<uid>`, a trial's files have the same names as below the home. So two studies never
share a folder there, and each host needs a home only for itself. The row holds the URL; each host has its own
credentials (boto3's standard chain).
"""

from __future__ import annotations

import os
import socket

from hpo.door import option
from hpo.errors import UserError
from hpo.ledger.rows import StudyRow
from hpo.storage.home import MARKER, Home
from trainer.checkpoint.location import DISK, Disk, ObjectStore
from trainer.errors import CheckpointError
from trainer.files.s3 import Away, Bucket


def url(study: StudyRow) -> str:
    """Returns the URL of the bucket in a study's row; an empty text if the home holds everything."""
    return study.environment.get("checkpoints", "")


def of(home: Home, study: StudyRow) -> Disk:
    """Returns the location of the files that the study's row refers to, for paths of this home."""
    return at(home, url(study), study.name, study.uid)


def at(home: Home, bucket: str, name: str, uid: str) -> Disk:
    """Returns the location of a study's files in the bucket with this URL, or in the home if it is empty."""
    return ObjectStore(Bucket(bucket).below(_folder(name, uid)), home.root) if bucket else DISK


def has_results(home: Home, study: StudyRow) -> bool:
    """Returns whether this home has the files that a driver writes into its own home.

    If the checkpoints are in a bucket, only the last driver's home has all of it.
    """
    where = study.environment
    return not url(study) or (where.get("host"), where.get("home")) == (socket.gethostname(), str(home.root))


def _bucket(address: str, study: StudyRow) -> Bucket:
    return Bucket(address).below(_folder(study.name, study.uid))


def _folder(name: str, uid: str) -> str:
    return f"{name}.{uid}"


def resolved_url(given: str | None, study: StudyRow | None, executor: str) -> str:
    """Returns the checkpoints' URL for a study, empty for its home: the one it began with, else the given one.

    Raises UserError or ConfigError if that is impossible, and Away if nothing answers there.
    """
    given_url = Bucket(given).url if given else ""
    stored = given_url if study is None else url(study)
    named = given != os.environ.get("HPO_CHECKPOINTS")  # otherwise it is for new studies
    if study is not None and given_url and given_url != stored and named:
        raise UserError(
            f"{option('checkpoints', given_url)}: study {study.name!r} was begun with its checkpoints in "
            f"{stored or 'its home'}, "
            f"and they stay there: leave the option out, or start another study by {option('name')}."
        )
    if stored and executor == "ray-tune":
        raise UserError(
            f"{option('checkpoints')} with {option('executor', 'ray-tune')}: Tune keeps checkpoints of its own; take "
            "another one."
        )
    if stored:
        try:
            Bucket(stored).check()
        except Away:
            raise
        except CheckpointError as error:
            raise UserError(f"{option('checkpoints')} {error}") from error
    return stored


def mark(home: Home, study: StudyRow) -> None:
    """Writes the study's uid where its checkpoints will be; workers recognize the location by it."""
    home.mark(study.name, study.uid)
    if bucket := url(study):
        _bucket(bucket, study).put_new(MARKER, study.uid.encode())


def clear(study: StudyRow) -> None:
    """Removes everything of the study from its bucket, if it has one.

    Other studies have their own folders. Raises CheckpointError.
    """
    if bucket := url(study):
        Bucket(bucket).remove(_folder(study.name, study.uid))


def check(home: Home, study: StudyRow, host: str = "") -> None:
    """Raises UserError or CheckpointError unless this process sees the location that `mark` has marked.

    `host`, by default the one in the study's row, drives the study.
    """
    bucket, host = url(study), host or study.environment["host"]
    if not bucket:
        home.check_mark(study.name, study.uid, host)
    elif _bucket(bucket, study).get(MARKER) != study.uid.encode():
        raise UserError(
            f"{bucket} is not, from here, where study {study.name!r} keeps its checkpoints: give this host the "
            f"AWS_ENDPOINT_URL of {host}, which drives it."
        )
