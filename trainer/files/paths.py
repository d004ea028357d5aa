"""Expands paths as users write them."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote, urlsplit

from trainer.errors import ConfigError

BUCKET = "s3://"


def expanded(path: str | Path) -> Path:
    """Returns `path` with a leading `~` or `~user` replaced; raises ConfigError if no such directory is known."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        who = str(path).split("/", maxsplit=1)[0]
        raise ConfigError(
            f"{str(path)!r} begins with {who!r}, whose home directory is not known here: write the path in full."
        ) from error


def local(path: str) -> Path:
    """Returns the path that a path or a file:// URL names on this host. Raises ConfigError."""
    if not path.startswith("file://"):
        return expanded(path)
    parts = urlsplit(path)
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise ConfigError(f"{path!r} names no file of this host: write file:///PATH, or the path alone.")
    return Path(unquote(parts.path))


def absolute(path: str) -> str:
    """Returns a path of this host in full, and an s3:// URL as it is."""
    return path if path.startswith(BUCKET) else str(local(path).absolute())
