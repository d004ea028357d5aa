"""`hpo verify`: a home against itself. The ledger's own rules, its files on disk, and what the tracker shows.

    rules.py     the ledger against its own rules
    disk.py      checkpoints, artifacts, metrics.json, and what a killed process has left lying
    tracker.py   MLflow against the ledger

"Behind" is what the tracker has not been sent yet, told by the cursors alone; "differs" is what was sent and does not
stand there as it should, or stands there without having been sent. Nothing is written.
"""

from __future__ import annotations

from hpo.ledger import Ledger, queries
from hpo.ledger.removal import REMOVING
from hpo.storage.home import Home
from hpo.text import command
from hpo.tracking.damage import damage_of
from hpo.tracking.uri import tracking_uri_of
from hpo.verify import disk, rules, tracker
from hpo.verify.report import Report

__all__ = ["Report", "verify"]


def verify(home: Home, storage: str, tracking_uri: str | None = None, study: str | None = None) -> Report:
    """Check one study, or all there are, each where it is tracked, or at `tracking_uri`.

    Beside a live study, what is still moving is left out.
    """
    report = Report()
    ledger = Ledger(storage, create=False)
    try:
        if ledger.is_sqlite:
            report.differences += ledger.look(rules.integrity)
        names = [study] if study else ledger.look(queries.study_names)
        damaged: dict[str, str] = {}
        for name in names:
            row = ledger.look(lambda connection, name=name: queries.study_row(connection, name))
            if row["state"] == REMOVING:
                again = command(f"rm --study {name}")
                report.differences.append(f"{name}: its removal was cut short: `{again}` finishes it")
                continue
            # Rows that break the ledger's own rules are nothing to hold a tracker against.
            if rules.check(ledger, row, report):
                disk.check(ledger, row, home, report)
                uri = tracking_uri_of(ledger, name, home, tracking_uri)
                if uri not in damaged:
                    damaged[uri] = damage_of(uri)
                if not damaged[uri]:
                    tracker.check(ledger, row, home, uri, report)
        report.differences += filter(None, damaged.values())
        disk.check_leftovers(home, ledger.look(queries.study_names), report)
    finally:
        ledger.close()
    return report
