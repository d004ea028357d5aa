"""Says where a study's checkpoints and its trials' files lie: in its home, or in a bucket that its row names.

In a bucket, below `<url>/<study>.<uid>`, what concerns trials has the names that it would have below the home. So two
studies never meet there, and each host needs a home only for itself. The row holds the URL; who may use it is for each
host to know (boto3's standard chain).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

from hpo.errors import UserError
from hpo.ledger.rows import RowMapping
from hpo.storage.home import MARKER, Home
from trainer.checkpoint.location import DISK, Disk, ObjectStore
from trainer.errors import CheckpointError
from trainer.files.s3 import Bucket


def url(study: Mapping[str, Any] | RowMapping) -> str:
    """Of the bucket in a study's row, empty where its home has all."""
    return study["environment"].get("checkpoints", "")


def place(home: Home, study: Mapping[str, Any] | RowMapping) -> Disk:
    """Where what the study's row speaks of lies, for paths of this home."""
    found = url(study)
    return ObjectStore(_bucket(found, study), home.root) if found else DISK


def has_results(home: Home, study: Mapping[str, Any] | RowMapping) -> bool:
    """Whether what a driver writes into its own home is to be found in this one: beside a bucket only the last driver's
    has all of it."""
    where = study["environment"]
    return not url(study) or (where.get("host"), where.get("home")) == (socket.gethostname(), str(home.root))


def _bucket(at: str, study: Mapping[str, Any] | RowMapping) -> Bucket:
    return Bucket(at).below(_folder(study))


def _folder(study: Mapping[str, Any] | RowMapping) -> str:
    return f"{study['name']}.{study['uid']}"


def settled(given: str | None, study: Mapping[str, Any] | RowMapping | None, executor: str) -> str:
    """The URL that a study is to be driven with, empty for its home: as it was begun, else as given. Raises UserError
    or ConfigError where that cannot be, or nothing answers there."""
    asked = Bucket(given).url if given else ""
    found = asked if study is None else url(study)
    named = given != os.environ.get("HPO_CHECKPOINTS")  # else it is for studies that begin
    if study is not None and asked and asked != found and named:
        raise UserError(
            f"--checkpoints {asked}: study {study['name']!r} was begun with its checkpoints in {found or 'its home'}, "
            "and they stay there: leave the option out, or start another study by --name."
        )
    if found and executor == "ray-tune":
        raise UserError("--checkpoints with --executor ray-tune: Tune keeps checkpoints of its own; take another one.")
    if found:
        try:
            Bucket(found).check()
        except CheckpointError as error:
            raise UserError(f"--checkpoints {error}") from error
    return found


def mark(home: Home, study: RowMapping) -> None:
    """Leave the study's uid where its checkpoints will lie, by which workers know that they see that very place."""
    home.mark(study["name"], study["uid"])
    if at := url(study):
        _bucket(at, study).put_new(MARKER, study["uid"].encode())


def clear(study: Mapping[str, Any] | RowMapping) -> None:
    """Remove all that the study has in its bucket, if it has one; of other studies nothing, since each has a folder of
    its own. Raises CheckpointError."""
    if at := url(study):
        Bucket(at).remove(_folder(study))


def check(home: Home, study: Mapping[str, Any] | RowMapping, host: str = "") -> None:
    """Raise UserError, or CheckpointError, unless `mark` was called with what this process sees. `host`, by default the
    one in its row, drives the study."""
    at, host = url(study), host or study["environment"]["host"]
    if not at:
        home.check_mark(study["name"], study["uid"], host)
    elif _bucket(at, study).get(MARKER) != study["uid"].encode():
        raise UserError(
            f"{at} is not, from here, where study {study['name']!r} keeps its checkpoints: give this host the "
            f"AWS_ENDPOINT_URL of {host}, which drives it."
        )
