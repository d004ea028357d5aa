"""Names of every kind reach every tracker: parameters, metrics and tags, each under one name that is its own."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import shown
from made_rows import study_row
from mirrored import Made

from hpo.errors import UserError
from hpo.ledger import transactions
from hpo.ledger.database.json import text
from hpo.ledger.names import MAX_METRIC
from hpo.space.tags import checked
from hpo.storage.home import Home
from hpo.tracking import curves, mirror_process, trackers
from hpo.tracking.base import Tracker
from hpo.tracking.mlflow.sqlite import SqliteTracker
from hpo.tracking.mlflow.tracker import MlflowTracker
from hpo.tracking.names import MAX_KEY, entry_name
from hpo.tracking.wandb_offline import _RESERVED as RESERVED
from hpo.tracking.wandb_offline import RUNS
from hpo.verify import verify

PLAIN = ["lr", "train.optim.lr", "val/größe", "精度", "f1 macro", "a-b.c:d", " lead", "trail ", "_step", "mlflow.x"]
PLAIN += ["_timestamp", "_runtime", "_wandb", "hpo.state", "__class__"]
ODD = [
    *(
        "x[0]",
        "x(0)",
        "lr (log)",
        "a,b=c",
        "p%",
        "a|b",
        "`a`",
        "it's",
        '"a"',
        "a\\b",
        "$x",
        "{x}",
        "recall@10",
        "☃",
        "😀",
    ),
    *("", ".", "..", "../up", "a/../b", "/root", "a//b", "a/./b", "a/", ".hidden", "...", "//"),
    *("a\tb", "a\nb", "a\r", "a\0b", "\x1b[31mred", "\u202eabc", "\x9b1m", "\ud800", "x" * 251, "é" * 251, "y[" * 130),
]
NAMES = [text(name) for name in (*PLAIN, *ODD)]  # as the ledger holds them
METRICS = [name for name in NAMES if 0 < len(name) <= MAX_METRIC]


def _named(tracker: str) -> Callable[[Home], Tracker]:
    def opened(home: Home) -> Tracker:
        if tracker in trackers.TRACKERS:
            return trackers.open_tracker(f"{tracker}:{home.root / tracker}", home.artifacts)
        return {"client": MlflowTracker, "rows": SqliteTracker}[tracker](home.tracking_uri, home.artifacts)

    return opened


def _taken(name: str) -> bool:
    try:
        return bool(checked(name, "1"))
    except UserError:
        return False


@pytest.fixture
def made(tmp_path, empty_mlflow):
    home = Home.at(tmp_path / "home").create()
    shutil.copyfile(empty_mlflow, home.root / "mlflow.db")
    study = Made(home)
    values = {name: float(n) for n, name in enumerate(NAMES)}
    ask = transactions.Ask(0, 0, 7, 0, values, {}, values, "h" * 64)
    study.ledger.transact(lambda connection: transactions.ask(connection, study.id, [ask]))
    study.count = 1
    taken = study.claim()
    study.report(
        taken, 1, {"val/loss": 0.5, "objective": 0.5, **{name: float(n) for n, name in enumerate(METRICS)}}, epoch=1
    )
    for name in filter(_taken, NAMES):
        study.tag(0, **{name: "tagged"})
    study.finish(taken, "complete", 1, [0.5])
    study.end()
    yield study
    study.ledger.close()


def test_two_names_never_become_one():
    names = [*PLAIN, *ODD, "a_b", "x_0_", "root", "up", "a/b"]
    assert len({entry_name(name) for name in names}) == len(names)
    assert all(entry_name(name) == name for name in PLAIN)
    assert all(entry_name(name) != name and 0 < len(entry_name(name)) <= MAX_KEY for name in ODD)


def test_mlflow_takes_what_is_encoded_and_refuses_what_is_not():
    from mlflow.exceptions import MlflowException
    from mlflow.utils.validation import _validate_metric, _validate_param

    for name in (*PLAIN, *ODD):
        _validate_param(entry_name(name), "1")
        _validate_metric(entry_name(name), 1.0, 1, 1)
    for name in ("x[0]", "a,b=c", "../up", "/root", "a//b", "a/", "x" * 251, "."):
        with pytest.raises(MlflowException):
            _validate_param(name, "1")


def test_mlflow_takes_every_name_that_a_tag_may_have():
    from mlflow.exceptions import MlflowException
    from mlflow.utils.validation import _validate_tag

    refused = list[str]()
    for name in filter(_taken, (*PLAIN, *ODD)):
        try:
            _validate_tag(name, "1")
        except MlflowException:
            refused.append(name)
    assert refused == []


@pytest.mark.parametrize("kind", ["client", "rows", *trackers.TRACKERS])
def test_every_name_reaches_every_tracker(made, kind):
    tracker = _named(kind)(made.home)
    result = mirror_process.drain(made.ledger, tracker, made.name, made.home)
    assert (result.behind, result.why) == (0, "")
    [view] = tracker.find(made.name, made.uid, children=True)
    expected = {entry_name(name): float(n) for n, name in enumerate(METRICS)}
    assert all(view.tags[name] == "tagged" for name in filter(_taken, NAMES))
    assert view.params == {entry_name(name): repr(float(n)) for n, name in enumerate(NAMES)}
    stored = {point.key: point.value for _, point in tracker.points([view])}
    assert {name: stored[name] for name in expected} == expected
    tracker.close()
    if kind in ("client", "rows"):
        report = verify(made.home, made.home.storage, made.home.tracking_uri)
        assert (report.differences, report.behind) == ([], 0)


def test_the_libraries_read_every_metric_and_parameter(made):
    for kind in trackers.TRACKERS:
        tracker = _named(kind)(made.home)
        mirror_process.drain(made.ledger, tracker, made.name, made.home)
        tracker.close()
    folder: Path = made.home.root / "tensorboard" / made.name / f"{made.name}-0000"
    [run] = (made.home.root / "wandb" / made.name / RUNS).iterdir()
    for values, own in ((shown.tensorboard(folder), ()), (shown.wandb(run), RESERVED)):
        names = [f"hpo/{name}" if name in own else entry_name(name) for name in METRICS]
        assert [name for name in names if (name, 1) not in values] == []
    [record] = [one.run for one in shown.wandb_records(run) if one.WhichOneof("record_type") == "run"]
    configured = {item.key or ".".join(item.nested_key) for item in record.config.update}
    names = [f"hpo/{name}" if name in RESERVED else entry_name(name) for name in NAMES]
    assert [name for name in names if name not in configured] == []


def test_the_curves_of_several_objectives_are_encoded_too():
    study = study_row(spec={"objectives": [{"metric": "val/f1 (macro)"}, {"metric": "val/loss"}]})
    first, second = curves.best_keys(study)
    assert second == "best_so_far/val/loss" and first == entry_name(first) != "best_so_far/val/f1 (macro)"
