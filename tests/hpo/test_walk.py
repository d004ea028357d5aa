"""The way from `hpo run` to the first claim stays as short as it is: a new detour is seen."""

from __future__ import annotations

from places import ROOT
from walk import walk

# At the commit d365881, before a run was planned at once: 63 files, 81 returns.
# The 48th file is `declaration/resolved.py`, which is asked whether trials pause in order. For outages the command and
# the pool visit `files/outage.py`, and the command `declaration/budget.py`, which reads `--outage-wait`. The 51st is
# `search/confirming.py`, which says what of the budget a confirming phase may need,
# the 52nd `workers/figures.py`, which measures a worker. Four files more record who runs the study (`ledger/audit.py`).
MOST_FILES, MOST_RETURNS = 56, 50


def test_the_way_to_the_first_claim_is_no_longer_than_it_was():
    taken = walk(ROOT)
    assert taken.ended, "the walk does not reach the claim: a call on the way cannot be followed"
    assert taken.files <= MOST_FILES and taken.returns <= MOST_RETURNS, (taken.files, taken.returns)


MAIN = """
from hpo.cli import steps


def run():
    steps.first()
    again()
    steps.second()


def again():
    pass
"""
STEPS = """
from hpo.ledger.claims import claim


def first():
    pass


def second():
    claim()
"""


def test_a_walk_counts_the_files_that_it_enters_and_the_returns(tmp_path):
    for name, text in {"cli/main": MAIN, "cli/steps": STEPS, "ledger/claims": "def claim():\n    pass\n"}.items():
        file = tmp_path / "hpo" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    taken = walk(tmp_path)
    assert taken.stays == ["hpo.cli.main", "hpo.cli.steps", "hpo.cli.main", "hpo.cli.steps", "hpo.ledger.claims"]
    assert (taken.files, taken.returns, taken.ended) == (3, 2, True)
