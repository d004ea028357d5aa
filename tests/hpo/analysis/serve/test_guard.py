"""What stands before the live pages: names of hosts, methods, headers, prefixes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rounds import rounds

from hpo.analysis.serve.guard import HEADERS, Below, Guard, check_host, check_prefix, host_name
from hpo.errors import UserError

HOSTS = {"127.0.0.1", "localhost", "::1", "hpo.example.org"}


def asked(method: str = "GET", path: str = "/", host: str | None = "127.0.0.1:5001", prefix: str = "") -> Any:
    """Status, headers, and the path that the pages are asked for."""
    sent: list[Any] = []
    seen: list[str] = []

    async def pages(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"cache-control", b"private")]})

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [] if host is None else [(b"host", host.encode())]
    scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b""}
    asyncio.run(Guard(Below(pages, prefix), HOSTS)(scope, None, send))  # pyright: ignore[reportArgumentType]
    found = {name.decode().lower(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], found, seen


@rounds("host", ["127.0.0.1:5001", "localhost", "[::1]:5001", "hpo.example.org", "HPO.example.org.:443"])
def test_a_name_of_its_own_is_let_in(host):
    assert asked(host=host)[0] == 200


@rounds(
    "host",
    ["evil.test", "evil.test:5001", "127.0.0.1.evil.test", "", None, "a b", "localhost@evil.test", "[::2]", "x" * 999],
)
def test_another_name_is_refused_whatever_the_method(host):
    for method in ("GET", "HEAD", "POST", "DELETE"):
        status, headers, seen = asked(method, host=host)
        assert status == 403 and not seen and headers["content-security-policy"]


@rounds("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE", "get"])
def test_only_reading_is_let_in(method):
    assert asked(method)[0] == 405
    assert asked("HEAD")[0] == 200


def test_each_answer_says_what_a_browser_may_do():
    _, headers, _ = asked()
    assert {name.lower() for name in HEADERS} <= headers.keys()
    assert headers["cache-control"] == "private"  # which the answer itself says
    policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
    assert (
        policy["default-src"] == "'none'" and policy["script-src"] == "'self'" and policy["frame-ancestors"] == "'none'"
    )
    assert "unsafe" not in policy["style-src-elem"] and "access-control-allow-origin" not in headers


def test_a_prefix_goes_whether_the_proxy_takes_it_or_not():
    assert asked(path="/hpo/study/a/", prefix="/hpo")[2] == ["/study/a/"]
    assert asked(path="/study/a/", prefix="/hpo")[2] == ["/study/a/"]
    assert asked(path="/hpoX/", prefix="/hpo")[2] == ["/hpoX/"]


@rounds("given", ["https://a.b", "a/b", "a b", "", "a:b", "*"])
def test_a_name_that_is_none_is_refused(given):
    with pytest.raises(UserError, match="--allowed-host"):
        check_host(given)


def test_names_and_prefixes_are_read():
    assert check_host("Hpo.Example.org:8443") == "hpo.example.org" and host_name("[::1]:5001") == "::1"
    assert (check_prefix("/hpo/"), check_prefix(""), check_prefix("/a/b")) == ("/hpo", "", "/a/b")
    for wrong in ("hpo", "/a b", "/a//b", "/a;b", "/a\r\nb"):
        with pytest.raises(UserError, match="--root-path"):
            check_prefix(wrong)
