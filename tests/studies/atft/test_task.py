"""The study under the trainer: it learns, repeats itself, and finds nothing where there is nothing."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from studies.atft import STUDY
from studies.atft.config import Config, DataConfig, MarketConfig, ModelConfig, SplitConfig
from studies.atft.phases import PHASES
from studies.atft.task import AtftTask
from trainer.checkpoint.store import CheckpointStore
from trainer.config import ScheduleConfig
from trainer.loop import fit
from trainer.report import CONTINUE

SMALL = Config(
    data=DataConfig(
        market=MarketConfig(num_days=280, num_stocks=24, snr=0.6),
        split=SplitConfig(val_days=40, test_days=20, min_train_days=40),
        min_stocks=10,
    ),
    model=ModelConfig(hidden_size=8, num_heads=2, dropout=0.1),
)

pytestmark = pytest.mark.whole


def train(config: Config, directory) -> tuple[str, list[dict[str, float]]]:
    reports: list[dict[str, float]] = []

    def report(report):
        reports.append(dict(report.metrics))
        return CONTINUE

    reporter = SimpleNamespace(preempted=False, report=report, event=lambda kind, **fields: None)
    outcome = fit(AtftTask(config), config.train, reporter, CheckpointStore(directory, fence=1))
    return outcome.kind, [r for r in reports if "val/rank_ic_5d" in r]


def changed(config: Config, **parts) -> Config:
    return Config.model_validate(
        {**dict(config), **{k: getattr(config, k).model_copy(update=v) for k, v in parts.items()}}
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(changed(SMALL, train={"num_epochs": 3}), tmp_path_factory.mktemp("atft"))


def test_it_learns_and_reports_every_metric_of_every_horizon(trained):
    kind, reports = trained
    assert kind == "complete" and len(reports) == 3
    assert reports[-1]["train/loss"] < 0.9 * reports[0]["train/loss"]
    assert max(r["val/rank_ic_5d"] for r in reports) > 0.1
    last = reports[-1]
    for h in (1, 5, 10, 20):
        for name in ("rank_ic", "icir", "rank_ic_t", "ic", "decile_spread", "sharpe_net", "turnover", "oracle_ratio"):
            assert math.isfinite(last[f"val/{name}_{h}d"])
    assert math.isfinite(last["val/loss"]) and not any(key.startswith("test/") for key in last)
    terms = ("mse", "rank_ic", "cs_ic", "sharpe")
    assert {f"train/loss_{term}" for term in terms} <= set(last)
    shares = [last[f"train/grad_share_{term}"] for term in terms]
    assert sum(shares) == pytest.approx(1.0) and min(shares) > 0


def test_the_same_seed_gives_the_same_numbers(trained, tmp_path):
    again = train(changed(SMALL, train={"num_epochs": 3}), tmp_path)[1]
    for first, second in zip(trained[1], again, strict=True):
        assert {k: v for k, v in first.items() if k.startswith(("val/", "train/loss"))} == {
            k: v for k, v in second.items() if k.startswith(("val/", "train/loss"))
        }


def test_each_phase_has_its_own_epochs_rate_weights_and_parts(tmp_path):
    """Four phases of one epoch each; the reports tell by which terms and rates each epoch was trained."""
    config = changed(
        SMALL,
        train={"num_epochs": 4, "schedule": ScheduleConfig()},
        loss={"phase": "schedule", "point": "quantile"},
    )
    kind, reports = train(config, tmp_path)
    assert kind == "complete"
    rates = [report["train/lr"] / config.train.optim.lr for report in reports]
    assert rates == pytest.approx([PHASES[k].lr for k in "1234"])
    for report, phase in zip(reports, PHASES.values(), strict=True):
        weighed = {"quantile" if term == "mse" else term for term, weight in phase.weights if weight}
        assert {key[11:] for key in report if key.startswith("train/loss_")} == weighed
        assert all(math.isfinite(report[f"val/rank_ic_{h}d"]) for h in (1, 5, 10, 20))


def test_a_phase_without_graph_and_fan_trains_and_judges_without_them():
    task = AtftTask(changed(SMALL, loss={"phase": "schedule"}))
    torch.manual_seed(0)
    model = task.model().eval()
    metrics = []
    for progress in (0.1, 0.6):
        task.progress = progress
        model.zero_grad()
        task.loss(model, task.train_set().__getitems__([0])).sum.backward()
        assert any(p.grad is not None for p in model.gat.parameters()) == (progress > 0.5)
        with torch.no_grad():
            metrics.append(task.evaluate(model)["val/rank_ic_5d"])
    assert metrics[0] != metrics[1]


def test_micro_batches_give_the_loss_of_the_whole_batch():
    config = changed(SMALL, model={"dropout": 0.0})
    task = AtftTask(config)
    torch.manual_seed(0)
    model = task.model()
    data = task.train_set()
    whole = task.loss(model, data.__getitems__([0, 3, 1]))
    parts = [task.loss(model, data.__getitems__([i])) for i in (0, 3, 1)]
    torch.testing.assert_close(whole.sum, sum(part.sum for part in parts))
    assert float(whole.count) == sum(float(part.count) for part in parts)


def test_folds_walk_forward_with_scalers_of_their_own_training_days():
    task = AtftTask(changed(SMALL, data={"split": SMALL.data.split.model_copy(update={"val_days": 20})}))
    first, second = (task.in_fold(fold, 2) for fold in range(2))
    longest, embargo = SMALL.data.horizons[-1], SMALL.data.split.embargo
    for fold in (first, second):
        split = fold.panel.split
        assert split.train[-1] + longest + embargo < split.val[0] and split.val[-1] + longest + embargo < split.test[0]
        known = fold.panel.returns[split.train, :, 1]
        assert fold.panel.return_scale[1] == pytest.approx(np.nanstd(known))
    assert second.panel.split.val[0] == first.panel.split.val[-1] + 1
    assert len(second.panel.split.train) == len(first.panel.split.train) + 20
    assert first.panel.return_scale[1] != second.panel.return_scale[1]


def test_the_last_block_is_judged_only_on_request():
    config = changed(SMALL, data={"split": SMALL.data.split.model_copy(update={"test": True})})
    task = AtftTask(config)
    torch.manual_seed(0)
    with torch.no_grad():
        metrics = task.evaluate(task.model().eval())
    assert math.isfinite(metrics["test/rank_ic_5d"])


def test_a_model_that_collapsed_has_no_score():
    task = AtftTask(SMALL)
    model = task.model().eval()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    with torch.no_grad():
        metrics = task.evaluate(model)
    assert math.isnan(metrics["val/rank_ic_5d"]) and metrics["val/undefined_days_5d"] == metrics["val/num_days_5d"]


def test_the_declaration_starts_where_the_configuration_does():
    assert STUDY.config == Config() and STUDY.objectives[0].metric == "val/rank_ic_5d"


@pytest.mark.slow
def test_shuffled_targets_teach_nothing(tmp_path):
    values = []
    for seed in range(4):
        config = changed(Config(), data={"seed": seed, "control": "shuffled"}, train={"num_epochs": 2})
        values.append(train(config, tmp_path / str(seed))[1][-1])
    # A daily RankIC of 64 stocks has a deviation of about 0.14; 119 days in each of four markets. Returns over h days
    # overlap, so that there are as many that do not as h goes into the days.
    for h in (1, 5):
        mean = sum(found[f"val/rank_ic_{h}d"] for found in values) / 4
        assert abs(mean) < 2 * 0.14 / math.sqrt(4 * 119 / h), h
