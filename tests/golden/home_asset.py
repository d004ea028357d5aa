"""The home that an earlier version has written: where it lies, what was recorded of it, how it is unpacked."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

ASSETS = Path(__file__).parents[1] / "assets"
NAME = "home-0.1.0"
COMPLETE, INTERRUPTED = "whole", "broken"  # the studies that it holds


def recorded() -> dict[str, Any]:
    """Returns what its commands said when it was written."""
    return json.loads((ASSETS / f"{NAME}.json").read_text())


def unpacked(place: Path) -> Path:
    """Unpacks the home into the directory `place`, and returns the home's directory."""
    with tarfile.open(ASSETS / f"{NAME}.tar.xz") as archive:
        archive.extractall(place, filter="data")
    return place / NAME
