"""Rows as queries return them, made of the columns that a test speaks of; every other column is None."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hpo.ledger.rows import ProposedTrial, StudyRow


def study_row(**columns: Any) -> StudyRow:
    """Returns the row of a study; its specification and its environment are empty unless they are given."""
    empty = dict.fromkeys(field.name for field in fields(StudyRow))
    return StudyRow.of(empty | {"spec": {}, "identity": {}, "environment": {}} | columns)


def trial_row(**columns: Any) -> ProposedTrial:
    """Returns the row of a trial; what is no column of it is left out."""
    return ProposedTrial(*(columns.get(field.name) for field in fields(ProposedTrial)))
