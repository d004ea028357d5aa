"""Encodes names that a tracker refuses, so that each metric and parameter has the same name in all trackers."""

from __future__ import annotations

import hashlib
import posixpath
import re

MAX_KEY = 250  # characters of a name that every release of MLflow 3 accepts
_REFUSED = re.compile(r"[^\w\-. :/]")


def entry_name(name: str) -> str:
    """Returns the name under which trackers show a metric or a parameter.

    A name that MLflow takes stays as it is (`mlflow.utils.validation`: letters, digits and `_-. :/`, no longer than
    MAX_KEY, and a path that is its own normal form). In any other name the characters that MLflow refuses become `_`,
    and a digest of the whole name follows, so that two names never become one.
    """
    plain = posixpath.normpath(_REFUSED.sub("_", name)).lstrip("/.") or "_"
    if plain == name and len(name) <= MAX_KEY:
        return name
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:8]
    return f"{plain[: MAX_KEY - 9]}-{digest}"
