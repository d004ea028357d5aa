"""Populations in earnest: real trials go on from each other's checkpoints, whatever happens in between."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from driven import stopping
from places import HARNESS
from sqlalchemy import select, update
from tiny_runs import digest, drive, rows

from hpo.analysis.results.trial import describe, detail
from hpo.errors import UserError
from hpo.ledger import Ledger, queries
from hpo.ledger.database.tables import asks, attempts, checkpoints, decisions, reports, trials
from hpo.storage import gc
from hpo.storage.home import Home
from hpo.tracking import projection
from hpo.verify import rules
from hpo.verify.report import Report
from hpo.workers.executors.local import Local

pytestmark = pytest.mark.whole

FULL = {"pause": 0.0, "train.num_epochs": 4, "train.checkpoint.every_epochs": None}
STUDY = str(HARNESS / "population_study.py")
BREED = {"reference": STUDY, "sampler": "random", "strategy": "pbt", "overrides": FULL}
SIZE = 3
T = trials.c


UNSAVED = """
from hpo import Float, study

@study(space={"x": Float(0.1, 1.0)}, minimize="loss", num_epochs=4, strategy={"name": "pbt", "population": 3})
def unsaved(trial):
    for epoch in range(1, 5):
        if trial.report(epoch, {"loss": trial.params.x / epoch}):
            return
"""


def bred(home: Home, *given, **flags) -> tuple[Ledger, str]:
    return drive(home, *given, **({"bound": {"trials": 4 * SIZE}} | BREED | flags))


@pytest.fixture(scope="module")
def golden(tmp_path_factory) -> Ledger:
    """One worker, never interrupted."""
    ledger, state = bred(Home(tmp_path_factory.mktemp("golden")))
    assert state == "complete"
    return ledger


def home_of(ledger: Ledger) -> Home:
    return Home(Path(ledger.url.removeprefix("sqlite:///")).parent)


def test_each_generation_goes_on_from_the_one_before(golden):
    found = rows(golden, T.number, T.state, T.generation, T.parent, T.from_epoch, T.epoch, T.step)
    assert len(found) == 4 * SIZE
    for number, state, generation, parent, from_epoch, epoch, step in found:
        assert generation == from_epoch == number // SIZE == epoch - 1 and step == 4 * epoch
        assert state == ("complete" if epoch == 4 else "pruned")
        assert (parent is None) == (generation == 0)
        assert parent is None or parent // SIZE == generation - 1
    assert {number % SIZE == parent % SIZE for number, _, _, parent, *_ in found if parent is not None} == {True, False}
    reported = rows(golden, reports.c.trial_id, reports.c.step)
    assert {(trial, step) for trial, step in reported} == {(n + 1, step) for n, *_, step in found}, "each its own epoch"
    assert {from_step for (from_step,) in rows(golden, attempts.c.from_step)} == {0, 4, 8, 12}
    status = golden.look(lambda c: queries.status(c, "tiny"))
    assert status.epochs_trained == 4 * SIZE


def test_who_goes_on_unchanged_is_who_was_never_interrupted(golden, tmp_path):
    """A lineage that is never replaced reports what one trial of its configuration does from end to end."""
    parents = dict(rows(golden, T.number, T.parent))
    lineages = [[n, n + SIZE, n + 2 * SIZE, n + 3 * SIZE] for n in range(SIZE)]
    [whole, *_] = [line for line in lineages if all(parents[b] == a for a, b in pairwise(line))]
    plain, _ = bred(Home(tmp_path / "plain"), strategy="none", bound={"trials": SIZE})

    def curve(ledger: Ledger, numbers: list[int]) -> list[tuple]:
        query = select(reports.c.step, reports.c.key, reports.c.value).join(trials)
        query = query.where(T.number.in_(numbers), reports.c.key.in_(["val/loss", "train/loss", "train/lr"]))
        return [
            tuple(row) for row in ledger.look(lambda c: c.execute(query.order_by(reports.c.step, reports.c.key)).all())
        ]

    assert curve(golden, whole) == curve(plain, whole[:1])


def test_a_replaced_member_has_its_donors_shape_and_other_rates(golden):
    query = select(T.number, T.parent, asks.c.params).join(asks, asks.c.trial_id == T.id)
    found = {number: (parent, params) for number, parent, params in golden.look(lambda c: c.execute(query).all())}
    replaced = 0
    for number, (parent, params) in found.items():
        if parent is None:
            continue
        settled = ("model.hidden_size", "train.optim.name")
        assert [params[path] for path in settled] == [found[parent][1][path] for path in settled]
        assert (params == found[parent][1]) == (parent == number - SIZE)
        replaced += parent != number - SIZE
    assert replaced >= 3


@pytest.mark.usefixtures("process")
def test_two_workers_give_the_same_study(golden, tmp_path):
    ledger, state = bred(Home(tmp_path / "home"), Local(2), workers=2)
    assert (state, digest(ledger)) == ("complete", digest(golden))


@pytest.mark.parametrize("strategy", ["pbt", pytest.param("pb2", marks=pytest.mark.slow)])
def test_interrupted_and_resumed_again_and_again_ends_the_same(golden, tmp_path, strategy):
    flags = {}
    if strategy == "pb2":
        (tmp_path / "pb2.py").write_text(
            "from dataclasses import replace\nfrom hpo import load\n"
            f"STUDY = replace(load({STUDY!r}), strategy={{'name': 'pb2', 'population': {SIZE}}})\n"
        )
        flags = {"reference": str(tmp_path / "pb2.py"), "strategy": None}
        golden, _ = bred(Home(tmp_path / "golden"), **flags)
        assert {strategy for (strategy,) in rows(golden, decisions.c.strategy)} == {"pb2"}
    home, state, stops = Home(tmp_path / "home"), "interrupted", 0
    while state == "interrupted":
        ledger, state = bred(home, tick=stopping(2), **flags)
        stops += state == "interrupted"
        gc.collect(ledger, home, "tiny")  # which takes nothing that is still to be gone on from
    assert stops > 3
    assert digest(ledger) == digest(golden)


def test_in_parts_it_is_the_same_study(golden, tmp_path):
    home = Home(tmp_path / "home")
    for count in (2, 5, 12, 20):
        ledger, state = bred(home, bound={"trials": count})
    assert (state, digest(ledger)) == ("complete", digest(golden))
    assert len(rows(ledger, T.number)) == 4 * SIZE, "the last generation is the last"
    report = Report()
    assert rules.check(ledger, ledger.look(lambda c: queries.study_row(c, "tiny")), report) and not report.differences


def test_a_budget_of_epochs_counts_what_was_trained(tmp_path):
    ledger, state = bred(Home(tmp_path / "home"), bound={"epochs": 7})
    assert state == "stopped", "no member has come to its last generation, so no trial is complete"
    assert len(rows(ledger, T.number)) == 7


def test_the_lineage_is_seen(golden):
    text = golden.look(lambda c: describe(detail(c, home_of(golden), "tiny", 4 * SIZE - 1), ""))
    parents = dict(rows(golden, T.number, T.parent))
    line, at = [], 4 * SIZE - 1
    while (at := parents[at]) is not None:
        line.append(at)
    assert f"\ngeneration 3: descends from {' <- '.join(map(str, line))}, began from {line[0]}/step-" in text
    assert "pause" in golden.look(lambda c: describe(detail(c, home_of(golden), "tiny", 0), ""))


def test_each_generation_is_a_run_that_names_its_parent(golden):
    study = golden.look(lambda c: queries.study_row(c, "tiny"))
    shown = golden.look(lambda c: list(projection.everything(c, study, home_of(golden))))
    assert len({one.run.uid for one in shown}) == 4 * SIZE
    parents = dict(rows(golden, T.number, T.parent))
    for one in shown:
        assert one.run.tags["hpo.generation"] == str(one.number // SIZE)
        assert one.run.tags.get("hpo.parent") == (None if parents[one.number] is None else str(parents[one.number]))
        assert one.batch.status == "FINISHED"


def test_a_generation_whose_members_all_fail_ends_the_study(tmp_path, monkeypatch):
    home = Home(tmp_path / "home")
    ledger, _ = bred(home, bound={"trials": SIZE})
    monkeypatch.setenv("TINY_FAIL", "1")
    ledger, state = bred(home)
    states = [one for _, one in sorted(rows(ledger, T.number, T.state))]
    assert (state, states) == ("stopped", ["pruned"] * SIZE + ["failed"] * SIZE)


def test_a_parent_without_a_checkpoint_is_named(tmp_path):
    home = Home(tmp_path / "home")
    ledger, _ = bred(home, bound={"trials": SIZE})
    ledger.transact(lambda c: c.execute(update(checkpoints).values(state="deleted")))
    with pytest.raises(UserError, match=r"trial 3 is to go on from trial \d, which has no checkpoint left"):
        bred(home)


def test_a_parent_that_has_never_saved_is_told_apart(tmp_path):
    """A function need not save, but under a population."""
    file = tmp_path / "unsaved.py"
    file.write_text(UNSAVED)
    expected = r"trial 3 is to go on from trial \d, which has saved no checkpoint: have the task save one with each"
    with pytest.raises(UserError, match=expected):
        bred(Home(tmp_path / "home"), reference=str(file), overrides={}, strategy=None)


def test_no_decision_is_taken_twice(golden):
    met = rows(golden, decisions.c.trial_id, decisions.c.step)
    assert len(met) == len(set(met))
    kinds = rows(golden, decisions.c.verdict, decisions.c.obeyed)
    assert [kind for kind, _ in kinds].count("pause") == 3 * SIZE and all(
        obeyed for kind, obeyed in kinds if kind == "pause"
    )
