"""Secret settings out of files, as Docker, Kubernetes and systemd hand them over: NAME_FILE names the file that holds
the value of NAME, so that no secret stands in a compose file or in the environment a container is started with."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

from hpo.errors import UserError
from trainer.quote import shortened

SECRETS = (
    "HPO_STORAGE",
    "HPO_TRACKING_URI",
    "HPO_SMTP",
    "MLFLOW_TRACKING_USERNAME",
    "MLFLOW_TRACKING_PASSWORD",
    "MLFLOW_TRACKING_TOKEN",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
)


def read_into(environ: MutableMapping[str, str]) -> None:
    """Set each of SECRETS whose file is named; processes that are started from here see the value, not the file's name.

    Raises UserError where a file cannot be read, is empty or holds several lines, or where both are set.
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
        raise UserError(f"{setting}: {shown} is no text: {fix}") from error
    if not text:
        raise UserError(f"{setting}: {shown} is empty: {fix}")
    if len(text.splitlines()) > 1:
        raise UserError(f"{setting}: {shown} holds {len(text.splitlines())} lines: {fix}")
    return text
