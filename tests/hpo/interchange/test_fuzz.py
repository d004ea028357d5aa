"""Whatever a source holds, it is imported or refused in one sentence: seeded damage to what each tool has written."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from hpo.errors import UserError
from hpo.interchange import sources
from hpo.interchange.sources import Request
from hpo.ledger import Ledger
from hpo.storage.home import Home
from trainer.errors import DataError
from trainer.quote import shorten_quoted

_names = itertools.count()
DEEP = "[" * 3000 + "]" * 3000
ODD: list[Any] = [
    *(
        None,
        True,
        "",
        "nan",
        "\0",
        "\x1b[2J",
        "\ud800",
        "x" * 5000,
        -1,
        0,
        1e400,
        float("nan"),
        -(2**70),
        2**31,
        10**400,
    ),
    *([], {}, [[]], {"a": {"b": [1]}}, "preempted", "1e5", "[1", "{", DEEP, "2024-13-45", "9999-12-31", "0001-01-01"),
]


def taken(home: Home, tool: str, source: Path | str, **given: Any) -> bool:
    """True for a source that is imported, False for one that is refused in a sentence; any other end is a fault."""
    request = Request(tool, str(source), name=f"n{next(_names)}", **given)
    try:
        sources.bring(request, home, None, None)[0].close()
    except (UserError, DataError) as error:
        said = shorten_quoted(str(error))
        assert said.strip() and "\n" not in said.strip() and len(said) < 3000, said
        assert said.rstrip().endswith((".", "?")), said
        return False
    return True


@pytest.fixture(params=[1, pytest.param(25, marks=pytest.mark.slow)], ids=["few", "many"])
def times(request) -> int:
    """How many times the usual number of damages is tried."""
    return request.param


@pytest.fixture
def fuzzed(home: Home) -> Iterator[Home]:
    Ledger(home.create().storage).close()
    yield home


def damaged(rng: random.Random, content: bytes) -> bytes:
    """The content with one thing wrong with it."""
    at, size = rng.randrange(len(content) or 1), rng.randrange(1, 40)
    kind = rng.randrange(6)
    if kind == 0:
        return content[:at]
    if kind == 1:
        return content[:at] + content[at + size :]
    if kind == 2:
        return content[:at] + bytes(rng.randrange(256) for _ in range(size)) + content[at + size :]
    if kind == 3:
        return content[:at] + content[at : at + size] * 2 + content[at + size :]
    if kind == 4:
        return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :] if content else b"\0"
    return content.replace(*rng.choice([(b'"', b"'"), (b"1", b"-1e999"), (b"0", b"null"), (b":", b""), (b"\n", b"\0")]))


COLUMNS = ("number", "state", "params.lr", "params.opt", "values.loss", "metrics.acc", "epoch", "started_at", "error")
COLUMNS += ("user_attrs_note", "param_C", "_step", "config/x", "mean_test_score", "tags.team", "name", "")


def written_rows(rng: random.Random, path: Path) -> None:
    """A table of odd cells, as CSV or JSON Lines."""
    columns = [name for name in COLUMNS if rng.random() < 0.6] + ["values.loss"] * (rng.random() < 0.9)
    columns = list(dict.fromkeys(columns))
    rows = []
    for number in range(rng.randrange(1, 4)):
        plain = {"number": number, "state": "complete", "values.loss": 0.5, "epoch": 3, "params.lr": 0.1}
        rows.append({n: rng.choice(ODD) if rng.random() < 0.06 else plain.get(n, "a") for n in columns})
    if path.suffix == ".csv":
        cells = [
            columns,
            *([json.dumps(v) if isinstance(v, list | dict) else str(v) for v in r.values()] for r in rows),
        ]
        quoted = [",".join('"' + str(cell).replace('"', '""') + '"' for cell in row) for row in cells]
        text = "\n".join(quoted) + "\n"
    else:
        text = "".join(json.dumps(row) + "\n" for row in rows)
    path.write_bytes(text.encode(errors="replace"))


@pytest.mark.parametrize("suffix", [".csv", ".jsonl"])
def test_tables_of_odd_cells(fuzzed, tmp_path, suffix, times):
    rng, ends = random.Random(suffix), set()
    for _ in range(60 * times):
        path = tmp_path / f"t{suffix}"
        written_rows(rng, path)
        if rng.random() < 0.3:
            path.write_bytes(damaged(rng, path.read_bytes()))
        given = rng.choice([{}, {"metrics": ["values.loss"]}, {"metrics": ["loss"]}, {"metrics": ["mean_test_score"]}])
        ends.add(taken(fuzzed, rng.choice(["csv", "wandb"]), path, **given))
    assert ends == {True, False}


PARQUET: dict[str, Any] = {
    "date": date(2024, 1, 31),
    "datetime": datetime(2024, 1, 31, 12),
    "time": time(12, 30),
    "timedelta": timedelta(days=1, microseconds=3),
    "decimal": Decimal("0.10"),
    "huge decimal": Decimal(10) ** 30,
    "bytes": b"text",
    "raw bytes": b"\xff\x00",
    "list": [1, 2],
    "struct": {"a": 1, "b": [None]},
    "nan": float("nan"),
    "large": 2**62,
}


@pytest.mark.parametrize(
    "where", ["params.x", "user_attrs_x", "values.x", "epoch", "number", "state", "started_at", "error"]
)
@pytest.mark.parametrize("kind", PARQUET)
def test_a_parquet_file_of_any_type(fuzzed, tmp_path, where, kind):
    import pyarrow as pa
    import pyarrow.parquet as pq

    value = PARQUET[kind]
    table = pa.table({"params.lr": [0.1, 0.2], "values.loss": [1.0, 2.0], where: pa.array([value, None])})
    pq.write_table(table, tmp_path / "t.parquet")
    end = taken(fuzzed, "csv", tmp_path / "t.parquet", metrics=["loss"])
    assert end or where in ("values.x", "epoch", "started_at", "state"), "a parameter or a note of any type is carried"


def test_files_of_parquet_that_are_damaged(fuzzed, tmp_path, times):
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(1)
    pq.write_table(pa.table({"params.lr": [0.1, 0.2], "values.loss": [1.0, 2.0]}), tmp_path / "whole.parquet")
    whole = (tmp_path / "whole.parquet").read_bytes()
    imported = list[bool]()
    for _ in range(30 * times):
        (tmp_path / "t.parquet").write_bytes(damaged(rng, whole))
        imported.append(taken(fuzzed, "csv", tmp_path / "t.parquet", metrics=["loss"]))
    assert not all(imported), "some damages are refused, each in a sentence"


def _files(root: Path, names: str) -> list[Path]:
    return sorted(path for path in root.rglob(names) if path.is_file())


DIRECTORIES = {
    "ray": ("ray-2.60.0.tar.xz", "*", {"metrics": ["val_loss"]}, 25),
    "wandb": ("wandb-0.31.0.tar.xz", "*.wandb", {"metrics": ["val/loss"]}, 15),
    "mlflow": ("mlflow-3.17.2-mlruns.tar.xz", "*", {"metrics": ["val/loss"]}, 8),
}


@pytest.mark.parametrize("tool", DIRECTORIES)
def test_directories_that_are_damaged(fuzzed, asset, tmp_path, tool, capfd, times):
    name, pattern, given, count = DIRECTORIES[tool]
    source, rng = asset(name), random.Random(tool)
    for _ in range(count * times):
        copy = tmp_path / "copy"
        shutil.copytree(source, copy)
        path = rng.choice(_files(copy, pattern))
        if rng.random() < 0.1:
            path.unlink()
        else:
            path.write_bytes(damaged(rng, path.read_bytes()))
        taken(fuzzed, tool, copy, **given)
        shutil.rmtree(copy)
    assert "Traceback" not in "".join(capfd.readouterr())


def odd_rays(rng: random.Random, root: Path) -> None:
    """Values that Ray Tune does not write, in the files that it does."""
    [state] = root.glob("experiment_state-*.json")
    content = json.loads(state.read_text())
    trial = [json.loads(part) for part in content["trial_data"][0]]
    part = rng.choice([part for part in trial if part])
    part[rng.choice(list(part))] = rng.choice(ODD)
    content["trial_data"][0] = [json.dumps(part) for part in trial]
    if rng.random() < 0.2:
        content["trial_data"] = rng.choice(ODD)
    state.write_text(json.dumps(content))
    if results := [path for path in _files(root, "result.json") if path.read_text().strip()]:
        result = rng.choice(results)
        lines = [json.loads(line) for line in result.read_text().splitlines()]
        rng.choice(lines)[rng.choice(list(lines[0]))] = rng.choice(ODD)
        result.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if rng.random() < 0.3 and (params := _files(root, "params.json")):
        rng.choice(params).write_text(json.dumps(rng.choice(ODD)) if rng.random() < 0.5 else DEEP)


def test_results_of_ray_tune_with_odd_values(fuzzed, asset, tmp_path, times):
    source, rng, ends = asset("ray-2.60.0.tar.xz"), random.Random(3), Counter[bool]()
    for _ in range(30 * times):
        shutil.copytree(source, tmp_path / "copy")
        odd_rays(rng, tmp_path / "copy")
        ends[taken(fuzzed, "ray", tmp_path / "copy", metrics=["val_loss"])] += 1
        shutil.rmtree(tmp_path / "copy")
    assert ends[True] and ends[False], "all were imported, or all refused: nothing was tested"


META = {
    "status": ["FINISHED", 99, None, "gone", -1],
    "start_time": [None, "soon", -1, 10**30, 1.5],
    "end_time": [None, "soon", 10**30],
    "lifecycle_stage": [None, "gone", 3],
    "run_id": [None, "other", 3],
    "experiment_id": [None, 0, "x"],
    "artifact_uri": [None, 3],
    "run_name": [None, 3],
    "source_type": [None, "LOCAL", 99],
}


@pytest.mark.parametrize("key", META)
def test_runs_of_mlflow_as_other_versions_may_have_written_them(fuzzed, asset, key, capfd):
    import yaml

    root = asset("mlflow-3.17.2-mlruns.tar.xz")
    metas = [path for path in _files(root, "meta.yaml") if len(path.relative_to(root).parts) == 3]
    text = metas[0].read_text()
    for value in [*META[key], ...]:
        content = yaml.safe_load(text) | {key: value}
        if value is ...:
            del content[key]
        metas[0].write_text(yaml.safe_dump(content))
        taken(fuzzed, "mlflow", root, metrics=["val/loss"])
    assert "Traceback" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("line", "imported"),
    [
        *((line, False) for line in ("", "soon 1", "1 low 1", "1", "\0", "nan nan nan", "1e400 1 1")),
        ("1 2 3 4 5", True),  # newer releases write more after the step
        ("9" * 40 + " 1 1", True),  # no time of a metric is read
    ],
)
def test_a_metric_of_mlflow_with_an_odd_line(fuzzed, asset, line, imported):
    root = asset("mlflow-3.17.2-mlruns.tar.xz")
    for path in _files(root, "loss"):
        path.write_text(line + "\n")
    assert taken(fuzzed, "mlflow", root, metrics=["val/loss"]) is imported


DATABASES = {
    "optuna": ("optuna-5.0.0.db.xz", {}),
    "mlflow": ("mlflow-3.17.2.db.xz", {"metrics": ["val/loss"]}),
}


@pytest.mark.parametrize("tool", DATABASES)
def test_databases_that_are_damaged(fuzzed, asset, tmp_path, tool, times):
    name, given = DATABASES[tool]
    whole, rng = asset(name).read_bytes(), random.Random(tool)
    for _ in range(8 * times):
        (tmp_path / "damaged.db").write_bytes(damaged(rng, whole))
        taken(fuzzed, tool, f"sqlite:///{tmp_path}/damaged.db", **given)


@pytest.mark.parametrize("tool", DATABASES)
def test_databases_with_odd_values(fuzzed, asset, tmp_path, tool, times):
    """A column of a table, that of every row, in a copy of the database."""
    name, given = DATABASES[tool]
    whole, rng = asset(name), random.Random(tool)
    with sqlite3.connect(whole) as base:
        tables = [table for (table,) in base.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        columns = [(t, row[1]) for t in tables for row in base.execute(f"PRAGMA table_info({t})")]
        columns = [(t, c) for t, c in columns if base.execute(f"SELECT 1 FROM {t} LIMIT 1").fetchone()]
    base.close()
    for table, column in rng.choices(columns, k=12 * times):
        shutil.copyfile(whole, tmp_path / "odd.db")
        value = rng.choice(
            [None, "soon", "", b"\xff", -1, 2**62, 1e308, "[" * 3000, '{"name": "Gone"}', "NaN", "{}", 7]
        )
        with sqlite3.connect(tmp_path / "odd.db") as odd:
            try:
                odd.execute("PRAGMA ignore_check_constraints = ON")
                odd.execute(f'UPDATE OR IGNORE {table} SET "{column}" = ?', (value,))
            except sqlite3.Error:
                continue
        odd.close()
        taken(fuzzed, tool, f"sqlite:///{tmp_path}/odd.db", **given)


def test_journals_of_optuna_that_are_damaged(fuzzed, tmp_path, times):
    import optuna
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    from hpo.search.samplers.optuna_sampler import quiet_optuna

    with quiet_optuna():
        storage = JournalStorage(JournalFileBackend(str(tmp_path / "whole.log")))
        study = optuna.create_study(storage=storage, study_name="s")
        study.optimize(
            lambda trial: trial.suggest_float("x", 0, 1) + trial.suggest_categorical("c", [1, 2]), n_trials=2
        )
    whole, rng = (tmp_path / "whole.log").read_bytes(), random.Random(2)
    imported = list[bool]()
    for _ in range(30 * times):
        (tmp_path / "damaged.log").write_bytes(damaged(rng, whole))
        imported.append(taken(fuzzed, "optuna", tmp_path / "damaged.log"))
    assert not all(imported), "some damages are refused, each in a sentence"
    for _ in range(30 * times):
        lines = [json.loads(line) for line in whole.splitlines()]
        line = rng.choice(lines)
        line[rng.choice(list(line))] = rng.choice(ODD)
        (tmp_path / "odd.log").write_text("".join(json.dumps(line) + "\n" for line in lines))
        taken(fuzzed, "optuna", tmp_path / "odd.log")


def test_what_cannot_be_read_is_named(fuzzed, tmp_path):
    for tool in sources.READERS:
        for source in (tmp_path, tmp_path / "none", "", "\0", "x" * 5000, "/dev/null", "sqlite:///", "http://"):
            assert not taken(fuzzed, tool, source, metrics=["loss"] if tool != "optuna" else ())
