"""Renders the live pages with the templates, the stylesheet and the scripts of a report."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from hpo.analysis.report.page import ASSETS, SCRIPTS, STYLE, rendered
from hpo.errors import UserError

LIVE = "live.js"
FILES = {LIVE: "text/javascript", STYLE: "text/css", **dict.fromkeys(SCRIPTS, "text/javascript")}


def check_installed() -> None:
    """Raises UserError if the extra is missing."""
    packages = ("jinja2", "starlette", "uvicorn")
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise UserError(f"live pages need {' and '.join(missing)}: pip install 'hpo[serve]'.")


@cache
def edition() -> str:
    """Returns a digest of the files, which is part of their addresses so that browsers may cache them."""
    whole = hashlib.sha256(b"".join((ASSETS / name).read_bytes() for name in FILES))
    return whole.hexdigest()[:16]


def home_page(rows: Sequence[Mapping[str, object]], where: str, cursor: str) -> str:
    """Returns the page of a home's studies."""
    what = {"title": "Studies", "rows": rows, "where": where, "scripts": (), "data": None}
    return _served("home.html.jinja", ".", cursor, [("studies", "")], **what)


def study_page(report: Mapping[str, object], cursor: str) -> str:
    """Returns a study's report, with the script that keeps it up to date."""
    data, trail = [report], [("studies", "../../"), (report["name"], "")]
    what = {"title": report["name"], "reports": data, "scripts": SCRIPTS, "data": data}
    return _served("report.html.jinja", "../..", cursor, trail, **what)


def unread_page(name: str, cursor: str) -> str:
    """Returns the page of a study while it is read for the first time."""
    trail = [("studies", "../../"), (name, "")]
    return _served("unread.html.jinja", "../..", cursor, trail, title=name, scripts=(), data=None)


def trial_page(trial: Mapping[str, Any], cursor: str) -> str:
    """Returns the page of one trial."""
    data = {name: trial[name] for name in ("number", "curves", "objectives", "usual", "machine")}
    what = {"title": f"{trial['study']}, trial {trial['number']}", "trial": trial, "scripts": SCRIPTS, "data": data}
    trail = [("studies", "../../../../"), (trial["study"], "../../"), (f"trial {trial['number']}", "")]
    beside = [
        (f"{'previous' if near < trial['number'] else 'next'} trial", f"../{near}/") for near in trial["neighbours"]
    ]
    return _served("trial.html.jinja", "../../../..", cursor, trail, beside, **what)


def _served(
    template: str,
    root: str,
    cursor: str,
    trail: Sequence[tuple[object, str]],
    beside: Sequence[tuple[str, str]] = (),
    **what: Any,
) -> str:
    """Returns a page; `root` is the relative path to the first page, so that a proxy may show all below any path.

    `trail` names the pages from the first one to this one, with a relative address of each but the last; `beside` has
    those next to this one.
    """
    live = {
        "root": root,
        "cursor": cursor,
        "assets": f"{root}/assets/{edition()}",
        "script": LIVE,
        "trail": trail,
        "beside": beside,
    }
    what["title"] = f"{what['title']} - hpo"
    return rendered(template, policy="", inline=None, live=live, **what)
