"""The way from coordinates to configurations and back; golden_search.py takes the digest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from hpo import Bool, Choice, Float, Int
from hpo.errors import SpaceError
from hpo.space import densities as good_values
from hpo.space.config import Raw, apply, as_json, assign, config_hash, flatten, from_json, resolve
from hpo.space.dimension import Dimension
from hpo.space.rules import parsed
from hpo.space.space import Space


class Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Sgd(Frozen):
    name: Literal["sgd"] = "sgd"
    momentum: float = 0.9


class Adamw(Frozen):
    name: Literal["adamw"] = "adamw"
    beta: float = 0.99
    fused: bool | None = None


class Model(Frozen):
    gat: bool = False
    heads: int = 4
    hidden: int = 32
    layers: int = 2
    sizes: tuple[int, ...] = (8, 4)
    width: int = 64
    rates: dict[str, float] = Field(default_factory=dict[str, float])


class Config(Frozen):
    optim: Annotated[Sgd | Adamw, Field(discriminator="name")] = Adamw()
    model: Model = Model()
    batch: int = 32
    chunk: int = 8
    dropout: float = 0.0
    first: int = 1
    kind: str = "a"
    last: int = 9
    lr: float = 0.01
    narrow: float = 0.1
    stride: int = 7
    wide: float = 0.9
    window: int = 14


SPACE = Space(
    {
        "batch": Int(8, 64, powers_of_two=True),
        "chunk": Int(4, 128, multiple_of="batch", powers_of_two=True),
        "dropout": Float(0.0, 0.5, step=0.1),
        "first": Int(0, 20, step=2),
        "last": Int(4, 30),
        "lr": Float(1e-4, 1e-1, log=True),
        "model.gat": Bool(),
        "model.heads": Int(1, 8),
        "model.hidden": Int(16, 256, multiple_of="model.heads", log=True),
        "model.layers": Int(1, 9, step=2, when={"model.gat": True}),
        "model.sizes": Choice([[8, 4], [16], [4, 4, 4]]),
        "model.width": Int(8, 4096, log=True),
        "narrow": Float(0.0, 1.0),
        "optim.beta": Float(0.9, 0.999, when={"optim.name": "adamw"}),
        "optim.momentum": Float(0.0, 0.9, step=0.3, when={"optim.name": ["sgd"], "kind": "a"}),
        "optim.name": Choice(["sgd", "adamw"]),
        "wide": Float(0.2, 1.5, log=True),
        "window": Int(3, 90, multiple_of="stride"),
    },
    rules=("narrow < wide", "first + 2 <= last", "model.heads * model.layers <= 40"),
)
# Some dimensions as a later form of the space has them.
CHANGED = Space(
    {
        **SPACE.dimensions,
        "lr": Float(1e-3, 1e-1, log=True),
        "model.heads": Int(2, 8, step=2),
        "model.sizes": Choice([[16], [8, 4], [2]]),
        "optim.momentum": Float(0.0, 0.9),
    },
    rules=SPACE.rules,
)
GRIDS = (
    ("batch", "chunk", "lr"),
    ("model.gat", "model.heads", "model.layers"),
    ("optim.name", "optim.momentum", "optim.beta", "dropout"),
    ("first", "last", "model.width"),
)
UNITS = (0.0, 0.015625, 0.125, 0.3, 0.49, 0.5, 0.625, 0.77, 0.9, 0.984375, 1.0)
OVERRIDES = {
    "batch": "0x20",
    "kind": "12",
    "lr": "1e-3",
    "model.gat": "true",
    "model.rates.first": "2",
    "model.sizes": "[1, 2]",
    "optim.name": "sgd",
}
REFUSED = {"batch": "1.5", "model.gat": "1", "optim.beta": "x", "model.none": "1"}


def decoding() -> Any:
    """Returns the values, configurations and hashes that fixed coordinates and overrides lead to."""
    space = SPACE.bound(Config())
    points = [[(number * (2 * axis + 3) + axis * 5) % 64 / 63 for axis in range(len(space))] for number in range(40)]
    parts = (SPACE.pinned(["optim", "lr"]), SPACE.bound(Config(kind="b")))
    return {
        "dimensions": {path: _dimension(dimension) for path, dimension in space.dimensions.items()},
        "coordinates": space.coordinates,
        "order": [space.order, space.paths],
        "points": [_point(space, point) for point in points],
        "parts": [[part.paths, part.fixed, part.rules] for part in parts],
        "grids": [_grid(paths, points) for paths in GRIDS for points in (2, 4)],
        "configuration": _configuration(),
    }


def _dimension(dimension: Dimension) -> Any:
    coordinates = [dimension.from_unit(u) for u in UNITS]
    table: dict[str, Any] = {
        "from unit": coordinates,
        "to unit": [dimension.to_unit(coordinate) for coordinate in coordinates],
        "count": str(dimension.count),
    }
    for divisor in (1, 4) if dimension.divisor else (1,):
        values = [dimension.value(coordinate, divisor) for coordinate in coordinates]
        table[f"by {divisor}"] = {
            "values": values,
            "at": [dimension.at(value, divisor) for value in values],
            "grids": [list(dimension.grid(points, divisor)) for points in (1, 3, 5)],
            "extremes": list(dimension.extremes(divisor)),
        }
    return table


def _point(space: Space, point: list[float]) -> Any:
    coordinates = space.from_unit(point)
    params = space.decode(coordinates)
    config = apply(Config(), params)
    return {
        "coordinates": coordinates,
        "params": params,
        "encoded": space.encode(params, space.from_unit([0.5] * len(space))),
        "retained": CHANGED.bound(Config()).retained(coordinates, params),
        "broken": space.broken(coordinates),
        "config": as_json(config),
        "hash": config_hash(config),
    }


def _grid(paths: Sequence[str], points: int) -> Any:
    """Returns the points of a grid over some dimensions, with the rules that name no others."""
    rules = [rule for rule in SPACE.rules if all(path in paths for path in parsed(rule).paths)]
    space = Space({path: SPACE.dimensions[path] for path in paths}, {"kind": "a"}, rules)
    grid = space.grid(points)
    return [grid.point(number) for number in range(grid.size)]


def _configuration() -> Any:
    """Returns overrides as the types of their fields read them, and what they make of a configuration."""
    read = {path: resolve(Config, path, Raw(value)) for path, value in OVERRIDES.items()}
    data = assign(Config, as_json(Config()), read)
    return {
        "read": read,
        "data": data,
        "flat": flatten(data),
        "hash": config_hash(from_json(Config, data)),
        "refused": [path for path, value in REFUSED.items() if _is_refused(path, value)],
    }


def _is_refused(path: str, value: str) -> bool:
    try:
        resolve(Config, path, Raw(value))
    except SpaceError:
        return True
    return False


def densities() -> Any:
    """Returns draws by each density, in a range of numbers that holds it, in a narrower one and in steps."""
    units = [0.0, *((4 * k + 1) / 64 for k in range(16))]
    drawn: dict[str, Any] = {}
    for name, density in good_values.densities().items():
        low, middle, high = (density.value(share) for share in (0.0, 0.5, 1.0))
        dimensions = {
            "wide": Float(low / 2, high * 2, log=True, like=name),
            "narrow": Float(low, middle, like=name, strength=1.0),
            "whole": Int(1, max(2, round(high)), like=name),
        }
        drawn[name] = {title: [dimension.guided(u) for u in units] for title, dimension in dimensions.items()}
    return drawn
