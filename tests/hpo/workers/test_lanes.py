"""A worker's trials as lanes of one model: the study is the same in any group, wherever it was interrupted, and what
befalls one lane is its own."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import mlflow
import pytest
from driven import turn
from lane_studies import (
    ALIKE,
    ALL,
    ALL_ALIKE,
    FLAGS,
    LANES,
    SIZES,
    STEPS,
    TRIALS,
    groups,
    outcomes,
    values,
    variant,
)
from rounds import rounds
from sqlalchemy import select
from study_runs import begin, drive, hpo, known, make, query, refused

from hpo.driver.request import request_of
from hpo.driver.resolve import declare
from hpo.ledger import Ledger, claims, transactions, worker_rows
from hpo.ledger.database.tables import asks, attempts, checkpoints, decisions, reports, studies, trials
from hpo.ledger.process_id import Process
from hpo.search.strategies.registry import STRATEGIES
from hpo.storage.home import Home
from hpo.workers import lanes as worker_lanes
from hpo.workers.executors.local import Local
from hpo.workers.held_trial import HeldTrial
from hpo.workers.lanes import LaneGroup
from hpo.workers.worker import Worker
from trainer.errors import CheckpointError, Fenced
from trainer.runtime import failpoint

pytestmark = pytest.mark.whole


@pytest.fixture(scope="module")
def golden(tmp_path_factory) -> Home:
    """The study trained in one go by one worker."""
    home = Home(tmp_path_factory.mktemp("golden") / "home")
    _, status, state, _ = drive(home, trials=TRIALS, **FLAGS)
    assert state == "complete" and status.trials["pruned"] > 2, "a study in which none is stopped shows nothing"
    return home


@pytest.fixture(scope="module")
def alike(tmp_path_factory) -> Home:
    """A study of trials that may all train together, each to its end."""
    home = Home(tmp_path_factory.mktemp("alike") / "home")
    _, _, state, _ = drive(home, trials=ALL, strategy="none", sampler="random", **FLAGS | ALIKE)
    assert state == "complete"
    return home


def at_commit(monkeypatch, n: int, call: Callable[[], object]) -> list[list[tuple[int, int | None]]]:
    """Call this before the n-th commit of a group's epochs; of all commits what they are of: (trial, epoch) each."""
    commit, seen = worker_lanes.commit, []

    def committed(ledger: Ledger, asking: Sequence[Any], wait: bool) -> Any:
        seen.append([(trial.claim.number, trial.report.epoch) for _, trial in asking])
        if len(seen) == n:
            call()
        return commit(ledger, asking, wait)

    monkeypatch.setattr(worker_lanes, "commit", committed)
    return seen


# One study


def test_whoever_trains_with_whom_the_study_is_the_same(tmp_path, golden):
    """Lanes of two, in other groups than those of four."""
    digest, _, _, _ = drive(Home(tmp_path / "home"), trials=TRIALS, **FLAGS | {"overrides": {"train.lanes": 2}})
    assert digest == known(golden)[0]
    assert values(Home(tmp_path / "home")) == values(golden)


def test_trials_come_to_what_they_come_to_alone_but_for_rounding(tmp_path, alike):
    drive(
        Home(tmp_path / "home"),
        trials=4,
        strategy="none",
        sampler="random",
        **FLAGS | {"overrides": ALIKE["overrides"] | {"train.lanes": 1}},
    )
    alone, together = values(Home(tmp_path / "home")), values(alike)
    assert alone.keys() == {*range(4)}
    for number, own in alone.items():
        assert [one[:2] for one in own] == [one[:2] for one in together[number]]
        assert [one[2] for one in own] == pytest.approx([one[2] for one in together[number]], rel=1e-4)


def test_all_reports_of_an_epoch_are_one_transaction(tmp_path, monkeypatch):
    seen = at_commit(monkeypatch, 0, lambda: None)
    home = Home(tmp_path / "home")
    drive(home, trials=4, strategy="none", sampler="random", **FLAGS | ALIKE)
    epochs = [[one for one in of if one[1] is not None] for of in seen]
    assert [of for of in epochs if of] == [[(number, epoch) for number in range(4)] for epoch in (1, 2, 3, 4)]


def test_a_lane_that_has_ended_makes_room_for_a_trial_that_waits(alike):
    """Six trials of four lanes are one group."""
    assert list(groups(alike).values()) == [[*range(ALL)]]
    assert outcomes(alike) == [(n, 1, "complete") for n in range(ALL)]
    assert [epoch for (epoch,) in query(alike, select(trials.c.epoch))] == [4] * ALL


def test_only_what_is_alike_shares_a_group(golden):
    sizes = {
        number: config["model"]["hidden_size"]
        for number, config in query(golden, select(trials.c.number, asks.c.config).join(trials))
    }
    found = groups(golden)
    assert None not in found and any(len(of) > 1 for of in found.values())
    assert all(len({sizes[number] for number in of}) == 1 for of in found.values())
    assert set(sizes.values()) == {8, 12}, "both kinds of trials are there"


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("asha", [[0, 1], [2], [3, 4]]), ("none", [[0, 1, 3, 4], [2]])],
)
def test_with_rungs_in_order_no_group_passes_over_a_trial_that_waits(tmp_path, strategy, expected):
    """At a rung a trial waits for all before it, and so would wait for one that nobody trains."""
    entries = [{"model.hidden_size": size} for size in SIZES]
    home = Home(tmp_path / "home")
    flags = FLAGS | {"strategy": strategy, "enqueue": entries}
    _, _, state, _ = drive(home, trials=len(SIZES), **flags)
    assert state == "complete" and sorted(groups(home).values()) == expected


def test_a_rung_compares_each_trial_with_all_before_it_and_none_after(golden):
    """Whoever came to the rung with it: by the reports and the text of the decisions alone."""
    at_epoch: dict[int, dict[int, float]] = defaultdict(dict)
    told = select(trials.c.number, reports.c.epoch, reports.c.value).join(trials)
    for number, epoch, value in query(golden, told.where(reports.c.key == "val/loss")):
        at_epoch[epoch][number] = value
    columns = trials.c.number, decisions.c.step, decisions.c.verdict, decisions.c.reason
    compared = 0
    for number, step, verdict, reason in query(golden, select(*columns).join(trials)):
        epoch = step // STEPS
        before = [value for other, value in at_epoch[epoch].items() if other <= number]
        rank = 1 + sum(value < at_epoch[epoch][number] for value in before)
        if verdict == "stop":
            kept = max(1, len(before) // 2)
            assert f"rank {rank} of {len(before)} at rung" in reason and f"(epoch {epoch})" in reason
            assert rank > kept and ("only the best goes on" if kept == 1 else f"the best {kept} go on") in reason
            compared += 1
        elif reason:
            assert rank <= max(1, len(before) // 2)
    assert compared == known(golden)[1].trials["pruned"]


def test_by_default_the_window_holds_two_trials_for_every_lane(tmp_path):
    for workers, lanes, window in ((1, 4, 8), (2, 4, 16), (1, 2, 4), (2, 1, 4)):
        request = request_of(Home(tmp_path), reference=str(LANES), overrides={"train.lanes": lanes})
        assert declare(request, None, workers=workers).spec.window == window


# Interruptions


@pytest.mark.parametrize("n", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 5, 9))])
def test_a_study_that_was_told_to_stop_and_resumed_is_the_study_in_one_go(tmp_path, golden, monkeypatch, n):
    """As SIGINT and SIGTERM tell it: all lanes are saved and wait."""
    home = Home(tmp_path / "home")
    driver = make(home, trials=TRIALS, **FLAGS)
    with monkeypatch.context() as patched:
        at_commit(patched, n, driver.request_stop)
        driver.acquire()
        assert driver.run() == "interrupted"
        driver.release()
    assert None not in {outcome for *_, outcome in outcomes(home)}, "none is held"
    left = {number for number, _, outcome in outcomes(home) if outcome == "preempted"}
    states = dict(map(tuple, query(home, select(trials.c.number, trials.c.state))))
    assert left and {states[number] for number in left} == {"waiting"}
    saved = {
        n for (n,) in query(home, select(trials.c.number).join(checkpoints, checkpoints.c.trial_id == trials.c.id))
    }
    assert left <= saved
    digest, _, state, _ = drive(home, trials=TRIALS, **FLAGS)
    assert (state, digest) == ("complete", known(golden)[0])


@pytest.mark.slow
def test_trials_go_on_in_other_groups_of_other_workers(tmp_path, golden, monkeypatch):
    home = Home(tmp_path / "home")
    driver = make(home, trials=TRIALS, **FLAGS)
    with monkeypatch.context() as patched:
        at_commit(patched, 3, driver.request_stop)
        driver.acquire()
        driver.run()
        driver.release()
    digest, _, state, _ = drive(home, Local(2), trials=TRIALS, **FLAGS)
    assert (state, digest) == ("complete", known(golden)[0])
    assert len(outcomes(home)) > TRIALS


# What befalls one lane


def fusions(monkeypatch) -> list[LaneGroup]:
    """Those that have trained from here on, the one that trains last."""
    made, init = [], LaneGroup.__init__

    def begun(self: LaneGroup, *given: Any) -> None:
        made.append(self)
        init(self, *given)

    monkeypatch.setattr(LaneGroup, "__init__", begun)
    return made


def joined(columns: Sequence[Any]) -> list[Any]:
    return [column.table.c.trial_id == trials.c.id for column in columns[:1] if column.table is not trials]


class Taken:
    """A study whose trials wait, a worker beside its driver, and hands that take a trial from that."""

    def __init__(self, home: Home, monkeypatch, reference: str = str(LANES), n: int = ALL, **flags: Any) -> None:
        self.home = home
        asked = {"strategy": "none", "sampler": "random", **FLAGS, **ALIKE, "reference": reference, **flags}
        self.driver = make(home, trials=n, **asked)
        self.driver.acquire()
        turn(self.driver)
        self.ledger = Ledger(home.storage)
        self.worker = Worker(self.ledger, home, "joined")

    def lose(self, number: int) -> None:
        """As the driver does where a worker is silent."""
        [(trial_id, fence)] = self.of(number, trials.c.id, trials.c.fence)
        self.ledger.transact(lambda c: transactions.lose(c, trial_id, fence, "it was silent"))

    def of(self, number: int, *columns: Any) -> list:
        query = select(*columns).where(trials.c.number == number, *joined(columns))
        return [*self.ledger.look(lambda connection: connection.execute(query).all())]

    def finish(self) -> str:
        """Let the driver's own worker train what is left; the digest."""
        assert self.driver.run() == "complete"
        self.close()
        return known(self.home)[0]

    def close(self) -> None:
        self.driver.release()
        self.ledger.close()


@pytest.fixture
def taken(tmp_path, monkeypatch):
    made = Taken(Home(tmp_path / "home"), monkeypatch)
    yield made
    made.close()


def test_a_group_takes_its_workers_share_of_what_is_open(taken, alike, monkeypatch):
    """Of six trials and two workers three, though there is room for four, lest the other worker stands idle."""
    [(environment,)] = query(taken.home, select(studies.c.environment))
    with taken.ledger.write() as connection:
        connection.execute(studies.update().values(environment=environment | {"workers": 2}))
    seen = at_commit(monkeypatch, 0, lambda: None)
    assert taken.worker.run_one([1])
    assert [number for number, _ in seen[0]] == [0, 1, 2]
    assert taken.finish() == known(alike)[0]


def lost_alone(taken: Taken, number: int) -> None:
    """All but that trial are complete by their first attempt; it waited again, and so the group took it again."""
    found = outcomes(taken.home)
    assert [one for one in found if one[0] != number] == [(n, 1, "complete") for n in range(ALL) if n != number]
    assert [one for one in found if one[0] == number] == [(number, 1, "lost"), (number, 3, "complete")]
    left = {path.name for path in taken.home.checkpoints("lanes", number).iterdir() if path.is_dir()}
    assert left == {
        path for path, state in taken.of(number, checkpoints.c.path, checkpoints.c.state) if state == "kept"
    }


def test_a_trial_that_was_taken_is_dropped_alone_at_its_report(taken, alike, monkeypatch):
    at_commit(monkeypatch, 3, lambda: taken.lose(2))
    with pytest.raises(Fenced, match="trial 2 was taken from this attempt"):
        taken.worker.run_one([1])
    lost_alone(taken, 2)
    assert taken.finish() == known(alike)[0]


def test_a_taken_trial_is_dropped_alone_when_leases_are_renewed(taken, alike, monkeypatch):
    """Between two reports."""
    training = fusions(monkeypatch)

    def look() -> None:
        taken.lose(2)
        training[-1].leases.renew()

    at_commit(monkeypatch, 3, look)
    with pytest.raises(Fenced, match="trial 2 was taken from this attempt"):
        taken.worker.run_one([1])
    lost_alone(taken, 2)
    assert taken.finish() == known(alike)[0]


def test_a_trial_that_was_taken_is_dropped_alone_when_it_has_ended(taken, alike, monkeypatch):
    """Between its last report and its end."""
    finish, lost = HeldTrial.finish, []

    def finished(trial: HeldTrial, outcome: Any) -> Any:
        if trial.claim.number == 2 and not lost:
            lost.append(taken.lose(2))
        return finish(trial, outcome)

    monkeypatch.setattr(HeldTrial, "finish", finished)
    with pytest.raises(Fenced, match="trial 2 was taken from this attempt"):
        taken.worker.run_one([1])
    lost_alone(taken, 2)
    assert taken.finish() == known(alike)[0]


def test_a_taken_trial_is_dropped_alone_while_its_group_waits(tmp_path, monkeypatch, golden):
    """Trial 0 is another worker's and comes late; of those that wait for it one is taken."""
    taken = Taken(Home(tmp_path / "home"), monkeypatch, n=4, strategy="asha")
    other = Process("far", 1, "then")
    taken.ledger.transact(lambda c: worker_rows.register(c, other, "joined"))
    [first] = taken.ledger.transact(lambda c: claims.claim(c, other.id, uuid.uuid4().hex, [1], 1))
    training = fusions(monkeypatch)
    raised: list[BaseException] = []

    def work() -> None:
        try:
            taken.worker.run_one([1])
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        pending = select(trials.c.number).where(trials.c.epoch == 1, trials.c.state == "running")
        deadline = time.monotonic() + 30
        while {n for (n,) in query(taken.home, pending)} < {1, 2, 3} and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(0.3)
        taken.lose(2)
        training[-1].leases.renew()
        time.sleep(0.5)
        found = outcomes(taken.home)
        assert thread.is_alive() and not raised, "the others go on"
        assert (2, 1, "lost") in found and (1, 1, None) in found
        assert {n for n, _, outcome in found if outcome is None} == {0, 1, 2, 3}, "what waits is taken again"
    finally:
        taken.ledger.transact(lambda c: transactions.lose(c, first.trial_id, first.fence, "gone"))
        thread.join(30)
        taken.close()
    assert [type(error) for error in raised] == [Fenced]


def test_an_attempt_is_not_taken_for_lost_since_an_earlier_one_has_ended(tmp_path, monkeypatch):
    """The lease may be renewed just when a trial has ended, which waits again at once: for its restart."""
    monkeypatch.setitem(STRATEGIES, "restarting", "pausing:RestartOne")
    finish, training = HeldTrial.finish, fusions(monkeypatch)

    def finished(trial: HeldTrial, outcome: Any) -> Any:
        ended = finish(trial, outcome)
        training[-1].leases.renew()
        return ended

    flags = FLAGS | ALIKE | {"strategy": "restarting", "sampler": "random", "window": 1}
    flags["overrides"] = ALIKE["overrides"] | {"train.num_epochs": 3}
    golden, _, state, _ = drive(Home(tmp_path / "golden"), trials=3, **flags)
    assert state == "complete" and (1, 1, "restarted") in outcomes(Home(tmp_path / "golden"))
    monkeypatch.setattr(HeldTrial, "finish", finished)
    digest, _, state, _ = drive(Home(tmp_path / "home"), trials=3, **flags)
    assert (state, digest) == ("complete", golden)
    assert outcomes(Home(tmp_path / "home")) == [
        (0, 1, "complete"),
        (1, 1, "restarted"),
        (1, 2, "complete"),
        (2, 1, "complete"),
    ]


def test_trials_that_wait_for_their_place_in_the_group_keep_their_leases(tmp_path, monkeypatch):
    """A model may take longer to make than a lease lasts, so those that come after it are renewed meanwhile."""
    slow = variant(
        tmp_path,
        "            c = self.config.model\n",
        "            c = self.config.model\n            time.sleep(0.3)\n",
    )
    home = Home(tmp_path / "home")
    short = {"overrides": ALIKE["overrides"] | {"train.num_epochs": 1}}
    taken = Taken(home, monkeypatch, slow, n=4, **short)
    with taken.ledger.write() as connection:
        connection.execute(studies.update().values(lease_seconds=0.4))
    silent: list[int] = []
    stale: dict[tuple[int, int], tuple[int, float]] = {}
    done = threading.Event()

    def watch() -> None:
        running = select(trials.c.number, attempts.c.fence, attempts.c.renewals).join(trials)
        while not done.wait(0.05):
            for number, fence, renewals in query(home, running.where(attempts.c.outcome.is_(None))):
                seen, since = stale.get((number, fence), (None, time.monotonic()))
                stale[number, fence] = renewals, since if seen == renewals else time.monotonic()
                if time.monotonic() - stale[number, fence][1] > 0.6:
                    silent.append(number)

    thread = threading.Thread(target=watch)
    thread.start()
    taken.worker.run_one([1])
    done.set()
    thread.join()
    taken.finish()
    assert Counter(silent) == {}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("        def model(self):\n", "        def model(self):\n            {check}\n"),
        ("        def evaluate(self, model):\n", "        def evaluate(self, model):\n            {check}\n"),
        pytest.param(
            "        def train_set(self):\n",
            "        def train_set(self):\n            {check}\n",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["model", "evaluate", "train_set"],
)
def test_a_bug_that_one_trial_meets_fails_that_trial_alone(tmp_path, alike, before, after):
    """The others report what they report without it."""
    params = dict(map(tuple, query(alike, select(trials.c.number, asks.c.params).join(trials))))
    odd = params[2]["train.optim.lr"]
    check = f"if self.config.train.optim.lr == {odd!r}: raise ValueError('a bug of one trial')"
    reference = variant(tmp_path, before, after.format(check=check))
    home = Home(tmp_path / "home")
    flags = FLAGS | ALIKE | {"reference": reference, "strategy": "none", "sampler": "random"}
    _, _, state, _ = drive(home, trials=ALL, **flags)
    assert state == "complete"
    assert outcomes(home) == [(n, 1, "user_error" if n == 2 else "complete") for n in range(ALL)]
    [(error,)] = query(home, select(trials.c.error).where(trials.c.state == "failed"))
    assert "ValueError: a bug of one trial" in error and "lanes_study.py" in error
    assert {n: own for n, own in values(home).items() if n != 2} == {n: v for n, v in values(alike).items() if n != 2}


def test_a_loss_that_is_not_finite_ends_its_lane_alone(tmp_path, alike):
    """A weight of it is infinite from the beginning."""
    params = dict(map(tuple, query(alike, select(trials.c.number, asks.c.params).join(trials))))
    last = "nn.Linear(c.hidden_size, 1)"
    spoilt = (
        f"last.bias.data.fill_(float('inf')) if self.config.train.optim.lr == {params[2]['train.optim.lr']!r} else 0"
    )
    reference = variant(tmp_path, last, f"[last := {last}, {spoilt}][0]")
    home = Home(tmp_path / "home")
    flags = FLAGS | ALIKE | {"reference": reference, "strategy": "none", "sampler": "random"}
    _, _, state, _ = drive(home, trials=ALL, **flags)
    assert state == "complete"
    assert outcomes(home) == [(n, 1, "nonfinite" if n == 2 else "complete") for n in range(ALL)]
    assert {n: own for n, own in values(home).items() if n != 2} == {n: v for n, v in values(alike).items() if n != 2}


def test_a_task_that_cannot_be_imported_fails_its_trials_only(tmp_path):
    """As it does for trials on their own."""
    reference = variant(
        tmp_path, "        globals()[name] = task()\n", '        raise RuntimeError("the module is broken")\n'
    )
    ends = {}
    for lanes in (1, 4):
        home = Home(tmp_path / str(lanes))
        overrides = {"train.lanes": lanes, "model.hidden_size": 8}
        _, _, state, _ = drive(home, trials=8, **FLAGS | {"reference": reference, "overrides": overrides})
        ends[lanes] = state, outcomes(home), query(home, select(trials.c.error).distinct())
    assert ends[4] == ends[1] and ends[1][0] == "stopped"


@pytest.mark.slow
def test_a_trial_that_kills_its_worker_takes_no_other_with_it(tmp_path, alike):
    """Those that have died with it twice train alone, so that it is seen which it is."""
    params = dict(map(tuple, query(alike, select(trials.c.number, asks.c.params).join(trials))))
    made = "        def model(self):\n"
    killing = f"            if self.config.train.optim.lr == {params[2]['train.optim.lr']!r}: os._exit(9)\n"
    home, flags = Home(tmp_path / "home"), FLAGS | ALIKE | {"reference": variant(tmp_path, made, made + killing)}
    drive(home, Local(1), trials=4, strategy="none", sampler="random", **flags)
    states = dict(map(tuple, query(home, select(trials.c.number, trials.c.state))))
    assert states == {n: "failed" if n == 2 else "complete" for n in states} and states.keys() >= {*range(4)}
    assert {outcome for number, _, outcome in outcomes(home) if number == 2} == {"lost"}
    expected = values(alike)
    assert {n: own for n, own in values(home).items() if n < 4} == {n: expected[n] for n in (0, 1, 3)}


# What befalls the place


def fill_disk(monkeypatch, hit: int) -> None:
    monkeypatch.setattr(failpoint, "_TESTING", True)
    monkeypatch.setattr(failpoint, "_POINTS", failpoint._parse(f"checkpoint.after_files=raise:ENOSPC@{hit}"))
    monkeypatch.setattr(failpoint, "_passed", {})


@pytest.mark.parametrize("hit", [7, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 11))])
def test_a_full_disk_gives_all_lanes_back_and_costs_no_trial(taken, alike, monkeypatch, hit):
    with monkeypatch.context() as patched:
        fill_disk(patched, hit)
        with pytest.raises(CheckpointError, match=os.strerror(errno.ENOSPC)):
            taken.worker.run_one([1])
    found = outcomes(taken.home)
    assert {outcome for *_, outcome in found} <= {"preempted", "complete"}
    assert sum(outcome == "preempted" for *_, outcome in found) == 4
    assert query(taken.home, select(trials.c.losses).distinct()) == [(0,)]
    assert {state for (state,) in query(taken.home, select(trials.c.state))} <= {"waiting", "complete"}
    assert taken.finish() == known(alike)[0]


def test_a_worker_that_is_preempted_saves_all_lanes_and_gives_them_back(taken, alike, monkeypatch):
    at_commit(monkeypatch, 3, taken.worker.preempt)
    assert taken.worker.run_one([1])
    assert outcomes(taken.home) == [(n, 1, "preempted") for n in range(4)]
    steps = dict(map(tuple, query(taken.home, select(trials.c.number, trials.c.step).where(trials.c.fence == 1))))
    newest = {}
    saved = select(trials.c.number, checkpoints.c.step).join(trials)
    for number, step in query(taken.home, saved.order_by(checkpoints.c.step)):
        newest[number] = step
    assert newest == steps, "each goes on from where it has left"
    assert taken.finish() == known(alike)[0]


# What a user gets wrong, and sees


@rounds(
    ("overrides", "words"),
    [
        (["train.lanes=0"], r"train\.lanes='0' is refused: input should be greater than or equal to 1"),
        (["train.lanes=many"], r"train\.lanes"),
        (
            ["train.lanes=4", "train.parallel.data=2"],
            r"lanes is 4: trials that train as lanes .* cannot do with parallel",
        ),
        (["train.lanes=4", "train.folds=2"], r"cannot do with folds=2; leave folds out, or lanes=1"),
        (["train.lanes=4", "train.precision=fp16"], r"cannot do with precision=fp16"),
    ],
)
def test_what_lanes_cannot_do_is_refused_before_anything_is_written(tmp_path, overrides, words):
    home = Home(tmp_path / "home")
    given = [part for one in overrides for part in ("-o", one)]
    said = refused(hpo("run", "--study", str(LANES), "--trials", "2", "--executor", "inline", *given, home=home), 2)
    assert len(said.strip().splitlines()) == 1 and re.search(words, said), said
    assert not home.root.exists()


@pytest.mark.usefixtures("process")
def test_a_loop_of_ones_own_has_no_lanes_and_says_so(tmp_path):
    home, tiny = Home(tmp_path / "home"), str(LANES.with_name("tiny_study.py"))
    flags = ("--trials", "8", "--executor", "inline", "--strategy", "none", "-o", "pause=0", *ALL_ALIKE)
    alike = ("-o", "train.optim.name=adamw")
    said = refused(hpo("run", "--study", tiny, *flags, *alike, home=home), 5)
    assert "TinyTask has a fit() of its own, which has no lanes: leave train.lanes." in said
    assert {outcome for *_, outcome in outcomes(home)} == {"bad_config"}


def test_ray_tune_has_no_lanes_and_says_so(tmp_path):
    home = Home(tmp_path / "home")
    flags = ("--trials", "4", "--executor", "ray-tune", "--scheduler", "fifo", "-o", "train.lanes=4")
    said = refused(hpo("run", "--study", str(LANES), *flags, home=home), 2)
    assert "it trains each trial on its own, and train.lanes is 4" in said and len(said.strip().splitlines()) == 1
    assert not outcomes(home)


RUN = ("run", "--study", str(LANES), "--executor", "inline", "--seed", "3", *ALL_ALIKE)


@pytest.fixture(scope="module")
def searched(tmp_path_factory, process) -> Home:
    """Begun by one worker, and continued by two."""
    home = Home(tmp_path_factory.mktemp("searched") / "home")
    begin(home, **FLAGS | ALIKE)
    onward = ("resume", "--trials", "6", "--executor", "local", "--workers", "2")
    for command in ((*RUN, "--trials", "2"), onward):
        result = hpo(*command, home=home)
        assert result.exit_code == 0, (result.output, result.stderr)
    return home


@pytest.mark.usefixtures("process")
@pytest.mark.parametrize(
    "strategy",
    [
        "asha-promote",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("none", "pbt", "hyperband", "freeze-thaw", "pb2", "median", "bohb", "hyperband-promote")
        ),
    ],
)
def test_under_every_strategy_a_study_of_lanes_comes_to_its_end(tmp_path, strategy):
    home = Home(tmp_path / "home")
    trials_of = "32" if strategy in ("pbt", "pb2") else "6"
    window = {"window": None} if strategy in ("pbt", "pb2") else {}
    begin(home, **FLAGS | ALIKE | window, strategy=strategy)
    result = hpo(*RUN, "--trials", trials_of, "--strategy", strategy, home=home)
    assert result.exit_code == 0, (result.output, result.stderr)
    verified = hpo("verify", home=home)
    assert verified.exit_code == 0 and re.match("0 differences", verified.stdout), verified.stdout
    found = groups(home)
    assert None not in found and any(len(of) > 1 for of in found.values())


def test_verify_finds_nothing_and_mlflow_shows_who_trained_together(searched):
    assert re.match("0 differences", hpo("verify", home=searched).stdout)
    client = mlflow.MlflowClient(searched.tracking_uri)
    [experiment] = [one for one in client.search_experiments() if one.name == "lanes"]
    shown = defaultdict(list)
    for run in client.search_runs([experiment.experiment_id], max_results=100):
        if run.data.tags["hpo.kind"] != "study":
            shown[run.data.tags["hpo.group"]].append(int(run.data.tags["hpo.trial"]))
    assert {group: sorted(of) for group, of in shown.items()} == groups(searched)
    assert max(map(len, shown.values())) > 1


def test_status_and_show_say_of_such_a_study_what_they_say_of_others(searched):
    digest, status = known(searched)
    said = json.loads(hpo("status", "--json", home=searched).stdout)
    assert (said["state"], said["digest"]) == ("complete", digest)
    assert sum(said["trials"].values()) == 6
    result = hpo("show", "3", home=searched)
    assert result.exit_code == 0 and "val/loss" in result.stdout, (result.output, result.stderr)
    assert status.trials["failed"] == 0


def test_resume_goes_on_with_other_workers_and_the_window_it_began_with(tmp_path, searched):
    digest, _, _, _ = drive(Home(tmp_path / "home"), trials=6, **FLAGS | ALIKE)
    assert known(searched)[0] == digest
