"""Finds the fields of a configuration by their dotted paths."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from hpo.errors import SpaceError
from hpo.text import near, resemblance


def _unwrap(annotation: Any) -> Iterator[Any]:
    """Yields the alternatives of an annotation, without Annotated, aliases and Union around them."""
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _unwrap(get_args(annotation)[0])
    elif origin in (Union, types.UnionType):
        for member in get_args(annotation):
            yield from _unwrap(member)
    elif hasattr(annotation, "__value__"):  # `type X = ...`
        yield from _unwrap(annotation.__value__)
    else:
        yield annotation


def models_of(annotation: Any) -> list[type[BaseModel]]:
    return [member for member in _unwrap(annotation) if isinstance(member, type) and issubclass(member, BaseModel)]


def children_of(annotation: Any, name: str) -> list[Any]:
    """Returns the annotations that field `name` has in the alternatives of `annotation`."""
    children: list[Any] = []
    for member in _unwrap(annotation):
        if isinstance(member, type) and issubclass(member, BaseModel):
            if name in member.model_fields:
                field = member.model_fields[name]
                children.append(Annotated[field.annotation, field])
        elif get_origin(member) in (dict, Mapping) or member is dict:
            children.append((get_args(member) or (str, Any))[1])
        elif member is Any:
            children.append(Any)
    return children


def _leaves(annotation: Any, like: str, prefix: str = "") -> Iterator[str]:
    """Yields the paths below `prefix`; for a dict the entry that `like` names: `phases.2` for `phase.2.lr`."""
    depth, parts = prefix.count("."), like.split(".")
    for member in _unwrap(annotation):
        fields: dict[str, Any] = {}
        if isinstance(member, type) and issubclass(member, BaseModel):
            fields = {name: field.annotation for name, field in member.model_fields.items()}
        elif get_origin(member) in (dict, Mapping) and resemblance(".".join(parts[:depth]), prefix[:-1]) >= 0.8:
            fields = {name: get_args(member)[1] for name in parts[depth : depth + 1] if name}
        for name, inner in fields.items():
            yield prefix + name
            if depth < 8:
                yield from _leaves(inner, like, f"{prefix}{name}.")


@lru_cache(maxsize=4096)
def field_type(config_type: type[BaseModel], path: str) -> Any:
    """Returns the annotation at `path`, including its constraints; a Union if alternatives differ.

    Raises SpaceError.
    """
    annotation: Any = config_type
    parts = path.split(".")
    for depth, name in enumerate(parts):
        children = children_of(annotation, name)
        if not children:
            where = ".".join(parts[:depth]) or config_type.__name__
            problem = f"{where} has no field {name!r}" if models_of(annotation) else f"{where} has no fields"
            fields = ", ".join(dict.fromkeys(field for model in models_of(annotation) for field in model.model_fields))
            fix = f"; it has {fields}." if fields else "."
            if parts[: depth + 1] == ["train"]:
                fix = "; give it train: TrainConfig = TrainConfig() (trainer.config)."
            raise SpaceError(f"unknown path {path!r}: {problem}{near(path, _leaves(config_type, path)) or fix}")
        annotation = children[0] if len(children) == 1 else Union[tuple(children)]  # noqa: UP007
    return annotation


def check_path(config_type: type[BaseModel], path: str) -> None:
    """Raises SpaceError, which names similar paths, unless `path` leads to a field of `config_type`."""
    field_type(config_type, path)
