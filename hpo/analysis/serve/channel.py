"""Tells everybody who listens what has changed of a subject, which is looked at once for all of them."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from hpo.analysis.report.page import embedded
from hpo.analysis.serve.subjects import Message, Subject
from hpo.errors import HpoError

PAUSE = 1.0  # seconds between looks
SHARE = 20  # times as long as a look has taken, at least, until the next
ALIVE = 15.0  # seconds after which a silent stream says that it is there


class Channel:
    """A subject and those who listen to it.

    Nothing is kept for a listener but the version that it has, so a slow one gets fewer messages and not late ones. A
    cursor, `<channel>.<version>`, is what it has: of another channel, such as that of a server before, it means
    nothing, and the page is read anew.
    """

    def __init__(self, subject: Subject, closing: Callable[[], bool]) -> None:
        self.subject = subject
        self._closing = closing
        self._id = secrets.token_hex(4)
        self._listeners = 0
        self._watch: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._trouble = ""

    @property
    def idle(self) -> bool:
        """Whether nobody listens."""
        return not self._listeners

    def cursor(self, version: int | None = None) -> str:
        return f"{self._id}.{self.subject.version if version is None else version}"

    def wake(self) -> None:
        """Have every listener look whether there is something for it."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def listen(self, cursor: str) -> AsyncIterator[str]:
        """The stream of one listener, as text/event-stream, from its cursor on."""
        own, _, version = cursor.partition(".")
        since = int(version) if own == self._id and version.isdigit() else None
        self._listeners += 1
        if self._watch is None:
            self._watch = asyncio.create_task(self._look())
        try:
            yield "retry: 1000\n\n"
            trouble = ""
            while not self._closing():
                changed = self._changed
                if self._watch.done():
                    self._watch.result()  # which raises what has ended it
                if trouble != self._trouble:
                    trouble = self._trouble
                    yield _event("trouble", {"text": trouble})
                if self.subject.version not in (since, 0):
                    message = await asyncio.to_thread(self.subject.message, since)
                    since = message.version
                    yield self._told(message)
                    continue
                try:
                    await asyncio.wait_for(changed.wait(), ALIVE)
                except TimeoutError:
                    yield ":\n\n"
        except HpoError as error:
            yield _event("trouble", {"text": str(error)})  # and the browser asks again
        finally:
            self._listeners -= 1
            if not self._listeners:
                self._watch.cancel()
                self._watch = None

    async def _look(self) -> None:
        while True:
            begin = time.monotonic()
            try:
                await asyncio.to_thread(self.subject.look)
                self._trouble = ""
            except HpoError as error:
                self._trouble = str(error)
            self.wake()
            await asyncio.sleep(max(PAUSE, SHARE * (time.monotonic() - begin)))

    def _told(self, message: Message) -> str:
        return _event(message.event, message.data or {}, self.cursor(message.version))


def _event(kind: str, data: dict[str, Any], cursor: str = "") -> str:
    """One event of a stream, whose data is JSON in one line; the page shows what is not seen as a report does."""
    text = embedded(data) if data else json.dumps(data)
    return f"event: {kind}\n" + (f"id: {cursor}\n" if cursor else "") + f"data: {text}\n\n"
