"""Holds the settings of a cleaning, and refuses those that mean nothing."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec

from studies._lm.clean.rules import NAMES
from trainer.errors import ConfigError

EXACT, NEAR, PERSONAL = "exact-duplicates", "near-duplicates", "personal"
STEPS = (PERSONAL, *NAMES, EXACT, NEAR)
GROUPS = ("c4", "gopher")


@dataclass(frozen=True)
class Settings:
    """Decides, together with the files, each byte of the output."""

    source: str
    column: str = "text"
    separator: str = ""  # between documents of a text file; empty: each file is one document
    off: tuple[str, ...] = ()  # of STEPS
    language: str = ""  # as "en"; empty: any
    against: str = ""  # a validation text
    similarity: float = 0.8  # from which two documents are near-duplicates
    perplexity: str = ""  # a model exported as safetensors
    quantile: float = 0.9  # of perplexity, up to which documents stay
    shard_mb: float = 16.0

    def __post_init__(self) -> None:
        for name in ("similarity", "quantile"):
            if not 0 < getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: give a number between 0 and 1, such as 0.8.")
        if not 0.001 <= self.shard_mb <= 256:
            raise ConfigError(f"shard_mb is {self.shard_mb}: give the size of a shard, 0.001 to 256 megabytes.")
        if self.language and find_spec("py3langid") is None:
            raise ConfigError(f"language={self.language!r} needs py3langid: pip install 'hpo[clean]'.")
        if self.perplexity and find_spec("torch") is None:
            raise ConfigError(f"perplexity={self.perplexity!r} needs PyTorch: pip install 'hpo[train]'.")

    def runs(self, step: str) -> bool:
        return step not in self.off


def steps_of(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the steps that names stand for: steps themselves, `c4` or `gopher` for all rules of that paper."""
    steps: set[str] = set()
    for name in names:
        chosen = [step for step in STEPS if step == name or (name in GROUPS and step.startswith(f"{name}-"))]
        if not chosen:
            raise ConfigError(f"{name!r} cannot be turned off: choose among {', '.join((*GROUPS, *STEPS))}.")
        steps.update(chosen)
    return tuple(step for step in STEPS if step in steps)
