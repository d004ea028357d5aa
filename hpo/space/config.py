"""Handles configurations: dotted paths into pydantic models, overrides from `-o` and YAML, one canonical JSON form.

A configuration is a frozen pydantic model with `extra="forbid"` whose fields are JSON-able. A path names a field
through its parents, `train.optim.lr`. Values come in as JSON values or as text (`Raw`, from `-o`) that is read by the
type of its field. Every mistake of a user raises `SpaceError` in one sentence.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_origin

import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from hpo.door import option
from hpo.errors import SpaceError, UserError
from hpo.space.paths import children_of, field_type, models_of
from hpo.space.strict_yaml import StrictLoader
from hpo.space.values import plain
from hpo.text import near
from trainer.quote import quoted
from trainer.report import Json

Config = TypeVar("Config", bound=BaseModel)


class Raw(str):
    """Text from a command line: read as YAML first if the field's type allows that, else as the text itself."""


# --- Files and overrides


def load_yaml(path: str | Path, *, max_bytes: int = 1 << 20) -> dict[str, Any]:
    """Returns the mapping in a YAML file, read strictly. Raises UserError, with `file:line` if a line is at fault."""
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; name another file.") from error
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
    """Splits `path=value`, the argument of `-o`; the value is a mapping if it stands in braces, else text.

    Spaces around a value are dropped; line ends and tabs are part of it, as in a separator.
    """
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise SpaceError(
            f"{option('overrides')} {text!r} is not an override; write {option('overrides')} path=value, for example "
            f"{option('overrides')} train.num_epochs=5."
        )
    value = value.strip(" ") or value
    read = _read(value) if value.startswith("{") else value
    return path.strip(), Raw(value) if isinstance(read, str) else read


def _read(text: str) -> Any:
    """Returns the YAML value, or the text itself if it is not YAML or YAML would fold its lines."""
    try:
        value = yaml.load(text, StrictLoader)
    except yaml.YAMLError:
        return str(text)
    return str(text) if isinstance(value, str) and "\n" in text and text[:1] not in "'\"|>" else value


def flatten(mapping: Mapping[str, Json], prefix: str = "") -> dict[str, Any]:
    """Flattens nested mappings to dotted paths; lists and empty mappings are leaves.

    Raises SpaceError for a repeated path.
    """
    flat: dict[str, Any] = {}
    for key, value in mapping.items():
        inner = flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
        if twice := flat.keys() & inner.keys():
            raise SpaceError(f"{min(twice)} is given twice; keep one of its values.")
        flat.update(inner)
    return flat


# --- Paths into types


@lru_cache(maxsize=4096)
def _adapter(config_type: type[BaseModel], path: str) -> TypeAdapter[Any]:
    return TypeAdapter(field_type(config_type, path))


def misfit(config_type: type[BaseModel], path: str, value: Any) -> str | None:
    """Returns the reason why the field's type and constraints refuse `value`, or None if they accept it."""
    try:
        read = _adapter(config_type, path).validate_json(json.dumps(value, allow_nan=False), strict=True)
    except ValidationError as error:
        return _reasons(error.errors(include_url=False))
    except (TypeError, ValueError):
        return "input should be a JSON value, its numbers finite"
    # Pyright considers no float equal to an int.
    if isinstance(value, int) and isinstance(read, float) and read != value:  # pyright: ignore[reportUnnecessaryComparison]
        return f"no float is exactly that, the nearest is {read!r}"
    return None


def resolve(config_type: type[BaseModel], path: str, value: Any) -> Any:
    """Returns the JSON value of an override: text is read by the field's type. Raises SpaceError if none fits."""
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
        for part in map(str, location):  # a location also holds the tags of unions, which name no field
            if children := children_of(annotation, part):
                annotation = children[0] if len(children) == 1 else Union[tuple(children)]  # noqa: UP007
                path.append(part)
        return ".".join(path)

    first = errors[0]
    path = path_of(first["loc"])
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])
        if path.rpartition(".")[2] != name:
            models = models_of(field_type(config_type, path)) if path else [config_type]
            known = [field for model in models for field in model.model_fields]
            hint = near(name, known) or f": there are {', '.join(known)}."
            return f"{f'{path}: ' if path else ''}there is no {name!r}{hint}"
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
    """Returns True if the JSON value `whole` equals `part` except for additional keys in its objects."""
    if isinstance(whole, Mapping) and isinstance(part, Mapping):
        return all(key in whole and holds(whole[key], value) for key, value in part.items())
    return type(whole) is type(part) and whole == part


def _written(model: BaseModel) -> dict[str, Any]:
    """Returns the fields that the JSON of a model has: without those that are left out at their defaults."""
    left_out = {name: field.exclude_if for name, field in type(model).model_fields.items() if field.exclude_if}
    return {name: part for name, part in vars(model).items() if name not in left_out or not left_out[name](part)}


def reads_as(value: Any, data: Json) -> bool:
    """Returns True if a configuration, or a part of it, has the values of `data` in types that JSON has.

    Returns False for a value of any other type, which only its JSON could compare.
    """
    parts: Any = _written(value) if isinstance(value, BaseModel) else value
    if isinstance(parts, dict):
        if not isinstance(data, Mapping) or parts.keys() != data.keys():  # pyright: ignore[reportUnknownMemberType]
            return False
        return all(reads_as(parts[name], part) for name, part in data.items())
    if isinstance(value, list | tuple):
        items: list[Any] = [*value]
        return isinstance(data, list) and len(items) == len(data) and all(map(reads_as, items, data))
    return type(value) is type(data) and value == data


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
    """Returns True if the field at `path` distinguishes the alternatives of a union of models."""
    parent, _, name = path.rpartition(".")
    models = models_of(field_type(config_type, parent)) if parent else []
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
    """Returns the configuration with JSON values, or text that is read by the field's type, at dotted paths.

    Raises SpaceError naming the path, the value and what was expected.
    """
    if not values:
        return config
    config_type = type(config)
    resolved = {path: resolve(config_type, path, value) for path, value in values.items()}
    return from_json(config_type, assign(config_type, as_json(config), resolved))
