"""Reads a trial's training progress from its row."""

from __future__ import annotations

from hpo.ledger.rows import TrialRow


def trained(row: TrialRow) -> int:
    """Returns the epochs of a trial as a budget counts them: 0 for a trial that was lost."""
    return 0 if row.outcome == "lost" else row.epoch - row.from_epoch


def has_value(row: TrialRow) -> bool:
    """Returns whether a trial has ended with a value; a trial stopped on a loss that is not finite has none."""
    return row.state in ("complete", "pruned") and row.values is not None
