"""What the tests of imports share: assets that released libraries wrote, and an import without the mirror."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hpo.interchange.sources import Request, bring
from hpo.ledger import queries
from hpo.storage.home import Home

MAKE = Path(__file__).parents[2] / "assets" / "imports" / "make.py"


def _make() -> Any:
    spec = importlib.util.spec_from_file_location("imports_make", MAKE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def asset(tmp_path) -> Callable[[str], Path]:
    """name -> the asset, unpacked."""
    return lambda name: _make().unpacked(name, tmp_path)


@pytest.fixture
def brought(home: Home) -> Callable[..., Any]:
    """Import into the home: what was done, and the rows that the ledger has then."""

    def run(tool: str, source: object, **given: Any) -> Any:
        ledger, done = bring(Request(tool, str(source), **given), home, None, None)
        with closing(ledger), ledger.read() as connection:
            study = queries.study_row(connection, done.name)
            trials = queries.trial_rows(connection, study.id)
            curves: dict[int, dict[str, list[tuple[int, float]]]] = {}
            for number, key, step, _, value in queries.curves(connection, study.id):
                curves.setdefault(number, {}).setdefault(key, []).append((step, value))
        return SimpleNamespace(done=done, study=study, trials=trials, curves=curves)

    return run
