"""The study's table: paired differences with their errors, rows that the project's own trainer has trained."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import yaml

from studies.atft import baseline, panel, results
from studies.atft.config import Config, DataConfig, MarketConfig
from studies.atft.features import forward_returns, to_grid
from studies.atft.market import simulate
from studies.atft.metrics import daily_ic
from studies.atft.panel import prepare
from studies.atft.table import clean

TINY = (
    *("data.market.num_days=280", "data.market.num_stocks=24", "data.min_stocks=10", "data.split.val_days=40"),
    *("data.split.test_days=20", "data.split.min_train_days=40", "model.hidden_size=8", "model.num_heads=2"),
    *("model.num_layers=1", "train.num_epochs=1"),
)

pytestmark = pytest.mark.whole
OPTIONS = [part for change in TINY for part in ("-o", change)]


def test_means_weigh_markets_alike_with_errors_of_independent_means():
    rng = np.random.default_rng(0)
    days = [rng.normal(0.05, 0.1, 400), np.append(rng.normal(0.01, 0.2, 100), np.nan)]
    mean, error = results.mean_and_error([values[None] for values in days], lag=0)
    assert mean == pytest.approx((days[0].mean() + days[1][:-1].mean()) / 2)
    each = [days[0].std() / 20, days[1][:-1].std() / 10]
    assert error == pytest.approx(np.hypot(*each) / 2)
    overlapping = [np.convolve(values[:100], np.ones(5), "valid")[None] for values in days]
    assert results.mean_and_error(overlapping, 4)[1] > 1.5 * results.mean_and_error(overlapping, 0)[1]


def test_an_error_holds_what_the_seeds_differ_by():
    """Three seeds, each with a mean of its own on all days: the days alone would say that the mean is known well."""
    rng = np.random.default_rng(0)
    noise, shifts = rng.normal(0.0, 0.001, (3, 400)), np.array([-0.03, 0.0, 0.03])
    mean, error = results.mean_and_error([0.1 + shifts[:, None] + noise], lag=0)
    assert mean == pytest.approx(0.1, abs=1e-3) and error == pytest.approx(0.03 / np.sqrt(3), rel=0.01)
    assert results.mean_and_error([0.1 + noise], lag=0)[1] < 1e-4


def test_the_table_pairs_days_and_says_what_of_the_gap_is_closed():
    rng = np.random.default_rng(1)
    luck = rng.normal(0.0, 0.1, (1, 50, 2))
    cell = {"ridge": luck + 0.05, "oracle": luck + 0.15, "without FAN": luck + 0.07, "default model": luck + 0.09}
    cell["default model"] = cell["default model"] + rng.normal(0.0, 1e-4, (2, 50, 2))
    text = results.table([cell, cell], (1, 5))
    assert "| default model | +0.0400 ± 0.0000 | +0.0400 ± 0.0000 |" in text
    assert "| without FAN | -0.0200 ± 0.0000 | -0.0200 ± 0.0000 |" in text
    assert "closes 40% (h = 1), 40% (h = 5)" in text


def first_means(text: str) -> dict[str, float]:
    """Of the first table, by row, for the first horizon."""
    rows = [line.removeprefix("| ").split(" | ") for line in text.splitlines()[2:]]
    return {name: float(first.split()[0]) for name, first, *_ in rows[: rows.index([""])]}


def test_every_row_is_trained_on_every_market_and_stands_beside_ridge(tmp_path, capsys, monkeypatch):
    best = tmp_path / "best.yaml"
    best.write_text(yaml.safe_dump({"model": {"temporal": "lstm"}}))
    monkeypatch.setitem(results.VARIANTS, "the four phases in turn", {"loss.phase": "schedule", "train.num_epochs": 4})
    asked = [*OPTIONS, "--seeds", "1", "--config", str(best), "--keep", str(tmp_path / "kept")]
    results.main([*asked, "--markets", "1"])
    text = capsys.readouterr().out
    rows = ["ridge", "oracle", "GRU", *results.VARIANTS, "default model", "found by search"]
    means = first_means(text)
    assert sorted(means) == sorted(rows)
    assert len(set(means.values())) == len(means), "two rows are the same model"

    trained, fresh = results.trained, []
    monkeypatch.setattr(results, "trained", lambda config, *of: fresh.append(config.data.seed) or trained(config, *of))
    both = [*asked, "--markets", "2", "--rows", "GRU"]
    results.main(both)
    assert fresh == [1, 1], "what was kept is not trained again"
    text = capsys.readouterr().out
    lines, means = text.splitlines(), first_means(text)
    oracle = []
    for market in (0, 1):
        panel = prepare(
            results.apply(Config(), dict(results.parse_override(t) for t in (*TINY, f"data.seed={market}"))).data
        )
        days = panel.split.val
        assert panel.oracle is not None
        oracle.append(np.nanmean(daily_ic(panel.oracle[days, :, 0], panel.returns[days, :, 0], 10)[0]))
    assert means["oracle"] == pytest.approx(np.mean(oracle), abs=6e-5)
    agreement = lines[next(i for i, line in enumerate(lines) if line.startswith("| agreement")) :]
    assert next(line for line in agreement if line.startswith("| oracle")) == "| oracle" + " | 1.0000 (1.00)" * 4 + " |"

    monkeypatch.setattr(results, "trained", None)
    results.main(both)
    assert capsys.readouterr().out == text, "what was kept is not trained again"

    monkeypatch.setattr(results, "kept", lambda config, *_: np.full((2, 40, 4), 0.1 + config.data.seed))
    results.main([*OPTIONS, "--markets", "2", "--first", "7", "--rows", "GRU"])
    captured = capsys.readouterr()
    assert [line for line in captured.err.splitlines() if "=" in line] == ["data.seed=7", "data.seed=8"]
    assert "| default model | 7.6000 (" in captured.out


def test_a_row_is_judged_on_validation_days_or_on_test_days_alone():
    """The same training, whose predictions are kept for other days."""
    base = results.apply(Config(), dict(results.parse_override(t) for t in TINY))
    for test in (False, True):
        config = results.apply(base, {"data.split.test": test})
        panel = results.Judged(config).panel
        days = panel.split.test if test else panel.split.val
        assert results.judging(panel, config.data) is days
        scores = results.trained(config)
        assert scores.shape[1] == len(days) and np.isfinite(scores).all(axis=(0, 2)).sum() > len(days) / 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--rows", "without luck"], "'without luck' is not a row: choose among GRU"),
        (["-o", "model.hiden_size=8"], "hidden_size"),
        (["--path", "nowhere.parquet"], "nowhere.parquet"),
        (["--markets", "0"], "argument --markets: '0' is not a whole number above 0: give 1 or more."),
        (["--seeds", "-1"], "argument --seeds: '-1' is not a whole number"),
        (["--folds", "0"], "argument --folds: '0' is not a whole number"),
    ],
)
def test_what_cannot_be_is_one_sentence_and_exit_2(arguments, words, capsys):
    with pytest.raises(SystemExit) as end:
        results.main(arguments)
    err = capsys.readouterr().err
    assert end.value.code == 2 and words in err.splitlines()[-1] and "Traceback" not in err


@pytest.mark.parametrize("number", ["0", "abc", "1.5"])
def test_markets_of_the_baseline_are_counted_from_one(number, capsys):
    with pytest.raises(SystemExit) as end:
        baseline.main([number])
    last = capsys.readouterr().err.splitlines()[-1]
    assert end.value.code == 2 and f"{number!r} is not a whole number above 0: give 1 or more." in last


@pytest.mark.parametrize("changed", ["studies/atft/phases.py", "trainer/optim/groups.py"])
def test_scores_are_kept_for_the_code_that_gave_them_alone(changed, tmp_path, monkeypatch):
    root = Path(results.__file__).parents[2]
    assert (root / changed).is_file()
    read = Path.read_bytes
    runs = []
    monkeypatch.setattr(results, "trained", lambda *_: np.full(3, runs.append(1) or len(runs)))
    for _ in range(2):
        assert results.kept(Config(), results.Judged, tmp_path)[0] == 1
    monkeypatch.setattr(Path, "read_bytes", lambda file: read(file) + b"#" * (file == root / changed))
    assert results.kept(Config(), results.Judged, tmp_path)[0] == 2


@pytest.fixture(scope="module")
def leaking(tmp_path_factory) -> str:
    """A panel with a column that is the return of the day after."""
    small = DataConfig(market=MarketConfig(num_days=260, num_stocks=28))
    table = clean(simulate(small.market, 0, small.horizons).table)[0]
    tomorrow = forward_returns(to_grid(table), (1,))[..., 0]
    columns = {"date": table.dates.astype("datetime64[s]"), "code": table.code_names[table.codes], **table.columns}
    columns["tomorrow"] = tomorrow[np.unique(table.dates, return_inverse=True)[1], table.codes]
    path = tmp_path_factory.mktemp("leaking") / "panel.parquet"
    pyarrow.parquet.write_table(pa.table(columns), path)
    return str(path)


def test_a_commands_data_report_names_a_column_that_knows_the_future(leaking, capsys):
    shape = [part for change in TINY if change.startswith(("data.min", "data.split")) for part in ("-o", change)]
    panel.main([leaking, *shape, "-o", "preset=none"])
    plain = json.loads(capsys.readouterr().out)
    assert "suspected_leaks" not in plain and "tomorrow" in plain["columns_unused"]
    panel.main([leaking, *shape, "-o", "preset=phases"])
    assert json.loads(capsys.readouterr().out) == plain, "a preset is taken, and changes nothing that is reported"
    panel.main([leaking, *shape, "-o", "preset=none", "-o", "data.features=tomorrow"])
    [found] = json.loads(capsys.readouterr().out)["suspected_leaks"]
    assert found.startswith("tomorrow (RankIC ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.parquet"], "nowhere.parquet is not a file"),
        (["-o", "data.features"], "is not an override"),
        (["-o", "data.feature=x"], "data.features"),
        (["-o", "preset=smal"], "this study has"),
        (["a.parquet", "b.parquet"], "unrecognized arguments: b.parquet"),
    ],
)
def test_a_data_report_that_cannot_be_is_one_sentence_and_exit_2(arguments, words, capsys):
    with pytest.raises(SystemExit) as end:
        panel.main(arguments)
    printed = capsys.readouterr()
    assert end.value.code == 2 and words in printed.err.splitlines()[-1] and printed.out == ""
