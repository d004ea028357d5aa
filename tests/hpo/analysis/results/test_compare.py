"""Trials side by side: order, columns, and what leaves as JSON, CSV and Parquet."""

from __future__ import annotations

import csv
import io
import json

import pyarrow.parquet as pq
import pytest
from crafted import open_crafted, put_trial
from rich.console import Console

from hpo.analysis.results.compare import compare, write_csv, write_parquet
from hpo.analysis.results.table import comparison
from hpo.analysis.results.trial import describe, detail
from hpo.declaration.references import load
from hpo.errors import UserError
from hpo.storage.home import Home
from hpo.text import endings


@pytest.fixture
def ledger(tmp_path):
    opened = open_crafted(tmp_path / "ledger.db")
    yield opened
    opened.close()


def table(ledger, top=None):
    with ledger.read() as connection:
        return compare(connection, "crafted", top)


def test_complete_trials_come_first_best_first_then_by_number(ledger):
    put_trial(ledger, 0, "complete", (0.5,))
    put_trial(ledger, 1, "pruned", (0.99,))
    put_trial(ledger, 2, "complete", (0.9,))
    put_trial(ledger, 3, "failed")
    put_trial(ledger, 4, "complete", (0.9,))
    put_trial(ledger, 5, "complete", (None,))
    put_trial(ledger, 6, "running", (0.95,))
    assert [row["number"] for row in table(ledger).rows] == [2, 4, 0, 5, 1, 3, 6]
    assert [row["number"] for row in table(ledger, top=2).rows] == [2, 4]


def test_minimised_objectives_are_sorted_ascending(tmp_path):
    objectives = [
        {"metric": "val/loss", "direction": "minimize", "select": "last"},
        {"metric": "val/accuracy", "direction": "maximize", "select": "last"},
    ]
    ledger = open_crafted(tmp_path / "two.db", objectives=objectives)
    put_trial(ledger, 0, "complete", values=[0.5, 0.1])
    put_trial(ledger, 1, "complete", values=[0.2, 0.0])
    rows = table(ledger).rows
    assert [row["number"] for row in rows] == [1, 0]
    assert rows[0]["values.val/loss"] == 0.2
    assert rows[0]["values.val/accuracy"] == 0.0
    ledger.close()


def test_metrics_are_those_at_the_end_and_every_row_has_every_column(ledger):
    put_trial(ledger, 0, "complete", (0.1, 0.7, 0.6), metrics={"val/loss": 1.0})
    put_trial(ledger, 1, "complete", (0.2,), params={"train.optim.momentum": 0.9})
    found = table(ledger)
    assert found.rows[0]["metrics.val/accuracy"] == 0.6
    assert all(set(row) == set(found.columns) for row in found.rows)
    assert found.rows[1]["metrics.val/loss"] is None
    assert found.rows[0]["params.train.optim.momentum"] is None


def test_the_epoch_of_the_metrics_is_told_where_it_is_not_the_last(tmp_path):
    """What joins by `epoch` or `step` would else take the figures of one epoch for those of another."""
    best = [{"metric": "val/accuracy", "direction": "maximize", "select": "best"}]
    ledger = open_crafted(tmp_path / "best.db", objectives=best)
    put_trial(ledger, 0, "complete", (0.1, 0.7, 0.6), metrics={"val/loss": (3.0, 2.0, 1.0)}, values=[0.7])
    put_trial(ledger, 1, "pruned", (0.2,), metrics={"val/loss": 4.0}, values=None)
    first, second = table(ledger).rows
    assert (first["epoch"], first["judged_epoch"], first["metrics.val/loss"]) == (3, 2, 2.0)
    assert (second["epoch"], second["judged_epoch"], second["metrics.val/loss"]) == (1, None, 4.0)
    head, row, *_ = printed(ledger, None)
    cells = dict(zip(head.split(), row.split(), strict=True))
    assert (cells["epoch"], cells["judged_epoch"], cells["val/loss"]) == ("3", "2", "2")
    ledger.close()
    ledger = open_crafted(tmp_path / "last.db")
    put_trial(ledger, 0, "complete", (0.1, 0.7), metrics={"val/loss": 1.0})
    assert table(ledger).rows[0]["judged_epoch"] == 2 and "judged_epoch" not in printed(ledger, None)[0]
    ledger.close()


def printed(ledger, width: int | None, **options) -> list[str]:
    """The table's lines, on a terminal of `width` columns or in a pipe."""
    text = io.StringIO()
    Console(file=text, width=width or 10_000).print(comparison(table(ledger), width, **options))
    return text.getvalue().splitlines()


def put_wide(ledger) -> dict[str, set[str]]:
    """Three trials of the study atft's parameters, of which one has the same value in all; path -> its values."""
    paths = load("atft").space.paths
    given = {path: [f"{place}{i}" for i in range(3)] for place, path in enumerate(paths)} | {paths[0]: ["same"] * 3}
    for i in range(3):
        params = {path: values[i] for path, values in given.items()}
        metrics = {"val/loss": float(i)} | {f"val/metric_{j}": i + j / 100 for j in range(12)}
        put_trial(ledger, i, "complete", (0.1 * i,), params=params, metrics=metrics | {"time/epoch_seconds": 1.5})
    return {path: set(values) for path, values in given.items()}


def test_metrics_are_those_of_the_epoch_that_a_trial_is_judged_by(tmp_path):
    best = {"metric": "val/accuracy", "direction": "maximize", "select": "best"}
    opened = open_crafted(tmp_path / "best.db", objectives=[best])
    held_out = {"test/accuracy": (0.4, 0.6, 0.3)}
    put_trial(opened, 0, "complete", (0.5, 0.9, 0.7), metrics=held_out, values=[0.9])
    put_trial(opened, 1, "failed", (0.5, 0.9, 0.7), metrics=held_out, values=None)
    judged, failed = table(opened).rows
    opened.close()
    assert (judged["metrics.val/accuracy"], judged["metrics.test/accuracy"]) == (0.9, 0.6)
    assert (failed["metrics.val/accuracy"], failed["metrics.test/accuracy"]) == (0.7, 0.3), "it is judged nowhere"


def test_a_path_is_headed_by_as_much_of_it_as_tells_it_apart():
    assert endings(
        ["train.optim.lr", "train.optim.name", "train.schedule.name", "loss.weights.1", "a.b.c", "d.b.c"]
    ) == {
        "train.optim.lr": "lr",
        "train.optim.name": "optim.name",
        "train.schedule.name": "schedule.name",
        "loss.weights.1": "weights.1",
        "a.b.c": "a.b.c",
        "d.b.c": "d.b.c",
    }
    assert endings(["lr", "optim.lr", "1", "name"]) == {"lr": "lr", "optim.lr": "optim.lr", "1": "1", "name": "name"}
    ends = endings(load("atft").space.paths)
    assert len(set(ends.values())) == len(ends), "two columns have one heading"


@pytest.mark.parametrize("width", [60, 80, 130])
def test_a_table_fits_its_terminal_and_names_all_that_it_leaves_out(ledger, width):
    given = put_wide(ledger)
    lines = printed(ledger, width)
    assert max(map(len, lines)) <= width
    head, below = lines[0].split(), " ".join(line.strip() for line in lines[4:])
    same = below.partition("left out: ")[0]
    assert f"the same in all: state complete, epoch 1, seconds 90, {next(iter(given))} same" in same
    out = below.partition("left out: ")[2]
    for path, end in list(endings(given).items())[1:]:
        assert (end in head) != (end in out.replace(",", "").split()), f"{path} is neither shown nor named"
    assert "metrics, 1 metric of the machine (--all shows them, --to FILE.csv writes them)" in out


@pytest.mark.parametrize("width", [50, 80, None])
def test_what_was_held_out_stands_beside_what_the_trials_were_judged_by(tmp_path, width):
    """Before any parameter, however narrow the terminal and however many metrics there are."""
    opened = open_crafted(tmp_path / "held.db", metrics=["val/*", "test/*"])
    for number in range(3):
        others = {f"val/metric_{i}": number + i / 100 for i in range(12)} | {"val/loss": float(number)}
        put_trial(opened, number, "complete", (0.1 * number,), metrics=others | {"test/accuracy": 0.2 * number})
    lines = printed(opened, width)
    with opened.read() as connection:
        curves = describe(detail(connection, Home(tmp_path), "crafted", 2), {}, every=False)
    opened.close()
    head, best, *_ = lines
    at = head.split().index("val/accuracy")
    assert head.split()[at : at + 2] == ["val/accuracy", "test/accuracy"]
    assert best.split()[at : at + 2] == ["0.2", "0.4"]
    left_out = int(" ".join(lines).partition("left out: ")[2].split(" metrics")[0].split()[-1])
    assert left_out + sum(name.startswith(("val/", "test/")) for name in head.split()) == 1 + 14
    assert curves.index("val/accuracy") < curves.index("test/accuracy") < curves.index("val/loss")


def test_in_a_pipe_all_parameters_are_columns_and_the_first_metrics(ledger):
    put_wide(ledger)
    head, *_, below = printed(ledger, None)
    assert "val/metric_4" in head and "val/metric_5" not in head and "time/epoch_seconds" not in head
    assert below == "left out: 5 metrics, 1 metric of the machine (--all shows them, --to FILE.csv writes them)"


def test_a_metric_that_the_study_declares_by_name_is_among_the_first(tmp_path):
    opened = open_crafted(tmp_path / "named.db", metrics=["val/metric_9", "val/*"])
    put_wide(opened)
    with opened.read() as connection:
        trial = detail(connection, Home(tmp_path), "crafted", 0)
    table, one = printed(opened, None), describe(trial, {}, every=False)
    opened.close()
    assert "val/metric_9" in table[0] and "val/metric_5" not in table[0]
    assert "val/metric_9" in one and "val/metric_5" not in one


@pytest.mark.parametrize("every", [False, True])
def test_it_says_of_how_many_trials_the_first_are_shown(ledger, every):
    for number in range(12):
        put_trial(ledger, number, "complete", (0.5,))
    for top, there in ((10, True), (12, False)):
        text = io.StringIO()
        Console(file=text, width=10_000).print(comparison(table(ledger, top), None, every=every))
        assert ("the first 10 of 12 trials (--top 12 shows all)" in text.getvalue()) is there


@pytest.mark.parametrize("width", [80, None])
def test_all_leaves_out_nothing_and_still_fits(ledger, width):
    given = put_wide(ledger)
    lines = printed(ledger, width, every=True)
    assert width is None or max(map(len, lines)) <= width
    heads = [line.split() for line in lines if line.lstrip().startswith("number")]
    assert {*endings(given).values(), "val/metric_11", "time/epoch_seconds"} <= {
        word for head in heads for word in head
    }
    assert len(heads) == 1 or all(line.split()[0] in ("number", "0", "1", "2") for line in lines if line)


def test_one_trial_shows_all_its_parameters_and_none_a_sentence(ledger):
    assert printed(ledger, 80) == ["crafted has no trials yet"]
    put_trial(ledger, 0, "complete", (0.5,))
    head, row = printed(ledger, 80)
    assert head.split() == ["number", "state", "epoch", "val/accuracy", "seconds", "lr"]
    assert row.split() == ["0", "complete", "1", "0.5", "90", "0.1"]


@pytest.mark.parametrize("cell", ["=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(1)", "\t=1", "\r=1"])
def test_csv_never_starts_a_text_cell_as_a_formula(ledger, tmp_path, cell):
    put_trial(ledger, 0, "complete", (-0.5,), params={"optim": cell, "=path": "plain"})
    write_csv(table(ledger), tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        header, row = csv.reader(file)
    cells = dict(zip(header, row, strict=True))
    assert cells["params.optim"] == f"'{cell}"
    assert cells["params.=path"] == "plain"
    assert float(cells["values.val/accuracy"]) == -0.5  # a negative number stays a number


@pytest.mark.parametrize("write", [write_csv, write_parquet])
def test_a_directory_that_is_not_there_is_not_made(ledger, tmp_path, write):
    put_trial(ledger, 0, "complete", (0.25,))
    with pytest.raises(UserError, match=r"nowhere/out cannot be written \(No such file or directory.*\): name another"):
        write(table(ledger), tmp_path / "nowhere" / "out")
    assert not (tmp_path / "nowhere").exists()


def test_parquet_reads_back_equal_and_mixed_columns_become_json(ledger, tmp_path):
    put_trial(ledger, 0, "complete", (0.25,), params={"mixed": "adam", "whole": 3, "list": [1, 2]})
    put_trial(ledger, 1, "complete", (0.5,), params={"mixed": 3, "whole": 4, "list": None})
    put_trial(ledger, 2, "waiting", params={"mixed": True, "whole": 5, "list": [3]})
    write_parquet(table(ledger), tmp_path / "out.parquet")
    rows = pq.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["values.val/accuracy"] for row in rows] == [0.5, 0.25, None]
    assert [row["params.whole"] for row in rows] == [4, 3, 5]
    assert [json.loads(row["params.mixed"]) for row in rows] == [3, "adam", True]
    assert [row["params.list"] for row in rows] == [None, "[1, 2]", "[3]"]


@pytest.mark.parametrize("write", [write_csv, write_parquet])
def test_a_file_that_cannot_be_written_is_one_sentence(ledger, tmp_path, write):
    put_trial(ledger, 0, "complete", (0.25,))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/out cannot be written .*: name another file\."):
        write(table(ledger), tmp_path / "file" / "out")


def test_a_study_without_trials_is_an_empty_table(ledger, tmp_path):
    found = table(ledger)
    assert found.rows == []
    write_csv(found, tmp_path / "out.csv")
    write_parquet(found, tmp_path / "out.parquet")
