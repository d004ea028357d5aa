"""Keeps a secret token in a file that only its owner can read."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from hpo.errors import StorageError

_OTHERS = 0o077


def token_in(path: Path) -> str:
    """Returns the token in the file: 256 bits that are made once, or what its owner has written there.

    Raises OSError, and StorageError for an empty file, whose token everybody would know.
    """
    try:
        with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
    except FileExistsError:
        if path.stat().st_mode & _OTHERS:
            path.chmod(0o600)
    token = path.read_text().strip()
    if not token:
        raise StorageError(f"{path} is empty: delete it, and the next start writes a token into it.")
    return token
