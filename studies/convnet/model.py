"""Defines a residual net for small images; torch only."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """y = x + conv(relu(bn(conv(relu(bn(x)))))), the pre-activation block of He et al. 2016, arXiv 1603.05027.

    x: [batch, channels_in, h, w] -> [batch, channels_out, h / stride, w / stride]. If the shape changes, a 1 x 1
    convolution of the activated input is added instead of x.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels_out)
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        changes = stride > 1 or channels_in != channels_out
        self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride, bias=False) if changes else None

    def forward(self, x: Tensor) -> Tensor:
        activated = self.norm1(x).relu()
        kept = x if self.shortcut is None else self.shortcut(activated)
        return kept + self.conv2(self.norm2(self.conv1(activated)).relu())


class ResNet(nn.Module):
    """A convolution, three stages of `num_blocks` blocks, the mean over positions, and a linear layer.

    x: [batch, 3, height, width] of intensities from 0 to 255, bytes or floats -> logits [batch, num_classes]. The
    second and third stages halve height and width.
    """

    def __init__(self, num_classes: int, *, width: int, num_blocks: int, dropout: float, channels_last: bool) -> None:
        super().__init__()
        self.memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        stages = [
            Block(width * 2 ** max(stage - (i == 0), 0), width * 2**stage, 2 if stage and i == 0 else 1)
            for stage in range(3)
            for i in range(num_blocks)
        ]
        self.blocks = nn.Sequential(*stages)
        self.norm = nn.BatchNorm2d(4 * width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(4 * width, num_classes)
        for layer in self.modules():  # does the same as Module.to, which fails on the fake tensors of a memory estimate
            if isinstance(layer, nn.Conv2d):
                layer.weight = nn.Parameter(layer.weight.detach().to(memory_format=self.memory_format))

    def forward(self, x: Tensor) -> Tensor:
        x = (x.float() / 127.5 - 1).contiguous(memory_format=self.memory_format)
        x = self.norm(self.blocks(self.stem(x))).relu().mean(dim=(2, 3))
        return self.head(self.dropout(x))
