"""Defines a multilayer perceptron; torch only."""

from __future__ import annotations

from torch import Tensor, nn


class MLP(nn.Module):
    """`num_layers` hidden layers of `hidden_size` units, GELU and dropout after each, and a linear head.

    x: [batch, in_features] -> logits: [batch, num_classes].
    """

    def __init__(
        self, in_features: int, num_classes: int, *, hidden_size: int, num_layers: int, dropout: float
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width in [in_features] + [hidden_size] * (num_layers - 1):
            layers += [nn.Linear(width, hidden_size), nn.GELU(), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers, nn.Linear(hidden_size, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)
