"""Hashes JSON values and source trees."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from trainer.files import durable


def json_sha256(data: Any) -> str:
    """Returns the sha256 of plain JSON, independent of the order of keys."""
    return sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def tree_sha256(path: Path, pattern: str) -> str:
    """Returns the sha256 of a file, or over the names and contents of the files below a directory."""
    if not path.is_dir():
        return durable.sha256(path)
    files = sorted(entry for entry in path.rglob(pattern) if entry.is_file())
    return json_sha256({str(file.relative_to(path)): durable.sha256(file) for file in files})
