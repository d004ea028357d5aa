"""Checks your own samplers, strategies and trackers against the guarantees that hpo's give, in a test of your project.

    from hpo.testing import check_sampler, check_strategy, check_tracker

    def test_my_sampler():
        check_sampler("my_module:MySampler")

A study resumes to the same bits because a sampler can be rebuilt from the ledger at any time and a strategy decides by
the history alone; a tracker shows each point once because what is sent again changes nothing. The checks raise
AssertionError, in a sentence, where that does not hold.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpo.search.samplers.base import Proposal, Sampler, TrialRecord
from hpo.search.samplers.registry import make_sampler
from hpo.search.strategies.registry import make_strategy
from hpo.search.strategies.table_history import TableHistory
from hpo.space.dimensions import Bool, Choice, Float, Int
from hpo.space.objective import Objective
from hpo.space.space import Space

if TYPE_CHECKING:
    from hpo.tracking.base import Batch, Run, RunView, Tracker

SPACES = (
    Space({"x": Float(-1.0, 1.0), "y": Float(1e-4, 1.0, log=True)}),
    Space(
        {
            "lr": Float(1e-4, 1e-1, log=True),
            "name": Choice(["sgd", "adamw", "lion"]),
            "momentum": Float(0.0, 0.9, step=0.1, when={"name": "sgd"}),
            "layers": Int(1, 6),
            "gate": Bool(),
        }
    ),
)
_STATES = ("complete", "complete", "complete", "pruned", "failed", "infeasible")
_WINDOW = 3  # trials that are open at an ask


def check_sampler(
    sampler: str | Mapping[str, object], *, trials: int = 24, objectives: int = 1, spaces: Sequence[Space] = SPACES
) -> None:
    """Checks a sampler, by its name, path or specification, in studies of `trials` trials.

    Proposals must have a coordinate for each dimension, repeat whatever else draws random numbers, and equal those of a
    sampler that is rebuilt from the ledger in the middle of a study, with its trials in any order.
    """
    judged = [Objective(f"value/{i}") for i in range(objectives)]
    for space in spaces:
        first, records = _searched(sampler, space, judged, trials, noise=1)
        second_run, _ = _searched(sampler, space, judged, trials, noise=2)
        for number, (proposal, repeated) in enumerate(zip(first, second_run, strict=True)):
            missing = set(space.paths) - proposal.coordinates.keys()
            assert not missing, f"{sampler}: trial {number} has no coordinate for {sorted(missing)[0]}."
            assert proposal == repeated, (
                f"{sampler}: trial {number} is proposed otherwise when the study is repeated: draw from a generator "
                "seeded by hpo.search.samplers.base.ask_seed(seed, number) alone."
            )
        for number in (0, trials // 2, trials - 1):
            rebuilt = _rebuilt(sampler, space, judged, first, records, number)
            assert rebuilt.ask(number) == first[number], (
                f"{sampler}: trial {number} is proposed otherwise by a sampler that is rebuilt from the ledger: let "
                "ask(number) depend on the seed, the number and the trials told alone."
            )
        assert isinstance(make_sampler(sampler, space, judged, 0).exhausted(trials), str), (
            f"{sampler}: exhausted(number) must return a text, empty where there is something left to try."
        )


def check_strategy(strategy: str | Mapping[str, object], *, trials: int = 12, epochs: int = 9) -> None:
    """Checks a strategy, by its name, path or specification, on curves with values that are not finite.

    Its specification survives JSON, and a verdict repeats, also by a newly made strategy.
    """
    made = make_strategy(strategy)
    stored = json.loads(json.dumps(made.model_dump()))
    anew = make_strategy(stored)
    assert anew.model_dump() == made.model_dump(), f"{strategy}: its options do not survive JSON."
    tables = _curves(trials, epochs)
    for number, curve in tables.items():
        for epoch in (epoch for epoch, _ in curve if made.wants(epoch)):
            history = TableHistory(number, epoch, tables, dict.fromkeys(range(number), "complete"))
            random.seed(epoch)
            verdict = made.decide(history)
            random.seed(-epoch)
            assert verdict == made.decide(history) == anew.decide(history), (
                f"{strategy}: the verdict on trial {number} at epoch {epoch} does not repeat: let decide(history) "
                "depend on the history and the options alone."
            )


def check_tracker(tracker: str, artifacts: Path | None = None) -> None:
    """Checks an empty tracker, named as for `--tracker` or `--tracking-uri`.

    Runs are found by their uid, also by a process that opens the tracker anew; a batch that is sent again changes
    nothing; a run that was discarded refuses what it is sent; removing a study leaves another one of its name.
    """
    from hpo.tracking.base import Batch, Point, Refused

    study, other = _run("a" * 32), _run("b" * 32)
    with closing(_opened(tracker, artifacts)) as shown:
        assert shown.find("checked", study.uid) == [], f"{tracker}: find() gives a run before there is one."
        parent = shown.open_study("checked", study)
        run_id = shown.open_trial(parent, _run(f"{study.uid}/0"))
        assert 0 < len(run_id) <= 64, f"{tracker}: a run's id has 1 to 64 characters, which is what the ledger keeps."
        points = [Point("loss", k, 1_700_000_002_000 + k, 0.5 * k) for k in range(20)]
        points += [Point("odd", 1, 1_700_000_002_000, math.nan)]
        whole = Batch(
            points, {"lr": "0.1", "name": "adamw"}, {"note": "µ"}, status="FINISHED", ended_at=1_700_000_009_000
        )
        part = replace(whole, points=points[:7], status="RUNNING", ended_at=None)
        for batch in (part, whole, part, whole):
            shown.send(run_id, batch)
        shown.flush()
        _check_run(tracker, shown, parent, run_id, study.uid, whole)
    with closing(_opened(tracker, artifacts)) as shown:
        _check_run(tracker, shown, parent, run_id, study.uid, whole)
        shown.send(run_id, whole)
        _check_run(tracker, shown, parent, run_id, study.uid, whole)
        shown.send(run_id, Batch(removed_tags=["note"]))
        [view] = shown.find("checked", study.uid, children=True)
        assert "note" not in view.tags, f"{tracker}: a tag that was removed is still shown."
        beside = shown.open_trial(shown.open_study("checked", other), _run(f"{other.uid}/0"))
        shown.discard(run_id)
        shown.discard(run_id)
        assert not shown.find("checked", study.uid, children=True), f"{tracker}: a run that was discarded is found."
        try:
            shown.send(run_id, Batch(tags={"a": "c"}))
        except Refused:
            pass
        else:
            raise AssertionError(f"{tracker}: send() to a run that was discarded must raise Refused.")
        for _ in range(2):
            shown.remove("checked", study.uid)
        assert not shown.find("checked", study.uid), f"{tracker}: a study that was removed is found."
        others = [view.run_id for view in shown.find("checked", other.uid, children=True)]
        assert others == [beside], f"{tracker}: removing a study removes another study of its name."


def _opened(tracker: str, artifacts: Path | None) -> Tracker:
    from hpo.tracking.trackers import open_tracker

    return open_tracker(tracker, artifacts or Path("artifacts"))


def _run(uid: str) -> Run:
    from hpo.tracking.base import Run

    name = "checked-0000" if "/" in uid else "checked"
    return Run(uid, name, 1_700_000_000_000, {"hpo.run_uid": uid, "hpo.study": "checked"})


def _check_run(tracker: str, shown: Tracker, parent: str, run_id: str, uid: str, batch: Batch) -> None:
    """Checks that the tracker has the study's run and a trial's run, which shows `batch` once."""
    assert [view.run_id for view in shown.find("checked", uid)] == [parent], f"{tracker}: the study's run is not found."
    views: list[RunView] = shown.find("checked", uid, children=True)
    assert [view.run_id for view in views] == [run_id], f"{tracker}: the trial's run is not found once by its uid."
    ended = (views[0].status, views[0].ended_at)
    assert ended == (batch.status, batch.ended_at), f"{tracker}: the run's end is {ended}, not what was sent last."
    assert views[0].params == batch.params, f"{tracker}: the run's parameters are not those sent."
    missing = {"hpo.run_uid": f"{uid}/0", **batch.tags}.items() - views[0].tags.items()
    assert not missing, f"{tracker}: the run lacks the tag {dict(missing)}."
    assert views[0].keys == {point.key for point in batch.points}, f"{tracker}: the run's keys are not its metrics'."
    stored = sorted(repr(point) for _, point in shown.points(views))
    assert stored == sorted(map(repr, batch.points)), f"{tracker}: its points are not those sent, each of them once."


def _searched(
    sampler: str | Mapping[str, object], space: Space, judged: Sequence[Objective], trials: int, noise: int
) -> tuple[list[Proposal], list[TrialRecord]]:
    """Returns the proposals and their ends, in a study where trial k - 3 has ended when trial k is asked."""
    made, proposals, records = make_sampler(sampler, space, judged, seed=7), list[Proposal](), list[TrialRecord]()
    for number in range(trials):
        _draw(noise + number)
        if number >= _WINDOW:
            made.tell(records[number - _WINDOW])
        proposals.append(made.ask(number))
        records.append(_ended(number, proposals[number], len(judged)))
    return proposals, records


def _rebuilt(
    sampler: str | Mapping[str, object],
    space: Space,
    judged: Sequence[Objective],
    proposals: Sequence[Proposal],
    records: Sequence[TrialRecord],
    number: int,
) -> Sampler:
    """Returns a new sampler that knows what the first one knew when trial `number` was asked."""
    made, first_running = make_sampler(sampler, space, judged, seed=7), max(number - _WINDOW + 1, 0)
    known = [*records[:first_running], *(_record(i, proposals[i], "running") for i in range(first_running, number))]
    random.Random(number).shuffle(known)
    for record in known:
        (made.tell if record.number < first_running else made.adopt)(_stored(record))
    return made


def _draw(seed: int) -> None:
    """Draws from the global generators, which changes their state."""
    import numpy as np

    random.seed(seed)
    np.random.seed(seed)


def _record(number: int, proposal: Proposal, state: str, **ended: object) -> TrialRecord:
    attributes = {"trial_attrs": proposal.trial_attrs, "study_attrs": proposal.study_attrs, "parent": proposal.parent}
    return TrialRecord(number, state, proposal.coordinates, **ended, **attributes)


def _ended(number: int, proposal: Proposal, objectives: int) -> TrialRecord:
    """Returns the end of a trial, which depends only on its number."""
    draws = random.Random(number)
    state, loss = draws.choice(_STATES), draws.random()
    curve = [(epoch, loss + 1 / epoch) for epoch in range(1, draws.randint(2, 6))] if objectives == 1 else []
    values = tuple(loss + i for i in range(objectives)) if state == "complete" else None
    return _record(number, proposal, state, values=values, curve=curve)


def _stored(record: TrialRecord) -> TrialRecord:
    """Returns the record as the ledger returns it."""
    data = json.loads(json.dumps(asdict(record)))
    values = data.pop("values")
    curve = [(epoch, value) for epoch, value in data.pop("curve")]
    violations = tuple(data.pop("violations"))
    return TrialRecord(**data, values=None if values is None else tuple(values), curve=curve, violations=violations)


def _curves(trials: int, epochs: int) -> dict[int, list[tuple[int, float]]]:
    draws = random.Random(0)

    def value(level: float, epoch: int) -> float:
        return math.nan if draws.random() < 0.05 else level + draws.random() / epoch

    levels = [draws.random() for _ in range(trials)]
    lasts = [draws.choice([epochs, epochs, draws.randint(1, epochs)]) for _ in range(trials)]
    return {
        number: [(epoch, value(levels[number], epoch)) for epoch in range(1, lasts[number] + 1)]
        for number in range(trials)
    }
