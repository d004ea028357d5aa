"""Reads secret settings from files, as Docker, Kubernetes and systemd provide them.

NAME_FILE names the file that holds the value of NAME, so no secret has to be in a compose file or in the environment
with which a container starts.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

from hpo import secret_environment
from hpo.errors import UserError
from trainer.quote import shortened

SECRETS = (
    *(name for name in secret_environment.NAMES if name != "PGPASSWORD"),  # libpq has its own file for it
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
)


def read_into(environ: MutableMapping[str, str]) -> None:
    """Sets each of SECRETS whose file is named; child processes see the value, not the file's name.

    Raises UserError if a file cannot be read, is empty or has several lines, or if both NAME and NAME_FILE are set.
    """
    for name in SECRETS:
        if path := environ.pop(f"{name}_FILE", ""):
            if name in environ:
                raise UserError(f"{name} and {name}_FILE are both set: leave one of them out.")
            environ[name] = _value(f"{name}_FILE", path)


def _value(setting: str, path: str) -> str:
    shown = shortened(path)
    fix = f"write the value of {setting.removesuffix('_FILE')} into that file, on one line."
    try:
        text = Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UserError(f"{setting}: {shown} cannot be read ({error.strerror}): {fix}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{setting}: {shown} is not text: {fix}") from error
    if not text:
        raise UserError(f"{setting}: {shown} is empty: {fix}")
    if len(text.splitlines()) > 1:
        raise UserError(f"{setting}: {shown} holds {len(text.splitlines())} lines: {fix}")
    return text
