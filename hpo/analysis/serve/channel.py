"""Sends a subject's changes to all listeners; one look at the subject serves all of them."""

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

PAUSE = 1.0  # seconds between looks at a subject
SHARE = 20  # least pause until the next look, in durations of the last one
ALIVE = 15.0  # seconds after which a silent stream sends a comment


class Channel:
    """Connects a subject with its listeners.

    A listener has no queue, only the version that it last received, so a slow one gets fewer messages rather than late
    ones. Its cursor, `<channel>.<version>`, names that version. A cursor of another channel, such as one of an earlier
    server, means nothing: the page is then loaded again.
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
        """Returns whether nobody listens."""
        return not self._listeners

    def cursor(self, version: int | None = None) -> str:
        return f"{self._id}.{self.subject.version if version is None else version}"

    def wake(self) -> None:
        """Makes every listener check for news."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def listen(self, cursor: str) -> AsyncIterator[str]:
        """Yields the stream of one listener, as text/event-stream, from its cursor on."""
        channel, _, version = cursor.partition(".")
        since = int(version) if channel == self._id and version.isdigit() else None
        self._listeners += 1
        if self._watch is None:
            self._watch = asyncio.create_task(self._look())
        try:
            yield "retry: 1000\n\n"
            trouble = ""
            while not self._closing():
                changed = self._changed
                if self._watch.done():
                    self._watch.result()  # raises the error that has ended it
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
            yield _event("trouble", {"text": str(error)})  # the browser reconnects
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
    """Returns one event of a stream with JSON in one line; invisible characters are escaped as in a report."""
    text = embedded(data) if data else json.dumps(data)
    return f"event: {kind}\n" + (f"id: {cursor}\n" if cursor else "") + f"data: {text}\n\n"
