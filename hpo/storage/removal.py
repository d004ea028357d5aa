"""Removes the files of a study: from its home, and from the bucket that its row names."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpo.errors import StorageError
from hpo.ledger.rows import RowMapping
from hpo.storage import locations
from hpo.storage.home import MARKER, Home
from hpo.text import command


def remove_study(home: Home, study: Mapping[str, Any] | RowMapping) -> None:
    """All of it, the mark by which the place is known at last. Raises StorageError where that is not allowed, and
    CheckpointError where a bucket is away."""
    remove_trials(home, study)
    name = study["name"]
    own = (home.checkpoints(name, 0).parent, home.files(name, 0).parent, home.plots(name), home.output(name))
    for place in (*own, *_others(home, name)):
        _remove(place, name)


def remove_trials(home: Home, study: Mapping[str, Any] | RowMapping) -> None:
    """What is of its trials, in the home and in the bucket of its uid."""
    locations.clear(study)
    for root in (home.checkpoints(study["name"], 0).parent, home.files(study["name"], 0).parent):
        for place in sorted(root.iterdir()) if root.is_dir() else ():
            if place.name != MARKER:
                _remove(place, study["name"])


def _others(home: Home, name: str) -> Iterator[Path]:
    """The study's logs, and what Ray Tune has kept of its experiments. Another study's name may begin with this one."""
    log = re.compile(rf"{re.escape(name)}\.\d{{8}}T\d{{6}}-\d+\..+\.log")
    experiment = re.compile(rf"{re.escape(name)}-\d+\.\d+")
    for root, own in ((home.logs, log), (home.tune, experiment)):
        yield from sorted(path for path in (root.iterdir() if root.is_dir() else ()) if own.fullmatch(path.name))


def _remove(place: Path, study: str) -> None:
    try:
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)
    except OSError as error:
        again = command(f"rm --study {study}")
        raise StorageError(
            f"{error.filename or place} cannot be removed ({error.strerror}): make its directory writable, then "
            f"`{again}` goes on."
        ) from error
