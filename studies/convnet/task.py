"""Trains and evaluates the convnet."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from studies.convnet.augment import augmentation
from studies.convnet.config import Config
from studies.convnet.data import num_classes, split
from studies.convnet.model import ResNet
from trainer import losses
from trainer.data import TensorDataset
from trainer.task import Loss, Task

EVALUATED_AT_ONCE = 500  # images


class ConvnetTask(Task):
    """Classifies images.

    Trials are compared by val/accuracy, since losses of other names or smoothing do not compare.
    """

    config: Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.change = augmentation(config.augment)

    def model(self) -> nn.Module:
        model = self.config.model
        return ResNet(
            num_classes(self.config.data),
            width=model.width,
            num_blocks=model.num_blocks,
            dropout=model.dropout,
            channels_last=model.channels_last,
        )

    def train_set(self) -> TensorDataset:
        return TensorDataset(*split(self.config.data, "train"))

    def augment(self, sample: Any, generator: torch.Generator) -> Any:
        return self.change(sample, generator)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
        """Returns the loss; with mixup (Zhang et al. 2018, arXiv 1710.09412, eq. 1) that of mixed images.

        It is computed on a x_i + (1 - a) x_j, by a to y_i and by 1 - a to y_j, where j is the image as far from the
        batch's end as i is from its beginning.
        """
        x, y = batch
        alpha = self.config.augment.mixup
        if not alpha:
            return self._loss(model(x), y)
        share = random.betavariate(alpha, alpha)  # seeded for this step and micro-batch by the trainer
        logits = model(share * x + (1 - share) * x.flip(0))
        loss, flipped = self._loss(logits, y), self._loss(logits, y.flip(0))
        return Loss(share * loss.sum + (1 - share) * flipped.sum, loss.count)

    def _loss(self, logits: Tensor, y: Tensor) -> Loss:
        loss = self.config.loss
        if loss.name == "focal":
            return losses.focal(logits, y, gamma=loss.gamma)
        return losses.cross_entropy(logits, y, label_smoothing=loss.label_smoothing)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Returns cross-entropy and accuracy, whatever the training loss, on val and, with data.test, on test."""
        device = next(model.parameters()).device
        metrics: dict[str, float] = {}
        for name in ("val", "test")[: 1 + self.config.data.test]:
            x, y = split(self.config.data, name)
            logits = torch.cat([model(part.to(device)).float().cpu() for part in x.split(EVALUATED_AT_ONCE)])
            metrics[f"{name}/loss"] = F.cross_entropy(logits, y).item()
            metrics[f"{name}/accuracy"] = (logits.argmax(dim=1) == y).float().mean().item()
        return metrics
