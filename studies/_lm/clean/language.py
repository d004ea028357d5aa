"""Recognizes the language of a text by py3langid, the extra `clean`."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from trainer.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

MOST_CHARACTERS = 10_000  # of a text that are looked at


def language_of(text: str) -> str:
    """Returns the likeliest language, as `en`."""
    return _classifier()(text[:MOST_CHARACTERS])


def check(language: str) -> None:
    """Raises ConfigError for a language that is not known."""
    import py3langid

    known = sorted(py3langid.langid.LanguageIdentifier.from_pickled_model(py3langid.langid.MODEL_FILE).nb_classes)
    if language not in known:
        raise ConfigError(f"language={language!r} is not known: choose among {', '.join(known)}.")


@cache
def _classifier() -> Callable[[str], str]:
    import py3langid

    return lambda text: py3langid.classify(text)[0]
