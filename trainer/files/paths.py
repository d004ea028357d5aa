"""Expands paths as users write them."""

from __future__ import annotations

from pathlib import Path

from trainer.errors import ConfigError


def expanded(path: str | Path) -> Path:
    """Returns `path` with a leading `~` or `~user` replaced; raises ConfigError if no such directory is known."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        who = str(path).split("/", maxsplit=1)[0]
        raise ConfigError(
            f"{str(path)!r} begins with {who!r}, whose home directory is not known here: write the path in full."
        ) from error
