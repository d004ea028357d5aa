"""Guards MLflow's pages: a request without the home's token sees and changes nothing.

Every user of this host, and every page open in a browser, can reach a port on loopback. A program sends the token as a
bearer token (`MLFLOW_TRACKING_TOKEN` of MLflow's client); a browser sends it once in the address that `hpo ui` prints,
then as a cookie that scripts cannot read.
"""

from __future__ import annotations

import hmac
import json
import os
from collections.abc import Awaitable, Callable, Collection, Mapping
from html import escape
from http.cookies import CookieError, SimpleCookie
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from hpo.storage.home import Home
from hpo.storage.token_file import token_in

PARAMETER = "token"
_OPEN = ("/health",)  # reveals only that the server is up
_REFUSED = (
    b"These pages ask for a token: open the address that `hpo ui` or `hpo serve` prints. A program brings what stands "
    b"in ui.token of the home as a bearer's, MLflow's client by MLFLOW_TRACKING_TOKEN.\n"
)

_SETTING = """<!doctype html><title>MLflow</title><script>
for (const [name, value] of Object.entries({settings}))
  if (localStorage.getItem(name) === null) localStorage.setItem(name, value);
location.replace({target} + location.hash);
</script>
"""

Send = Callable[[Any], Awaitable[None]]
Receive = Callable[[], Awaitable[Any]]
App = Callable[[Any, Any, Any], Awaitable[None]]


def token_of(home: Home) -> str:
    """Returns the token of a home's pages: 256 bits, made once, in a file that only its owner can read.

    Raises OSError.
    """
    return token_in(home.root / "ui.token")


class Gate:
    """An ASGI application that passes requests on to `app` if they have the `token` and an allowed origin.

    The origin must be one of `origins` or missing. The `cookie` holds for all paths and is sent when another site links
    to these pages. With `strictly` it holds only for the paths below that of the page, and other sites do not send it.
    A browser that is let in gets `settings`, entries of its local storage, unless it has one of that name; not with
    `strictly`, whose pages take no script from the gate.
    """

    def __init__(
        self,
        app: App,
        token: str,
        origins: Collection[str],
        cookie: str,
        *,
        strictly: str = "",
        settings: Mapping[str, str] | None = None,
    ) -> None:
        self._app, self._token, self._origins, self._cookie = app, token, origins, cookie
        self._strictly, self._settings = strictly, dict(settings or {})

    async def __call__(self, scope: Mapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in scope["headers"]}
        if "origin" in headers and headers["origin"] not in self._origins:
            return await answer(send, 403, b"Another site's pages may not ask these.\n")
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        if scope["method"] == "GET" and any(self._is_token(value) for name, value in query if name == PARAMETER):
            return await self._let_in(scope["path"], [pair for pair in query if pair[0] != PARAMETER], send)
        if scope["path"] in _OPEN or self._is_token(self._brought(headers)):
            return await self._app(scope, receive, send)
        return await answer(send, 401, _REFUSED, ("WWW-Authenticate", "Bearer"))

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())

    def _brought(self, headers: Mapping[str, str]) -> str:
        kind, _, credentials = headers.get("authorization", "").partition(" ")
        if kind.lower() == "bearer":
            return credentials.strip()
        try:
            cookie = SimpleCookie(headers.get("cookie", "")).get(self._cookie)
        except CookieError:
            return ""
        return cookie.value if cookie else ""

    async def _let_in(self, path: str, query: list[tuple[str, str]], send: Send) -> None:
        """Sets the cookie and redirects to the same page; a browser keeps the fragment.

        A strict cookie is not sent if the request comes from a page of another site, or a file: a page of this server
        must redirect.
        """
        if self._strictly:
            cookie = f"{self._cookie}={self._token}; Path={self._strictly}; HttpOnly; SameSite=Strict"
            same = f"./{quote(path.rpartition('/')[2], safe='')}" + (f"?{urlencode(query)}" if query else "")
            page = f'<!doctype html><meta http-equiv="refresh" content="0; url={escape(same)}">'
            return await answer(send, 200, page.encode(), ("Set-Cookie", cookie), content="text/html")
        # A path with two slashes would lead to another host.
        target = "/" + path.lstrip("/") + (f"?{urlencode(query)}" if query else "")
        cookie = ("Set-Cookie", f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Lax")
        if not self._settings:
            return await answer(send, 303, b"", ("Location", target), cookie)
        page = _SETTING.format(settings=_in_script(self._settings), target=_in_script(target)).encode()
        return await answer(send, 200, page, cookie, content="text/html")


def _in_script(value: object) -> str:
    """Returns JSON that cannot end the script element: a path may hold `</script>`."""
    return json.dumps(value).replace("<", "\\u003c")


async def answer(send: Send, status: int, body: bytes, *headers: tuple[str, str], content: str = "text/plain") -> None:
    """Answers an HTTP request completely, with a text that is not cached."""
    kinds = {"Content-Type": f"{content}; charset=utf-8", "Cache-Control": "no-store"}
    sent = (kinds | dict(headers)).items()
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in sent]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": body})


def opening_page(home: Home, address: str) -> Path:
    """Returns a page that only the owner can read and that sends a browser to `address`.

    Arguments of a process would show the address to others.
    """
    path = home.root / "ui.html"
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(f'<meta http-equiv="refresh" content="0; url={address}">\n')
    return path
