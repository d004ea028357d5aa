"""What a study learns from earlier ones of its home: from whom, what its row keeps, and what a resume makes of it."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest
from driven import driven
from places import HARNESS
from rounds import rounds
from sqlalchemy import delete, select, update

from hpo.analysis.report import snapshot
from hpo.analysis.report.environment import environment
from hpo.driver.request import request_of
from hpo.driver.resolve import declare
from hpo.errors import DriftError, UserError
from hpo.ledger import Ledger, queries
from hpo.ledger.database.tables import asks, reports, studies, trials
from hpo.search.samplers.learned import PLACES
from hpo.storage.home import Home

pytestmark = pytest.mark.whole

STUDY, POPULATION = str(HARNESS / "curves_study.py"), str(HARNESS / "population_study.py")
JUDGE = '"val/loss", "minimize"'


def drive(home, count, name="new", **flags):
    """Runs a study without its mirror; returns its parameters by number, and its digest."""
    with closing(Ledger(home.create().storage)) as ledger:
        request = request_of(home, **{"reference": STUDY, "name": name, "window": 4} | flags)
        _, state = driven(ledger, request, trials=count)
        assert state == "complete"
        with ledger.read() as connection:
            row = queries.study_row(connection, name)
            params = [trial.params for trial in queries.trial_rows(connection, row.id)]
            return params, queries.digest(connection, row)


def declared(home, name="new", notices=None, **flags):
    """Returns the specification of a study that is not begun."""
    with closing(Ledger(home.storage)) as ledger:
        request = request_of(home, **{"reference": STUDY, "name": name, "learn_from": "auto"} | flags)
        return declare(request, ledger, 1, tell=(notices if notices is not None else []).append).spec


def origins(home, name="new"):
    with closing(Ledger(home.storage)) as ledger, ledger.read() as connection:
        study = queries.study_row(connection, name).id
        query = select(asks.c.trial_attrs).join(trials).where(trials.c.study_id == study).order_by(trials.c.number)
        return [row.get("origin", "") for row in connection.execute(query).scalars()]


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A home with two studies, of which each has searched the space at random."""
    home = Home(tmp_path_factory.mktemp("begun") / "home")
    for seed, name in enumerate(("first", "second"), start=5):
        drive(home, 20, name, sampler="random", strategy="none", seed=seed)
    return home


@pytest.fixture
def home(begun, tmp_path):
    return Home(Path(shutil.copytree(begun.root, tmp_path / "home")))


def best_of(home, name):
    with closing(Ledger(home.storage)) as ledger, ledger.read() as connection:
        rows = queries.trial_rows(connection, queries.study_row(connection, name).id)
    return min((row for row in rows if row.values), key=lambda row: row.values).params


def edited(tmp_path, old, new):
    file = tmp_path / "edited.py"
    file.write_text(Path(STUDY).read_text().replace(old, new))
    return str(file)


def test_names_that_teach_nothing_are_not_repeated(home):
    notices: list[str] = []
    declared(home, learn_from="first,nope", notices=notices)
    assert "--learn-from nope: no study 'nope'" in notices[0] and "--learn-from first` repeats it" in notices[1]
    with pytest.raises(UserError, match=r"^--learn-from '': give auto, none, or the names of studies\.$"):
        declared(home, learn_from=[""])


def test_a_study_begins_with_the_portfolio_and_says_from_whom(home):
    notices: list[str] = []
    spec = declared(home, notices=notices)
    assert spec.learn_from == ["first", "second"] and spec.behaviour["learning"] == 1
    assert "learned from first (20 trials), second (20 trials): " in notices[0]
    assert "--seed 0 --learn-from first,second` repeats it" in notices[0]
    portfolio = spec.knowledge["portfolio"]
    params, digest = drive(home, 16, learn_from=["auto"])
    places = PLACES[: len(portfolio)]
    assert len(places) > 2 and [entry["params"] for entry in portfolio] == [params[place] for place in places]
    assert declared(home, learn_from="first").knowledge["portfolio"][0]["params"] == best_of(home, "first")
    told = origins(home)
    assert [told[place] for place in places] == [f"portfolio of {entry['study']}" for entry in portfolio]
    rest = {origin.split(" of ")[0] for number, origin in enumerate(told) if number not in places}
    assert {"density", "random", "model (freeze-thaw)"} >= rest and "density" in rest
    assert drive(home, 16, "again", learn_from="first,second") == (params, digest), "the line that is told repeats it"
    with closing(Ledger(home.storage)) as ledger, ledger.read() as connection:
        facts = environment(snapshot.read(connection, "new"))["facts"]
    assert ["learned from", "first, second"] in facts


def test_what_is_enqueued_comes_before_it_and_not_twice(home):
    best = declared(home).knowledge["portfolio"][0]["params"]
    spec = declared(home, enqueue=[best])
    assert best not in [entry["params"] for entry in spec.knowledge["portfolio"]]
    drive(home, 6, learn_from="auto", enqueue=[best])
    assert origins(home)[0] == "enqueued" and not origins(home)[1].startswith("enqueued")


def test_parts_are_the_study_at_once_though_the_earlier_ones_are_gone(home):
    whole, digest = drive(home, 16, "whole", learn_from="first")
    drive(home, 5, "parts", learn_from="first")
    with closing(Ledger(home.storage)) as ledger:
        with ledger.read() as connection:
            row = queries.study_row(connection, "first")
        ledger.transact(lambda connection: _removed(connection, row.id))
    drive(home, 9, "parts", learn_from="first")  # the same words as before; there is nothing to be read any more
    assert drive(home, 16, "parts") == (whole, digest)


def _removed(connection, study_id):
    own = select(trials.c.id).where(trials.c.study_id == study_id)
    for table in (reports, asks):
        connection.execute(delete(table).where(table.c.trial_id.in_(own)))
    connection.execute(update(studies).where(studies.c.id == study_id).values(name="gone"))


def test_other_teachers_are_drift(home):
    drive(home, 3, learn_from="first")
    for other in ("second", "none"):
        with pytest.raises(DriftError, match="the knowledge of earlier studies"):
            drive(home, 4, learn_from=other)
    drive(home, 4, learn_from="auto")  # a study that has begun goes on with what it knows


def test_none_proposes_what_a_home_without_earlier_studies_does(home, tmp_path):
    alone = drive(Home(tmp_path / "alone"), 12, learn_from="auto")
    assert drive(home, 12, learn_from="none") == alone
    assert (
        declared(home, learn_from="none").knowledge == {}
        and "learning" not in declared(home, learn_from="none").behaviour
    )


def test_the_environment_says_what_no_option_does(home, monkeypatch):
    assert os.environ["HPO_LEARN_FROM"] == "none" and declared(home, learn_from=None).learn_from == []
    monkeypatch.delenv("HPO_LEARN_FROM")
    assert declared(home, learn_from=None).learn_from == ["first", "second"]


@rounds(
    ("old", "new", "taught"),
    [
        ("Float(1e-4, 1.0", "Float(1e-3, 0.1", True),  # other ranges
        ('"num_heads": Choice([1, 2, 3, 4]),', '"num_heads": Choice([1, 2]),', True),
        ('        "momentum": Float(0.0, 0.9, when={"optimizer": "sgd"}),\n', "", True),  # fewer dimensions
        (JUDGE, '"val/loss", "maximize"', False),
        (JUDGE, '"time/epoch", "minimize"', False),
        ("Float(1e-4, 1.0", "Float(1e-9, 1e-8", False),  # none of whose values anything is known
    ],
)
def test_by_default_those_teach_that_agree_in_objective_and_dimensions(home, tmp_path, old, new, taught):
    spec = declared(home, reference=edited(tmp_path, old, new))
    assert (spec.learn_from == ["first", "second"]) == taught and bool(spec.knowledge) == taught


def test_samplers_that_learn_from_no_trial_begin_without(home):
    for sampler in ("random", "qmc", "grid"):
        assert not declared(home, sampler=sampler).knowledge
        with pytest.raises(UserError, match=rf"--learn-from first: sampler '{sampler}' does not learn"):
            declared(home, sampler=sampler, learn_from="first")
    assert declared(home, sampler="tpe").knowledge


@rounds(
    ("learn_from", "words"),
    [
        ("sorce", "--learn-from sorce: no study 'sorce' in this ledger"),
        ("new", "--learn-from new teaches nothing: it is this study itself"),
        ("none,first", "--learn-from none,first: none stands alone"),
        ("first,auto", "--learn-from first,auto: auto stands alone"),
        (" , ", "give auto, none, or the names of studies"),
    ],
)
def test_what_cannot_be_learned_from_is_refused_in_one_sentence(home, learn_from, words):
    with pytest.raises(UserError) as caught:
        declared(home, learn_from=learn_from)
    assert words in str(caught.value)


def test_either_name_of_the_option_is_given(home):
    assert declared(home, learn_from=None, warm_start="first") == declared(home, learn_from="first")
    with pytest.raises(UserError, match="--warm-start first is another name of --learn-from first: give one"):
        declared(home, warm_start="first")


def _valueless(connection, study_id):
    own = trials.c.study_id == study_id
    connection.execute(update(trials).where(own).values(values=[float("nan")], state="complete"))


def _short(connection, study_id):
    connection.execute(update(trials).where(trials.c.study_id == study_id, trials.c.number > 0).values(state="failed"))


def _other(connection, study_id):
    spec = connection.execute(select(studies.c.spec).where(studies.c.id == study_id)).scalar_one()
    spec["objectives"][0]["direction"] = "maximize"
    connection.execute(update(studies).where(studies.c.id == study_id).values(spec=spec))


def _broken(connection, study_id):
    own = select(trials.c.id).where(trials.c.study_id == study_id)
    connection.exec_driver_sql(
        f"UPDATE asks SET params = '{{[' WHERE trial_id IN ({own.compile(compile_kwargs={'literal_binds': True})})"
    )


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (_valueless, "--learn-from second teaches nothing: it has 0 trials with a finite value"),
        (_short, "--learn-from second teaches nothing: it has 1 trial with a finite value, and two are needed"),
        (_other, "its trials are judged by maximize val/loss, and this study's by minimize val/loss"),
        (_broken, "study second teaches nothing, since it cannot be read"),
    ],
)
def test_who_teaches_nothing_is_left_out_and_the_search_goes_on(home, harm, words):
    with closing(Ledger(home.storage)) as ledger:
        with ledger.read() as connection:
            row = queries.study_row(connection, "second")
        ledger.transact(lambda connection: harm(connection, row.id))
    notices: list[str] = []
    spec = declared(home, learn_from="first,second", notices=notices)
    assert words in notices[0] and [lesson["study"] for lesson in spec.knowledge["studies"]] == ["first"]
    assert declared(home).learn_from == ["first"]
    with pytest.raises(UserError) as caught:
        declared(home, learn_from="second")
    assert words in str(caught.value)


def test_a_trial_whose_parameters_changed_in_training_teaches_nothing(home):
    drive(home, 12, "bred", reference=POPULATION, window=None, overrides={"pause": 0.0})
    notices: list[str] = []
    flags = {"reference": POPULATION, "overrides": {"pause": 0.0}, "sampler": "tpe", "strategy": "none"}
    spec = declared(home, learn_from="bred", notices=notices, **flags)
    with closing(Ledger(home.storage)) as ledger, ledger.read() as connection:
        rows = queries.trial_rows(connection, queries.study_row(connection, "bred").id)
    changed, parents = queries.changed(rows), {row.parent for row in rows}
    whole = [
        row
        for row in rows
        if row.number not in changed
        and (row.state == "complete" or (row.state == "pruned" and row.number not in parents))
    ]
    assert changed and spec.knowledge["studies"][0]["trials"] == len(whole)


def test_what_the_row_keeps_is_plain_and_small(home):
    text = json.dumps(declared(home).knowledge)
    assert json.loads(text) == declared(home).knowledge and len(text) < 20_000
