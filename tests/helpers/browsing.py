"""Debian's Chromium, and pages opened in it that may ask no one else and complain of nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

CHROMIUM = shutil.which("chromium")
NEEDED = "runs after `apt-get install chromium`"


@contextmanager
def chromium() -> Iterator[Any]:
    """The browser; within it no event loop can run in this thread."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@contextmanager
def opened(browser: Any, address: str, width: int = 1280, scheme: str = "light", away: bool = False) -> Iterator[Any]:
    """The page at an address, once its scripts are ready.

    Whatever it asks of another place, and whatever it complains of, fails the test; but that a server is `away`.
    """
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    shown, asked, complaints = context.new_page(), list[str](), list[str]()
    shown.on("request", lambda request: asked.append(request.url))
    shown.on("console", lambda message: complaints.append(message.text))
    shown.on("pageerror", lambda error: complaints.append(str(error)))
    shown.on("dialog", lambda dialog: complaints.append(f"dialog {dialog.message}"))
    shown.goto(address)
    yield shown
    place = address if address.startswith("file:") else "/".join(address.split("/")[:3])
    assert all(url.startswith(place) for url in asked), asked
    assert [one for one in complaints if not (away and one.startswith("Failed to load resource"))] == []
    context.close()


def grave_faults(shown: Any) -> list[Any]:
    """What axe finds that is serious or critical."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(shown).response["violations"]
    return [(one["id"], one["nodes"][0]["html"][:200]) for one in found if one["impact"] in ("serious", "critical")]
