"""Makes the table of the study: ridge, a GRU, variants of the model, the model, and one from a file.

python -m studies.atft.results [--markets 4] [--first 0] [--seeds 2] [--config best.yaml] [-o data.market.num_days=900]
python -m studies.atft.results --path panel.parquet --folds 3 --seeds 3 [--keep DIRECTORY]

Every row is trained by trainer.loop.fit and judged by its last epoch on the validation days, which select nothing, or
with -o data.split.test=true on the test days, which no search has seen.
A market (or a walk-forward fold of a file) gives a RankIC per seed and day. Differences are paired by seed and day;
their variances are Newey and West's over the days, with lag h - 1, plus that of the seeds' means over their number, as
of independent means. For a synthetic market a second table has the rank correlation with the known conditional mean in
place of the returns: the RankIC over the oracle's without the noise of the returns.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import trainer
from hpo.errors import UserError
from hpo.space.config import apply, flatten, load_yaml, parse_override
from studies.atft.baseline import positive, ridge_predictions
from studies.atft.config import Config, DataConfig
from studies.atft.metrics import daily_ic, newey_west_t
from studies.atft.panel import Panel
from studies.atft.task import AtftTask
from trainer.checkpoint.store import CheckpointStore
from trainer.errors import ConfigError, DataError
from trainer.loop import fit
from trainer.report import Silent

RIDGE, GRU, DEFAULT, ORACLE = "ridge", "GRU", "default model", "oracle"
VARIANTS: dict[str, dict[str, Any]] = {
    "without the graph": {"model.graph": False},
    "without FAN": {"model.num_frequencies": 0},
    "without selection": {"model.selection": "none"},
    "without attention": {"model.attention": False},
    "FAN with a second layer": {"model.main_layers": 2},
    "the four phases in turn": {"loss.phase": "schedule", "train.num_epochs": 8},
    "with EMA": {"train.average.name": "ema"},
}

PERSISTENCE = 20  # days over which the agreement with a slow conditional mean is assumed correlated


class Gru(nn.Module):
    """The plain recurrent baseline: a GRU over each stock's window, a linear head. Takes the inputs of `Atft`."""

    def __init__(self, num_features: int, num_horizons: int, hidden_size: int, dropout: float) -> None:
        super().__init__()
        self.gru = nn.GRU(num_features, hidden_size, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden_size, num_horizons)

    def forward(self, x: Tensor, *others: Tensor, **parts: bool) -> Tensor:
        _, last = self.gru(x.flatten(0, 1))
        return self.head(self.dropout(last[0])).view(*x.shape[:2], -1)


class Judged(AtftTask):
    """The task, which keeps its last predictions for the days that judge: [days, stocks, horizons]."""

    predictions: np.ndarray

    def predict(self, model: nn.Module, days: np.ndarray) -> tuple[np.ndarray, float]:
        predictions, loss = super().predict(model, days)
        if days is judging(self.panel, self.data):
            self.predictions = predictions
        return predictions, loss


def judging(panel: Panel, config: DataConfig) -> np.ndarray:
    """Returns the days that judge a row: the validation days, or the test days with data.split.test."""
    return panel.split.test if config.split.test else panel.split.val


class GruTask(Judged):
    def model(self) -> nn.Module:
        c = self.config.model
        return Gru(len(self.panel.feature_names), len(self.data.horizons), c.hidden_size, c.dropout)


def trained(config: Config, task_type: type[Judged] = Judged) -> np.ndarray:
    """Returns `scores` of a model trained under `config`."""
    task = task_type(config)
    with tempfile.TemporaryDirectory() as directory:
        outcome = fit(task, config.train, Silent(), CheckpointStore(Path(directory), fence=1))
    if outcome.kind != "complete":
        raise ConfigError(f"a row of the table ended as {outcome.kind}: {outcome.error}")
    return scores(task.panel, task.predictions, config.data)


def scores(panel: Panel, predictions: np.ndarray, config: DataConfig) -> np.ndarray:
    """Returns [1 or 2, judging days, horizons]: the RankIC of predictions [days, stocks, horizons].

    For a synthetic market the second is their rank correlation with the conditional mean of the same stocks.
    """
    days = judging(panel, config)
    truths = [panel.returns[days]]
    if panel.oracle is not None:
        truths.append(np.where(np.isfinite(truths[0]), panel.oracle[days], np.nan))
    horizons = range(predictions.shape[-1])
    return np.stack([
        np.stack([daily_ic(predictions[..., j], truth[..., j], config.min_stocks)[0] for j in horizons], axis=-1)
        for truth in truths
    ])  # fmt: skip


def kept(config: Config, task_type: type[Judged], directory: Path | None) -> np.ndarray:
    """Returns `trained`, or its stored result for the same configuration, code and file."""
    if directory is None:
        return trained(config, task_type)
    digest = hashlib.sha256((task_type.__name__ + config.model_dump_json()).encode())
    for source in sorted([*Path(__file__).parent.glob("*.py"), *Path(trainer.__file__).parent.rglob("*.py")]):
        digest.update(source.read_bytes())
    if config.data.path:
        digest.update(Path(config.data.path).read_bytes())
    file = directory / f"{digest.hexdigest()[:16]}.npy"
    if not file.exists():
        scores = trained(config, task_type)
        directory.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(".part.npy")
        np.save(part, scores)
        part.replace(file)
    return np.load(file)


def measured(
    config: Config, rows: Mapping[str, Config], seeds: int, directory: Path | None = None
) -> dict[str, np.ndarray]:
    """Returns `scores` of every row on one market or fold, [seeds, ...]; ridge and oracle have one seed."""
    panel, data = Judged(config).panel, config.data
    days = judging(panel, data)
    ridge = [ridge_predictions(panel, j, days, data.min_stocks) for j in range(len(data.horizons))]
    by_row = {RIDGE: scores(panel, np.stack(ridge, axis=-1), data)[None]}
    if panel.oracle is not None:
        by_row[ORACLE] = scores(panel, panel.oracle[days], data)[None]
    for name, row in rows.items():
        start = time.perf_counter()
        runs = [apply(row, {"train.seed": seed}) for seed in range(seeds)]
        by_row[name] = np.stack([kept(run, GruTask if name == GRU else Judged, directory) for run in runs])
        print(f"{name}: {(time.perf_counter() - start) / seeds:.0f} s a run", file=sys.stderr, flush=True)
    return by_row


def mean_and_error(cells: Sequence[np.ndarray], lag: int) -> tuple[float, float]:
    """Returns (mean, standard error) of values [seeds, days] by market or fold, which weigh the same.

    NaN days are left out. One seed has no spread: the error is then that of the days alone.
    """
    means, variances = [], []
    for values in cells:
        known = values[:, np.isfinite(values).all(axis=0)]
        daily, of_seeds = known.mean(axis=0), known.mean(axis=1)
        spread = of_seeds.var(ddof=1) / len(of_seeds) if len(of_seeds) > 1 else 0.0
        means.append(daily.mean())
        of_days = (daily.mean() / newey_west_t(daily, lag)) ** 2 if daily.any() else 0.0  # of a row less itself
        variances.append(of_days + spread)
    return float(np.mean(means)), float(np.sqrt(np.sum(variances)) / len(means))


def table(
    cells: Sequence[Mapping[str, np.ndarray]], horizons: Sequence[int], title: str = "RankIC", lag: int | None = None
) -> str:
    """Returns three tables in Markdown of values [seeds, days, horizons] by row and cell.

    These are the means (and their shares of the oracle's), differences from ridge, and from the default model. `lag` is
    that of the errors, by default h - 1.
    """

    def pairs(name: str, base: str | None = None) -> list[tuple[float, float]]:
        less = [c[name] - c[base] if base else c[name] for c in cells]
        return [mean_and_error([v[..., j] for v in less], h - 1 if lag is None else lag)
                for j, h in enumerate(horizons)]  # fmt: skip

    head = " | ".join(f"h = {h}" for h in horizons)
    names, oracle = list(cells[0]), ORACLE in cells[0]
    means = {name: [mean for mean, _ in pairs(name)] for name in names}
    lines = [f"| {title}{' (over oracle)' if oracle else ''} | {head} |", "|---" * (len(horizons) + 1) + "|"]
    for name in names:
        ratio = [f" ({v / o:.2f})" for v, o in zip(means[name], means[ORACLE], strict=True)] if oracle else []
        ratio = ratio or [f" ± {error:.4f}" for _, error in pairs(name)]
        lines.append(f"| {name} | {' | '.join(f'{v:.4f}{r}' for v, r in zip(means[name], ratio, strict=True))} |")
    for base in (RIDGE, DEFAULT):
        lines += ["", f"| less {base} | {head} |", "|---" * (len(horizons) + 1) + "|"]
        for name in names:
            if name not in (base, ORACLE):
                lines.append(f"| {name} | {' | '.join(f'{m:+.4f} ± {e:.4f}' for m, e in pairs(name, base))} |")
    if oracle:
        closed = [(d - r) / (o - r) for d, r, o in zip(means[DEFAULT], means[RIDGE], means[ORACLE], strict=True)]
        lines += ["", "of the gap between ridge and oracle the default model closes "
                  + ", ".join(f"{c:.0%} (h = {h})" for c, h in zip(closed, horizons, strict=True))]  # fmt: skip
    return "\n".join(lines)


def report(cells: Sequence[Mapping[str, np.ndarray]], horizons: Sequence[int]) -> str:
    """Returns the tables of the results of `measured` for every market or fold."""
    texts = [table([{name: v[:, 0] for name, v in cell.items()} for cell in cells], horizons)]
    if ORACLE in cells[0]:
        agreement = [{name: v[:, 1] for name, v in cell.items()} for cell in cells]
        texts.append(table(agreement, horizons, "agreement", PERSISTENCE))
    return "\n\n".join(texts)


def configurations(base: Config, found: Mapping[str, Any] | None, only: Iterable[str] = ()) -> dict[str, Config]:
    """Returns the rows that are trained, by name; `found` holds the dotted paths of a search's best."""
    rows = {GRU: base} | {name: apply(base, changes) for name, changes in VARIANTS.items()} | {DEFAULT: base}
    if found is not None:
        rows["found by search"] = apply(base, found)
    only = set(only)
    if unknown := sorted(only - set(rows)):
        raise ConfigError(f"--rows {unknown[0]!r} is not a row: choose among {', '.join(rows)}.")
    return {name: row for name, row in rows.items() if not only or name in only or name == DEFAULT}


def cells_of(base: Config, markets: int, folds: int, first: int = 0) -> list[dict[str, Any]]:
    """Returns the settings of each market, counted from `first`, or of each walk-forward fold of a file."""
    if base.data.path:
        return [{"data.split.num_folds": folds, "data.split.fold": fold} for fold in range(folds)]
    return [{"data.seed": market} for market in range(first, first + markets)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m studies.atft.results", description="The study's table.")
    parser.add_argument("--path", default="", help="a panel; without it synthetic markets")
    parser.add_argument("--markets", type=positive, default=4)
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the markets N, N + 1, ... (data.seed)")
    parser.add_argument("--folds", type=positive, default=3, help="walk-forward folds of a panel")
    parser.add_argument("--seeds", type=positive, default=2, help="of the training")
    parser.add_argument(
        "--keep", type=Path, metavar="DIRECTORY", help="keep every run's scores here, and go on from them"
    )
    parser.add_argument("--config", help="the YAML of `hpo best --to`: one more row")
    parser.add_argument("--rows", default="", help="only these, separated by commas; the default model is always there")
    parser.add_argument("-o", dest="overrides", action="append", default=[], metavar="PATH=VALUE")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    try:
        overrides = dict(parse_override(text) for text in options.overrides)
        base = apply(Config(), {"data.path": options.path, **overrides})
        best = flatten(load_yaml(options.config)) if options.config else None
        rows = configurations(base, best, filter(None, (name.strip() for name in options.rows.split(","))))
        cells = []
        for cell in cells_of(base, options.markets, options.folds, options.first):
            print(", ".join(f"{key}={value}" for key, value in cell.items()), file=sys.stderr, flush=True)
            configs = {name: apply(row, cell) for name, row in rows.items()}
            cells.append(measured(apply(base, cell), configs, options.seeds, options.keep))
        print(report(cells, base.data.horizons))
    except (UserError, ConfigError, DataError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
