"""What a run shows: figures, the table on a terminal, lines elsewhere; and what it costs the ledger."""

from __future__ import annotations

import io
import math
from collections import Counter
from typing import Any

import pytest
from crafted import change_trial, open_crafted, put_trial
from pydantic import BaseModel
from rich.console import Console
from sqlalchemy import event, insert, select, update

from hpo import Float, Objective, Study
from hpo.analysis.results.format import duration, sparkline
from hpo.analysis.results.progress import Progress
from hpo.analysis.results.status import line
from hpo.analysis.results.trial import describe, detail
from hpo.clock import FakeClock
from hpo.display import live
from hpo.display.live import REFRESH_SECONDS, View, doing, screen, short_params
from hpo.display.notices import data_report, kept_overrides, unasked
from hpo.display.summary import summary
from hpo.driver.request import RunResult
from hpo.ledger import queries
from hpo.ledger.database.tables import asks, checkpoints, events, leases, reports, studies, trials
from hpo.ledger.stored_spec import StoredSpec
from hpo.search.samplers.registry import SAMPLERS
from hpo.search.strategies.registry import complete, default, make_strategy
from hpo.storage.home import Home


@pytest.fixture
def ledger(tmp_path):
    opened = open_crafted(tmp_path / "ledger.db")
    yield opened
    opened.close()


def console(width: int = 100, **options: Any) -> Console:
    return Console(file=io.StringIO(), width=width, height=24, **options)


def text_of(shown: Any, width: int = 100) -> str:
    to = console(width)
    to.print(shown)
    return to.file.getvalue()


@pytest.mark.parametrize(
    ("values", "blocks"),
    [
        ([], ""),
        ([3.0], "▁"),
        ([2.0, 2.0], "▁▁"),
        ([0.0, 1.0], "▁█"),
        ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"),
        ([1.0, math.nan, 0.0], "█ ▁"),
        ([math.inf, -1.0], " ▁"),
        ([math.nan], " "),
        ([*range(16)], "▁▁▂▂▃▃▄▄▅▅▆▆▇▇██"),
        ([0.0, 2.0, math.nan] * 16, "▁" * 16),
        ([*range(64)], "▁▁▂▂▃▃▄▄▅▅▆▆▇▇██"),
        ([math.nan] * 32 + [1.0] * 32, "        ▁▁▁▁▁▁▁▁"),
    ],
)
def test_sparkline(values, blocks):
    assert sparkline(values) == blocks


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3661, "1:01:01")])
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_parameters_are_named_by_their_last_part_while_that_is_unique():
    assert short_params({"train.optim.lr": 0.00012345, "model.size": 64}) == "lr=0.0001234 size=64"
    assert short_params({"a.name": "x", "b.name": "y"}) == "a.name=x b.name=y"


def test_progress_follows_the_ledger_and_tells_each_end_once(ledger):
    clock = FakeClock()
    put_trial(ledger, 0, "complete", (0.5,))
    put_trial(ledger, 1, "running", (0.1, 0.2))
    progress = Progress(ledger, "crafted", clock)
    assert progress.best == [progress.trials[0]]
    assert progress.trials[1].shown == [0.2]
    put_trial(ledger, 2, "complete", (0.4, 0.9))
    clock.sleep(30)
    assert [trial.number for trial in progress.refresh()] == [2]
    assert progress.best == [progress.trials[2]]
    assert progress.trials[2].curve == [0.4, 0.9]
    change_trial(ledger, 1, state="pruned", values=[0.2], epoch=3)
    assert [trial.number for trial in progress.refresh()] == [1]
    assert progress.refresh() == []
    assert progress.trials[2].curve == [0.4, 0.9]


def test_rates_count_what_this_process_saw_and_the_rest_is_extrapolated(ledger):
    clock = FakeClock()
    put_trial(ledger, 0, "complete", (0.5, 0.6))
    progress = Progress(ledger, "crafted", clock)
    assert progress.eta() is None
    put_trial(ledger, 1, "complete", (0.5, 0.6))
    put_trial(ledger, 2, "pruned", (0.5,))
    clock.sleep(60)
    progress.refresh()
    per_minute, epochs_per_second = progress.rates()
    assert per_minute == pytest.approx(2.0)
    assert epochs_per_second == pytest.approx(3 / 60)
    assert progress.eta() == pytest.approx(60 * 7 / 2)  # 10 requested, 3 ended
    for number in range(3, 7):
        put_trial(ledger, number, "paused", (0.5,))
    progress.refresh()
    assert progress.counts(noun=True) == "3/10 trials, 4 paused"
    assert progress.eta() == pytest.approx(60 * 3 / 6), "what waits at a rung may have had its share"


def test_who_joins_late_sees_the_rate_of_the_run_itself(ledger):
    """The driver began at 100: what ended or was trained before is of another run."""
    put_trial(ledger, 0, "complete", (0.5, 0.6))  # at 90
    put_trial(ledger, 1, "running", (0.5,))  # its epoch was closed at 0
    with ledger.write() as connection:
        lease = {"name": "driver:1", "owner": "me", "fence": 1, "renewals": 0, "since": 100.0}
        connection.execute(insert(leases).values(lease))
    clock = FakeClock(100.0)
    run = Progress(ledger, "crafted", clock)
    assert run.begins
    clock.sleep(30)
    with ledger.write() as connection:
        more = {"trial_id": 2, "step": 20, "key": "val/accuracy", "fold": 0, "epoch": 2, "value": 0.7}
        connection.execute(insert(reports).values(**more, fence=1, revision=1, at=125.0))
        connection.execute(update(trials).where(trials.c.number == 1).values(epoch=2))
    put_trial(ledger, 2, "complete", (0.5, 0.6), created_at=110.0, ended_at=120.0)
    run.refresh()
    late = Progress(ledger, "crafted", clock)
    assert late.rates() == run.rates() == pytest.approx((2.0, 3 / 30)) and late.eta() == run.eta()
    assert not late.begins and late.elapsed == run.elapsed == 30
    clock.sleep(30)
    put_trial(ledger, 3, "pruned", (0.5,), created_at=135.0, ended_at=140.0)
    for one in (run, late):
        one.refresh()
    assert late.rates() == run.rates() == pytest.approx((2.0, 4 / 60))


@pytest.mark.parametrize("direction", ["minimize", "maximize"])
def test_only_complete_trials_with_a_number_can_be_best(tmp_path, direction):
    objectives = [{"metric": "val/accuracy", "direction": direction, "select": "last"}]
    ledger = open_crafted(tmp_path / "one.db", objectives=objectives)
    put_trial(ledger, 0, "complete", (None,))
    put_trial(ledger, 1, "pruned", (-9.0,))
    put_trial(ledger, 2, "pruned", (9.0,))
    put_trial(ledger, 3, "complete", (0.3,))
    put_trial(ledger, 4, "complete", (0.7,))
    put_trial(ledger, 5, "complete", (0.3,))
    [best] = Progress(ledger, "crafted", FakeClock()).best
    assert best.number == (3 if direction == "minimize" else 4)
    ledger.close()


def test_kept_totals_are_those_of_the_trials_and_unseen_ones_are_read(ledger):
    progress = Progress(ledger, "crafted", FakeClock())
    for number, state in enumerate(("waiting", "running", "paused", "paused", "complete")):
        put_trial(ledger, number, state, (0.5,) * number)
    progress.refresh()
    change_trial(ledger, 0, state="running")
    change_trial(ledger, 1, state="pruned", values=[0.5], epoch=2)
    change_trial(ledger, 2, state="complete", values=[0.9], epoch=9)  # thawed and ended between two looks
    assert [trial.number for trial in progress.refresh()] == [1, 2]
    trials = progress.trials.values()
    assert progress.epochs == sum(trial.epoch for trial in trials) == 0 + 2 + 9 + 3 + 4
    assert +progress.states == Counter(trial.state for trial in trials)
    assert (progress.ended, progress.paused) == (3, 1)
    assert progress.best == [progress.trials[2]]


def test_ray_tune_trials_that_go_on_as_others_are_among_those_asked_for(tmp_path):
    """Of two trials one was replaced twice, and its last child trains; under a population's strategy each counts."""
    for strategy, ended in (("none", 1), ("pbt", 3)):
        ledger = open_crafted(tmp_path / f"{strategy}.db", strategy={"name": strategy})
        put_trial(ledger, 0, "complete", (0.5,))
        put_trial(ledger, 1, "pruned", (0.4,))
        progress = Progress(ledger, "crafted", FakeClock())
        put_trial(ledger, 2, "pruned", (0.6,), parent=0)
        put_trial(ledger, 3, "running", (0.7,), parent=0)
        progress.refresh()
        assert progress.ended == ended and progress.counts(noun=True) == f"{ended}/10 trials"
        first = summary(progress, RunResult("crafted", "interrupted", "", 0, 2), 0.0).splitlines()[0]
        assert first.endswith(" in 0:00, perturbed 2 times" if strategy == "none" else " in 0:00")
        with ledger.read() as connection:
            assert line(queries.status(connection, "crafted")).startswith(
                f"crafted: interrupted, {ended} of 10 trials ended"
            )
        ledger.close()


def test_a_refresh_is_two_queries_and_there_are_two_a_second_at_most(ledger):
    for number in range(6):
        put_trial(ledger, number, "complete" if number < 3 else "running", (0.5,))
    clock = FakeClock(100.0)
    view = View(ledger, "crafted", console(), workers=2, clock=clock).start()
    statements: list[str] = []
    event.listen(ledger.engine, "before_cursor_execute", lambda *args: statements.append(args[2]))
    for _ in range(1000):  # ten seconds of a driver that ticks every hundredth
        view.tick()
        clock.sleep(0.01)
    selects = [query for query in statements if query.startswith("SELECT")]
    assert REFRESH_SECONDS >= 0.5
    assert 30 <= len(selects) <= 2 * 20
    assert len(statements) - len(selects) <= 20  # each refresh begins one read transaction


def test_without_a_terminal_each_trial_that_ends_is_one_line(ledger):
    put_trial(ledger, 0, "complete", (0.5,))
    clock = FakeClock(100.0)
    to = console(40)
    view = View(ledger, "crafted", to, workers=2, clock=clock).start()
    put_trial(ledger, 1, "complete", (0.25, 0.75))
    put_trial(ledger, 2, "failed", error="ValueError: [bold]no[/bold]\nsecond line")
    put_trial(ledger, 3, "running", (0.1,))
    for _ in range(3):
        clock.sleep(1)
        view.tick()
    view.stop()
    lines = to.file.getvalue().splitlines()
    assert (
        lines[0] == "crafted: 10 trials, 1 of them done before; tpe · median · 2 workers · ordered, window 4 · seed 0"
    )
    assert lines[1] == "trial 1 complete  epoch 2/4  val/accuracy 0.75  best so far", "the totals stand in the next"
    assert lines[2].startswith("trial 2 failed  epoch 0/4  ValueError: [bold]no[/bold]  (3/10, ")
    assert len(lines) == 3


class Config(BaseModel):
    x: float = 0.5


def test_a_strategy_that_nobody_asked_for_is_explained_first(ledger):
    assert Study("s", Config(), "m:T", {"x": Float(0.0, 1.0)}, [Objective("loss")]).strategy == {}
    declared_by_study = default(parts=1)
    by_default = complete(declared_by_study, 50)
    with ledger.write() as connection:
        spec = connection.execute(select(studies.c.spec)).scalar_one()
        connection.execute(update(studies).values(spec=spec | {"strategy": by_default}))
    to = console(40)
    View(ledger, "crafted", to, workers=1, clock=FakeClock()).start()
    first, second = to.file.getvalue().splitlines()
    assert first.startswith("strategy: asha: a trial stops at epochs 4, 12, 36 ...") and "--strategy none" in first
    assert second.startswith("crafted: ")
    strategy = make_strategy(by_default)
    assert [epoch for epoch in range(1, 40) if strategy.rung(epoch) != strategy.rung(epoch - 1)] == [4, 12, 36]
    assert strategy.eta == 3
    plain = {"sampler": "tpe", "objectives": [{}], "earlier": [], "order": "ordered", "window": 8}
    (declared,) = unasked(StoredSpec.of(plain | {"strategy": {**by_default, "eta": 4}}))
    assert declared.startswith(
        "strategy: asha: a trial stops at epochs 4, 16, 64 ... unless it is among the best 1/4 of"
    )
    (bounded,) = unasked(StoredSpec.of(plain | {"strategy": {**by_default, "max_epochs": 13}}))
    assert bounded.startswith("strategy: asha: a trial stops at epochs 4, 12 unless")
    assert [*unasked(StoredSpec.of(plain | {"strategy": {**by_default, "max_epochs": 4}}))] == []
    assert [*unasked(StoredSpec.of(plain | {"strategy": {"name": "none"}}))] == []
    joined = [*unasked(StoredSpec.of(plain | {"strategy": {"name": "none"}}), workers=0)]
    assert joined == ["no worker begins here: others join by `hpo worker`"]
    short = complete(declared_by_study, 3)
    for last, words in ((3, "3 epochs"), (4, "4 epochs"), (1, "1 epoch")):
        said = f"strategy: asha: no trial is stopped, since each has {words} and the first rung is epoch 4"
        assert [*unasked(StoredSpec.of(plain | {"strategy": short}), last=last)] == [said]
    (reached,) = unasked(StoredSpec.of(plain | {"strategy": by_default}), last=13)
    assert reached.startswith("strategy: asha: a trial stops at epochs 4, 12 unless")
    (ordered,) = unasked(StoredSpec.of(plain | {"strategy": by_default}))
    assert "that have reported there before it;" in ordered
    assert "before it" not in next(iter(unasked(StoredSpec.of(plain | {"strategy": by_default, "order": "async"}))))


@pytest.mark.parametrize(
    ("config", "space", "last"),
    [
        ({"train.num_epochs": 3}, {}, 3),
        ({"train.num_epochs": None, "x": 1}, {}, math.inf),
        ({"train.num_epochs": 3}, {"train.num_epochs": {}}, math.inf),
        ({"train.num_epochs": 30, "train.folds": 5}, {}, 5),
    ],
)
def test_the_last_epoch_is_that_which_the_study_declares(ledger, config, space, last):
    """One that is searched is no bound."""
    with ledger.write() as connection:
        connection.execute(update(studies).values(identity={"config": config, "space": space}))
    assert Progress(ledger, "crafted", FakeClock()).last_epoch == last


def test_a_threshold_without_bounds_is_told_how_to_have_them():
    spec = {"sampler": "tpe", "order": "ordered", "window": 2}
    (said,) = unasked(StoredSpec.of(spec | {"strategy": make_strategy("threshold").model_dump()}))
    assert said.startswith("strategy: threshold has no bounds") and said.endswith(
        '{"name": "threshold", "upper": 0.7}.'
    )
    bounded = [make_strategy({"name": "threshold", bound: 0.7}).model_dump() for bound in ("lower", "upper")]
    assert [[*unasked(StoredSpec.of(spec | {"strategy": one}))] for one in bounded] == [[], []]


def test_workers_that_the_window_leaves_idle_are_told_of():
    spec = {"sampler": "tpe", "strategy": {"name": "none"}, "order": "ordered", "window": 2}
    (said,) = unasked(StoredSpec.of(spec), 3)
    assert said.startswith("of 3 workers 2 can work at a time") and "--window 6 --allow-drift" in said
    assert [*unasked(StoredSpec.of(spec), 2)] == [*unasked(StoredSpec.of(spec | {"order": "async"}), 3)] == []


@pytest.mark.parametrize(
    ("objectives", "earlier", "said"),
    [
        (1, 0, "freeze-thaw up to trial 500, then tpe"),
        (1, 3, "tpe"),
        (2, 0, "tpe up to trial 250, then nsga2"),
        (5, 3, "tpe up to trial 250, then nsga3"),
    ],
)
def test_what_auto_chooses_is_said_first(objectives, earlier, said):
    spec = {"sampler": "auto", "objectives": [{}] * objectives, "earlier": [{}] * earlier}
    spec |= {"strategy": {"name": "none"}, "order": "ordered", "window": 4}
    assert [*unasked(StoredSpec.of(spec))] == [f"sampler: auto, which is {said}"]


def test_a_sampler_whose_asks_take_seconds_is_announced():
    spec = {"objectives": [{}], "earlier": [], "strategy": {"name": "none"}, "order": "ordered", "window": 4}
    [said] = unasked(StoredSpec.of(spec | {"sampler": "gp"}))
    assert said.startswith("sampler: gp, which takes 2 to 9 s of processor time for each trial")
    for name in SAMPLERS.keys() - {"gp", "auto"}:
        assert not [*unasked(StoredSpec.of(spec | {"sampler": name}))], name
    planned = spec | {"sampler": "auto", "planned": {"grid": 12}}
    why = "since there are 12 configurations, and trials for each of them"
    assert [*unasked(StoredSpec.of(planned))] == [f"sampler: auto, which is grid, {why}"]


def test_the_live_screen_fits_the_terminal_and_keeps_the_best_in_sight(ledger):
    put_trial(ledger, 0, "complete", (0.2, 0.99))
    for number in range(1, 9):
        put_trial(ledger, number, "pruned", (0.1, 0.2))
    put_trial(ledger, 9, "running", (0.3,), params={f"model.parameter_{i}": i for i in range(20)})
    progress = Progress(ledger, "crafted", FakeClock())
    lines = text_of(screen(progress, "heading", 100, 12)).splitlines()
    assert len(lines) <= 12
    assert max(map(len, lines)) <= 100
    assert "9/10 trials" in lines[1]
    rows = {line.split("/4")[0].strip(): line for line in lines[3:]}
    assert "★ 0    2" in rows
    assert "0.99" in rows["★ 0    2"]
    assert "running" in rows["9    1"]
    assert "…" in rows["9    1"]
    assert "7    2" in rows
    assert "1    2" not in rows


def test_a_terminal_gets_its_table_and_is_left_clean(ledger):
    put_trial(ledger, 0, "running", (0.5,))
    clock = FakeClock(100.0)
    to = console(force_terminal=True)
    view = View(ledger, "crafted", to, workers=1, clock=clock).start()
    view.tick()
    assert "val/accuracy" in to.file.getvalue()
    change_trial(ledger, 0, state="complete", values=[0.5])
    view.stop()
    assert "trial 0 complete" not in to.file.getvalue()
    assert to.file.getvalue().count("\x1b[?25h") == 1  # the cursor is back
    assert view.progress.trials[0].state == "complete"


def test_a_run_that_trained_nothing_says_once_what_it_waits_for(ledger):
    clock, pipe = FakeClock(), console(200)
    view = View(ledger, "crafted", pipe, workers=2, clock=clock).start()
    assert "workers are starting ..." in text_of(screen(view.progress, "heading", 100, 24))
    put_trial(ledger, 0, "running")
    for _ in range(20):
        clock.sleep(1.0)
        view.tick()
    lines = pipe.file.getvalue().splitlines()
    assert lines[1:] == ["1 trial running, in the first epoch, 0 epochs trained  (0/10)"]
    assert "1 trial running, in the first epoch ..." in text_of(screen(view.progress, "heading", 100, 24))
    change_trial(ledger, 0, epoch=1)
    clock.sleep(29.0)
    view.tick()
    assert pipe.file.getvalue().splitlines()[2:] == ["1 trial running, 1 epoch trained  (0/10)"]
    assert "..." not in text_of(screen(view.progress, "heading", 100, 24))


def test_a_resume_says_that_workers_are_starting_until_one_has_a_trial(ledger):
    put_trial(ledger, 0, "complete", (0.5, 0.6))
    put_trial(ledger, 1, "waiting", (0.5,))
    with ledger.write() as connection:
        lease = {"name": "driver:1", "owner": "me", "fence": 2, "renewals": 0, "since": 100.0}
        connection.execute(insert(leases).values(lease))
    clock, pipe = FakeClock(100.0), console(200)
    view = View(ledger, "crafted", pipe, workers=2, clock=clock).start()
    clock.sleep(2.0)
    view.tick()
    assert pipe.file.getvalue().splitlines()[1:] == ["workers are starting, 3 epochs trained  (1/10)"]
    change_trial(ledger, 1, state="running")
    clock.sleep(2.0)
    view.tick()
    assert doing(view.progress) == "1 trial running, in the first epoch"
    change_trial(ledger, 1, state="waiting", epoch=2)
    clock.sleep(2.0)
    view.tick()
    assert doing(view.progress) == "no trial is running", "of this run one has been trained"


def test_an_objective_that_a_first_epoch_lacks_is_told_of_once(tmp_path):
    misspelt = [{"metric": "val/acuracy", "direction": "maximize", "select": "last"}]
    ledger, clock = open_crafted(tmp_path / "ledger.db", objectives=misspelt), FakeClock()
    pipe = console()
    view = View(ledger, "crafted", pipe, workers=2, clock=clock).start()
    put_trial(ledger, 0, "running", (0.5,), metrics={"train/loss": 1.0, "train/samples_per_sec": 9.0, "val/loss": 2.0})
    for _ in range(3):
        clock.sleep(1.0)
        view.tick()
    ledger.close()
    assert pipe.file.getvalue().splitlines()[1:] == [
        "trial 0 has reported an epoch without 'val/acuracy', by which the study judges; did you mean 'val/accuracy'? "
        "Reported were val/accuracy, val/loss, train/loss. Unless it comes later, the trial will fail: name one of "
        "them in the study, or report it with the others."
    ]


@pytest.mark.parametrize(("last", "said"), [(0.5, True), (0.4, False)])
def test_first_trials_of_one_value_are_told_of_once(tmp_path, last, said):
    ledger, clock, pipe = open_crafted(tmp_path / "ledger.db"), FakeClock(), console(400)
    view = View(ledger, "crafted", pipe, workers=2, clock=clock).start()
    for number in range(7):
        put_trial(ledger, number, "complete", (last if number == 4 else 0.5,))
        clock.sleep(1.0)
        view.tick()
    ledger.close()
    told = (
        "the first 5 complete trials all have val/accuracy 0.5, whatever their parameters: see that what is trained "
        "reads train.optim.lr."
    )
    assert pipe.file.getvalue().count(told) == said and ("whatever" in pipe.file.getvalue()) is said


@pytest.mark.parametrize("bound", ["val/los", "time/epoch_seconds"])
def test_a_misspelt_constraint_is_told_of_as_an_objective_is(tmp_path, bound):
    """But not one by what the machine takes, which is measured apart from what the task reports."""
    ledger, clock = open_crafted(tmp_path / "ledger.db", constraints=[{"metric": bound, "upper": 1.0}]), FakeClock()
    pipe = console()
    view = View(ledger, "crafted", pipe, workers=2, clock=clock).start()
    put_trial(ledger, 0, "running", (0.5,), metrics={"val/loss": 2.0})
    clock.sleep(1.0)
    view.tick()
    ledger.close()
    told = "trial 0 has reported an epoch without 'val/los', by which the study judges; did you mean 'val/loss'?"
    assert (told in pipe.file.getvalue()) is (bound == "val/los")
    assert ("without" in pipe.file.getvalue()) is (bound == "val/los")


@pytest.mark.parametrize(
    ("objectives", "said"), [(["val/accuracy"], False), (["val/accuracy", "val/loss"], False), (["val/loss"], True)]
)
def test_nothing_is_told_of_objectives_that_are_reported(tmp_path, objectives, said):
    spec = [{"metric": metric, "direction": "maximize", "select": "last"} for metric in objectives]
    ledger, clock, pipe = open_crafted(tmp_path / "ledger.db", objectives=spec), FakeClock(), console()
    view = View(ledger, "crafted", pipe, workers=2, clock=clock).start()
    put_trial(ledger, 0, "running")
    change_trial(ledger, 0, epoch=1)
    clock.sleep(1.0)
    view.tick()
    assert "without" not in pipe.file.getvalue(), "of an epoch without metrics nothing can be said"
    put_trial(ledger, 1, "running", (0.5,), metrics={} if said else {"val/loss": 2.0})
    change_trial(ledger, 0, state="waiting", epoch=0)
    clock.sleep(1.0)
    view.tick()
    ledger.close()
    assert ("has reported an epoch without" in pipe.file.getvalue()) is said


def test_why_a_trial_failed_is_in_the_table_and_the_summary(ledger):
    clock = FakeClock()
    view = View(ledger, "crafted", console(200), workers=2, clock=clock).start()
    put_trial(ledger, 1, "failed", error="own.py:3, in loss: ValueError: twice\nsaid")
    clock.sleep(5.0)
    view.tick()
    assert "own.py:3, in loss: ValueError: twice" in text_of(screen(view.progress, "heading", 120, 24), 120)
    ended = summary(view.progress, RunResult("crafted", "complete", "", 0, None), 0.0)
    assert "hpo show 1 --study crafted" in ended


def test_the_summary_says_what_to_do_next(ledger):
    put_trial(ledger, 0, "complete", (0.5,), params={"train.optim.lr": 0.001})
    progress = Progress(ledger, "crafted", FakeClock())
    interrupted = summary(progress, RunResult("crafted", "interrupted", "", 3, 2), 0.0)
    assert "crafted: interrupted, 1 of 10 trials ended (1 complete)" in interrupted
    assert "hpo resume --study crafted" in interrupted
    assert "behind by 3" in interrupted
    complete = summary(progress, RunResult("crafted", "complete", "", 0, None), 0.0)
    assert "best: trial 0, val/accuracy 0.5\n  train.optim.lr = 0.001" in complete
    assert "hpo resume" not in complete
    assert "hpo best --study crafted     how to train it" in complete, "no checkpoint is kept"
    with ledger.write() as connection:
        kept = {"trial_id": 1, "step": 10, "epoch": 1, "path": "step-10", "sha256": "0" * 64, "size": 1, "metrics": {}}
        connection.execute(insert(checkpoints).values(kept | {"state": "kept", "fence": 1, "revision": 1, "at": 0.0}))
    complete = summary(progress, RunResult("crafted", "complete", "", 0, None), 0.0)
    assert "hpo best --study crafted     its checkpoint, and how to train it" in complete
    assert "behind" not in complete


def test_the_summary_counts_skipped_steps_and_long_warmups(ledger):
    """Once, however often it happened; of a trial that ended by it, its error has said so."""
    for number, state in enumerate(("complete", "complete", "pruned", "infeasible")):
        trial = put_trial(ledger, number, state, (0.5,))
        kinds = ["skipped_step"] * 2 * (number > 0) + ["warmup_not_over", "unread_options"] * (number == 0)
        kinds += ["compiled_shapes"] * (number < 2)
        with ledger.write() as connection:
            study = connection.execute(select(studies.c.id)).scalar_one()
            for i, kind in enumerate(kinds):
                fields = {"reason": "train.average.decay=0.5 is read only with train.average.name=ema."}
                row = {"study_id": study, "trial_id": trial, "kind": kind, "fields": fields, "revision": 1, "at": 0.0}
                connection.execute(insert(events).values(**row, uid=f"{number}.{i}"))
    said = summary(
        Progress(ledger, "crafted", FakeClock()), RunResult("crafted", "complete", "", 0, None), 0.0
    ).splitlines()
    (skipped,) = (line for line in said if "skipped" in line)
    assert skipped.startswith("in 2 trials steps were skipped") and "`hpo show 1 --study crafted`" in skipped
    (cold,) = (line for line in said if "warmup" in line)
    assert cold.startswith("in 1 trial the warmup was longer than the run")
    (unread,) = (line for line in said if "not all was read" in line)
    (shapes,) = (line for line in said if line.startswith("in 2 trials train.average"))  # the reason as it is
    assert shapes.endswith("train.average.name=ema")
    assert unread.startswith("in 1 trial not all was read of what is set: train.average.decay=0.5 is read only with")


@pytest.mark.parametrize(("skipped", "said"), [((0.0, 0.0), []), ((1.0, 0.0), ["1 step"]), ((3.0, 2.0), ["5 steps"])])
def test_a_trial_says_how_many_steps_it_skipped(ledger, tmp_path, skipped, said):
    trial = put_trial(ledger, 0, "complete", (0.5, 0.6))
    with ledger.write() as connection:
        for epoch, value in enumerate(skipped, start=1):
            row = {"trial_id": trial, "step": 10 * epoch, "key": "train/skipped_steps", "fold": 0, "epoch": epoch}
            connection.execute(insert(reports).values(**row, value=value, fence=1, revision=1, at=0.0))
    text = ledger.look(lambda c: describe(detail(c, Home.at(tmp_path), "crafted", 0), ""))
    lines = [line for line in text.splitlines() if "skipped, whose" in line]
    assert lines == [f"{count} skipped, whose loss or gradient was not finite" for count in said]


def test_of_folds_it_says_how_often_steps_were_skipped(ledger, tmp_path):
    trial = put_trial(ledger, 0, "complete", (0.5, 0.6))
    with ledger.write() as connection:
        own = {"trial_id": trial, "revision": 1, "at": 0.0}
        row = {"key": "val/accuracy", "value": 0.5, "fence": 1, "step": 10, "fold": 1, "epoch": 1}
        connection.execute(insert(reports).values(**own, **row))
        for i in range(2):
            row = {"study_id": 1, "kind": "skipped_step", "fields": {"step": i}, "uid": f"0.{i}"}
            connection.execute(insert(events).values(**own, **row))
    text = ledger.look(lambda c: describe(detail(c, Home.at(tmp_path), "crafted", 0), ""))
    assert "\n2 times steps were skipped, whose loss or gradient was not finite\n" in text


def test_before_any_trial_has_ended_nothing_is_counted(ledger):
    said = summary(Progress(ledger, "crafted", FakeClock()), RunResult("crafted", "interrupted", "", 0, 2), 0.0)
    assert said.startswith("crafted: interrupted, 0 of 10 trials ended in 0:00")


def test_the_time_that_a_run_took_begins_with_its_command(ledger):
    """The first view appears five seconds after the command, once the study is read and its workers are prepared."""
    clock = FakeClock(100.0)
    view = View(ledger, "crafted", Console(quiet=True), workers=1, clock=clock, since=95.0)
    clock.sleep(6.0)
    said = summary(view.progress, RunResult("crafted", "interrupted", "", 0, 2), view.seconds)
    assert said.startswith("crafted: interrupted, 0 of 10 trials ended in 0:11")


def test_of_configurations_that_were_listed_none_is_called_the_best(tmp_path):
    ledger = open_crafted(tmp_path / "ledger.db", listed=[{"label": "as found", "params": {"train.seed": 1}}])
    put_trial(ledger, 0, "complete", (0.5,), params={"train.seed": 1})
    said = summary(Progress(ledger, "crafted", FakeClock()), RunResult("crafted", "complete", "", 0, None), 0.0)
    ledger.close()
    assert "1 of 10 trials ended (1 complete)" in said and "hpo compare" in said
    assert "best" not in said and "seed" not in said


def test_the_data_report_is_its_counts_and_a_line_for_each_text():
    found = {"rows": 9, "missing_open": 0, "columns_unused": ["a", "b"], "stocks": 2, "universe": "2 of 3"}
    assert list(data_report(found)) == ["data: rows 9, stocks 2", "  columns unused: a, b", "  universe: 2 of 3"]
    assert list(data_report({})) == []


def test_a_study_without_a_number_of_trials_shows_the_budget_it_has(ledger):
    put_trial(ledger, 0, "complete", (0.5, 0.6))
    with ledger.write() as connection:
        connection.execute(update(studies).values(requested=0, max_epochs=40, max_seconds=5400.0))
    progress = Progress(ledger, "crafted", FakeClock())
    assert (progress.asked_for(), progress.counts(noun=True)) == ("40 epochs or 1h30m", "1 trial, 2/40 epochs")
    assert progress.eta() is None
    to = console(200)
    View(ledger, "crafted", to, workers=1, clock=FakeClock()).start()
    assert to.file.getvalue().startswith("crafted: 40 epochs or 1h30m, 1 trial done before; tpe")
    assert "1 trial, 2/40 epochs" in text_of(screen(progress, "heading", 100, 24))
    reason = RunResult("crafted", "interrupted", "the time is used up", 0, None)
    assert "crafted: interrupted, 1 trial ended (1 complete)" in summary(progress, reason, 0.0)
    assert "goes on from the last checkpoints" not in summary(progress, reason, 0.0)


def put_ended(ledger, numbers: range) -> None:
    """Complete trials of one report each, in one transaction."""
    first = put_trial(ledger, numbers[0], "complete", (0.5,))
    with ledger.write() as connection:
        for table, key in ((trials, trials.c.id), (asks, asks.c.trial_id), (reports, reports.c.trial_id)):
            row = dict(connection.execute(select(table).where(key == first)).mappings().one())
            copies = ({"number": number} if table is trials else {} for number in numbers[1:])
            ids = range(first + 1, first + len(numbers))
            rows = [row | {key.name: i} | copy for i, copy in zip(ids, copies, strict=True)]
            connection.execute(insert(table), rows)


def test_a_refresh_costs_the_same_after_1000_trials_as_after_10(tmp_path):
    """In instructions of SQLite's virtual machine, which runs about ten for each row that it looks at."""
    cost = {}
    for count in (10, 1000):
        ledger = open_crafted(tmp_path / f"{count}.db")
        put_ended(ledger, range(count))
        for number in (count, count + 1):
            put_trial(ledger, number, "running", (0.1, 0.2, 0.3))
        progress = Progress(ledger, "crafted", FakeClock())
        assert progress.ended == count
        instructions = []
        with ledger.read() as connection:
            database: Any = connection.connection.dbapi_connection
        database.set_progress_handler(lambda counted=instructions: counted.append(1) or 0, 1)
        assert progress.refresh() == []
        database.set_progress_handler(None, 0)
        cost[count] = len(instructions)
        ledger.close()
    assert 0 < cost[1000] < 1.2 * cost[10]


def test_a_run_names_the_overrides_the_study_keeps():
    spec = StoredSpec.of({"overrides": {"train.num_epochs": 2, "train.optim.name": "sgd"}})
    assert 'kept from before: train.optim.name="sgd";' in kept_overrides(spec, {"train.num_epochs": 2})
    assert kept_overrides(spec, spec.overrides) == ""
    fused, single = (StoredSpec.of({"overrides": {"train.lanes": lanes}}) for lanes in (16, 1))
    assert kept_overrides(fused, {}) == kept_overrides(fused, {"preset": "small"})
    assert kept_overrides(fused, {}) == "train.lanes=16, with which this study began"
    assert kept_overrides(fused, {"train.lanes": 16}) == kept_overrides(single, {}) == ""
    assert kept_overrides(spec, {"preset": "small"}) == kept_overrides(spec, None) == ""  # replaced; nothing was named


def test_of_parameters_those_that_differ_most_stand_first():
    params = [{"same": 1, "few": n % 2, "train.optim.lr": n / 7} for n in range(6)]
    order = live.by_difference(params)
    assert order == ["train.optim.lr", "few"]
    assert live.short_params(params[3], order) == "lr=0.4286 few=1 same=1"


@pytest.mark.parametrize("width", range(1, 40))
def test_a_line_is_never_cut_inside_a_word(width):
    text = "lr=0.4286 batch_size=32 hidden_size=256"
    shown = live.whole_words(text, width)
    assert len(shown) <= width
    kept = shown.removesuffix("…").split(" ")
    assert shown == text or kept == text.split(" ")[: len(kept)] or width < len("lr=0.4286") + 1


def test_there_is_no_rate_before_there_is_one(tmp_path):
    clock = FakeClock()
    ledger = open_crafted(tmp_path / "ledger.db")
    progress = Progress(ledger, "crafted", clock)
    assert live._rates(progress, epochs=True) == []
    put_trial(ledger, 0, "complete", (0.5, 0.6))
    clock.sleep(30.0)
    progress.refresh()
    assert live._rates(progress, epochs=True) == ["2.0 trials/min", "0.1 epochs/s", "ETA 4:30"]
    ledger.close()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_notice_says_which_trials_are_waited_for(tmp_path, terminal):
    ledger, clock, stream = open_crafted(tmp_path / "ledger.db"), FakeClock(), io.StringIO()
    put_trial(ledger, 0, "running", (0.5,))
    put_trial(ledger, 1, "complete", (0.5,))
    console = Console(file=stream, force_terminal=terminal, width=80, color_system=None)
    view = live.View(ledger, "crafted", console, workers=1, clock=clock).start()
    view.tick()
    view.tick("stopping: trials are saved")
    assert "waiting for 1 trial to save and leave: 0 (epoch 1/4)\n" in stream.getvalue()
    ledger.close()
