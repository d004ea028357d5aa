"""Enumerates the grid of a space: every combination of its dimensions' values once, in a fixed order.

The dimensions on which others depend are split first, into blocks: one block for each combination of their values. In a
block the other active dimensions are independent, so its points are numbered by the values on their axes.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from hpo.errors import SpaceError
from hpo.space.values import LISTED

if TYPE_CHECKING:
    from hpo.space.space import Space


class _Block(NamedTuple):
    end: int  # the number of points in this block and those before it
    decided: dict[str, Any]  # the coordinates of the dimensions on which others depend
    axes: dict[str, Sequence[Any]]  # the coordinates of each other active dimension


class Grid:
    """The points of a space, with `points` values for each dimension that has no steps.

    Inactive dimensions add no points, and points that break a rule of the space are left out. Raises SpaceError if a
    dimension has too many values to list.
    """

    def __init__(self, space: Space, points: int) -> None:
        self._space, self._points = space, points
        self._blocks = self._split_blocks()
        self._whole = self._blocks[-1].end  # the number of points, including those that break a rule
        self._kept, self._unseen = list[int](), iter(range(self._whole))

    @property
    def size(self) -> int:
        """Returns the number of distinct configurations of the grid."""
        return len(self._kept_up_to(self._whole)) if self._space.rejects else self._whole

    def ends(self, number: int) -> bool:
        """Returns True if the grid ends before point `number`; with rules this is quicker than `size`."""
        return len(self._kept_up_to(number)) <= number if self._space.rejects else number >= self._whole

    def point(self, number: int) -> dict[str, Any]:
        """Returns the coordinates of point `number`. Raises IndexError unless it is in 0 .. size - 1."""
        if number < 0 or self.ends(number):
            raise IndexError(f"grid point {number} of {self.size}")
        return self._coordinates(self._kept_up_to(number)[number] if self._space.rejects else number)

    def _kept_up_to(self, number: int) -> list[int]:
        """Returns the points of the whole grid that satisfy the rules, at least up to index `number` among these."""
        last = self._kept[-1] if self._kept else 0
        while len(self._kept) <= number and (index := next(self._unseen, None)) is not None:
            if not self._space.fault(self._space.decode(self._coordinates(index))):
                self._kept.append(index)
                last = index
            if index - last > LISTED:
                raise SpaceError(f"of {LISTED} points of the grid none keeps to the rules: choose another sampler.")
        return self._kept

    def _coordinates(self, index: int) -> dict[str, Any]:
        end, decided, axes = self._blocks[bisect_right(self._blocks, index, key=lambda block: block.end)]
        rest = index - (end - math.prod(len(axis) for axis in axes.values()))
        dimensions = self._space.dimensions
        coordinates = {path: dimension.from_unit(0.0) for path, dimension in dimensions.items()} | decided
        for path in reversed(axes):
            rest, choice = divmod(rest, len(axes[path]))
            coordinates[path] = axes[path][choice]
        return {path: coordinates[path] for path in self._space.paths}

    def _split_blocks(self) -> list[_Block]:
        space = self._space
        deciding = set[str]().union(*(space.references(path) for path in space.paths))
        parts: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, {})]  # coordinates and parameters so far
        for path in (path for path in space.order if path in deciding):
            parts = list(self._split(path, parts))
            if len(parts) > LISTED:
                raise SpaceError(f"the grid branches {len(parts)} times by {path}; use steps or another sampler.")
        axes = [
            {
                path: self._axis(path, params)
                for path in space.paths
                if path not in deciding and space.is_active(path, params)
            }
            for _, params in parts
        ]
        ends = accumulate(math.prod(len(axis) for axis in block.values()) for block in axes)
        return [_Block(end, decided, block) for end, (decided, _), block in zip(ends, parts, axes, strict=True)]

    def _split(
        self, path: str, parts: Sequence[tuple[dict[str, Any], dict[str, Any]]]
    ) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        """Yields each part once for each value of the dimension at `path` if it is active there."""
        for coordinates, params in parts:
            if not self._space.is_active(path, params):
                yield coordinates, params
                continue
            for coordinate in self._axis(path, params):
                value = self._space.value_at(path, coordinate, params)
                yield {**coordinates, path: coordinate}, {**params, path: value}

    def _axis(self, path: str, params: Mapping[str, Any]) -> Sequence[Any]:
        dimension, divisor = self._space.there(path, params)
        if getattr(dimension, "step", 1) not in (None, 1) and dimension.count > LISTED:
            raise SpaceError(f"{path} has {dimension.count} values, too many for a grid: widen its step, or drop it.")
        return dimension.grid(self._points, divisor)
