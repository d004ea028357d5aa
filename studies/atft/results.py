"""The table of the study: ridge, a GRU, the model without each of its parts, the model, and one from a file.

python -m studies.atft.results [--markets 4] [--seeds 2] [--config best.yaml] [-o data.market.num_days=900]
python -m studies.atft.results --path panel.parquet --folds 3 --seeds 3

Every row is trained by trainer.loop.fit and judged by its last epoch on the validation days: nothing is chosen there.
A market (or a walk-forward fold of a file) gives a RankIC per day, a mean over seeds. Differences are paired by day;
their standard errors are Newey and West's with lag h - 1 of each market or fold, put together as of independent means.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hpo.config import apply, flatten, load_yaml, parse_override
from hpo.errors import UserError
from studies.atft.baseline import ridge_predictions
from studies.atft.config import Config
from studies.atft.metrics import daily_ic, newey_west_t
from studies.atft.task import AtftTask
from trainer.checkpoint import CheckpointStore
from trainer.errors import ConfigError, DataError
from trainer.loop import fit
from trainer.report import Silent

RIDGE, GRU, DEFAULT, ORACLE = "ridge", "GRU", "default model", "oracle"
ABLATIONS: dict[str, dict[str, Any]] = {
    "without the graph": {"model.graph": False},
    "without FAN": {"model.num_frequencies": 0},
    "without selection": {"model.selection": "none"},
    "without attention": {"model.attention": False},
}
Days = list[np.ndarray]  # per market or fold: RankIC [days, horizons], NaN where a day has none


class Gru(nn.Module):
    """The plain recurrent baseline: a GRU over each stock's window, a linear head. Takes what `Atft` takes."""

    def __init__(self, num_features: int, num_horizons: int, hidden_size: int, dropout: float) -> None:
        super().__init__()
        self.gru = nn.GRU(num_features, hidden_size, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden_size, num_horizons)

    def forward(self, x: Tensor, *others: Tensor, **parts: bool) -> Tensor:
        _, last = self.gru(x.flatten(0, 1))
        return self.head(self.dropout(last[0])).view(*x.shape[:2], -1)


class Judged(AtftTask):
    """The task, which keeps what it last predicted for the validation days: [days, stocks, horizons]."""

    predictions: np.ndarray

    def predict(self, model: nn.Module, days: np.ndarray) -> tuple[np.ndarray, float]:
        predictions, loss = super().predict(model, days)
        if days is self.panel.split.val:  # with data.split.test there are others
            self.predictions = predictions
        return predictions, loss


class GruTask(Judged):
    def model(self) -> nn.Module:
        c = self.config.model
        return Gru(len(self.panel.feature_names), len(self.data.horizons), c.hidden_size, c.dropout)


def trained(config: Config, task_type: type[Judged] = Judged) -> np.ndarray:
    """RankIC [validation days, horizons] of a model trained as `config` says."""
    task = task_type(config)
    with tempfile.TemporaryDirectory() as directory:
        outcome = fit(task, config.train, Silent(), CheckpointStore(Path(directory), fence=1))
    if outcome.kind != "complete":
        raise ConfigError(f"a row of the table ended as {outcome.kind}: {outcome.error}")
    return rank_ics(task.panel.returns, task.panel.split.val, task.predictions, config.data.min_stocks)


def rank_ics(returns: np.ndarray, days: np.ndarray, predictions: np.ndarray, min_stocks: int) -> np.ndarray:
    """RankIC [days, horizons] of predictions [days, stocks, horizons]."""
    horizons = range(returns.shape[-1])
    return np.stack([daily_ic(predictions[..., j], returns[days, :, j], min_stocks)[0] for j in horizons], axis=-1)


def measured(config: Config, rows: Mapping[str, Config], seeds: int) -> dict[str, np.ndarray]:
    """RankIC [days, horizons] of every row on one market or fold, a mean over seeds; ridge and oracle need none."""
    task = Judged(config)
    panel, days, least = task.panel, task.panel.split.val, config.data.min_stocks
    ridge = [ridge_predictions(panel, j, days, least) for j in range(len(config.data.horizons))]
    found = {RIDGE: rank_ics(panel.returns, days, np.stack(ridge, axis=-1), least)}
    if panel.oracle is not None:
        found[ORACLE] = rank_ics(panel.returns, days, panel.oracle[days], least)
    for name, row in rows.items():
        start = time.perf_counter()
        runs = [apply(row, {"train.seed": seed}) for seed in range(seeds)]
        found[name] = np.mean([trained(run, GruTask if name == GRU else Judged) for run in runs], axis=0)
        print(f"{name}: {(time.perf_counter() - start) / seeds:.0f} s a run", file=sys.stderr, flush=True)
    return found


def mean_and_error(days: Sequence[np.ndarray], lag: int) -> tuple[float, float]:
    """(mean, standard error) of daily values by market or fold, which weigh the same; NaN days are left out."""
    known = [values[np.isfinite(values)] for values in days]
    means = np.array([values.mean() for values in known])
    errors = [abs(mean / newey_west_t(values, lag)) for mean, values in zip(means, known, strict=True)]
    return float(means.mean()), float(np.sqrt(np.square(errors).sum()) / len(known))


def table(cells: Sequence[Mapping[str, np.ndarray]], horizons: Sequence[int]) -> str:
    """Three tables in Markdown: RankIC (and its share of the oracle), differences from ridge, and from the default."""
    head = " | ".join(f"h = {h}" for h in horizons)
    names, oracle = list(cells[0]), ORACLE in cells[0]
    means = {n: [mean_and_error([c[n][:, j] for c in cells], 0)[0] for j in range(len(horizons))] for n in names}
    lines = [f"| RankIC{' (over oracle)' if oracle else ''} | {head} |", "|---" * (len(horizons) + 1) + "|"]
    for name, row in means.items():
        ratio = [f" ({v / o:.2f})" for v, o in zip(row, means[ORACLE], strict=True)] if oracle else [""] * len(row)
        lines.append(f"| {name} | {' | '.join(f'{v:.4f}{r}' for v, r in zip(row, ratio, strict=True))} |")
    for base in (RIDGE, DEFAULT):
        lines += ["", f"| less {base} | {head} |", "|---" * (len(horizons) + 1) + "|"]
        for name in names:
            if name in (base, ORACLE) or base not in names:
                continue
            pairs = [mean_and_error([c[name][:, j] - c[base][:, j] for c in cells], h - 1)
                     for j, h in enumerate(horizons)]  # fmt: skip
            lines.append(f"| {name} | {' | '.join(f'{m:+.4f} ± {e:.4f}' for m, e in pairs)} |")
    if oracle:
        closed = [(d - r) / (o - r) for d, r, o in zip(means[DEFAULT], means[RIDGE], means[ORACLE], strict=True)]
        lines += ["", "of the gap between ridge and oracle the default model closes "
                  + ", ".join(f"{c:.0%} (h = {h})" for c, h in zip(closed, horizons, strict=True))]  # fmt: skip
    return "\n".join(lines)


def configurations(base: Config, found: Mapping[str, Any] | None, only: Iterable[str] = ()) -> dict[str, Config]:
    """The rows that are trained, by name; `found` holds the dotted paths of a search's best."""
    rows = {GRU: base} | {name: apply(base, changes) for name, changes in ABLATIONS.items()} | {DEFAULT: base}
    if found is not None:
        rows["found by search"] = apply(base, found)
    only = set(only)
    if unknown := sorted(only - set(rows)):
        raise ConfigError(f"--rows {unknown[0]!r} is not a row: choose among {', '.join(rows)}.")
    return {name: row for name, row in rows.items() if not only or name in only or name == DEFAULT}


def cells_of(base: Config, markets: int, folds: int) -> list[dict[str, Any]]:
    """What differs between the markets, or between the walk-forward folds of a file."""
    if base.data.path:
        return [{"data.split.num_folds": folds, "data.split.fold": fold} for fold in range(folds)]
    return [{"data.seed": market} for market in range(markets)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.atft.results", description="The study's table.")
    parser.add_argument("--path", default="", help="a panel; without it synthetic markets")
    parser.add_argument("--markets", type=int, default=4)
    parser.add_argument("--folds", type=int, default=3, help="walk-forward folds of a panel")
    parser.add_argument("--seeds", type=int, default=2, help="of the training, a mean over which is taken")
    parser.add_argument("--config", help="the YAML of `hpo best --save`: one more row")
    parser.add_argument("--rows", default="", help="only these, separated by commas; the default model is always there")
    parser.add_argument("-o", dest="overrides", action="append", default=[], metavar="PATH=VALUE")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        overrides = dict(parse_override(text) for text in given.overrides)
        base = apply(Config(), {"data.path": given.path, **overrides})
        found = flatten(load_yaml(given.config)) if given.config else None
        rows = configurations(base, found, filter(None, (name.strip() for name in given.rows.split(","))))
        cells = []
        for place in cells_of(base, given.markets, given.folds):
            print(", ".join(f"{key}={value}" for key, value in place.items()), file=sys.stderr, flush=True)
            cells.append(measured(apply(base, place), {n: apply(row, place) for n, row in rows.items()}, given.seeds))
        print(table(cells, base.data.horizons))
    except (UserError, ConfigError, DataError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
