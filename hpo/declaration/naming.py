"""Checks the names of studies."""

from __future__ import annotations

import re

from hpo.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_RESERVED = {"con", "prn", "aux", "nul", *(f"{stem}{i}" for stem in ("com", "lpt") for i in range(1, 10))}


def check_name(name: str, what: str = "study name") -> str:
    """Returns `name` if it is safe as a directory and a run name on every platform, else raises UserError."""
    if not _NAME.fullmatch(name) or name.split(".")[0].lower() in _RESERVED or name.endswith("."):
        raise UserError(
            f"{what} {name!r} cannot be used: a letter or digit, then up to 63 letters, digits, '.', '_' or '-', with "
            "no '.' at the end, and none of the names of devices (con, nul, com1 ...) that Windows keeps to itself."
        )
    return name
