"""Computes positions other than plain rotary ones: for rows longer than a model was trained on, or without rotation.

`Scaled` slows the rotation of a model that was trained on `trained` positions, so that `factor` times as many fit:

    linear   every rate over the factor: position interpolation (Chen et al. 2023, arXiv 2306.15595)
    ntk      a larger base, theta * factor^(width / (width - 2)), which leaves the fastest rate as it is and divides the
             slowest by the factor: NTK-aware scaling (Peng et al. 2023, arXiv 2309.00071, section 3.1)
    yarn     rates that turn less than once in `trained` positions are divided, those that turn more than 32 times are
             left alone, a ramp lies in between, and cos and sin are multiplied by 0.1 ln(factor) + 1 (section 3.2 to
             3.4). The ramp is linear in the number of the rate, as in the authors' code and in transformers.

`Alibi` subtracts a multiple of the distance from the scores (Press et al. 2022, arXiv 2108.12409). `Learned` adds a
vector for each position of a document. `window` and `sinks` of any of them limit what a token sees: the last `window`
tokens of its document (Beltagy et al. 2020, arXiv 2004.05150) and the document's first `sinks` (Xiao et al. 2023,
arXiv 2309.17453).
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from studies.gpt.model import Rotary, tables

Scaling = Literal["none", "linear", "ntk", "yarn"]
FAST, SLOW = 32, 1  # rotations within the trained positions between which YaRN's ramp lies


class Windowed(Rotary):
    """Rotary positions of tokens that see the last `window` tokens, themselves included, and the first `sinks`.

    A window of None is the whole document.
    """

    def __init__(self, width: int, theta: float = 1.0, *, window: int | None = None, sinks: int = 0) -> None:
        super().__init__(width, theta)
        self.window, self.sinks = window, sinks

    def limit(
        self, mask: Tensor | None, documents: Tensor | None, length: int, device: torch.device, start: int
    ) -> Tensor | None:
        if self.window is None:
            return mask
        distance = distances(length, device, start)
        near = distance < self.window
        if self.sinks:
            near = near | (places(documents, start + length, device)[:, None, None, :] < self.sinks)
        return near & (distance >= 0 if mask is None else mask)


class Scaled(Windowed):
    """Rotary positions, scaled so that `factor` times `trained` of them fit."""

    def __init__(
        self,
        width: int,
        theta: float,
        *,
        scaling: Scaling = "none",
        trained: int = 1,
        factor: float = 1.0,
        window: int | None = None,
        sinks: int = 0,
    ) -> None:
        super().__init__(width, theta, window=window, sinks=sinks)
        self.scaling: Scaling = scaling
        self.trained, self.factor = trained, factor

    def turns(self, length: int, device: torch.device, start: int) -> Tensor:
        if self.scaling == "none" or self.factor == 1:
            return super().turns(length, device, start)
        return scaled_tables(length, self.width, self.theta, self.scaling, self.trained, self.factor, device, start)


class Unturned(Windowed):
    """Positions that turn nothing."""

    def turns(self, length: int, device: torch.device, start: int) -> Tensor:
        ones = torch.ones(length, self.width, device=device)
        return torch.stack((ones, torch.zeros_like(ones)))


class Alibi(Unturned):
    """Subtracts slope * distance from the scores of each head, in place of turning queries and keys."""

    def __init__(self, width: int, heads: int, *, window: int | None = None, sinks: int = 0) -> None:
        super().__init__(width, window=window, sinks=sinks)
        self.heads = heads

    def limit(
        self, mask: Tensor | None, documents: Tensor | None, length: int, device: torch.device, start: int
    ) -> Tensor:
        """Returns what is added to the scores, [batch or 1, heads, length, start + length]."""
        mask, distance = super().limit(mask, documents, length, device, start), distances(length, device, start)
        bias = -torch.tensor(slopes(self.heads), device=device)[:, None, None] * distance
        return torch.where(distance >= 0 if mask is None else mask, bias, -math.inf)


class Learned(nn.Module, Unturned):
    """Adds a learned vector for each position of a document, of which there are `count`."""

    def __init__(self, width: int, hidden: int, count: int, *, window: int | None = None, sinks: int = 0) -> None:
        nn.Module.__init__(self)
        Unturned.__init__(self, width, window=window, sinks=sinks)
        self.table = nn.Embedding(count, hidden)

    def place(self, x: Tensor, documents: Tensor | None, start: int) -> Tensor:
        stop = start + x.shape[1]
        return x + self.table(places(documents, stop, x.device)[:, start:])


def rates(width: int, theta: float, scaling: Scaling, trained: int, factor: float) -> list[float]:
    """Returns the angles [width / 2] by which one position turns each pair of coordinates."""
    if scaling == "ntk":
        theta *= factor ** (width / (width - 2))
    plain = [theta ** (-2 * i / width) for i in range(width // 2)]
    if scaling == "linear":
        return [rate / factor for rate in plain]
    if scaling != "yarn":
        return plain
    low, high = (_number(turns, width, theta, trained) for turns in (FAST, SLOW))
    low, high = max(math.floor(low), 0), min(math.ceil(high), width - 1)
    ramp = [min(max((i - low) / max(high - low, 0.001), 0.0), 1.0) for i in range(width // 2)]
    return [rate * (1 - share) + rate / factor * share for rate, share in zip(plain, ramp, strict=True)]


def _number(turns: float, width: int, theta: float, trained: int) -> float:
    """Returns the number of the rate that turns so many times within the trained positions."""
    return width * math.log(trained / (2 * math.pi * turns)) / (2 * math.log(theta))


def scaled_tables(
    length: int,
    width: int,
    theta: float,
    scaling: Scaling,
    trained: int,
    factor: float,
    device: torch.device,
    start: int,
) -> Tensor:
    """Returns cos and sin [2, length, width], as `tables` returns those of plain rotary positions."""
    if scaling == "ntk":
        return tables(length, width, theta * factor ** (width / (width - 2)), device, start)
    positions = torch.arange(start, start + length, dtype=torch.float32, device=device)
    turned = torch.tensor(rates(width, theta, scaling, trained, factor), dtype=torch.float32, device=device)
    angle = (positions[:, None] * turned).repeat(1, 2)
    return torch.stack((angle.cos(), angle.sin())) * (0.1 * math.log(factor) + 1 if scaling == "yarn" else 1.0)


# As `tables`, a compiled model keeps it.
scaled_tables._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def slopes(heads: int) -> list[float]:
    """Returns the slope of each head: 2^(-8 i / heads), i = 1 .. heads.

    Where `heads` is not a power of two, those of the power below come first, then every second one of the power above,
    as in the authors' code.
    """
    power = 2 ** math.floor(math.log2(heads))
    first = [2 ** (-8 * i / power) for i in range(1, power + 1)]
    return first + [2 ** (-4 * i / power) for i in range(1, 2 * power + 1, 2)][: heads - power]


def distances(length: int, device: torch.device, start: int = 0) -> Tensor:
    """Returns [length, start + length], how far each token lies after each that may have been read."""
    ends = torch.arange(start + length, device=device)
    return ends[start:, None] - ends[None, :]


def places(documents: Tensor | None, length: int, device: torch.device) -> Tensor:
    """Returns [batch or 1, length], the position of each token in its document, from 0; None: a row is one document."""
    index = torch.arange(length, device=device)[None, :]
    if documents is None:
        return index
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(begins, index, 0).cummax(dim=1).values
