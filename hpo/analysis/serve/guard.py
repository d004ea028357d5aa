"""Guards the live pages before the gate: which host names they answer to, and what a browser may do with them."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

from hpo.door import option
from hpo.errors import UserError
from hpo.tracking.ui.gate import App, Receive, Send, answer

LOOPBACK = ("127.0.0.1", "localhost", "::1")
_READING = ("GET", "HEAD")
_HOST = re.compile(r"(\[[0-9a-fA-F:]+\]|[A-Za-z0-9_.-]+)(?::(\d{1,5}))?")
# Scripts and styles are files. Plotly sets style attributes, and fills a style element that it has added empty, which
# has the hash of an empty text.
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
    """Returns the name in `NAME`, `NAME:PORT`, `[ADDRESS]` or `[ADDRESS]:PORT`, in lower case; else an empty text."""
    match = _HOST.fullmatch(host)
    return match[1].strip("[]").lower().rstrip(".") if match else ""


def check_host(given: str) -> str:
    """Returns a name by which browsers may call the pages. Raises UserError if it is not a host name."""
    if name := host_name(given):
        return name
    raise UserError(
        f"{option('allowed_host', repr(given))} is not a host name: give it as browsers show it, without https://."
    )


class Guard:
    """An ASGI application that passes read requests on to `app` if they use one of the names `hosts`."""

    def __init__(self, app: App, hosts: Collection[str]) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return None
        headers: Mapping[str, str] = {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in scope["headers"]}

        async def guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                present = {name.lower() for name, _ in message["headers"]}
                more = [(k.encode(), v.encode()) for k, v in HEADERS.items() if k.lower().encode() not in present]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        if host_name(headers.get("host", "")) not in self._hosts:
            return await answer(guarded, 403, b"These pages are not known by this name: see --allowed-host.\n")
        if scope["method"] not in _READING:
            return await answer(guarded, 405, b"These pages show the ledger: nothing can be changed here.\n")
        return await self._app(scope, receive, guarded)


class Below:
    """An ASGI application that removes `prefix` from the path, for proxies that pass it on."""

    def __init__(self, app: App, prefix: str) -> None:
        self._app, self._prefix = app, prefix

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if self._prefix and path.startswith(f"{self._prefix}/"):
            scope = {**scope, "path": path[len(self._prefix) :]}
        await self._app(scope, receive, send)


def check_prefix(given: str) -> str:
    """Returns a prefix of paths without a slash at its end. Raises UserError if it is not a path."""
    if re.fullmatch(r"(/[A-Za-z0-9._~-]+)*/?", given):
        return given.rstrip("/")
    raise UserError(f"{option('root_path', repr(given))} is not a path: give it as the proxy shows it, such as /hpo.")
