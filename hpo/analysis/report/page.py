"""Makes a report's page of its data, and the live pages of theirs: templates, one stylesheet and a few scripts.

In a file all of them stand inside it, and its policy lets nothing else run and nothing be fetched. What users have
written, names, values and errors, is escaped by the template; characters that would not be seen, or turn a line of text
round, are shown as their code points.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpo.analysis.report.sure import steadiest
from hpo.errors import UserError
from hpo.text import counted, spelled
from trainer.files.durable import replacing, sync
from trainer.quote import unseen, visible

if TYPE_CHECKING:
    from jinja2 import Environment

    from hpo.analysis.report.data import StudyReport

ASSETS = Path(__file__).with_name("assets")
SCRIPTS = ("plotly-cartesian.min.js", "figures.js", "parameters.js", "report.js")  # in this order
STYLE = "report.css"
_ESCAPED = re.compile(r"(?<!\\)((?:\\\\)*)\\u(?!d[89a-f])([0-9a-f]{4})")  # in JSON; halves of a pair stay together


def file_page(reports: Sequence[StudyReport]) -> str:
    """The page as one file that needs nothing from elsewhere."""
    scripts = [_asset(name) for name in SCRIPTS]
    style = _asset(STYLE)
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    bodies = [report.to_json() for report in reports]
    title = f"{' beside '.join(report.name for report in reports)}: report"
    inline = {"scripts": [_marked_up(one) for one in scripts], "style": _marked_up(style)}
    return rendered(
        "report.html.jinja", title=title, reports=bodies, data=bodies, policy=policy, inline=inline, live=None
    )


def write(reports: Sequence[StudyReport], path: Path) -> Path:
    """Write the page; raises UserError where that is not allowed, or the extra `report` is missing."""
    check_installed()
    text = file_page(reports)
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be written, {path.parent} is no directory: make it first.")
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(text.encode())
            sync(temporary)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): name another file.") from error
    return path


def rendered(template: str, *, data: Any, **what: Any) -> str:
    """A page: `frame.html.jinja` says what each needs. `data` is what its scripts read."""
    return _environment().get_template(template).render(data=_marked_up(embedded(data)), **what)


def _marked_up(text: str) -> Any:
    """A text that is to stand in a page as it is."""
    from markupsafe import Markup

    return Markup(text)


def check_installed() -> None:
    """Raise UserError where the extra is missing, before a study is read."""
    try:
        import jinja2  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(f"a report needs {error.name}: pip install 'hpo[report]'.") from error


@cache
def _environment() -> Environment:
    import jinja2

    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS),
        autoescape=True,
        finalize=_finalized,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (figure, measured, short, setting, moment, confirmed, steadier, differing, fact, totalled, attempted)
    made.filters |= {one.__name__: one for one in filters} | {"duration": spelled}
    return made


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


# What users have written


def _finalized(value: Any) -> Any:
    """Returns a text as `visible` does, and any other value, such as markup, as it is."""
    return visible(value) if type(value) is str else value


def embedded(data: Any) -> str:
    """JSON that may stand in a script element: without `<`, `>` and `&`, its unseen characters as `visible` has them.

    Raises ValueError for a number that JSON has not.
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    text = _ESCAPED.sub(_unescaped, text)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _unescaped(match: re.Match[str]) -> str:
    """Returns the escape of an unseen character as text, that of any other one as it is."""
    return rf"{match[1]}\\u{match[2]}" if unseen(chr(int(match[2], 16))) else match[0]


# Filters of the template


def figure(value: float | None) -> str:
    """A value to six digits, as `hpo best` and `hpo status` have it."""
    return "" if value is None else f"{value:.6g}"


def measured(mean: float, error: float | None) -> str:
    """A mean to the second digit of its standard error, and that."""
    if not error:
        return figure(mean)
    return f"{mean:.{max(0, 1 - math.floor(math.log10(error)))}f} ± {short(error)}"


def short(value: float) -> str:
    return f"{value:.2g}"


def setting(value: Any) -> str:
    """A value of a configuration as one types it: a text as it is, None as nothing, anything else as JSON."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def moment(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")


def confirmed(report: Mapping[str, Any], number: int) -> Mapping[str, Any] | None:
    """A trial's row among the confirmed ones, by the first objective."""
    rows = report["sure"]["confirm"][0]["rows"] if report["sure"]["confirm"] else ()
    return next((row for row in rows if row["trial"] == number), None)


def steadier(report: Mapping[str, Any], number: int) -> Mapping[str, Any] | None:
    """The row of another trial than this one that is the best under other seeds."""
    row = steadiest(report["sure"]["confirm"], report["objectives"][0]["direction"])
    return row if row and row["trial"] != number else None


def differing(reports: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """Path -> its value in the best configuration of each study, where these are not the same."""
    best = [one["answer"]["best"][0]["params"] if one["answer"]["best"] else {} for one in reports]
    for path in dict.fromkeys(path for params in best for path in params):
        values = [params.get(path) for params in best]
        if any(value != values[0] for value in values):
            yield path, values


def fact(facts: Sequence[Sequence[str]], name: str) -> str:
    return next((value for one, value in facts if one == name), "")


def totalled(counts: Mapping[str, int]) -> str:
    return counted(sum(counts.values()), "trial")


def attempted(by_state: Mapping[str, Mapping[str, float]]) -> float:
    return sum(one["seconds"] for one in by_state.values())
