"""Holds one finding of a diagnosis: what was examined, its verdict and the advice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """A figure, its verdict and advice.

    `value` is None if it could not be measured; `figure` says it in words, with the thresholds that decide the verdict;
    `advice` is empty if nothing needs to change.
    """

    check: str
    verdict: str
    figure: str
    value: float | None = None
    advice: str = ""


def unmeasured(check: str, why: str) -> Finding:
    return Finding(check, "not measured", why)


def names(found: Sequence[str]) -> str:
    """Returns the first three names, and how many more there are."""
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
