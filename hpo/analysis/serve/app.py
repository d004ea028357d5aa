"""Maps addresses to the live pages, as an ASGI application.

Links are relative, so the pages work below any path. No part of an address is used as a file path: a study is looked up
in the ledger by its name, a trial by its number.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, Router

from hpo.analysis.report.page import ASSETS
from hpo.analysis.serve import curve_lines, pages
from hpo.analysis.serve.channel import Channel
from hpo.analysis.serve.live_study import LiveStudy
from hpo.analysis.serve.subjects import LiveHome, LiveTrial, Subject
from hpo.analysis.serve.trial_page import trial_page
from hpo.errors import HomeError, HpoError, NoLedger, UserError
from hpo.ledger import queries

if TYPE_CHECKING:
    from hpo.ledger import Ledger
    from hpo.storage.home import Home

MOST_IDLE = 8  # studies kept in memory although nobody views them
PATIENCE = 0.4  # seconds that a page waits for its study to be read
_BIGGEST = 2**31 - 1


class Pages:
    """Serves a home's pages, with the channels that keep them up to date. Everything runs in one event loop."""

    def __init__(self, ledger: Ledger, home: Home, mlflow: str = "") -> None:
        self._ledger, self._home, self._mlflow = ledger, home, mlflow
        self._studies = LiveHome(ledger)
        self._channels: dict[object, Channel] = {}
        self._closed = False
        handlers = {
            "/": self._show_home,
            "/events": self._home_events,
            "/assets/{edition}/{name}": _asset,
            "/study/{name}": _slashed,
            "/study/{name}/": self._show_study,
            "/study/{name}/events": self._study_events,
            "/study/{name}/curves": self._curves,
            "/study/{name}/trial/{number:int}": _slashed,
            "/study/{name}/trial/{number:int}/": self._show_trial,
            "/study/{name}/trial/{number:int}/events": self._trial_events,
            "/health": lambda _: PlainTextResponse("OK"),
        }
        routes = [Route(path, handler) for path, handler in handlers.items()]
        self.app = Starlette(exception_handlers={HpoError: _failed, HTTPException: _missing})
        self.app.router = Router(routes, redirect_slashes=False)  # a redirection would name a host and omit the prefix

    def close(self) -> None:
        """Ends all streams; called from the thread of the event loop."""
        self._closed = True
        for channel in self._channels.values():
            channel.wake()

    async def _show_home(self, request: Request) -> Response:
        channel = self._channel("home", lambda: self._studies)
        await asyncio.to_thread(self._studies.look)
        cursor = channel.cursor()
        return HTMLResponse(pages.home_page(self._studies.rows, str(self._home.root), cursor))

    async def _home_events(self, request: Request) -> Response:
        return _stream(self._channel("home", lambda: self._studies), request)

    async def _show_study(self, request: Request) -> Response:
        channel, study = self._study(request)
        looking = asyncio.create_task(asyncio.to_thread(study.look))
        await asyncio.wait([looking], timeout=PATIENCE)
        if looking.done():
            looking.result()
            if study.known is None:
                await self._refuse(study.name)
        known = study.known
        if known is None:
            return HTMLResponse(pages.unread_page(study.name, channel.cursor(0)))
        text = await asyncio.to_thread(pages.study_page, known.report, channel.cursor(known.made))
        return HTMLResponse(text)

    async def _study_events(self, request: Request) -> Response:
        return _stream(self._study(request)[0], request)

    async def _curves(self, request: Request) -> Response:
        request_for = curve_lines.asked(request.query_params)
        name = request.path_params["name"]
        read = await asyncio.to_thread(curve_lines.lines, self._ledger, name, request_for)
        return JSONResponse(read)

    async def _show_trial(self, request: Request) -> Response:
        channel, name, number = self._trial(request)

        def read() -> str:
            channel.subject.look()
            cursor = channel.cursor()
            with self._ledger.read() as connection:
                shown = trial_page(connection, self._home, name, number, self._mlflow, self._shares(name))
            return pages.trial_page(shown, cursor)

        return HTMLResponse(await asyncio.to_thread(read))

    async def _trial_events(self, request: Request) -> Response:
        return _stream(self._trial(request)[0], request)

    def _study(self, request: Request) -> tuple[Channel, LiveStudy]:
        name = request.path_params["name"]
        channel = self._channel(("study", name), lambda: LiveStudy(self._ledger, self._home, name))
        assert isinstance(channel.subject, LiveStudy)
        return channel, channel.subject

    def _trial(self, request: Request) -> tuple[Channel, str, int]:
        name, number = request.path_params["name"], request.path_params["number"]
        if number > _BIGGEST:
            raise HTTPException(404, f"no study has a trial {number}.")
        return self._channel((name, number), lambda: LiveTrial(self._ledger, name, number)), name, number

    def _shares(self, name: str) -> Mapping[str, float]:
        """Returns the importances by the first objective of a study whose report is in memory; empty without one."""
        channel = self._channels.get(("study", name))
        known = channel.subject.known if channel and isinstance(channel.subject, LiveStudy) else None
        return next(iter(known.report["importances"]["shares"].values()), {}) if known else {}

    async def _refuse(self, name: str) -> None:
        """Raises the error that lists the existing studies."""
        await asyncio.to_thread(self._ledger.look, lambda connection: queries.study_row(connection, name))

    def _channel(self, key: object, subject: Callable[[], Subject]) -> Channel:
        """Returns the channel of a subject; removes channels without listeners, except the last MOST_IDLE."""
        channel = self._channels.pop(key, None) or Channel(subject(), lambda: self._closed)
        for idle in [other for other, listened in self._channels.items() if listened.idle][:-MOST_IDLE]:
            del self._channels[idle]
        self._channels[key] = channel
        return channel


def _slashed(request: Request) -> Response:
    """Redirects to the page as a directory, by a relative address, because a proxy may have put it below a path."""
    last = str(request.path_params.get("number", request.path_params["name"]))
    return Response(status_code=307, headers={"Location": f"./{quote(last, safe='')}/"})


def _stream(channel: Channel, request: Request) -> Response:
    cursor = request.headers.get("last-event-id") or request.query_params.get("since", "")
    headers = {"X-Accel-Buffering": "no"}  # nginx passes each event on at once
    stream: AsyncIterator[str] = channel.listen(cursor)
    return StreamingResponse(stream, media_type="text/event-stream", headers=headers)


async def _asset(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in pages.FILES or request.path_params["edition"] != pages.edition():
        raise HTTPException(404, "this file does not exist.")
    headers = {"Cache-Control": "private, max-age=31536000, immutable"}
    return FileResponse(ASSETS / name, media_type=pages.FILES[name], headers=headers)


async def _failed(request: Request, error: Exception) -> Response:
    """Answers with the error's one sentence, as a command prints it."""
    missing = isinstance(error, UserError) and not isinstance(error, HomeError | NoLedger)
    return PlainTextResponse(f"{error}\n", status_code=404 if missing else 503)


async def _missing(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return PlainTextResponse(f"{error.detail}\n", status_code=error.status_code)
