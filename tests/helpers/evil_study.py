"""A study of which everything that a user can write is out to do harm in a page."""

from __future__ import annotations

from pathlib import Path

from crafted import open_crafted, put_trial
from sqlalchemy import update

from hpo.analysis.report import data
from hpo.ledger.database import tables
from hpo.storage.home import Home

EVIL = ["<script>alert(1)</script>", '"><img src=x onerror=alert(2)>', "</script><script>alert(3)</script>"]
EVIL += ["'; alert(4) //", "\u202egpj.exe", "{{ 7 * 7 }}", "<!--<script>", "\u2028x", "a\x1b[31mb", "\\u202e"]


def read(tmp_path: Path) -> data.StudyReport:
    """What a report reads of it."""
    objectives = [{"metric": f"val/{EVIL[0]}", "direction": "minimize", "select": "last"}]
    ledger = open_crafted(tmp_path / "ledger.db", objectives=objectives, metrics=["*"])
    with ledger.write() as connection:
        host = {"host": EVIL[1], "home": str(tmp_path), "versions": {EVIL[0]: EVIL[2]}, "data": {EVIL[1]: EVIL[4]}}
        row = {"environment": host, "identity": {"data": {EVIL[0]: EVIL[1]}}, "state": "complete"}
        connection.execute(update(tables.studies).values(**row))
        connection.execute(update(tables.workers).values(host=EVIL[0]))
    for number, text in enumerate(EVIL):
        params = {f"model.{EVIL[2]}": text, f"x.{EVIL[4]}": 0.1 * number, "model.plain": text}
        put_trial(ledger, number, "complete", (0.5,), params=params, values=[float(number)], metrics={EVIL[2]: 1.0})
    put_trial(ledger, len(EVIL), "failed", error=f"ValueError: {EVIL[0]}\n{EVIL[2]}")
    with ledger.write() as connection:
        evil = {"val/accuracy": objectives[0]["metric"]}
        for old, new in evil.items():
            connection.execute(update(tables.reports).where(tables.reports.c.key == old).values(key=new))
    read = data.read(ledger, Home.at(tmp_path), "crafted")
    ledger.close()
    return read
