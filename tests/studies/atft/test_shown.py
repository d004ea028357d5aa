"""What `hpo show`, `compare` and `best` show first of this study, and what its presets say of themselves."""

from __future__ import annotations

from types import SimpleNamespace

from crafted import open_crafted, put_trial

from hpo.analysis.results.best import best_trials, describe_best
from hpo.analysis.results.compare import compare, headline
from hpo.analysis.results.table import comparison
from hpo.driver.prepare import _taken_out
from hpo.space.config import Raw
from hpo.storage.home import Home
from studies.atft import STUDY

RATIO = "val/oracle_ratio_5d"
BLOCK = ("ic", "icir", "rank_ic_sd", "rank_ic_t", "sharpe_gross", "sharpe_net", "turnover", "drawdown", "oracle_ratio")
REPORTED = ("train/loss", "train/grad_norm", "val/loss", *(f"val/{n}_{h}d" for h in (1, 5, 10, 20) for n in BLOCK))


def test_the_ratio_to_the_oracle_is_among_the_first_metrics():
    """Of the eight that show and compare list, of some forty that a trial reports."""
    objective = STUDY.objectives[0].metric
    assert RATIO in headline([objective, *REPORTED], [objective], STUDY.metrics)[:5]


def test_best_and_compare_show_the_ratio_beside_the_objective(tmp_path):
    objective = {"metric": "val/rank_ic_5d", "direction": "maximize", "select": "best"}
    spec = {"objectives": [objective], "metrics": list(STUDY.metrics)}
    ledger = open_crafted(tmp_path / "ledger.db", **spec)
    for number, (value, ratio) in enumerate(((0.21, 0.68), (0.19, 0.61))):
        metrics = dict.fromkeys(REPORTED, (0.5 + number / 9,)) | {RATIO: (ratio,), "val/rank_ic_5d": (value,)}
        put_trial(ledger, number, "complete", (value,), metrics=metrics, values=[value])
    with ledger.read() as connection:
        [best] = best_trials(connection, Home(tmp_path), "crafted")
        beside = compare(connection, "crafted")
    ledger.close()
    assert f"  {RATIO} 0.68" in describe_best(best).splitlines()
    table = comparison(beside, 100).renderables[0]
    assert RATIO in [str(column.header) for column in table.columns]


def spec_of(**given) -> SimpleNamespace:
    """Of a study's specification what is read."""
    return SimpleNamespace(**({"reference": "atft", "tier": None, "listed": []} | given))


def test_a_preset_says_what_it_takes_out_of_the_space():
    spec = spec_of(overrides={"model.num_heads": 8, "model.hidden_size": 8})
    told = _taken_out({"preset": Raw("full")}, spec)
    assert told == "preset=full sets model.hidden_size, model.num_heads, model.num_layers, which are not searched"
    assert _taken_out({"preset": Raw("full"), "model.num_heads": Raw("8")}, spec) == (
        "this run sets model.num_heads, which is not searched\n"
        "model.num_heads=8 is none of what would be searched, 1, 2, 4\n"
        "preset=full sets model.hidden_size, model.num_layers, which are not searched"
    )
    assert _taken_out({"preset": Raw("small")}, spec) == ""
    assert _taken_out({"model.hidden_size": Raw("8")}, spec) == (
        "this run sets model.hidden_size, which is not searched\n"
        "model.hidden_size=8 is none of what would be searched, 16 to 64, powers of two"
    )
    within = spec_of(overrides={"model.hidden_size": 32})
    told = _taken_out({"model.hidden_size": Raw("32")}, within)
    assert told == "this run sets model.hidden_size, which is not searched"
    assert _taken_out({"train.num_epochs": Raw("8")}, spec) == "", "which the study does not search"
    assert _taken_out({"model.hidden_size": 8}, spec_of(listed=[{}])) == "", "where nothing is searched"


def test_of_a_tier_a_preset_takes_what_that_would_search():
    told = _taken_out({"preset": Raw("full")}, spec_of(tier=1))
    assert told == "preset=full sets model.hidden_size, which is not searched"
