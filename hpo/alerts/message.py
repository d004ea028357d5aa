"""What is sent: one event, or several that are summed up, under an id by which a receiver knows what it has."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpo.alerts.events import Event
from hpo.ledger.rows import RowMapping
from hpo.text import command, counted

_SHOWN = 20  # events of a sum that are written out


@dataclass(frozen=True)
class Message:
    """`content` is what a webhook and a command get as JSON; `title` and `text` are for people."""

    id: str
    content: Mapping[str, Any]

    @property
    def title(self) -> str:
        return self.content["title"]

    @property
    def text(self) -> str:
        return self.content["text"]


def content(study: Mapping[str, Any] | RowMapping, event: Event, at: str) -> dict[str, Any]:
    """An event as it is stored and sent; `at` in ISO 8601. Its id holds the study's own, so it is of no other."""
    return {
        "id": f"{study['uid']}/{event.name}",
        "event": event.kind,
        "study": study["name"],
        "trial": event.trial,
        "title": event.title,
        "text": event.text,
        "values": dict(event.values) if event.values else {},
        "at": at,
    }


def message(contents: Sequence[Mapping[str, Any]]) -> Message:
    """One message of one event, or of several; the same of the same."""
    if len(contents) == 1:
        return Message(contents[0]["id"], contents[0])
    ids = [one["id"] for one in contents]
    counts = ", ".join(f"{count} {kind}" for kind, count in Counter(one["event"] for one in contents).items())
    lines = [one["title"] for one in contents[:_SHOWN]]
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
    """What `hpo alert` sends to see whether it arrives."""
    words: dict[str, Any] = {"id": f"test/{at}", "event": "test", "study": "", "trial": None}
    words |= {"title": "a trial message of hpo", "text": "Alerts to this place arrive.", "values": {}, "at": at}
    return Message(words["id"], words)
