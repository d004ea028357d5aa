"""Renders reports and live pages from their data by templates, one stylesheet and a few scripts.

A page in a file contains all of them; its content policy allows no other script and no fetching. The template escapes
what users have written: names, values and errors. Characters that are invisible, or that reverse a line of text, are
shown as their code points.
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

from hpo.analysis.report.certainty import steadiest
from hpo.analysis.report.cost import SPENT_IN_VAIN
from hpo.analysis.results.differences import Difference, differences, incomparable
from hpo.errors import UserError
from hpo.text import counted, spelled
from trainer.files.durable import replacing, sync
from trainer.quote import unseen, visible

if TYPE_CHECKING:
    from jinja2 import Environment

    from hpo.analysis.report.data import StudyReport

Facts = Mapping[str, Any]  # a report, or a part of it, as JSON values
ASSETS = Path(__file__).with_name("assets")
SCRIPTS = ("plotly-cartesian.min.js", "figures.js", "parameters.js", "report.js")  # loaded in this order
STYLE = "report.css"
_ESCAPED = re.compile(r"(?<!\\)((?:\\\\)*)\\u(?!d[89a-f])([0-9a-f]{4})")  # in JSON; surrogates stay paired


def file_page(reports: Sequence[StudyReport]) -> str:
    """Returns the page as one self-contained file."""
    scripts = [_asset(name) for name in SCRIPTS]
    style = _asset(STYLE)
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    bodies = [report.to_json() for report in reports]
    title = f"{' beside '.join(report.name for report in reports)}: report"
    inline = {"scripts": [_marked_up(script) for script in scripts], "style": _marked_up(style)}
    return rendered(
        "report.html.jinja", title=title, reports=bodies, data=bodies, policy=policy, inline=inline, live=None
    )


def write(reports: Sequence[StudyReport], path: Path) -> Path:
    """Writes the page. Raises UserError if that is not allowed, or the extra `report` is missing."""
    check_installed()
    text = file_page(reports)
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be written, {path.parent} is not a directory: make it first.")
    try:
        with replacing(path) as temporary:
            temporary.write_bytes(text.encode())
            sync(temporary)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): name another file.") from error
    return path


def rendered(template: str, *, data: object, **what: object) -> str:
    """Returns a page. `frame.html.jinja` lists what each template needs; `data` is what its scripts read."""
    return _environment().get_template(template).render(data=_marked_up(embedded(data)), **what)


def _marked_up(text: str) -> Any:
    """Returns a text that the template inserts unescaped."""
    from markupsafe import Markup

    return Markup(text)


def check_installed() -> None:
    """Raises UserError if the extra is missing, before a study is read."""
    try:
        import jinja2  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(f"a report needs {error.name}: pip install 'hpo[report]'.") from error


@cache
def _environment() -> Environment:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(ASSETS),
        autoescape=True,
        finalize=_finalized,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    filters = (figure, measured, to_error, noise, short, setting, moment, confirmed, steadier, differing, unlike)
    filters += (measures, fact, totalled, attempted, sentence, lead, by_importance, in_column, polyline, first_failure)
    filters += (capital,)
    environment.filters |= {function.__name__: function for function in filters} | {
        "duration": spelled,
        "several": counted,
    }
    return environment


def _asset(name: str) -> str:
    return (ASSETS / name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


# Texts of users


def _finalized(value: object) -> Any:
    """Returns a text with its invisible characters escaped, and any other value, such as markup, as it is."""
    return visible(value) if type(value) is str else value


def embedded(data: object) -> str:
    """Returns JSON for a script element: without `<`, `>` and `&`, and with invisible characters as in `visible`.

    Raises ValueError for a number that JSON does not have.
    """
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    text = _ESCAPED.sub(_unescaped, text)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _unescaped(match: re.Match[str]) -> str:
    """Returns the escape of an invisible character as text, and any other escape as it is."""
    return rf"{match[1]}\\u{match[2]}" if unseen(chr(int(match[2], 16))) else match[0]


# Filters of the template


def figure(value: float | None) -> str:
    """Returns a value to six digits, as `hpo best` and `hpo status` print it."""
    return "" if value is None else f"{value:.6g}"


def measured(mean: float, error: float | None) -> str:
    """Returns a mean to the second digit of its standard error, followed by the error."""
    return f"{to_error(mean, error)} ± {to_error(error, error)}" if error else to_error(mean, None)


def to_error(value: float | None, error: float | None) -> str:
    """Returns a value to the second digit of its error; to four significant digits if the error is not known."""
    if value is None:
        return ""
    return f"{value:.{max(0, 1 - math.floor(math.log10(error)))}f}" if error else f"{value:.4g}"


def in_column(value: float | None, report: Facts, metric: str) -> str:
    """Returns an objective's value with as many decimals as the others of the answer, so that they align."""
    error = noise(report, metric)
    if value is None or error:
        return to_error(value, error)
    most = max(
        (abs((best["means"] or best["values"])[metric] or 0.0) for best in report["answer"]["best"]), default=0.0
    )
    return f"{value:.{max(0, 3 - math.floor(math.log10(most)))}f}" if 1e-4 < most < 1e6 else to_error(value, None)


def noise(report: Facts, metric: str) -> float | None:
    """Returns the standard deviation of one run of an objective; None if no other seeds were trained."""
    known = report["sure"]["noise"].get(metric)
    return known["deviation"] if known else None


def short(value: float) -> str:
    return f"{value:.2g}"


def setting(value: object) -> str:
    """Returns a value of a configuration as a user types it: a text as it is, None as nothing, others as JSON."""
    if isinstance(value, float):
        return f"{value:.6g}"
    return value if isinstance(value, str) else "" if value is None else json.dumps(value)


def capital(text: str) -> str:
    """Returns a text with a capital letter, unless its first word is a name such as `loss.scale.rank_ic`."""
    first = text.partition(" ")[0].rstrip(".")
    return text if re.search(r"[._/=]", first) else text[:1].upper() + text[1:]


def sentence(text: str) -> list[str]:
    """Returns a sentence with a capital letter, split at its backticks: every second part is code."""
    return capital(text).split("`")


def moment(at: float, *, seconds: bool = False) -> str:
    return datetime.fromtimestamp(at, UTC).strftime(f"%Y-%m-%d %H:%M{':%S' if seconds else ''} UTC")


def confirmed(report: Facts, number: int) -> Facts | None:
    """Returns a trial's row among the confirmed ones, by the first objective."""
    rows = report["sure"]["confirm"][0]["rows"] if report["sure"]["confirm"] else ()
    return next((row for row in rows if row["trial"] == number), None)


def steadier(report: Facts, number: int) -> Facts | None:
    """Returns the row of the best trial under other seeds, if it differs from this trial."""
    row = steadiest(report["sure"]["confirm"], report["objectives"][0]["direction"])
    return row if row and row["trial"] != number else None


def lead(report: Facts, number: int) -> dict[str, Any] | None:
    """Returns how far the answer is ahead of the next trial; None without another complete trial of one objective.

    It is {"by": float, "error": float or null, "trial": the next one}: the mean difference under other seeds where
    there is one, else the difference of the two values.
    """
    [objective, *others], trials = report["objectives"], report["trials"]
    sign = 1.0 if objective["direction"] == "minimize" else -1.0
    [table] = report["sure"]["confirm"][:1] or [{"rows": (), "ahead": None}]
    if others:
        return None
    if (ahead := table["ahead"]) and table["rows"][0]["trial"] == number:
        differs = (ahead["error"] or 0.0) > 1e-12 * abs(ahead["mean"])  # else equal seed by seed, up to rounding
        return {"by": ahead["mean"], "error": ahead["error"] if differs else None, "trial": table["rows"][1]["trial"]}
    values = dict(zip(trials["number"], trials["values"][objective["metric"]], strict=True))
    places = dict(zip(trials["number"], trials["place"], strict=True))
    ranked = sorted((n for n, place in places.items() if place is not None and n != number), key=lambda n: places[n])
    if table["ahead"] or not ranked or values.get(number) is None:
        return None
    return {"by": sign * (values[ranked[0]] - values[number]), "error": None, "trial": ranked[0]}


def by_importance(params: Mapping[str, object], report: Facts) -> dict[str, object]:
    """Returns the parameters, those that explain most of the first objective first."""
    shares = report["importances"]["shares"].get(report["objectives"][0]["metric"], {})
    return {path: params[path] for path in sorted(params, key=lambda path: -shares.get(path, -1.0))}


def differing(reports: Sequence[Facts]) -> Iterator[tuple[str, list[Any]]]:
    """Yields path -> its values in the best configuration of each study, if they differ."""
    best = [report["answer"]["best"][0]["params"] if report["answer"]["best"] else {} for report in reports]
    for path in dict.fromkeys(path for params in best for path in params):
        values = [params.get(path) for params in best]
        if any(value != values[0] for value in values):
            yield path, values


def unlike(reports: Sequence[Facts]) -> list[Difference]:
    """Returns the settings in which the studies differ, first those that change the measure."""
    return differences([report["settings"] for report in reports])


def measures(reports: Sequence[Facts]) -> str:
    """Returns a sentence that warns of comparing the values of the studies; empty if they have one measure."""
    return incomparable([report["name"] for report in reports], unlike(reports))


def polyline(line: Sequence[tuple[float, float]], width: int, height: int) -> str:
    """Returns the points of a step line in an SVG of this size, with a margin of 2 above and below."""
    xs, ys = zip(*line, strict=True)
    left, low, across, up = min(xs), min(ys), (max(xs) - min(xs)) or 1, (max(ys) - min(ys)) or 1
    points, last = list[str](), height / 2
    for x, y in line:
        at = width * (x - left) / across
        level = height - 2 - (height - 4) * (y - low) / up
        points += [f"{at:.1f},{last:.1f}"] if points else []
        points.append(f"{at:.1f},{level:.1f}")
        last = level
    return " ".join(points)


def first_failure(trials: Facts) -> str:
    """Returns a clause with the first trial that failed or is infeasible and its error; empty without an error."""
    rows = zip(trials["number"], trials["state"], trials["why"], strict=True)
    return next((f"; trial {n}: {why}" for n, state, why in rows if state in SPENT_IN_VAIN and why), "")


def fact(facts: Sequence[Sequence[str]], name: str) -> str:
    return next((value for label, value in facts if label == name), "")


def totalled(counts: Mapping[str, int]) -> str:
    return counted(sum(counts.values()), "trial")


def attempted(by_state: Mapping[str, Mapping[str, float]]) -> float:
    return sum(sums["seconds"] for sums in by_state.values())
