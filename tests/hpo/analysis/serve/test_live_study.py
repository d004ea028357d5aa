"""A study that is watched: what is sent of its changes, put together, is what a report says that is made now."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from crafted import change_trial, open_crafted, put_trial
from sqlalchemy import delete, insert, update

from hpo.analysis.report import data
from hpo.analysis.serve import curve_lines, pages
from hpo.analysis.serve.live_study import LiveStudy
from hpo.analysis.serve.subjects import LiveHome, LiveTrial, in_families
from hpo.errors import HomeError, UserError
from hpo.ledger import Ledger
from hpo.ledger.database import tables
from hpo.storage.home import Home


@pytest.fixture
def ledger(tmp_path) -> Iterator[Ledger]:
    opened = open_crafted(tmp_path / "ledger.db")
    yield opened
    opened.close()


@pytest.fixture(params=["sqlite", "postgresql"])
def any_ledger(request, tmp_path) -> Iterator[Ledger]:
    url = request.getfixturevalue("postgres_database")() if request.param == "postgresql" else ""
    opened = open_crafted(tmp_path / "ledger.db", url=url)
    yield opened
    opened.close()


def watched(ledger: Ledger, tmp_path: Path, looks: int = 2) -> LiveStudy:
    """With a report that has all parts, which the second look makes."""
    study = LiveStudy(ledger, Home.at(tmp_path), "crafted")
    for _ in range(looks):
        study.look()
    return study


def report_again(ledger: Ledger, number: int, epoch: int, value: float, revision: int, **columns: Any) -> None:
    """A trial reports once more."""
    with ledger.write() as connection:
        mine = tables.trials.c.number == number
        id_ = connection.execute(tables.trials.select().where(mine)).mappings().one()["id"]
        point = {"trial_id": id_, "step": 10 * epoch, "key": "val/accuracy", "fold": 0, "epoch": epoch, "value": value}
        connection.execute(insert(tables.reports).values(**point, fence=1, revision=revision, at=float(epoch)))
    change_trial(ledger, number, epoch=epoch, step=10 * epoch, revision=revision, **columns)


def merged(report: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    """As the page's script puts a part into its report."""
    made = copy.deepcopy(report)
    made |= {name: part[name] for name in ("state", "status", "counts")}
    columns = made["trials"]
    for name, column in flat(part["trials"]).items():
        into = columns
        for key in name[:-1]:
            into = into[key]
        for number, value in zip(part["trials"]["number"], column, strict=True):
            own = into.setdefault(name[-1], [])
            own += [None] * (number + 1 - len(own))
            own[number] = value
    for metric, lines in part["curves"]["lines"].items():
        for number, (grid, values) in lines.items():
            made["curves"]["lines"].setdefault(metric, {})[number] = [part["curves"]["grids"][grid], values]
    columns |= part.get("places", {})
    return made


def flat(columns: dict[str, Any]) -> dict[tuple[str, ...], list[Any]]:
    found: dict[tuple[str, ...], list[Any]] = {}
    for name, column in columns.items():
        if isinstance(column, dict):
            found |= {(name, *key): one for key, one in flat(column).items()}
        elif name != "searched":
            found[(name,)] = column
    return found


def drawn(report: dict[str, Any]) -> dict[str, Any]:
    """Each trial's curve with its places."""
    grids = report["curves"]["grids"]
    return {
        metric: {number: [grids[at] if isinstance(at, int) else at, values] for number, (at, values) in lines.items()}
        for metric, lines in report["curves"]["lines"].items()
    }


def test_changes_put_together_are_the_report_of_now(any_ledger, tmp_path):
    ledger = any_ledger
    put_trial(ledger, 0, "complete", (0.5, 0.6))
    put_trial(ledger, 1, "running", (0.2,), revision=1)
    study = watched(ledger, tmp_path)
    assert study.known is not None
    report, version = dict(study.known.report), study.version
    for step in range(2, 5):
        report_again(ledger, 1, step, 0.2 * step, revision=step)
        if step == 3:
            put_trial(
                ledger, 2, "failed", (0.1,), error="ValueError: no", params={"train.optim.lr": 1.0, "model.new": 3}
            )
        study.look()
        message = study.message(version)
        assert message.event == "rows" and message.data is not None
        assert message.data["trials"]["number"] == ([1, 2] if step == 3 else [1])
        report, version = merged(report, message.data), message.version
    report_again(ledger, 1, 5, 0.9, revision=5, state="complete", values=[0.9], ended_at=5.0)
    study.look()
    assert study.message(version).event == "rows"
    part = study.message(version).data
    assert part is not None and part["places"] == {"front": [0, 0, None], "place": [1, 0, None]}
    report = merged(report, part)
    now = data.read(ledger, Home.at(tmp_path), "crafted").to_json()
    for column in report["trials"].keys() - {"settings", "searched"}:
        assert report["trials"][column] == now["trials"][column], column
    assert report["trials"]["settings"]["model.new"][2] == 3
    assert drawn(report) == drawn(now)
    assert (report["state"], report["status"], report["counts"]) == (now["state"], now["status"], now["counts"])


def test_one_that_lags_gets_all_it_lacks_and_nothing_twice(ledger, tmp_path):
    for number in range(3):
        put_trial(ledger, number, "running", (0.1,), revision=1)
    study = watched(ledger, tmp_path)
    first = study.version
    seen = []
    for number in range(3):
        report_again(ledger, number, 2, 0.5, revision=2)
        study.look()
        seen.append(study.version)
    numbers = [(study.message(since).data or {}).get("trials", {}).get("number") for since in (first, *seen)]
    assert numbers == [[0, 1, 2], [1, 2], [2], None]
    assert study.message(seen[0]) is study.message(seen[0])  # it is read once for all who lack it
    study.look()
    assert study.version == seen[-1]  # nothing has changed


def test_a_report_is_made_anew_once_it_is_due(ledger, tmp_path, monkeypatch):
    put_trial(ledger, 0, "running", (0.1,), revision=1)
    study = watched(ledger, tmp_path, looks=1)
    assert study.known is not None and not study.known.whole
    before = study.version
    study.look()
    assert study.known.whole and study.message(before).event == "refresh"
    whole = study.version
    report_again(ledger, 0, 2, 0.5, revision=2)
    study.look()
    assert study.message(whole).event == "rows"
    study._due = 0.0
    study.look()
    assert study.message(whole).event == "refresh" == study.message(whole + 1).event
    assert study.message(study.version + 5).event == "refresh"  # of a server before


def test_a_study_that_goes_and_comes_back_is_told(ledger, tmp_path):
    put_trial(ledger, 0, "complete", (0.5,))
    study = watched(ledger, tmp_path)
    before = study.version
    with ledger.write() as connection:
        for table in ("reports", "attempts", "asks", "trials", "studies"):
            connection.execute(delete(getattr(tables, table)))
    study.look()
    assert study.known is None and study.version > before and study.message(before).event == "gone"
    with ledger.write() as connection:
        row = {"name": "crafted", "uid": "f" * 32, "created_at": 1.0, "state": "open", "requested": 5}
        spec = {
            "reference": "mlp",
            "objectives": [{"metric": "val/accuracy", "direction": "maximize", "select": "last"}],
        }
        spec |= {"overrides": {}, "sampler": "tpe", "strategy": {"name": "none"}, "order": "ordered", "window": 1}
        row |= {"spec": spec | {"seed": 0, "metrics": [], "name": "crafted"}, "identity": {}, "environment": {}}
        connection.execute(insert(tables.studies).values(row))
    gone = study.version
    study.look()
    assert study.message(gone).event == "refresh" and study.known is not None and study.known.count == 0


def test_a_study_made_anew_between_two_looks_is_another(ledger, tmp_path):
    put_trial(ledger, 0, "complete", (0.5,))
    study = watched(ledger, tmp_path)
    before = study.version
    with ledger.write() as connection:
        connection.execute(update(tables.studies).values(uid="a" * 32))
    study.look()
    assert study.message(before).event == "refresh"


def test_the_home_and_a_trial_have_versions_too(ledger, tmp_path):
    studies, trial, missing = LiveHome(ledger), LiveTrial(ledger, "crafted", 0), LiveTrial(ledger, "crafted", 9)
    put_trial(ledger, 0, "running", (0.1,), revision=1)
    for subject in (studies, trial, missing):
        subject.look()
    assert (studies.version, trial.version) == (1, 1) and studies.rows[0]["counts"] == {"running": 1}
    assert missing.message(None).event == "gone"
    for subject in (studies, trial):
        subject.look()
        assert subject.version == 1
    report_again(ledger, 0, 2, 0.5, revision=2, state="complete", values=[0.5])
    for subject in (studies, trial):
        subject.look()
        assert subject.version == 2 and subject.message(1).event == "refresh"
    assert (studies.rows[0]["best"], studies.rows[0]["number"]) == (0.5, 0)


def test_a_derived_study_stands_below_its_own():
    of = {"a": "", "b": "", "b-confirm": "b", "b-confirm-2": "b-confirm", "gone-finish": "gone"}
    rows = [{"name": name, "of": source, "created_at": at} for at, (name, source) in enumerate(of.items())]
    placed = [(row["name"], row["depth"]) for row in in_families(rows)]
    assert placed == [("gone-finish", 0), ("b", 0), ("b-confirm", 1), ("b-confirm-2", 2), ("a", 0)]


def test_the_line_of_a_study_is_the_best_so_far(ledger):
    for number, value in enumerate([0.3, 0.2, 0.5, 0.4]):
        put_trial(ledger, number, "complete", (value,))
    put_trial(ledger, 4, "running", (0.9,))
    studies = LiveHome(ledger)
    studies.look()
    [row] = studies.rows
    assert row["line"] == [(0, 0.3), (1, 0.3), (2, 0.5), (3, 0.5), (4, 0.5)]
    assert (row["ended"], row["status"]) == (4, f"{row['state']}, 4 of 10 trials ended")


def test_curves_of_any_metric_over_epochs_and_time(any_ledger):
    ledger = any_ledger
    put_trial(ledger, 0, "complete", (0.5, None), metrics={"train/lr": (0.1, 0.2)})
    with ledger.write() as connection:
        mine = tables.reports.c.step
        connection.execute(update(tables.reports).values(at=100.0 + 3.0 * mine))
        connection.execute(update(tables.trials).values(started_at=100.0))

    def lines(**given: str) -> Any:
        return curve_lines.lines(ledger, "crafted", curve_lines.asked(given))

    assert lines(metric="train/lr", along="time") == {0: [[30.0, 60.0], [0.1, 0.2]]}
    assert lines(metric="val/accuracy") == {0: [[1, 2], [0.5, None]]}
    assert lines(metric="val/accuracy", along="step") == {0: [[10, 20], [0.5, None]]}
    with pytest.raises(UserError, match="no trial of study 'crafted' has reported 'unknown': there are train/lr, val/"):
        lines(metric="unknown")
    for wrong in ({"metric": ""}, {"metric": "x" * 251}, {"metric": "a", "along": "../etc"}):
        with pytest.raises(UserError):
            curve_lines.asked(wrong)


def test_a_ledger_that_is_only_read_lets_nothing_be_written(tmp_path):
    open_crafted(tmp_path / "ledger.db").close()
    only_read = Ledger(f"sqlite:///{tmp_path}/ledger.db", create=False, read_only=True)
    with pytest.raises(HomeError, match="readonly"), only_read.write() as connection:
        connection.execute(update(tables.studies).values(requested=1))
    with only_read.read() as connection:
        assert connection.execute(tables.studies.select()).mappings().one()["requested"] == 10
    only_read.close()


def test_the_list_shows_the_mean_under_other_seeds():
    row = {"name": "a", "created_at": 0.0, "of": "", "depth": 0, "requested": 5, "trials": 5, "ended": 5, "front": 0}
    row |= {"metric": "val/loss", "direction": "minimize", "state": "complete", "status": "complete", "counts": {}}
    row |= {"best": 0.285086, "number": 3, "line": []}
    alone = pages.home_page([row | {"mean": None, "error": None}], "home", "a.1")
    seeds = pages.home_page([row | {"mean": 0.27557, "error": 0.0079}], "home", "a.1")
    assert "<strong>0.2851</strong>" in alone and "under other seeds" not in alone
    assert "<strong>0.2756 ± 0.0079</strong>" in seeds and "under other seeds" in seeds
