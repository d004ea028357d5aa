"""Configurations: dotted paths into pydantic models, overrides from `-o` and YAML, one canonical JSON form.

A configuration is a frozen pydantic model with `extra="forbid"` whose fields are JSON-able. A path names a
field through its parents, `train.optim.lr`. Values come in as JSON values or as text (`Raw`, from `-o`) that is
read by the type of the field it is meant for. Everything a user can get wrong raises `SpaceError` in one sentence.
"""

from __future__ import annotations

import hashlib
import json
import types
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from hpo.errors import SpaceError, UserError
from hpo.space.strict_yaml import StrictLoader
from hpo.space.values import plain
from hpo.text import near, resemblance
from trainer.quote import quoted
from trainer.report import Json

Config = TypeVar("Config", bound=BaseModel)


class Raw(str):
    """Text from a command line: read as YAML first where the field's type allows that, else as the text itself."""


# --- Files and overrides


def load_yaml(path: str | Path, *, max_bytes: int = 1 << 20) -> dict[str, Any]:
    """Read one YAML mapping, strictly. Raises UserError with `file:line` where it can be blamed on one."""
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from error
    if len(data) > max_bytes:
        raise UserError(f"{path} is larger than {max_bytes} bytes; a configuration file is not that large.")
    try:
        loaded: Json = yaml.load(data.decode("utf-8-sig"), StrictLoader)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 at byte {error.start}; save it as UTF-8.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        raise UserError(f"{path}{line}: {problem}.") from error
    if not isinstance(loaded, dict | None):
        raise UserError(f"{path}: the file must hold a mapping of fields to values, not {type(loaded).__name__}.")
    return loaded or {}


def parse_override(text: str) -> tuple[str, Any]:
    """Splits `path=value`, the argument of `-o`; the value is a mapping where it stands in braces, else text.

    Spaces around a value go; line ends and tabs are part of it, as of a separator.
    """
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise SpaceError(f"-o {text!r} is not an override; write -o path=value, for example -o train.num_epochs=5.")
    value = value.strip(" ") or value
    read = _read(value) if value.startswith("{") else value
    return path.strip(), Raw(value) if isinstance(read, str) else read


def _read(text: str) -> Any:
    """Returns the YAML value, or the text itself where it is not YAML or YAML would fold its lines."""
    try:
        value = yaml.load(text, StrictLoader)
    except yaml.YAMLError:
        return str(text)
    return str(text) if isinstance(value, str) and "\n" in text and text[:1] not in "'\"|>" else value


def flatten(mapping: Mapping[str, Json], prefix: str = "") -> dict[str, Any]:
    """Nested mappings to dotted paths; lists and empty mappings are leaves. A path given twice is a SpaceError."""
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        inner = flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
        if twice := flat.keys() & inner.keys():
            raise SpaceError(f"{min(twice)} is given twice; keep one of its values.")
        flat.update(inner)
    return flat


# --- Paths into types


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


def _models(annotation: Any) -> list[type[BaseModel]]:
    return [member for member in _unwrap(annotation) if isinstance(member, type) and issubclass(member, BaseModel)]


def _children(annotation: Any, name: str) -> list[Any]:
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
    """Yields the paths below `prefix`; a dict has the entry that `like` has there: `phases.2` for `phase.2.lr`."""
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
    """The annotation at `path`, its constraints included; a Union where alternatives differ. Raises SpaceError."""
    annotation: Any = config_type
    parts = path.split(".")
    for depth, name in enumerate(parts):
        children = _children(annotation, name)
        if not children:
            where = ".".join(parts[:depth]) or config_type.__name__
            what = f"{where} has no field {name!r}" if _models(annotation) else f"{where} has no fields"
            lacks_train = parts[: depth + 1] == ["train"]
            fix = "; give it train: TrainConfig = TrainConfig() (trainer.config)." if lacks_train else "."
            raise SpaceError(f"unknown path {path!r}: {what}{near(path, _leaves(config_type, path)) or fix}")
        annotation = children[0] if len(children) == 1 else Union[tuple(children)]  # noqa: UP007
    return annotation


def check_path(config_type: type[BaseModel], path: str) -> None:
    """Raises SpaceError, which names similar paths, unless `path` leads to a field of `config_type`."""
    field_type(config_type, path)


@lru_cache(maxsize=4096)
def _adapter(config_type: type[BaseModel], path: str) -> TypeAdapter[Any]:
    return TypeAdapter(field_type(config_type, path))


def misfit(config_type: type[BaseModel], path: str, value: Any) -> str | None:
    """Returns the reason why the field's type and constraints refuse `value`, or None where they accept it."""
    try:
        read = _adapter(config_type, path).validate_json(json.dumps(value, allow_nan=False), strict=True)
    except ValidationError as error:
        return _reasons(error.errors(include_url=False))
    except (TypeError, ValueError):
        return "input should be a JSON value, its numbers finite"
    # To pyright no float equals an int.
    if isinstance(value, int) and isinstance(read, float) and read != value:  # pyright: ignore[reportUnnecessaryComparison]
        return f"no float is exactly that, the nearest is {read!r}"
    return None


def resolve(config_type: type[BaseModel], path: str, value: Any) -> Any:
    """The JSON value meant by an override: text is read by the field's type. Raises SpaceError where none fits."""
    candidates = [value]
    if isinstance(value, str):
        candidates = [_read(value), str(value)] if isinstance(value, Raw) else [str(value), _read(value)]
    reasons = [misfit(config_type, path, candidate) for candidate in candidates]
    for candidate, reason in zip(candidates, reasons, strict=True):
        if reason is None:
            return candidate
    shown = quoted(str(value) if isinstance(value, str) else value)
    raise SpaceError(f"{path}={shown} is refused: {reasons[0]}.")


def _reasons(errors: list[Any]) -> str:
    texts = (
        f"there is no {error['loc'][-1]!r} in it"
        if error["type"] == "extra_forbidden"
        else error["msg"].removeprefix("Value error, ").rstrip(".")
        for error in errors
    )
    distinct = dict.fromkeys(text[:1].lower() + text[1:] for text in texts)
    return " or ".join(distinct).replace(" or input should be", " or")


def _sentence(config_type: type[BaseModel], error: ValidationError) -> str:
    """Returns the first mistake of a validation error: its path, its value and what was expected."""
    errors = error.errors(include_url=False)

    def path_of(location: tuple[int | str, ...]) -> str:
        path: list[str] = []
        annotation: Any = config_type
        for part in map(str, location):  # the tags of unions stand in a location too, and name no field
            if children := _children(annotation, part):
                annotation = children[0] if len(children) == 1 else Union[tuple(children)]  # noqa: UP007
                path.append(part)
        return ".".join(path)

    first = errors[0]
    path = path_of(first["loc"])
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])
        if path.rpartition(".")[2] != name:
            models = _models(field_type(config_type, path)) if path else [config_type]
            known = [field for model in models for field in model.model_fields]
            there = near(name, known) or f": there are {', '.join(known)}."
            return f"{f'{path}: ' if path else ''}there is no {name!r}{there}"
        return f"{path or first['loc'][-1]}={first['input']!r} does not belong to the alternative that is chosen there."
    same = [entry for entry in errors if path_of(entry["loc"]) == path]
    if not path:
        return f"{_reasons(same)}."
    if first["type"] == "missing" or isinstance(first["input"], dict):
        return f"{path}: {_reasons(same)}."
    return f"{path}={first['input']!r} is refused: {_reasons(same)}."


# --- Values


def as_json(config: BaseModel) -> dict[str, Any]:
    """Returns the configuration as plain JSON values; raises as `canonical_json` does."""
    return json.loads(canonical_json(config))


def canonical_json(config: BaseModel) -> str:
    """Returns the canonical JSON text of a configuration: sorted keys, no spaces, floats in shortest exact decimals.

    Raises SpaceError for NaN and infinities, which JSON cannot hold.
    """
    data = config.model_dump(mode="json", warnings=False, fallback=_by_numpy)  # pydantic checks no defaults
    try:
        return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except ValueError as error:
        path, value = next((path, value) for path, value in flatten(data).items() if not _finite(value))
        raise SpaceError(f"{path}={value!r} cannot be kept; give a finite number or null.") from error


def _by_numpy(value: Any) -> Any:
    if (read := plain(value)) is value:
        raise SpaceError(f"the configuration holds {quoted(value, 80)}, a {type(value).__name__}, which JSON cannot.")
    return read


def _finite(value: Any) -> bool:
    return "NaN" not in (text := json.dumps(value)) and "Infinity" not in text


def holds(whole: Json, part: Json) -> bool:
    """Returns true where the JSON value `whole` equals `part` but for additional keys in its objects."""
    if isinstance(whole, Mapping) and isinstance(part, Mapping):
        return all(key in whole and holds(whole[key], value) for key, value in part.items())
    return type(whole) is type(part) and whole == part


def config_hash(config: BaseModel) -> str:
    """Returns the sha256 of the canonical JSON, 64 hex digits; the same in every process."""
    return hashlib.sha256(canonical_json(config).encode()).hexdigest()


def from_json(config_type: type[Config], data: Mapping[str, Any]) -> Config:
    """Returns the configuration from the output of `as_json`. Raises SpaceError in one sentence."""
    try:
        return config_type.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise SpaceError(_sentence(config_type, error)) from error


@lru_cache(maxsize=4096)
def _is_tag(config_type: type[BaseModel], path: str) -> bool:
    """Returns true where the field at `path` tells the alternatives of a union of models apart."""
    parent, _, name = path.rpartition(".")
    models = _models(field_type(config_type, parent)) if parent else []
    return len(models) > 1 and all(
        name in model.model_fields and get_origin(model.model_fields[name].annotation) is Literal for model in models
    )


def assign(config_type: type[BaseModel], data: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a configuration's JSON with values set at dotted paths, parents before their parts.

    Choosing another alternative of a tagged union (`train.optim.name`) starts from that alternative's defaults: the
    earlier values belonged to the old one.
    """
    data = json.loads(json.dumps(data))

    for path in sorted(values, key=lambda path: (path.count("."), not _is_tag(config_type, path), path)):
        parent, _, name = path.rpartition(".")
        node = data
        for part in parent.split(".") if parent else ():
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        if node.get(name, values[path]) != values[path] and _is_tag(config_type, path):
            node.clear()
        node[name] = values[path]
    return data


def apply(config: Config, values: Mapping[str, Any]) -> Config:
    """Returns a new configuration with JSON values, or text that is read by the field's type, at dotted paths.

    Raises SpaceError naming the path, the value and what was expected.
    """
    config_type = type(config)
    resolved = {path: resolve(config_type, path, value) for path, value in values.items()}
    return from_json(config_type, assign(config_type, as_json(config), resolved))
