"""The gate before MLflow's pages: who brings no token, or comes from another site, reaches nothing."""

from __future__ import annotations

import asyncio
import stat

from rounds import rounds

from hpo.storage.home import Home
from hpo.tracking.ui.gate import Gate, opening_page, token_of

TOKEN = "t" * 64
ORIGINS = ["http://127.0.0.1:5000", "http://localhost:5000"]
EVIL = ("origin", "http://evil.test")
BEARER, COOKIE = ("authorization", f"Bearer {TOKEN}"), ("cookie", f"other=1; hpo-5000={TOKEN}")


def asked(method: str, target: str, *headers: tuple[str, str], kind: str = "http") -> tuple[int, dict[str, str]]:
    """Status and headers of the answer; 200 is MLflow's."""
    sent = []

    async def behind(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message) -> None:
        sent.append(message)

    path, _, query = target.partition("?")
    scope = {"type": kind, "method": method, "path": path, "query_string": query.encode()}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in headers]
    asyncio.run(Gate(behind, TOKEN, ORIGINS, "hpo-5000")(scope, None, send))
    first = sent[0]
    answered = {name.decode().lower(): value.decode() for name, value in first.get("headers", ())}
    return first.get("status", first.get("code")), answered


@rounds("method", ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_every_method_asks_for_the_token_and_for_the_origin(method):
    for path in ("/", "/ajax-api/2.0/mlflow/runs/delete", "/api/2.0/mlflow/experiments/search", "/graphql", "//health"):
        assert asked(method, path)[0] == 401
        assert asked(method, path, ("authorization", "Bearer wrong"))[0] == 401
        assert asked(method, path, ("authorization", f"Basic {TOKEN}"))[0] == 401
        assert asked(method, path, ("cookie", "hpo-5001=" + TOKEN))[0] == 401
        for brought in (BEARER, COOKIE):
            assert asked(method, path, brought)[0] == 200
            assert asked(method, path, brought, ("origin", ORIGINS[1]))[0] == 200
            assert asked(method, path, brought, EVIL)[0] == 403
            assert asked(method, path, brought, ("origin", "null"))[0] == 403
    assert asked(method, "/health")[0] == 200


def test_the_address_that_is_printed_leaves_a_cookie():
    status, headers = asked("GET", f"/?token={TOKEN}&a=b%20c")
    assert (status, headers["location"]) == (303, "/?a=b+c")
    cookie, *attributes = headers["set-cookie"].split("; ")
    assert {"HttpOnly", "SameSite=Lax"} < {*attributes}
    assert asked("GET", "/", ("cookie", cookie))[0] == 200
    assert asked("GET", f"//evil.test/?token={TOKEN}")[1]["location"] == "/evil.test/"
    for wrong in (("GET", "/?token="), ("GET", "/?token=wrong"), ("POST", f"/?token={TOKEN}")):
        assert asked(*wrong)[0] == 401
    assert asked("GET", "/socket", BEARER, kind="websocket") == (1008, {})


def test_a_browser_is_given_settings_and_led_on_without_the_token():
    """What the address holds ends no script; one that has the cookie already loses the token from its address too."""
    sent = []

    async def send(message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/</script>", "query_string": f"token={TOKEN}&a=b".encode()}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in (COOKIE,)]
    asyncio.run(Gate(None, TOKEN, ORIGINS, "hpo-5000", settings={"name": '"value"'})(scope, None, send))
    page = sent[1]["body"].decode()
    headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    assert sent[0]["status"] == 200 and headers["Content-Type"].startswith("text/html") and headers["Set-Cookie"]
    assert '{"name": "\\"value\\""}' in page and 'location.replace("/\\u003c/script>?a=b"' in page
    assert TOKEN not in page and page.count("</script>") == 1


def test_a_token_is_made_once_and_read_by_its_owner_alone(tmp_path):
    home = Home.at(tmp_path)
    token = token_of(home)
    assert token == token_of(home) and len(bytes.fromhex(token)) * 8 >= 128
    page = opening_page(home, f"http://127.0.0.1:5000/?token={token}")
    assert token in page.read_text() and page == opening_page(home, page.read_text())
    for path in (home.root / "ui.token", page):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
