"""Compares the installed code with the code that its release recorded."""

from __future__ import annotations

from collections.abc import Iterator

from hpo.declaration import code_digest
from hpo.doctor.finding import Finding
from hpo.version import VERSION


def code() -> Iterator[Finding]:
    """Yields a note about the areas of the code that differ from the recorded ones."""
    if areas := ", ".join(code_digest.modified()):
        text = f"the code of {areas} differs from release {VERSION}, so a study that was begun with it may report drift"
        yield Finding(
            "python", "note", text, "new studies need nothing; whoever changed it runs `make golden` in the clone."
        )
