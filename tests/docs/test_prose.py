"""Prose of hpo, trainer and studies: no file holds more that is not plain English than its baseline allows."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from places import ROOT
from prose import BASELINE, KINDS, PACKAGES, Counts, count, count_all, faults, read_baseline, risen, update

NEEDS_GIT = pytest.mark.skipif(shutil.which("git") is None, reason="runs where git is installed")

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


def test_no_file_counts_more_than_its_baseline():
    counts = count_all(ROOT)
    assert {path.split("/")[0] for path in counts} == set(PACKAGES)
    sentences = risen(ROOT, counts, read_baseline(ROOT))
    assert sentences == [], "write these places in plain English; for a renamed or split file run `make prose`"


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
    ],
)
def test_uses_parameters_and_attributes_do_not_count_as_names(source):
    assert count(source) == Counts()


def test_a_fault_names_its_line_and_words():
    assert faults(WORDY) == [(0, 1, "What"), (1, 6, "is no trial"), (2, 4, "found"), (2, 4, "one")]


@pytest.fixture
def copied(tmp_path) -> Path:
    """Returns a tree that holds one file, with a baseline that equals its counts."""
    write(tmp_path, "hpo/plan.py", WORDY)
    (tmp_path / BASELINE).parent.mkdir(parents=True)
    assert update(tmp_path) == []
    assert (tmp_path / BASELINE).read_text() == '{\n"hpo/plan.py": [1, 1, 2]\n}\n'
    return tmp_path


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def commit(root: Path) -> None:
    settings = ("-c", "user.name=name", "-c", "user.email=name@example.com", "-c", "commit.gpgsign=false")
    for arguments in (["init", "--quiet"], ["add", "--all"], [*settings, "commit", "--quiet", "-m", "The plan"]):
        subprocess.run(["git", *arguments], cwd=root, check=True)


def now(root: Path) -> list[str]:
    return risen(root, count_all(root), read_baseline(root))


@pytest.mark.parametrize(
    ("planted", "sentence"),
    [
        (
            'def keep():\n    """Where a plan is kept."""\n',
            f"hpo/plan.py: 2 {KINDS[0]}, 1 allowed, on lines 1 (What), 10 (Where)",
        ),
        (
            'MESSAGE = "the rest of those that wait"\n',
            f"hpo/plan.py: 2 {KINDS[1]}, 1 allowed, on lines 6 (is no trial), 9 (of those that)",
        ),
        ("held = 3\n", f"hpo/plan.py: 3 {KINDS[2]}, 2 allowed, on lines 4 (found), 4 (one), 9 (held)"),
    ],
)
def test_a_planted_fault_is_refused_with_its_place(copied, planted, sentence):
    assert now(copied) == []
    write(copied, "hpo/plan.py", WORDY + "\n" + planted)
    [refusal] = now(copied)
    assert refusal == sentence
    assert update(copied) == [refusal]
    assert json.loads((copied / BASELINE).read_text()) == {"hpo/plan.py": [1, 1, 2]}


def test_a_clause_planted_in_a_real_file_is_refused(tmp_path):
    path = "trainer/optim/muon.py"
    source = (ROOT / path).read_text()
    write(tmp_path, path, source)
    allowed = read_baseline(ROOT)
    assert risen(tmp_path, count_all(tmp_path), allowed) == []
    write(tmp_path, path, f'{source}\n\ndef planted():\n    """Whether it counts."""\n')
    [refusal] = risen(tmp_path, count_all(tmp_path), allowed)
    assert refusal.startswith(path) and "(Whether)" in refusal


def test_a_count_that_fell_is_allowed_and_then_lowered(copied):
    write(copied, "hpo/plan.py", WORDY.replace("What a plan holds", "Plans"))
    assert now(copied) == []
    assert update(copied) == []
    assert json.loads((copied / BASELINE).read_text()) == {"hpo/plan.py": [0, 1, 2]}
    write(copied, "hpo/plan.py", WORDY)
    assert len(now(copied)) == 1


def test_a_file_without_faults_leaves_the_baseline(copied):
    write(copied, "hpo/plan.py", PLAIN)
    assert update(copied) == []
    assert json.loads((copied / BASELINE).read_text()) == {}


@NEEDS_GIT
def test_a_new_file_has_no_baseline(copied):
    commit(copied)
    write(copied, "hpo/other.py", '"""Whether it counts."""\n')
    assert len(now(copied)) == 1 and update(copied) == now(copied)
    (copied / "hpo" / "plan.py").unlink()  # an unlike file takes nothing over from one that has gone
    assert len(now(copied)) == 1 and update(copied) == now(copied)


@NEEDS_GIT
@pytest.mark.parametrize("committed", [False, True])
def test_a_renamed_file_keeps_its_counts(copied, committed):
    commit(copied)
    write(copied, "trainer/moved.py", WORDY + "\nPLAN = 3\n")
    (copied / "hpo" / "plan.py").unlink()
    if committed:
        commit(copied)
    assert len(now(copied)) == 3  # until it is recorded
    assert update(copied) == []
    assert json.loads((copied / BASELINE).read_text()) == {"trainer/moved.py": [1, 1, 2]}
    assert now(copied) == []


@NEEDS_GIT
def test_a_renamed_file_with_a_further_fault_is_refused(copied):
    commit(copied)
    write(copied, "hpo/moved.py", WORDY + "held = 3\n")
    (copied / "hpo" / "plan.py").unlink()
    assert len(update(copied)) == 3


@NEEDS_GIT
def test_parts_of_a_file_share_its_counts(copied):
    commit(copied)
    head, body = WORDY.split("\n\n")
    write(copied, "hpo/plan.py", PLAIN)
    write(copied, "hpo/head.py", head)
    write(copied, "hpo/body.py", body)
    assert update(copied) == []
    assert json.loads((copied / BASELINE).read_text()) == {"hpo/body.py": [0, 1, 2], "hpo/head.py": [1, 0, 0]}


@NEEDS_GIT
def test_a_copy_takes_nothing_over(copied):
    commit(copied)
    write(copied, "hpo/copy.py", WORDY)
    assert len(update(copied)) == 3


def test_a_renamed_file_needs_git_to_keep_its_counts(copied, monkeypatch):
    monkeypatch.setenv("PATH", "")
    (copied / "hpo" / "plan.py").rename(copied / "hpo" / "moved.py")
    assert len(update(copied)) == 3
