"""Makes the live pages of what is read, by the templates, the stylesheet and the scripts of a report."""

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
    """Raise UserError where the extra is missing."""
    packages = ("jinja2", "starlette", "uvicorn")
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise UserError(f"live pages need {' and '.join(missing)}: pip install 'hpo[serve]'.")


@cache
def edition() -> str:
    """Names the files as they are, so that a browser may keep them."""
    whole = hashlib.sha256(b"".join((ASSETS / name).read_bytes() for name in FILES))
    return whole.hexdigest()[:16]


def home_page(rows: Sequence[Mapping[str, Any]], where: str, cursor: str) -> str:
    """The studies of a home."""
    return _served("home.html.jinja", ".", cursor, title="Studies", rows=rows, where=where, scripts=(), data=None)


def study_page(report: Mapping[str, Any], cursor: str) -> str:
    """A study's report, and what keeps it up to date."""
    data = [report]
    return _served("report.html.jinja", "../..", cursor, title=report["name"], reports=data, scripts=SCRIPTS, data=data)


def unread_page(name: str, cursor: str) -> str:
    """The page of a study while it is read for the first time."""
    return _served("unread.html.jinja", "../..", cursor, title=name, scripts=(), data=None)


def trial_page(trial: Mapping[str, Any], cursor: str) -> str:
    """All of one trial."""
    title = f"{trial['study']}, trial {trial['number']}"
    data = {name: trial[name] for name in ("number", "curves", "objectives")}
    return _served("trial.html.jinja", "../../../..", cursor, title=title, trial=trial, scripts=SCRIPTS, data=data)


def _served(template: str, root: str, cursor: str, **what: Any) -> str:
    """`root` leads from the page to the first one, so that a proxy may show them all below any path."""
    live = {"root": root, "cursor": cursor, "assets": f"{root}/assets/{edition()}", "script": LIVE}
    return rendered(template, policy="", inline=None, live=live, **what)
