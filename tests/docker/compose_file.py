"""Reads docker/'s files as Compose and BuildKit would: variables, merged overlays, the last stage of a Dockerfile."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

DOCKER = Path(__file__).parents[2] / "docker"
VARIABLE = re.compile(r"\$\{(?P<name>[A-Z][A-Z0-9_]*)(?:(?P<how>:-|:\?)(?P<rest>[^}]*))?\}")


class MissingVariable(SystemExit):
    """A variable that has to be set is not."""


def read(*files: Path, environ: Mapping[str, str]) -> dict[str, Any]:
    """The merged model of Compose files, variables from `environ`: mappings of overlays are merged, a list replaces."""
    model: dict[str, Any] = {}
    for file in files:
        model = _merged(model, _filled(yaml.safe_load(file.read_text()), environ))
    for service in model["services"].values():
        if isinstance(service.get("command"), str):
            service["command"] = shlex.split(service["command"])
    return model


def _filled(node: Any, environ: Mapping[str, str]) -> Any:
    def value(match: re.Match[str]) -> str:
        name, how, rest = match["name"], match["how"], match["rest"]
        if environ.get(name):
            return environ[name]
        if how == ":?":
            raise MissingVariable(f"{name}: {rest}")
        return rest or ""

    if isinstance(node, dict):
        return {key: _filled(item, environ) for key, item in node.items()}
    if isinstance(node, list):
        return [_filled(item, environ) for item in node]
    return VARIABLE.sub(value, node).replace("$$", "$") if isinstance(node, str) else node


def _merged(below: Any, above: Any) -> Any:
    if isinstance(below, dict) and isinstance(above, dict):
        return below | {key: _merged(below.get(key), item) for key, item in above.items()}
    return above


def image_of(dockerfile: Path) -> dict[str, Any]:
    """What the last stage of a Dockerfile says of a container: its entry point, command, environment and user."""
    text = re.sub(r"\\\n\s*", "", dockerfile.read_text())
    base, last = text[: text.index("\nFROM", text.index("\nFROM") + 1)], text[text.rindex("\nFROM ") :]
    said = dict(re.findall(r"^(ENTRYPOINT|CMD|USER|WORKDIR) (.+)$", last, re.MULTILINE))
    environment = dict(
        word.split("=", 1) for line in re.findall(r"^ENV (.+)$", base + last, re.MULTILINE) for word in line.split()
    )
    return {
        "entrypoint": json.loads(said["ENTRYPOINT"]),
        "command": json.loads(said.get("CMD", "[]")),
        "environment": environment,
        "user": said["USER"],
        "working_dir": said["WORKDIR"],
    }
