"""Resolves the preset under which a study searches, `Study.search_preset`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpo.errors import SpaceError, StudyError
from hpo.space.assignments import NO_PRESET
from hpo.space.config import flatten, resolve
from hpo.text import near

if TYPE_CHECKING:
    from hpo.declaration.study import Study


def check(study: Study, where: str) -> None:
    """Raises StudyError if the preset of the search is none, or sets what is searched."""
    if (preset := study.search_preset) is None:
        return
    if not isinstance(preset, str) or preset not in study.presets:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise StudyError(f"{where}: search_preset={preset!r} is none of its presets.")
    if NO_PRESET in study.presets:
        raise StudyError(f"{where}: a preset is called {NO_PRESET!r}, which names none: call it otherwise.")
    if both := [path for path in flatten(study.presets[preset]) if path in study.space.paths]:
        raise StudyError(f"{where}: search_preset={preset!r} sets {both[0]}, which is searched: leave one of them.")


def unknown(study: Study, preset: str | None) -> SpaceError:
    """Returns the error about a preset that the study does not have."""
    names = [*study.presets, *([NO_PRESET] if study.search_preset else [])]
    nearest = near(preset, names) if preset else ""
    return SpaceError(f"unknown preset {preset!r}: this study has {', '.join(names) or 'none'}{nearest or '.'}")


def new_overrides(study: Study, overrides: Mapping[str, object]) -> dict[str, object]:
    """Returns the overrides of a new study: `overrides` under `search_preset` if they name no preset."""
    return {**({"preset": study.search_preset} if study.search_preset else {}), **overrides}


def as_new(study: Study, overrides: Mapping[str, object]) -> Study:
    """Returns the study as a new run with `overrides` configures it. Raises SpaceError as `configure` does."""
    return study.configure(new_overrides(study, overrides))


def of_search_alone(study: Study) -> dict[str, object]:
    """Returns the overrides whose values are those of `search_preset`, with `preset`.

    `preset` is `none` where the study has no preset, which a new study has to be given. Empty under another preset.
    """
    preset = study.overrides.get("preset", NO_PRESET)
    if not study.search_preset or preset not in (study.search_preset, NO_PRESET):
        return {}
    values = flatten(study.presets.get(preset, {}))
    values = {path: resolve(type(study.config), path, value) for path, value in values.items()}
    return {"preset": preset} | {path: value for path, value in values.items() if study.overrides[path] == value}
