"""The installation: whether its code is the one that its release recorded."""

from __future__ import annotations

from collections.abc import Iterator

from hpo.declaration import code_digest
from hpo.doctor.finding import Finding
from hpo.version import VERSION


def code() -> Iterator[Finding]:
    """Yields which areas of the code differ from those whose behaviour this release recorded."""
    if areas := ", ".join(code_digest.modified()):
        text = f"modified: the code of {areas} is not the one recorded for release {VERSION}; begun studies ask"
        yield Finding("python", "note", text, "`make golden` in the clone records it where no part behaves otherwise.")
