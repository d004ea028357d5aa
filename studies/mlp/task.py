"""Trains and evaluates the mlp."""

from __future__ import annotations

import itertools

from torch import Tensor, nn
from torch.nn import functional as F

from studies.mlp.config import Config
from studies.mlp.data import digits
from studies.mlp.model import MLP
from trainer.data import TensorDataset
from trainer.task import Loss, Task


class MlpTask(Task):
    """Cross-entropy on the training split; loss and accuracy on val and, with data.test, on test."""

    config: Config
    lane_fields = ("model.dropout",)
    part: tuple[int, int] = (0, 1)  # the fold and the number of folds

    def in_fold(self, fold: int, folds: int) -> MlpTask:
        task = MlpTask(self.config)
        task.part = fold, folds
        return task

    def model(self) -> nn.Module:
        model = self.config.model
        return MLP(64, 10, hidden_size=model.hidden_size, num_layers=model.num_layers, dropout=model.dropout)

    def parallel_plan(self, model: nn.Module) -> dict[str, str]:
        """Returns columns and rows in turn; an odd last layer stays whole."""
        linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        return dict(zip(linear[: len(linear) // 2 * 2], itertools.cycle(("colwise", "rowwise")), strict=False))

    def pipeline_plan(self, model: nn.Module) -> list[nn.Module]:
        return [*model.get_submodule("layers").children()]

    def train_set(self) -> TensorDataset:
        return TensorDataset(*self._split("train"))

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        x, y = batch
        return Loss(F.cross_entropy(model(x), y, reduction="sum"), len(y))

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        device = next(model.parameters()).device
        metrics: dict[str, float] = {}
        for name in ("val", "test")[: 1 + self.config.data.test]:
            x, y = (tensor.to(device) for tensor in self._split(name))
            logits = model(x).float()
            metrics[f"{name}/loss"] = F.cross_entropy(logits, y).item()
            metrics[f"{name}/accuracy"] = (logits.argmax(dim=1) == y).float().mean().item()
        return metrics

    def _split(self, name: str) -> tuple[Tensor, Tensor]:
        return digits(self.config.data.split_seed, *self.part)[name]
