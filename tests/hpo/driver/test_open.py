"""A study's row where the ledger has none yet."""

from __future__ import annotations

import pytest
from study_runs import hpo
from tiny_runs import TINY

from hpo.doctor import home as homes


@pytest.mark.whole
@pytest.mark.parametrize("emptied", [False, True])
def test_checkpoints_that_the_ledger_does_not_know_are_not_taken(home, emptied, process):
    """Of a ledger that is lost, or empty: the study would begin anew in their place, and retention delete them."""
    arguments = ("run", "--study", TINY, "--trials", "2", "--executor", "inline")
    assert hpo(*arguments, home=home).exit_code == 0
    kept = sorted(home.root.glob("checkpoints/*/*/step-*"))
    for file in home.root.glob("ledger.db*"):
        file.unlink()
        if emptied and file.name == "ledger.db":
            file.touch()
    [found] = [one for one in homes.ledger(home, None) if one.level == "fails"]
    assert "has checkpoints" in found.text
    result = hpo(*arguments, home=home)
    assert result.exit_code == 2 and "that the ledger does not know: restore the ledger from a" in result.stderr
    assert kept and sorted(home.root.glob("checkpoints/*/*/step-*")) == kept
