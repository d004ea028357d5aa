"""Stores a study's report with the study; its MLflow run then shows it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from hpo.analysis.report import page
from hpo.ledger import Ledger
from hpo.storage import artifacts

if TYPE_CHECKING:
    from hpo.analysis.report.data import StudyReport
    from hpo.storage.home import Home

NAME = "report.html"


def leave(ledger: Ledger, home: Home, report: StudyReport) -> Path:
    """Stores the page in place of an earlier one and returns its path. The mirror sends it when it next drains."""
    with tempfile.TemporaryDirectory() as directory:
        files = {NAME: page.write([report], Path(directory, NAME))}
        artifacts.leave_in_home(ledger, home, report.name, files, "--to FILE.html")
    return home.plots(report.name) / NAME
