"""What more trials would bring, as commands, Python and the report say it."""

from __future__ import annotations

import json
import shutil

import pytest
from places import HARNESS
from sqlalchemy import update
from study_runs import drive, hpo, refused

import hpo as package
from hpo.ledger import Ledger, queries
from hpo.ledger.database import tables
from hpo.search.forecast import Seen, forecast
from hpo.storage.home import Home

pytestmark = pytest.mark.whole
CURVES = str(HARNESS / "curves_study.py")


@pytest.fixture(scope="module")
def searched(tmp_path_factory):
    home = Home(tmp_path_factory.mktemp("searched") / "home")
    drive(home, trials=16, reference=CURVES, sampler="random", strategy="none")
    return home


def seen_of(home: Home) -> list[Seen]:
    with Ledger(home.storage).read() as connection:
        rows = queries.trial_rows(connection, 1)
    valued = [row for row in rows if row.state in ("complete", "pruned") and row.values]
    return [Seen(row.values[0], row.state == "complete") for row in valued]


def test_every_door_says_the_same(searched):
    """Oracle: the forecast of the ledger's rows."""
    more = forecast(seen_of(searched), 50)
    assert more is not None
    facts = json.loads(hpo("forecast", "--trials", "50", "--json", home=searched).stdout)
    assert (facts["trials"], facts["gain"], facts["most"]) == (50, more.gain, more.most)
    handle = package.open(home=searched.root)
    assert handle.forecast(50).gain == more.gain
    line = handle.forecast().described()
    assert line.startswith("20 more trials, about ") and line in hpo("status", home=searched).stdout
    assert hpo("forecast", home=searched).stdout.startswith(line)
    assert json.loads(hpo("status", "--json", home=searched).stdout)["forecast"]["gain"] == handle.forecast().gain


def test_the_report_shows_it(searched, tmp_path):
    page = package.open(home=searched.root).report(tmp_path / "page.html").read_text()
    assert package.open(home=searched.root).forecast().described() in page


def test_removed_trials_do_not_count(searched, tmp_path):
    """Oracle: the forecast of the trials that are shown; the best of all is removed."""
    home = Home(shutil.copytree(searched.root, tmp_path / "home"))
    best = package.open(home=home.root).best["number"]
    assert hpo("rm", str(best), "--study", "curves", "--yes", "--leave-mlflow", home=home).exit_code == 0
    more, shown = package.open(home=home.root).forecast(), seen_of(home)
    again = forecast(shown, more.trials)
    assert len(shown) == 15 and again is not None and (more.gain, more.most) == (again.gain, again.most)
    assert more.gain != package.open(home=searched.root).forecast().gain and more.trial != best
    others = [str(number) for number in range(16) if number != best][:8]
    assert hpo("rm", *others, "--study", "curves", "--yes", "--leave-mlflow", home=home).exit_code == 0
    assert "the study has 7, 7 of them complete: `hpo resume --study curves --trials 19 " in refused(
        hpo("forecast", home=home), 2
    )


def test_few_trials_are_refused_in_a_sentence(home):
    drive(home, trials=3, reference=CURVES, sampler="random", strategy="none")
    error = refused(hpo("forecast", home=home), 2)
    few = "--study curves: a forecast needs 10 trials with a value, 3 of them complete, and the study has 3, 3 of them"
    assert f"{few} complete: `hpo resume --study curves --trials 10 " in error
    assert "expected gain" not in hpo("status", home=home).stdout


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        ("infeasible", "none of 12 trials is feasible, `hpo show 0 --study curves "),
        ("nonfinite", "none of 12 trials gave a finite value, `hpo show 0 --study curves "),
    ],
)
def test_trials_without_a_value_are_refused_by_their_reason(home, outcome, why):
    """More of the same trials would bring no forecast."""
    drive(home, trials=12, reference=CURVES, sampler="random", strategy="none")
    with Ledger(home.storage).write() as connection:
        connection.execute(update(tables.trials).values(state="infeasible", outcome=outcome))
    error = refused(hpo("forecast", home=home), 2)
    assert f"--study curves: a forecast needs 10 trials with a value, 3 of them complete, and {why}" in error


def test_several_objectives_are_refused_in_a_sentence(home):
    drive(home, trials=12, reference=str(HARNESS / "several_study.py"), strategy="none")
    assert "2 objectives, and a forecast is made of one best value" in refused(hpo("forecast", home=home), 2)
