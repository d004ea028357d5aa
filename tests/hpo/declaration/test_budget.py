"""Budgets: how they are given, kept and held against what is used."""

from __future__ import annotations

import pytest
from made_rows import study_row

from hpo.declaration.budget import Budget, parse_time
from hpo.errors import UserError
from hpo.text import spelled


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3600", 3600), ("90m", 5400), ("2h", 7200), ("1d12h", 129600), ("1h30m", 5400), ("0.5h", 1800), ("45s", 45)],
)
def test_times_as_people_write_them(text, seconds):
    assert parse_time(text) == seconds
    assert parse_time(spelled(seconds)) == seconds


@pytest.mark.parametrize("text", ["", "0", "-5", "2 hours", "h", "m30", "1e9", "nan", "99999999999999999999", "9999d"])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(UserError, match="is not a length of time: give seconds, or such as 90m"):
        parse_time(text)


def test_what_is_given_stands_over_what_was_stored():
    assert Budget(epochs=5).over(Budget(trials=3, epochs=4)) == Budget(trials=3, epochs=5)
    stored = Budget(trials=3, seconds=60.0)
    assert Budget.of(study_row(**stored.columns())) == stored
    assert not Budget() and Budget(seconds=1.0)


def test_a_bound_may_be_repeated_but_not_lowered_below_what_is_used():
    stored, used = Budget(trials=8, epochs=40, seconds=60.0), Budget(trials=8, epochs=44, seconds=61.0)
    stored.check("s", stored, used)
    Budget(trials=9, epochs=45, seconds=90.0).check("s", stored, used)
    for given, words in (
        (Budget(trials=3), "--trials 3: study 's' has used 8 trials already"),
        (Budget(epochs=43), "--epochs 43: study 's' has used 44 epochs already"),
        (Budget(seconds=30.0), "--time 30s: study 's' has used 1m1s already"),
    ):
        with pytest.raises(UserError, match=words):
            given.check("s", stored, used)
