"""Recognizes the language of a text by py3langid, the extra `clean`."""

from __future__ import annotations

from trainer.errors import ConfigError

MOST_CHARACTERS = 10_000  # of a text that are looked at


def language_of(text: str) -> str:
    """Returns the likeliest language, as `en`."""
    import py3langid

    return str(py3langid.classify(text[:MOST_CHARACTERS])[0])


def check(language: str) -> None:
    """Raises ConfigError for a language that is not known."""
    import py3langid

    known = sorted(str(name) for name, _ in py3langid.rank("text"))
    if language not in known:
        raise ConfigError(f"language={language!r} is not known: choose among {', '.join(known)}.")
