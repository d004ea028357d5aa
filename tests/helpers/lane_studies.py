"""Studies whose trials train as lanes, and what the ledger knows of their groups."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from places import HARNESS
from sqlalchemy import select
from study_runs import query

from hpo.ledger.database.tables import attempts, reports, trials
from hpo.storage.home import Home

LANES = HARNESS / "lanes_study.py"


TRIALS, WINDOW, SEED = 9, 8, 3


STEPS = 4  # of an epoch


ALL = 6  # of a study without a search


FLAGS: dict[str, Any] = {"reference": str(LANES), "window": WINDOW, "seed": SEED, "overrides": {"train.lanes": 4}}


ALIKE = {"overrides": {"train.lanes": 4, "model.hidden_size": 8}}


# The command trains several sizes one by one, and what a strategy may stop, unless a study has begun otherwise.
ALL_ALIKE = ("-o", "train.lanes=4", "-o", "model.hidden_size=8")


def groups(home: Home) -> dict[str, list[int]]:
    """Of each group the trials whose last attempt was in it."""
    found = defaultdict(list)
    for number, group in map(tuple, query(home, select(trials.c.number, trials.c.group).order_by(trials.c.number))):
        found[group].append(number)
    return dict(found)


def values(home: Home) -> dict[int, list[tuple]]:
    """Of each trial what it has reported, but for what the machine decides."""
    found = defaultdict(list)
    told = select(trials.c.number, reports.c.key, reports.c.step, reports.c.value).join(trials)
    for number, *value in query(home, told.where(reports.c.key.in_(("val/loss", "train/loss")))):
        found[number].append(tuple(value))
    return {number: sorted(own) for number, own in found.items()}


def outcomes(home: Home) -> list[tuple[int, int, str | None]]:
    """(trial, fence, outcome) of every attempt."""
    ends = select(trials.c.number, attempts.c.fence, attempts.c.outcome).join(trials)
    return sorted(map(tuple, query(home, ends)))


def variant(tmp_path: Path, before: str, after: str) -> str:
    """The study with a line of its own."""
    file = tmp_path / "mine" / "lanes_study.py"
    file.parent.mkdir()
    text = LANES.read_text()
    assert text.count(before) == 1
    file.write_text(text.replace(before, after))
    return str(file)


SIZES = (8, 8, 12, 8, 8)
