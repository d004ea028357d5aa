"""Implements `hpo verify`, which compares a home's ledger with its rules, the files on disk and the tracker.

    rules.py     the ledger against its own rules
    disk.py      checkpoints, artifacts, metrics.json, and leftovers of killed processes
    tracker.py   MLflow against the ledger

The tracker is "behind" by the transactions it has not been sent yet, which the cursors alone show. It "differs" where
sent data is missing or changed, or where it holds data that was never sent. Nothing is written.
"""

from __future__ import annotations

from hpo.ledger import Ledger, queries
from hpo.ledger.removal import REMOVING
from hpo.storage.home import Home
from hpo.text import command
from hpo.tracking.mlflow.damage import damage_of
from hpo.tracking.uri import tracking_uri_of
from hpo.verify import disk, rules, tracker
from hpo.verify.report import Report

__all__ = ["Report", "verify"]


def verify(home: Home, storage: str, tracking_uri: str | None = None, study: str | None = None) -> Report:
    """Checks one study, or all studies, each against its own tracker or the one at `tracking_uri`.

    If the study is running, data that may still change is left out.
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
            if row.state == REMOVING:
                removes = command(f"rm --study {name}")
                report.differences.append(f"{name}: its removal was cut short: `{removes}` finishes it")
                continue
            # A tracker cannot be compared with rows that break the ledger's own rules.
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
