"""Removes the files of a study from its home and from the bucket that its row names."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from hpo.errors import StorageError
from hpo.ledger.rows import StudyRow
from hpo.storage import locations
from hpo.storage.home import MARKER, Home
from hpo.text import command


def remove_study(home: Home, study: StudyRow) -> None:
    """Removes all files of a study, the mark of its directory last.

    Raises StorageError if that is not allowed, and CheckpointError if a bucket is unreachable.
    """
    remove_trials(home, study)
    name = study.name
    directories = (home.checkpoints(name, 0).parent, home.files(name, 0).parent, home.plots(name), home.output(name))
    for directory in (*directories, *_others(home, name)):
        _remove(directory, name)


def remove_trials(home: Home, study: StudyRow) -> None:
    """Removes the files of its trials, from the home and from the bucket of its uid."""
    locations.clear(study)
    for root in (home.checkpoints(study.name, 0).parent, home.files(study.name, 0).parent):
        for directory in sorted(root.iterdir()) if root.is_dir() else ():
            if directory.name != MARKER:
                _remove(directory, study.name)


def _others(home: Home, name: str) -> Iterator[Path]:
    """Yields the study's logs and Ray Tune's files on its experiments. Another study's name may begin with this one."""
    log = re.compile(rf"{re.escape(name)}\.\d{{8}}T\d{{6}}-\d+\..+\.log")
    experiment = re.compile(rf"{re.escape(name)}-\d+\.\d+")
    for root, pattern in ((home.logs, log), (home.tune, experiment)):
        yield from sorted(path for path in (root.iterdir() if root.is_dir() else ()) if pattern.fullmatch(path.name))


def _remove(path: Path, study: str) -> None:
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        removes = command(f"rm --study {study}")
        raise StorageError(
            f"{error.filename or path} cannot be removed ({error.strerror}): make its directory writable, then "
            f"`{removes}` goes on."
        ) from error
