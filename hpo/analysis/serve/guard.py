"""What stands before the gate of the live pages: by which name they are called, and what a browser may do with them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

from hpo.errors import UserError
from hpo.tracking.gate import App, Receive, Send, answer

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_READING = ("GET", "HEAD")
_HOST = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9_.-]+)(?::(\d{1,5}))?")
# Scripts and styles are files. Plotly sets style attributes, and fills a style element that it has added empty, whose
# hash is that of no text.
_EMPTY = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
POLICY = (
    f"default-src 'none'; script-src 'self'; style-src-elem 'self' {_EMPTY}; style-src-attr 'unsafe-inline'; "
    "img-src data: blob:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def host_name(host: str) -> str:
    """The name of `NAME`, `NAME:PORT`, `[ADDRESS]` or `[ADDRESS]:PORT`, in small letters; empty for what is none."""
    found = _HOST.fullmatch(host)
    return found[1].strip("[]").lower().rstrip(".") if found else ""


def check_host(given: str) -> str:
    """A name that browsers may call the pages by, or raise UserError."""
    if name := host_name(given):
        return name
    raise UserError(f"--allowed-host {given!r} is no name of a host: give it as browsers show it, without https://.")


class Guard:
    """An ASGI application that passes on to `app` what reads, by one of the names `hosts`."""

    def __init__(self, app: App, hosts: Collection[str]) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return None
        headers: Mapping[str, str] = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                own = {name.lower() for name, _ in message["headers"]}
                more = [(k.encode(), v.encode()) for k, v in HEADERS.items() if k.lower().encode() not in own]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        if host_name(headers.get("host", "")) not in self._hosts:
            return await answer(guarded, 403, b"These pages are not known by this name: see --allowed-host.\n")
        if scope["method"] not in _READING:
            return await answer(guarded, 405, b"These pages show the ledger: nothing can be changed here.\n")
        return await self._app(scope, receive, guarded)


class Below:
    """An ASGI application that takes `prefix` from the path, where a proxy passes it on with it."""

    def __init__(self, app: App, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if self._prefix and path.startswith(f"{self._prefix}/"):
            scope = {**scope, "path": path[len(self._prefix) :]}
        await self._app(scope, receive, send)


def check_prefix(given: str) -> str:
    """A prefix of paths, without a slash at its end, or raise UserError."""
    if re.fullmatch(r"(/[A-Za-z0-9._~-]+)*/?", given):
        return given.rstrip("/")
    raise UserError(f"--root-path {given!r} is no path: give it as the proxy shows it, such as /hpo.")
