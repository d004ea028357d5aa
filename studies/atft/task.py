"""Defines the atft study's task for the trainer."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from studies.atft.config import Config
from studies.atft.graph import EDGE_FEATURES
from studies.atft.losses import MEDIAN, QUANTILES, composite
from studies.atft.metrics import metric_block, oracle_rank_ic
from studies.atft.model import Atft
from studies.atft.panel import LEAK_RANK_IC, Panel, prepare
from studies.atft.phases import behind, plan
from studies.atft.split import blocks
from trainer.task import Loss, Task

Batch = dict[str, Tensor]
SHARES_EVERY = 10  # steps between two measurements of each term's gradient
INPUTS = ("x", "mask", "sectors", "neighbours", "valid", "edges")


class Blocks:
    """Blocks of consecutive days of a panel. A batch of blocks is a dict of tensors:

    x [D, N, L, F], mask [D, N], sectors [N], neighbours and valid [D, N, K], edges [D, N, K, E], targets and returns
    [D, horizons, N] (returns in training deviations), blocks [B, D] of membership, days [D].
    """

    def __init__(self, panel: Panel, days: np.ndarray, size: int, lookback: int) -> None:
        self.panel = panel
        self.blocks = blocks(days[panel.mask[days].any(axis=1)], size)
        self.window = np.arange(1 - lookback, 1)

    def __len__(self) -> int:
        return len(self.blocks)

    def __getitems__(self, indices: list[int]) -> Batch:
        panel, graphs = self.panel, self.panel.graphs
        parts = [self.blocks[i] for i in indices]
        days = np.concatenate(parts)
        graph = graphs.of_day[days]
        member = np.repeat(np.arange(len(parts)), [len(p) for p in parts])
        return {
            "x": torch.from_numpy(panel.x[days[:, None] + self.window]).transpose(1, 2),
            "mask": torch.from_numpy(panel.mask[days]),
            "sectors": torch.from_numpy(panel.sectors + 1),
            "neighbours": torch.from_numpy(graphs.neighbours[graph]),
            "valid": torch.from_numpy(graphs.valid[graph]),
            "edges": torch.from_numpy(graphs.edges[graph]),
            "targets": torch.from_numpy(panel.targets[days].swapaxes(1, 2)),
            "returns": torch.from_numpy((panel.returns[days] / panel.return_scale).astype(np.float32).swapaxes(1, 2)),
            "blocks": torch.from_numpy((member == np.arange(len(parts))[:, None]).astype(np.float32)),
            "days": torch.from_numpy(days),
        }


class AtftTask(Task):
    """Ranks the stocks of a day by their return over several horizons; a sample is a block of consecutive days."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.data, self.panel = config.data, prepare(config.data)
        self.omega = torch.tensor(np.array(config.omega) / sum(config.omega), dtype=torch.float32)
        self.plan = plan(config.loss.phase, dict(config.loss.scale), config.phases)
        self.quantiles = config.loss.point == "quantile"
        self.composite = partial(
            composite,
            tau=config.loss.tau,
            point=config.loss.point,
            min_stocks=self.data.min_stocks,
        )

        self.ceilings = {name: self._ceiling(days) for name, days in self._spans().items()}

    def in_fold(self, fold: int, folds: int) -> AtftTask:
        """Returns the task of a fold, walk-forward: each is validated on the days after those of the fold before."""
        return AtftTask(self.config.in_fold(fold, folds))

    def model(self) -> nn.Module:
        return Atft(
            len(self.panel.feature_names),
            len(self.data.horizons),
            self.panel.num_sectors,
            len(EDGE_FEATURES),
            lookback=self.data.lookback,
            num_quantiles=len(QUANTILES) if self.quantiles else 1,
            **dict(self.config.model),
        )

    def train_set(self) -> Blocks:
        return Blocks(self.panel, self.panel.split.train, self.data.block_days, self.data.lookback)

    def loss(self, model: nn.Module, batch: Any) -> Loss:
        shares = torch.is_grad_enabled() and self.step % SHARES_EVERY == 0
        return self._composite(self._forward(model, batch, self.progress), batch, self.progress, shares)

    def lr_scale(self, progress: float) -> float:
        """Returns the phase's own factor on the learning rate."""
        return self.plan.at(progress).lr

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Returns the metric block of each horizon on the validation days, `val/rank_ic_5d` and so on, and `val/loss`.

        On the synthetic market `val/oracle_ratio_5d` is RankIC over that of the known conditional mean; for a file
        `val/suspected_leaks` counts the horizons whose RankIC is too good to be true. With data.split.test the same is
        returned for the test days, as `test/...`.
        """
        metrics: dict[str, float] = {}
        for name, days in self._spans().items():
            metrics |= self._evaluate_span(model, days, name)
        return metrics

    def _spans(self) -> dict[str, np.ndarray]:
        split = self.panel.split
        return {"val": split.val} | ({"test": split.test} if self.data.split.test else {})

    def _ceiling(self, days: np.ndarray) -> list[float]:
        """Returns the RankIC of the known conditional mean by horizon; empty for a real panel."""
        oracle, returns = self.panel.oracle, self.panel.returns
        if oracle is None:
            return []
        horizons = range(len(self.data.horizons))
        return [oracle_rank_ic(oracle[days, :, j], returns[days, :, j], self.data.min_stocks) for j in horizons]

    def _forward(self, model: nn.Module, batch: Batch, progress: float) -> Tensor:
        phase = self.plan.at(progress)
        return model(*(batch[name] for name in INPUTS), use_fan=phase.fan, use_graph=phase.graph)

    def _composite(self, out: Tensor, batch: Batch, progress: float, shares: bool = False) -> Loss:
        return self.composite(
            out.transpose(1, 2),
            batch["targets"],
            batch["returns"],
            batch["mask"],
            batch["blocks"],
            weights=self.plan.weights.at(progress),
            horizon_weights=self.omega.to(out.device),
            shares=shares,
        )

    def _evaluate_span(self, model: nn.Module, days: np.ndarray, prefix: str) -> dict[str, float]:
        predictions, loss = self.predict(model, days)
        metrics = {f"{prefix}/loss": loss}
        for j, h in enumerate(self.data.horizons):
            returns = self.panel.returns[days, :, j]
            block = metric_block(
                predictions[..., j],
                returns,
                self.panel.next_returns[days],
                h,
                min_stocks=self.data.min_stocks,
                **dict(self.config.evaluation),
            )
            if self.ceilings[prefix]:
                block["oracle_ratio"] = block["rank_ic"] / self.ceilings[prefix][j]
            metrics |= {f"{prefix}/{name}_{h}d": value for name, value in block.items()}
        if self.panel.oracle is None:
            ranked = [metrics[f"{prefix}/rank_ic_{h}d"] for h in self.data.horizons]
            metrics[f"{prefix}/suspected_leaks"] = float(sum(value > LEAK_RANK_IC for value in ranked))
        return metrics

    def predict(self, model: nn.Module, days: np.ndarray) -> tuple[np.ndarray, float]:
        """Returns (predictions [days, stocks, horizons], NaN where not ranked; mean composite loss per day)."""
        device = next(model.parameters()).device
        data = Blocks(self.panel, days, self.data.block_days, self.data.lookback)
        predictions = np.full((len(self.panel.days), *self.panel.returns.shape[1:]), np.nan)
        total, count = 0.0, 0.0
        for i in range(len(data)):
            batch = {name: value.to(device) for name, value in data.__getitems__([i]).items()}
            out = self._forward(model, batch, behind(self.progress)).float()
            loss = self._composite(out, batch, behind(self.progress))
            total, count = total + float(loss.sum), count + float(loss.count)
            ranked = out[..., MEDIAN] if self.quantiles else out
            masked = torch.where(batch["mask"][..., None], ranked, torch.nan)
            predictions[batch["days"].cpu().numpy()] = masked.cpu().numpy()
        return predictions[days], total / count if count else float("nan")
