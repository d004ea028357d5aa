"""A stream tells each listener what it lacks, whoever else listens and however slow it is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from hpo.analysis.serve import channel as channels
from hpo.analysis.serve.channel import Channel
from hpo.analysis.serve.subjects import Message
from hpo.errors import StorageError


class Counter:
    """A subject whose versions come from the test, and that counts the looks."""

    def __init__(self) -> None:
        self.version, self.looks, self.trouble = 1, 0, ""

    def look(self) -> None:
        self.looks += 1
        if self.trouble:
            raise StorageError(self.trouble)

    def message(self, since: int | None) -> Message:
        if since is None:
            return Message("refresh", self.version)
        return Message("rows", self.version, {"lacked": list(range(since + 1, self.version + 1))})


def parsed(text: str) -> dict[str, Any]:
    fields = dict(line.split(": ", 1) for line in text.strip().split("\n") if ": " in line)
    return fields | ({"data": json.loads(fields["data"])} if "data" in fields else {})


async def next_event(stream: AsyncIterator[str]) -> dict[str, Any]:
    while True:
        found = parsed(await asyncio.wait_for(anext(stream), 20))
        if "event" in found:
            return found


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(channels, "PAUSE", 0.01)
    monkeypatch.setattr(channels, "ALIVE", 0.05)


def test_a_cursor_goes_on_where_it_was_and_of_another_server_begins_anew():
    async def body() -> None:
        subject = Counter()
        channel = Channel(subject, lambda: False)
        stream = channel.listen(channel.cursor(1))
        subject.version = 3
        first = await next_event(stream)
        assert (first["event"], first["data"], first["id"]) == ("rows", {"lacked": [2, 3]}, channel.cursor(3))
        await stream.aclose()
        subject.version = 6
        again = channel.listen(first["id"])
        assert (await next_event(again))["data"] == {"lacked": [4, 5, 6]}
        await again.aclose()
        for other in ("0badcafe.3", "", "x", f"{channel.cursor(1)}.5", "é.1"):
            stream = channel.listen(other)
            assert (await next_event(stream))["event"] == "refresh"
            await stream.aclose()

    asyncio.run(body())


def test_many_listeners_are_one_look_and_the_last_ends_it():
    async def body() -> None:
        subject = Counter()
        channel = Channel(subject, lambda: False)
        streams = [channel.listen(channel.cursor(1)) for _ in range(20)]
        for stream in streams:
            await anext(stream)
        subject.version = 2
        found = await asyncio.gather(*(next_event(stream) for stream in streams))
        assert {json.dumps(one["data"]) for one in found} == {'{"lacked": [2]}'}
        threads = [one for one in threading.enumerate() if one.name.startswith("asyncio")]
        assert len(threads) < 20
        for stream in streams:
            await stream.aclose()
        assert channel.idle
        looks = subject.looks
        await asyncio.sleep(0.1)
        assert subject.looks <= looks + 1

    asyncio.run(body())


def test_trouble_is_told_and_so_is_its_end():
    async def body() -> None:
        subject = Counter()
        channel = Channel(subject, lambda: False)
        subject.trouble = "the ledger <b> is away."
        stream = channel.listen(channel.cursor(1))
        found = await next_event(stream)
        assert (found["event"], found["data"]) == ("trouble", {"text": subject.trouble})
        subject.trouble = ""
        assert (await next_event(stream))["data"] == {"text": ""}
        await stream.aclose()

    asyncio.run(body())


def test_a_fault_of_the_reader_ends_the_stream_and_is_not_kept_quiet():
    class Broken(Counter):
        def look(self) -> None:
            raise ZeroDivisionError

    async def body() -> None:
        channel = Channel(Broken(), lambda: False)
        stream = channel.listen(channel.cursor(1))
        with pytest.raises(ZeroDivisionError):
            while True:
                await asyncio.wait_for(anext(stream), 20)

    asyncio.run(body())


def test_closing_ends_every_stream():
    async def body() -> None:
        closing: list[bool] = []
        channel = Channel(Counter(), lambda: bool(closing))
        stream = channel.listen(channel.cursor(1))
        await anext(stream)
        closing.append(True)
        channel.wake()
        with contextlib.suppress(StopAsyncIteration):
            while True:
                await asyncio.wait_for(anext(stream), 20)
        assert channel.idle

    asyncio.run(body())
