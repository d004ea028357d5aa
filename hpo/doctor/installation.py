"""Compares the installed code with the code that its release recorded."""

from __future__ import annotations

from collections.abc import Iterator

from hpo.declaration import code_digest
from hpo.doctor.finding import Finding
from hpo.version import VERSION


def code() -> Iterator[Finding]:
    """Yields a note about the areas of the code that differ from the recorded ones."""
    if areas := ", ".join(code_digest.modified()):
        text = f"modified: the code of {areas} is not the one recorded for release {VERSION}; begun studies ask"
        yield Finding("python", "note", text, "`make golden` in the clone records it where no part behaves otherwise.")
