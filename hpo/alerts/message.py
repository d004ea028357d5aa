"""Builds messages of one event or a summary of several, under an id by which a receiver recognizes a repeat."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpo.alerts.events import Event
from hpo.ledger.rows import StudyRow
from hpo.text import command, counted

_SHOWN = 20  # events that a summary lists


@dataclass(frozen=True)
class Message:
    """A message: `content` goes to webhooks and commands as JSON; `title` and `text` are for people."""

    id: str
    content: Mapping[str, Any]

    @property
    def title(self) -> str:
        return self.content["title"]

    @property
    def text(self) -> str:
        return self.content["text"]


def content(study: StudyRow, event: Event, at: str) -> dict[str, Any]:
    """Returns an event as it is stored and sent; `at` is in ISO 8601. Its id contains the study's, so it is unique."""
    return {
        "id": f"{study.uid}/{event.name}",
        "event": event.kind,
        "study": study.name,
        "trial": event.trial,
        "title": event.title,
        "text": event.text,
        "values": dict(event.values) if event.values else {},
        "at": at,
    }


def message(contents: Sequence[Mapping[str, Any]]) -> Message:
    """Returns the message of one event, or the summary of several; the same contents give the same message."""
    if len(contents) == 1:
        return Message(contents[0]["id"], contents[0])
    ids = [event["id"] for event in contents]
    counts = ", ".join(f"{count} {kind}" for kind, count in Counter(event["event"] for event in contents).items())
    lines = [event["title"] for event in contents[:_SHOWN]]
    more = len(contents) - len(lines)
    lines += [f"and {more} more: `{command('compare --study ' + contents[0]['study'])}` has them"] if more else []
    summed = {
        "id": f"sum/{hashlib.sha256(' '.join(ids).encode()).hexdigest()[:32]}",
        "event": "several",
        "study": contents[0]["study"],
        "trial": None,
        "title": f"study {contents[0]['study']}: {counted(len(ids), 'event')} ({counts})",
        "text": "\n".join(lines),
        "values": {},
        "at": contents[-1]["at"],
        "events": ids,
    }
    return Message(summed["id"], summed)


def trial_message(at: str) -> Message:
    """Returns the message that `hpo alert` sends to test whether it arrives."""
    words: dict[str, Any] = {"id": f"test/{at}", "event": "test", "study": "", "trial": None}
    words |= {"title": "a trial message of hpo", "text": "Alerts to this place arrive.", "values": {}, "at": at}
    return Message(words["id"], words)
