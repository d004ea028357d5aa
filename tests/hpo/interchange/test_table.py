"""Tables of trials: those that are exported here, those of other tools, and those that people write."""

from __future__ import annotations

import time

import pandas as pd
import pytest

import hpo
from hpo.errors import UserError
from hpo.interchange.export import dated, document, export_study
from hpo.ledger import Ledger
from trainer.errors import DataError


def written(path, text: str):
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("format", ["csv", "parquet"])
def test_an_exported_table_comes_back_as_an_equal_frame(asset, home, brought, tmp_path, format):
    """But for what CSV cannot hold: 3 beside texts is a text, and nothing is no option."""
    first = brought("optuna", asset("optuna-5.0.0.db.xz")).done.name
    file = tmp_path / f"trials.{format}"
    export_study(Ledger(home.storage), home, first, str(file), format)
    brought("csv", file, directions=["maximize"], name="again")
    before, after = (hpo.open(name, home=home.root).trials() for name in (first, "again"))
    if format == "csv":
        before["params.optimizer"] = before["params.optimizer"].map(lambda one: None if one is None else str(one))
    columns = [one for one in before.columns if one not in ("step", "judged_epoch", "metrics.value", "reason")]
    pd.testing.assert_frame_equal(before[columns], after[columns], check_dtype=False)


def test_an_exported_document_has_all_curves(asset, home, brought):
    name = brought("optuna", asset("optuna-5.0.0.db.xz")).done.name
    found = document(Ledger(home.storage), name)
    assert found["space"]["lr"]["log"] and found["objectives"][0]["direction"] == "maximize"
    trial = found["trials"][6]
    assert [step for step, _, _ in trial["curves"]["value"]] == [1, 2, 3]
    assert trial["curves"]["value"][1] == [2, 2, "nan"] and trial["attributes"] == {"note": {"seen": [6, None]}}
    assert trial["started_at"].endswith("+00:00")
    assert [one["number"] for one in dated(Ledger(home.storage), name).rows] == list(range(12))


def test_a_table_of_optunas_is_known_by_its_columns(asset, brought, tmp_path):
    import optuna

    from hpo.search.samplers.optuna_sampler import quiet_optuna

    with quiet_optuna():
        study = optuna.load_study(study_name="digits sweep", storage=f"sqlite:///{asset('optuna-5.0.0.db.xz')}")
    study.trials_dataframe().to_csv(tmp_path / "t.csv", index=False)
    found = brought("csv", tmp_path / "t.csv", directions=["maximize"])
    by_number = [trial for trial in study.get_trials() if trial.state.is_finished()]
    assert [trial.params["lr"] for trial in found.trials] == [trial.params["lr"] for trial in by_number]
    assert found.trials[4].state == "failed" and found.trials[5].state == "pruned"
    assert found.trials[0].started_at == by_number[0].datetime_start.timestamp()
    assert found.done.left[0] == "1 row in state RUNNING, which may end yet"


def test_columns_that_are_named_and_those_that_are_guessed(brought, tmp_path):
    file = written(tmp_path / "mine.csv", "run,lr,opt,val/loss,comment\na,0.1,sgd,3,x\nb,0.01,adam,1.5,y\nc,1,adam,,\n")
    found = brought("csv", file, params=["lr", "opt"], metrics=["val/loss"])
    assert found.trials[0].params == {"lr": 0.1, "opt": "sgd"}
    assert [trial.state for trial in found.trials] == ["complete", "complete", "failed"]
    assert found.trials[2].error == "it has no val/loss" and found.done.left == ["the column comment"]
    guessed = brought("csv", file, metrics=["val/loss"], name="guessed")
    assert guessed.done.guessed[0] == "the parameters are lr, opt, comment (--param names them)"
    assert guessed.done.guessed[1] == "val/loss is minimized (--direction maximize says otherwise)"
    space = guessed.study.spec.imported["space"]
    assert space["lr"] == {"type": "Float", "low": 0.01, "high": 1.0, "log": False, "step": None}
    assert space["opt"] == {"type": "Choice", "options": ["sgd", "adam"]}


def test_a_value_that_is_not_finite_is_infeasible_and_none_is_a_failure(brought, tmp_path):
    file = written(tmp_path / "t.csv", "lr,val/loss\n0.1,inf\n0.2,0.5\n0.3,\n0.4,-inf\n")
    found = brought("csv", file, metrics=["val/loss"])
    assert [trial.state for trial in found.trials] == ["infeasible", "complete", "failed", "infeasible"]
    assert found.trials[0].error == "its values [inf] are not finite"
    with pytest.raises(UserError, match=r"by which metric its trials are judged \(it has lr, val/loss\)"):
        brought("csv", file, name="another")


def test_a_time_without_a_zone_is_of_this_machine(brought, tmp_path, monkeypatch):
    """As Optuna's tables have them; one with a zone is of that zone wherever it is read."""
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        rows = "lr,loss,started_at\n1,1,2024-01-01 09:00:00.123456\n2,2,2024-01-01T00:00:00+00:00\n"
        text = brought("csv", written(tmp_path / "text.csv", rows), metrics=["loss"], params=["lr"])
        naive = brought("csv", written(tmp_path / "t.csv", rows[:-30]), metrics=["loss"], params=["lr"])
    finally:
        monkeypatch.undo()
        time.tzset()
    assert [trial.started_at for trial in text.trials] == [1704067200.123456, 1704067200.0]
    assert [trial.started_at for trial in naive.trials] == [1704067200.123456]


def test_an_exported_table_of_wandbs_pages(brought, tmp_path):
    file = written(
        tmp_path / "wandb.csv",
        "Name,State,Created,Runtime,User,lr,val/loss\n"
        "calm-1,finished,2024-01-01T00:00:00.000Z,10,me,0.1,0.5\nwild-2,crashed,2024-01-01T00:00:10.000Z,3,me,0.2,\n",
    )
    found = brought("wandb", file, metrics=["val/loss"], params=["lr"])
    assert [(trial.state, trial.params) for trial in found.trials] == [
        ("complete", {"lr": 0.1}),
        ("failed", {"lr": 0.2}),
    ]
    assert found.trials[0].started_at == 1704067200.0


@pytest.mark.parametrize(
    ("text", "given", "said"),
    [
        ("lr,loss\n0.1,low\n", {"metrics": ["loss"]}, r"row 2 .*, column 'loss' is 'low': it must be a number\.$"),
        ("lr,loss,state\n0.1,1,gone\n", {"metrics": ["loss"]}, "column 'state' is 'gone': a state is one of complete"),
        ("lr,loss,started_at\n0.1,1,soon\n", {"metrics": ["loss"]}, "column 'started_at' is 'soon': write a time as"),
        ("lr,loss\n0.1,1\n", {}, "does not say by which metric its trials are judged .*name it by --metric"),
        ("lr,loss\n0.1,1\n", {"metrics": ["los"]}, "--metric los: .* has no such column; it has lr, loss"),
        ("lr,loss\n0.1,1\n", {"metrics": ["loss"], "params": ["x"]}, "--param x: .* has no such column"),
        ("run,loss\na,1\na,2\n", {"metrics": ["loss"]}, "has the trial 'a' twice: remove one of them"),
        ("lr,lr,loss\n1,1,1\n", {"metrics": ["loss"]}, "has the column 'lr' twice"),
        ("lr,loss\n", {"metrics": ["loss"]}, "has a header and no rows: give at least one row"),
        ("lr,loss\n1\n", {"metrics": ["loss"]}, "is ragged"),
        ("", {"metrics": ["loss"]}, "is empty"),
    ],
)
def test_a_table_that_cannot_be_taken_is_one_sentence(brought, home, tmp_path, text, given, said):
    with pytest.raises((UserError, DataError), match=said) as raised:
        brought("csv", written(tmp_path / "t.csv", text), **given)
    assert "\n" not in str(raised.value)


def test_a_text_that_a_spreadsheet_would_run_comes_back(home, brought, tmp_path):
    file = written(tmp_path / "t.csv", "formula,loss\n'=1+1,1\nplain,2\n")
    assert brought("csv", file, metrics=["loss"]).trials[0].params == {"formula": "=1+1"}


def test_a_state_that_is_unknown_is_not_carried(brought, tmp_path):
    rows = '"Name","State","lr","val/loss"\n"a","finished",0.1,0.5\n"b","preempted",0.2,0.6\n"c","odd",0.3,0.7\n'
    found = brought("wandb", written(tmp_path / "t.csv", rows), metrics=["val/loss"])
    assert [(trial.state, trial.params) for trial in found.trials] == [("complete", {"lr": 0.1})]
    assert found.done.left == [
        "1 row in state preempted, which may end yet",
        "1 row in state odd, which is none that is known here",
    ]


SKLEARN = (
    ",mean_fit_time,std_fit_time,param_C,param_kernel,params,split0_test_score,mean_test_score,std_test_score,"
    "rank_test_score\n"
    "0,0.001,0.0,0.1,rbf,\"{'C': 0.1}\",0.9,0.85,0.05,2\n1,0.001,0.0,1.0,,\"{'C': 1.0}\",0.95,0.9,0.02,1\n"
)


def test_a_search_of_scikit_learns(brought, tmp_path):
    """The columns of cv_results_: parameters by their prefix, all scores as metrics, no rank."""
    file = written(tmp_path / "cv.csv", SKLEARN)
    found = brought("csv", file, metrics=["mean_test_score"], directions=["maximize"])
    assert [trial.params for trial in found.trials] == [{"C": 0.1, "kernel": "rbf"}, {"C": 1.0}]
    assert [trial.values for trial in found.trials] == [[0.85], [0.9]]
    assert set(found.curves[0]) == {
        *("mean_fit_time", "std_fit_time", "split0_test_score", "mean_test_score", "std_test_score")
    }
    assert found.done.left == [] and not any("parameters are" in guess for guess in found.done.guessed)


def test_a_table_of_wandbs_history_has_its_steps(brought, tmp_path):
    file = written(tmp_path / "t.csv", "config.lr,loss,_step,_runtime,_timestamp\n0.1,0.5,7,3.5,1700000000\n")
    found = brought("wandb", file, metrics=["loss"])
    assert found.curves[0] == {"loss": [(7, 0.5)]} and found.done.left == []
    assert found.trials[0].params == {"lr": 0.1}


def test_values_of_parquet_become_those_of_json(brought, tmp_path):
    import datetime
    import decimal

    import pyarrow as pa
    import pyarrow.parquet as pq

    cells = {
        "params.day": datetime.date(2024, 1, 31),
        "params.at": datetime.datetime(2024, 1, 31, 12, tzinfo=datetime.UTC),
        "params.price": decimal.Decimal("0.10"),
        "params.count": decimal.Decimal("12"),
        "params.text": b"text",
        "params.raw": b"\xff\x00",
        "params.wait": datetime.timedelta(seconds=90),
        "params.layers": [{"size": decimal.Decimal("2")}],
        "values.loss": decimal.Decimal("0.5"),
        "started_at": datetime.datetime(2024, 1, 31, 12, tzinfo=datetime.UTC),
    }
    pq.write_table(pa.table({name: [value] for name, value in cells.items()}), tmp_path / "t.parquet")
    [trial] = brought("csv", tmp_path / "t.parquet").trials
    assert trial.params == {
        "day": "2024-01-31",
        "at": "2024-01-31T12:00:00+00:00",
        "price": 0.1,
        "count": 12,
        "text": "text",
        "raw": "ff00",
        "wait": 90.0,
        "layers": [{"size": 2}],
    }
    assert (trial.values, trial.started_at) == ([0.5], 1706702400.0)


DEEP = "[" * 1000 + "]" * 1000


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        (
            "t.csv",
            "lr,loss,epoch\n0.1,1,inf\n",
            r"row 2 .*, column 'epoch' is inf: an epoch is a whole number below 2147483647",
        ),
        ("t.csv", "lr,loss,epoch\n0.1,1,1e300\n", "column 'epoch' is 1e[+]300: an epoch is a whole number"),
        (
            "t.jsonl",
            f'{{"lr": {DEEP}, "loss": 1}}\n',
            r"t\.jsonl row 1 has more than 200 levels: make its values flatter",
        ),
        (
            "t.jsonl",
            '{"lr": ' + "[" * 60 + "]" * 60 + ', "loss": 1}\n',
            "row 1, column 'lr': it has more than 50 levels: make",
        ),
        ("t.csv", "lr,loss,started_at\n0.1,1,1e99\n", r"column 'started_at' is 1e\+99: write a time as"),
        ("t.csv", "lr,loss,state\n0.1,1,gone\n0.1,1,lost\n", "column 'state' is 'lost': a state is one of complete"),
    ],
)
def test_a_value_that_no_trial_has_is_refused_with_its_place(brought, home, tmp_path, name, text, said):
    with pytest.raises((UserError, DataError), match=said) as raised:
        brought("csv", written(tmp_path / name, text), metrics=["loss"])
    assert "\n" not in str(raised.value) and not home.root.exists()


def test_a_cell_of_csv_that_is_nested_too_deep_stays_text(brought, tmp_path):
    found = brought("csv", written(tmp_path / "t.csv", f"lr,loss\n{DEEP},1\n"), metrics=["loss"])
    assert found.trials[0].params == {"lr": DEEP}
