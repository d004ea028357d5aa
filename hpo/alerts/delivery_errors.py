"""Holds the errors of messages that were not delivered."""

from __future__ import annotations

from hpo.errors import HpoError

MAX_ANSWER = 200  # characters of an answer that an error quotes


class Undelivered(HpoError):
    """A target did not accept a message; `after` is the number of seconds until the next try, if it named one."""

    def __init__(self, why: str, after: float | None = None) -> None:
        super().__init__(why)
        self.after = after


class NotTaken(Undelivered):
    """A target will never accept this message, though it may accept others."""
