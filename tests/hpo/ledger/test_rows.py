"""Rows are frozen dataclasses: nothing outside the ledger reads them by a text, and `Any` only becomes rarer."""

from __future__ import annotations

import ast
from collections import Counter
from dataclasses import FrozenInstanceError, fields, is_dataclass

import pytest
from made_rows import study_row, trial_row
from places import ROOT
from sqlalchemy import literal, select

from hpo.ledger import Ledger, read, rows
from hpo.ledger.rows import NumberedCheckpoint, TrialRow
from hpo.ledger.stored_spec import StoredSpec

NAMES = ("attempt", "checkpoint", "decision", "event", "lease", "row", "study", "worker")
MOST_SUBSCRIPTS = 50
MOST_ANY = 1055
KINDS = [kind for kind in vars(rows).values() if isinstance(kind, type) and is_dataclass(kind)]


def counted() -> tuple[int, int, set[str]]:
    """Returns the subscripts of `NAMES` by a text outside the ledger, the uses of Any, and who else names a mapping."""
    subscripts, uses, mappings = 0, Counter[str](), set[str]()
    for file in sorted((ROOT / "hpo").rglob("*.py")):
        inside = file.is_relative_to(ROOT / "hpo" / "ledger")
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Name):
                uses[node.id] += 1
            if inside:
                continue
            if isinstance(node, ast.Name | ast.alias) and "RowMapping" in ast.unparse(node):
                mappings.add(file.name)
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in NAMES:
                subscripts += isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str)
    return subscripts, uses["Any"], mappings


def test_rows_are_read_by_attribute_and_any_becomes_rarer():
    subscripts, uses, mappings = counted()
    assert mappings == set()
    assert subscripts <= MOST_SUBSCRIPTS
    assert uses <= MOST_ANY, "give the value its type, or object where nothing reads it"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_row_never_changes(kind):
    row = kind(*(None for _ in fields(kind)))
    with pytest.raises(FrozenInstanceError):
        setattr(row, fields(kind)[0].name, 1)
    assert not hasattr(row, "__dict__")


def test_a_query_that_selects_other_columns_than_its_rows_have_is_refused(home):
    ledger = Ledger(home.create().storage)
    swapped = select(*(literal(1).label(name) for name in ("key", "trial_id", "fold")))
    with ledger.read() as connection, pytest.raises(TypeError, match="MetricKey has the fields"):
        read.every(rows.MetricKey, connection.execute(swapped))
    ledger.close()


def test_an_earlier_specification_has_the_defaults_of_what_it_lacks():
    old = {"reference": "mlp", "objectives": [], "unknown": 1}
    spec = StoredSpec.of(old)
    assert spec.json is old and spec.strategy == {"name": "none"} and spec.constraints == [] and spec.imported is None
    assert study_row(spec=old).spec == spec


def test_the_seconds_of_a_trial_need_both_its_ends():
    assert trial_row(started_at=1.0, ended_at=3.5).seconds == 2.5
    assert trial_row(started_at=1.0).seconds is None and issubclass(type(trial_row()), TrialRow)
    assert [field.name for field in fields(NumberedCheckpoint)][-1] == "number"
