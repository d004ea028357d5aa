"""Reports how many of the ledger's transactions a tracker lacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hpo.ledger import Ledger, queries
from hpo.text import command, counted
from hpo.tracking import projection
from hpo.tracking.trackers import called


@dataclass(frozen=True)
class DrainResult:
    """The result of a drain: batches `sent`, how many of the ledger's transactions the tracker is `behind`, and `why`.

    `repaired` lists the changes that people had made there and how each was handled.
    """

    sent: int
    behind: int
    why: str = ""
    repaired: Sequence[str] = ()


def behind(ledger: Ledger, tracker_name: str, study: str) -> int:
    """Returns how many of the ledger's transactions on a study the tracker lacks, from the cursors alone."""
    return ledger.look(lambda c: projection.behind(c, tracker_name, queries.study_row(c, study)))


def lag(result: DrainResult, tracker_name: str) -> str:
    """Returns the text for the user about a drain; an empty one if the tracker has everything."""
    if not result.behind:
        return ""
    why = f" ({result.why})" if result.why else ""
    behind = counted(result.behind, "transaction")
    if "is damaged" in result.why:  # its sentence says what to do
        return f"{called(tracker_name)} is behind by {behind}: {result.why}"
    return f"{called(tracker_name)} is behind by {behind}{why}: run `{command('sync')}`; nothing is lost."
