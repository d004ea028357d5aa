"""The digest of a short study under every sampler and every strategy, and the sentence where the two are refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from driven import driven
from golden_studies import tried

from hpo.declaration import preflight
from hpo.driver.request import RunRequest, request_of
from hpo.driver.resolve import declare
from hpo.errors import UserError
from hpo.ledger import Ledger, queries
from hpo.search.samplers.registry import SAMPLERS
from hpo.search.strategies.registry import STRATEGIES
from hpo.storage.home import Home

DECLARATION = Path(__file__).with_name("matrix_study.py")
TRIALS, WINDOW = 12, 2

# Options with which a model is asked after a few trials, and a trial of five epochs meets rungs.
SAMPLER_OPTIONS: dict[str, dict[str, Any]] = {
    "tpe": {"n_startup_trials": 4},
    "gp": {"n_startup_trials": 10},
    "nsga2": {"population_size": 3},
    "nsga3": {"population_size": 3},
}
STRATEGY_OPTIONS: dict[str, dict[str, Any]] = {
    "median": {"n_startup_trials": 1},
    "percentile": {"n_startup_trials": 1, "percentile": 40.0},
    "patient": {"patience": 0, "strategy": None},
    "threshold": {"upper": 1.0, "n_warmup_epochs": 2},
    "wilcoxon": {"n_startup_epochs": 1},
    "paired": {"parts": 4, "p_threshold": 0.3},
    "halving": {"eta": 2},
    "asha": {"min_epochs": 1, "eta": 2},
    "hyperband": {"eta": 2},
    "asha-promote": {"eta": 2},
    "pasha": {"eta": 2},
    "hyperband-promote": {"eta": 2},
    "freeze-thaw": {"min_epochs": 1, "eta": 2},
    "bohb": {"eta": 2},
    "pbt": {"population": 4, "interval": 2},
    "pb2": {"population": 4, "interval": 2},
}
POPULATIONS = ("pbt", "pb2")
PAUSING = ("asha-promote", "pasha", "hyperband-promote", "freeze-thaw", "bohb", *POPULATIONS)


# The cells that are computed by default: every sampler, most strategies, and one refusal of each kind.
SAMPLED = {
    "one objective": {
        ("tpe", "asha"),
        ("tpe", "bohb"),
        ("random", "pb2"),
        ("random", "threshold"),
        ("qmc", "hyperband"),
        ("grid", "patient"),
        ("gp", "wilcoxon"),
        ("cmaes", "none"),
        ("nsga2", "median"),
        ("nsga3", "pbt"),
        ("auto", "hyperband-promote"),
        ("freeze-thaw", "freeze-thaw"),
        ("bohb", "bohb"),
    },
    "two objectives": {("nsga3", "asha"), ("random", "median"), ("cmaes", "none")},
}
DECLARED = {"one objective": "STUDY", "two objectives": "SEVERAL"}


def matrix(ledger: Ledger, home: Home, *, every: bool) -> dict[str, Any]:
    """Returns, by the number of objectives, sampler -> strategy -> what came of it; None for a cell that the sample
    leaves out, unless `every` cell is computed."""
    return {title: _matrix(ledger, home, kind, None if every else SAMPLED[title]) for title, kind in DECLARED.items()}


def _matrix(ledger: Ledger, home: Home, kind: str, sample: set[tuple[str, str]] | None) -> dict[str, Any]:
    def cell(sampler: str, strategy: str) -> Any:
        left_out = sample is not None and (sampler, strategy) not in sample
        return None if left_out else _cell(ledger, home, kind, sampler, strategy)

    return {sampler: {strategy: cell(sampler, strategy) for strategy in STRATEGIES} for sampler in SAMPLERS}


def _cell(ledger: Ledger, home: Home, kind: str, sampler: str, strategy: str) -> dict[str, Any]:
    request = request_of(
        home,
        reference=f"{_written(home, sampler, strategy)}:{kind}",
        name=f"{kind}.{sampler}.{strategy}",
        sampler=sampler,
        window=None if strategy in POPULATIONS else 1 if strategy in PAUSING else WINDOW,
        overrides={"checkpoints": True} if strategy in PAUSING else {},
    )
    try:
        preflight.check(declare(request, ledger, workers=1))
    except UserError as error:
        return {"refused": str(error)}
    return tried(lambda: _driven(ledger, request))


def _written(home: Home, sampler: str, strategy: str) -> Path:
    """Writes the declaration with this sampler and strategy, and returns its file."""
    text = DECLARATION.read_text()
    for declared, kind, options in (
        ('sampler="random"', "sampler", {"name": sampler, **SAMPLER_OPTIONS.get(sampler, {})}),
        ('strategy="none"', "strategy", {"name": strategy, **STRATEGY_OPTIONS.get(strategy, {})}),
    ):
        assert declared in text, f"{DECLARATION.name} has no {declared} to replace"
        text = text.replace(declared, f"{kind}={options!r}")
    file = home.root / "matrix_study.py"
    file.write_text(text)
    return file


def _driven(ledger: Ledger, request: RunRequest) -> dict[str, Any]:
    name, state = driven(ledger, request, trials=TRIALS)
    assert state == "complete", f"{name} is {state}"
    with ledger.read() as connection:
        study = queries.study_row(connection, name)
        rows = queries.trial_rows(connection, study.id)
        states = dict(sorted(Counter(row.state for row in rows).items()))
        epochs = sum(row.epoch - row.from_epoch for row in rows)
        return {"digest": queries.digest(connection, study), "states": states, "epochs": epochs}
