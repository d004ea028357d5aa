"""Checks the path that a command or a call will write, before it computes anything."""

from __future__ import annotations

import os
from errno import EACCES

from hpo.door import option
from hpo.errors import UserError
from trainer.files.paths import expanded


def check_free(to: str, *, directory: bool = False, force: bool) -> None:
    """Raises UserError if `to` cannot be written.

    That is the case if it exists and `force` is not set, if it is a file instead of a directory or the reverse, if its
    parent directory is missing or not writable, or if it is a URL.
    """
    path, kind, to = expanded(to), "directory" if directory else "file", option("to", to)
    if "://" in to:
        raise UserError(f"{to}: this command writes to no URL; name a {kind}.")
    try:
        exists, parent = path.exists(), path.absolute().parent
        if exists and path.is_dir() != directory:
            raise UserError(f"{to} is a {'file: name a directory' if directory else 'directory: name a file'}.")
        if exists and not force and (any(path.iterdir()) if directory else path.is_file()):
            replace = "write over it" if directory else "replace it"
            raise UserError(f"{to} exists already: name another {kind}, or give {option('force')} to {replace}.")
        if not parent.is_dir():
            raise UserError(f"{to}: directory {path.parent} does not exist; make it, or name another {kind}.")
        if not os.access(path if exists else parent, os.W_OK):
            raise PermissionError(EACCES, os.strerror(EACCES))
    except OSError as error:
        raise UserError(f"{to} cannot be written ({error.strerror}): name another {kind}.") from error


def check_new(to: str) -> None:
    """Raises UserError as `check_free` does, and for a directory that is not empty: it may hold a model's source."""
    check_free(to, directory=True, force=True)
    path = expanded(to)
    if path.is_dir() and any(path.iterdir()):
        raise UserError(f"{option('to', to)} is not empty, and nothing in it is overwritten: name a new directory.")
