"""Prose of hpo, trainer and studies: the counter by example, and no fault in any file."""

from __future__ import annotations

import pytest
from places import ROOT
from prose import PACKAGES, Counts, count, faults, places

WORDY = '''"""What a plan holds."""

def chosen(trials, given):
    found = [one for one in trials if one in given]
    if not found:
        raise ValueError("there is no trial")
    return found
'''
PLAIN = '''"""Plans."""

def longest(trials, limit):
    """Returns the trials that are longer than `limit`."""
    return [trial for trial in trials if len(trial) > limit]
'''


def test_hpo_trainer_and_studies_are_written_in_plain_english():
    assert all((ROOT / package).is_dir() for package in PACKAGES)
    assert places(ROOT) == []


@pytest.mark.parametrize(
    "source",
    [
        '"""What a plan holds."""',
        'class Plan:\n    """\n    Of those rows the first."""',
        'def plan():\n    """Whether a plan stands."""',
        'async def plan():\n    """how a plan is made."""',
    ],
)
def test_a_docstring_that_opens_with_a_clause_counts(source):
    assert count(source) == Counts(openings=1)


@pytest.mark.parametrize(
    "source",
    [
        '"""Whatever the plan: it holds."""',
        '"""Returns what a plan holds."""',
        'plan = "What a plan holds"',
        "# Of those rows the first.",
        'def plan():\n    rows = []\n    """What a string in a body says."""',
    ],
)
def test_other_sentences_do_not_count_as_clauses(source):
    assert count(source) == Counts()


@pytest.mark.parametrize(
    "text",
    [
        "there is no trial 7",
        "'x' is no optimizer",
        "leave away --name",
        "it was left away",
        "the rows behind it",
        "mend the file",
        "the file was mended",
        "this comes to 3 epochs",
        "a rung that trials\n    come to",
        "The first of those that wait",
    ],
)
def test_stock_phrases_count_in_messages_and_docstrings(text):
    assert count(f"raise ValueError({text!r})") == Counts(phrases=1)
    assert count(f"def plan(x):\n    raise ValueError(f'{{x}}' {text!r} f'{{x}}')") == Counts(phrases=1)
    assert count(f'"""{text}."""') == Counts(phrases=1)


@pytest.mark.parametrize(
    "text",
    [
        "the loss is no longer finite",
        "this is no slower",
        "a recommended amendment",
        "the rows behind items",
        "this becomes tomorrow's plan",
        "leave the way free",
        "of those rows that wait",
    ],
)
def test_phrases_that_look_alike_do_not_count(text):
    assert count(f"raise ValueError({text!r})") == Counts()


def test_comments_do_not_count():
    assert count("# There is no trial behind it.\nrows = 1  # mend") == Counts()


@pytest.mark.parametrize(
    "source",
    [
        "found = 1",
        "found: int = 1",
        "given += 1",
        "first, (own, *rest) = rows",
        "for one in rows: pass",
        "rows = [1 for one in rows]",
        "rows = {name: 1 for name, held in rows}",
        "if (mine := 1): pass",
        "with open(path) as held: pass",
        "try: pass\nexcept OSError as given: pass",
        "match rows:\n    case [*own]: pass",
        "match rows:\n    case {'name': found}: pass",
        "told += 1",
        "rows = [1 for item in rows]",
        "try: pass\nexcept OSError as thing: pass",
        "class Plan:\n    def told(self):\n        asked: int = 1",
        "class Plan:\n    found: int = 1",
    ],
)
def test_each_binding_of_an_empty_name_counts(source):
    assert count(source) == Counts(names=1)


@pytest.mark.parametrize(
    "source",
    [
        "rows = found + one",
        "def plan(given, *, own=None): pass",
        "plan(held=3)",
        "plan.mine = 3",
        "rows['found'] = 1",
        "one_row = 1",
        "del held",
        "class Plan:\n    told: int\n    asked: int = 0",
    ],
)
def test_uses_parameters_and_attributes_do_not_count_as_names(source):
    assert count(source) == Counts()


def test_a_fault_names_its_line_and_words():
    assert faults(WORDY) == [(0, 1, "What"), (1, 6, "is no trial"), (2, 4, "found"), (2, 4, "one")]


@pytest.mark.parametrize(
    ("planted", "line"),
    [
        ('def keep():\n    """Where a plan is kept."""\n', "hpo/plan.py:7: docstring that opens with a clause: Where"),
        ('MESSAGE = "the rest of those that wait"\n', "hpo/plan.py:6: stock phrase: of those that"),
        ("held = 3\n", "hpo/plan.py:6: name that says nothing: held"),
    ],
)
def test_a_planted_fault_is_printed_with_its_place(tmp_path, planted, line):
    path = tmp_path / "hpo" / "plan.py"
    path.parent.mkdir()
    path.write_text(PLAIN)
    assert places(tmp_path) == []
    path.write_text(PLAIN + planted)
    assert places(tmp_path) == [line]
