"""The page of a report: nothing a user has written runs or hides in it, and the file needs nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import evil_study
import pytest
from crafted import open_crafted, put_trial
from evil_study import EVIL
from hypothesis import given
from hypothesis import strategies as st
from places import ROOT
from study_runs import hpo

import hpo.analysis.report.page as pages
import hpo.analysis.serve.pages as live
from hpo.analysis.report import data
from hpo.errors import UserError
from hpo.storage.home import Home
from trainer.quote import unseen

PLOTLY = "79542150855a52c567260e3137095dbe2b744e6d702a5cabe67da246942fba7a"  # of plotly.js-cartesian-dist-min 4.1.1


class Elements(HTMLParser):
    """The tags of a page with their attributes, and the texts of its scripts and of the rest."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._open = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag
        self.scripts += [""] if tag == "script" else []

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    def handle_data(self, data: str) -> None:
        if self._open == "script":
            self.scripts[-1] += data
        elif self._open != "style":
            self.text += data


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> data.StudyReport:
    return evil_study.read(tmp_path_factory.mktemp("written"))


@pytest.fixture(scope="module")
def page(written) -> str:
    return pages.file_page([written])


def test_nothing_that_a_user_has_written_runs(written):
    page = pages.file_page([written, written])
    found = Elements(page)
    assert len(found.scripts) == len(pages.SCRIPTS) + 1  # and the data
    assert not [tag for tag, _ in found.tags if tag in ("img", "iframe", "object", "embed", "base", "link")]
    assert not [name for _, attrs in found.tags for name in attrs if name.startswith("on")]
    assert "alert(1)</script>" in found.text and any("{{ 7 * 7 }}" in one for one in found.scripts)
    for script in (*pages.SCRIPTS, pages.STYLE):
        page = page.replace(pages._asset(script), "")
    assert "<script>alert" not in page and "onerror=alert(2)>" not in page


def test_what_is_not_seen_or_turns_a_line_is_shown(page):
    for name in pages.SCRIPTS:
        page = page.replace(pages._asset(name), "")
    assert not [one for one in page if unseen(one)]
    assert "\\u202egpj.exe" in Elements(page).text


def test_the_data_in_the_page_is_the_report(page):
    [script] = [one for one in Elements(page).scripts if one.startswith("[{")]
    assert not set("<>&") & set(script)
    [found] = json.loads(script)
    assert found["trials"]["settings"]["model.plain"][:4] == EVIL[:4]
    assert found["trials"]["settings"]["model.plain"][4:] == [*map(pages.visible, EVIL[4:]), None]


def shown(value: Any) -> Any:
    if isinstance(value, str):
        return pages.visible(value)
    if isinstance(value, dict):
        return {pages.visible(key): shown(one) for key, one in value.items()}
    return [shown(one) for one in value] if isinstance(value, list) else value


texts = st.text(st.sampled_from("ab\\\"'<>&/u202e\u202e\u2066\u200f\ufeff\x1b\x00\x7f\x9f\n\t \u2028é😀"))


leaves = texts | st.integers() | st.booleans() | st.none()


@given(st.recursive(leaves, lambda one: st.lists(one) | st.dictionaries(texts, one)))
def test_embedded_data_is_what_was_given_but_for_what_is_not_seen(value):
    text = pages.embedded(value)
    assert text.isascii() and not set("<>&") & set(text)
    found = json.loads(text)
    assert found == shown(value) or len(json.dumps(found)) < len(json.dumps(shown(value)))  # keys may become one


def test_numbers_that_json_has_not_are_refused():
    with pytest.raises(ValueError, match="JSON"):
        pages.embedded({"x": float("nan")})


def test_the_policy_names_each_script_and_lets_nothing_be_fetched(page):
    found = Elements(page)
    [policy] = [attrs["content"] for _, attrs in found.tags if attrs.get("http-equiv") == "Content-Security-Policy"]
    assert policy is not None and policy.startswith("default-src 'none'; ") and "unsafe-eval" not in policy
    rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
    assert rules["img-src"] == "data: blob:" and "http" not in policy
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(one.encode()).digest()).decode()}'" for one in found.scripts}
    assert len(set(rules["script-src"].split()) & hashes) == len(pages.SCRIPTS)
    assert not [attrs for _, attrs in found.tags if attrs.get("src")]
    anchors = {link for _, attrs in found.tags if (link := attrs.get("href"))}
    assert anchors <= {f"#{attrs['id']}" for _, attrs in found.tags if attrs.get("id")} and "#answer" in anchors


def test_a_live_page_is_the_same_with_its_parts_as_files(written, page):
    served = Elements(live.study_page(written.to_json(), "abc.1"))
    files = [attrs["src"] or "" for tag, attrs in served.tags if tag == "script" and attrs.get("src")]
    plotly = [attrs["href"] or "" for tag, attrs in served.tags if attrs.get("rel") == "preload"]
    assert [one.rpartition("/")[2] for one in plotly + files] == [*pages.SCRIPTS, live.LIVE]
    body = [
        Elements(text.partition("<article")[2]).text.split()
        for text in (live.study_page(written.to_json(), "a.1"), page)
    ]
    assert body[0] == body[1] and len(body[0]) > 100
    assert not [one for tag, one in served.tags if tag == "style" or one.get("style")]


def test_plotlys_script_is_the_released_one_with_its_licence():
    assets = ROOT / "hpo" / "analysis" / "report" / "assets"
    assert hashlib.sha256((assets / "plotly-cartesian.min.js").read_bytes()).hexdigest() == PLOTLY
    assert "MIT" in (assets / "plotly-cartesian.LICENSE.txt").read_text()
    assert {path.name for path in assets.iterdir()} >= {*pages.SCRIPTS, pages.STYLE}
    assert files("hpo.analysis.report") / "assets" == assets


def test_no_script_ends_the_element_it_stands_in():
    for name in pages.SCRIPTS:
        assert not re.search(r"</script|<!--", pages._asset(name), re.IGNORECASE), name


def test_a_missing_extra_is_one_sentence(monkeypatch, tmp_path, written):
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    with pytest.raises(UserError, match=r"a report needs jinja2: pip install 'hpo\[report\]'"):
        pages.write([written], tmp_path / "x.html")


def test_a_place_that_cannot_be_written_is_named(written, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"none/x\.html cannot be written, .*none is not a directory: make it first\."):
        pages.write([written], tmp_path / "none" / "x.html")
    assert not (tmp_path / "none").exists()
    with pytest.raises(UserError, match="cannot be written"):
        pages.write([written], tmp_path / "file" / "x.html")


def test_the_command_writes_one_study_or_several(tmp_path):
    home = Home.at(tmp_path / "home").create()
    ledger = open_crafted(home.root / "ledger.db", names=("a", "b"))
    put_trial(ledger, 0, "complete", (0.5,))
    ledger.close()
    both = hpo("report", "a", "b", "--to", str(tmp_path / "both.html"), home=home)
    assert both.exit_code == 0, both.output
    assert both.stdout == f"page: {tmp_path / 'both.html'}\n"
    text = Elements((tmp_path / "both.html").read_text()).text
    assert "a beside b: report" in text and "Studies side by side" in text
    assert hpo("report", "a", "b", "--to", str(tmp_path), home=home).exit_code == 2
    unknown = hpo("report", "a", "c", "--to", str(tmp_path / "x.html"), home=home)
    assert unknown.exit_code == 2 and "no study 'c' in this ledger (it holds a, b)" in unknown.stderr
    several = hpo("report", home=home)
    assert several.exit_code == 2 and "name one" in several.stderr
    assert not Path(tmp_path / "x.html").exists()


def test_another_trial_that_is_better_under_other_seeds_is_named():
    spread = [{"mean": mean, "error": 0.1, "count": 3} for mean in (0.4, 0.6)]
    means = ((3, spread[0]), (5, spread[1]), (7, None))
    rows = [{"trial": number, "again": mean, "left": False} for number, mean in means]
    for direction, best in (("maximize", 5), ("minimize", 3)):
        report = {"sure": {"confirm": [{"rows": rows}]}, "objectives": [{"direction": direction}]}
        assert pages.steadier(report, best) is None
        other = pages.steadier(report, 8 - best)
        assert other is not None and other["trial"] == best
    assert pages.steadier({"sure": {"confirm": []}, "objectives": [{"direction": "minimize"}]}, 3) is None


def confirmed_report(written: data.StudyReport, **changed: Any) -> dict[str, Any]:
    """The report of a study of which other seeds put the second one of the search first."""
    ahead = {"mean": 0.0046, "error": 0.0097, "count": 3}
    spread = [{"mean": mean, "error": 0.0079, "count": 3} for mean in (0.27557, 0.28017)]
    rows = [
        {"trial": n, "selected": 0.285086, "again": s, "held_out": None, "gap": None, "left": False}
        for n, s in zip((1, 0), spread, strict=True)
    ]
    table = {"metric": "val/loss", "hold_out": None, "rows": rows, "ahead": ahead, "default": None}
    best = written.answer["best"][0] | {"number": 1, "values": {"val/loss": 0.285086}, "means": {"val/loss": 0.27557}}
    best |= {"held_out": {}, "held_out_as": {}, "instead": []}
    objectives = [{"metric": "val/loss", "direction": "minimize", "select": "last"}]
    sure = {**written.sure, "confirm": [table], "noise": {"val/loss": {"deviation": 0.0088, "runs": 6}}}
    trials = {
        "number": [0, 1],
        "place": [0, 1],
        "values": {"val/loss": [0.2677, 0.285086]},
        "why": ["", ""],
        "state": 2 * ["complete"],
    }
    answer = {**written.answer, "best": [best], "front": 1, "seeds": True}
    report = {"objectives": objectives, "sure": sure, "answer": answer, "trials": {**written.trials, **trials}}
    return written.to_json() | report | changed


def test_the_headline_is_what_other_seeds_confirm(written):
    text = " ".join(Elements(live.study_page(confirmed_report(written), "a.1")).text.split())
    assert "is the best of 11 trials under other seeds: val/loss 0.2756 ± 0.0079 (less is better)." in text
    assert "in the search0.2851" in text and "0.285086" not in text
    assert "ahead of trial 0 by0.0046 ± 0.0097 0.5 times the noise of one run" in text
    assert text.index("The answer") < text.rindex("Cautions") < text.index("How sure that is")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("widen the range", "Widen the range"),
        ("loss.scale.rank_ic = 2.9", "loss.scale.rank_ic = 2.9"),
        ("num_heads, of which", "num_heads, of which"),
        ("seeds: three", "Seeds: three"),
        ("held-out days", "Held-out days"),
        ("val/loss is noisy", "val/loss is noisy"),
        ("", ""),
    ],
)
def test_a_sentence_begins_with_a_capital_unless_with_a_name(text, shown):
    assert pages.capital(text) == shown


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [(0.285086, 0.0088, "0.2851"), (12.3456, 0.5, "12.35"), (1234.5, 80.0, "1234"), (0.285086, None, "0.2851")],
)
def test_a_value_has_the_digits_of_its_error(value, error, text):
    assert pages.to_error(value, error) == text


def test_without_other_seeds_the_lead_is_over_the_next_of_the_search(written):
    alone = confirmed_report(written)
    alone["sure"] = {**alone["sure"], "confirm": [], "noise": {}}
    assert pages.lead(alone, 0) == {"by": pytest.approx(0.017386), "error": None, "trial": 1}
    assert pages.lead(confirmed_report(written, objectives=2 * alone["objectives"]), 0) is None


def test_a_lead_that_is_equal_under_each_seed_has_no_error(written):
    """The differences are then equal up to rounding, and the rounding is no noise to show."""
    report = confirmed_report(written)
    [table, *others] = report["sure"]["confirm"]
    number, ahead = table["rows"][0]["trial"], {"mean": 0.018955594666666686, "count": 2}
    for error, shown in ((5.6e-17, None), (0.0, None), (0.002, 0.002)):
        report["sure"] = {**report["sure"], "confirm": [{**table, "ahead": {**ahead, "error": error}}, *others]}
        lead = pages.lead(report, number)
        assert lead is not None and (lead["by"], lead["error"]) == (ahead["mean"], shown)


def test_the_first_failure_is_named_with_its_error():
    trials = {"number": [3, 4, 5], "state": ["pruned", "failed", "infeasible"], "why": ["rank 2", "", "ValueError: no"]}
    assert pages.first_failure(trials) == "; trial 5: ValueError: no"
    assert pages.first_failure({"number": [3], "state": ["pruned"], "why": ["rank 2"]}) == ""


def test_parameters_that_explain_most_stand_first():
    report = {"objectives": [{"metric": "m"}], "importances": {"shares": {"m": {"width": 0.7, "lr": 0.2}}}}
    assert list(pages.by_importance({"act": 1, "lr": 2, "width": 3}, report)) == ["width", "lr", "act"]


def lightness(colour: str) -> float:
    """CIE L* of a colour such as `#0b2f73`, by the sRGB standard, IEC 61966-2-1."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    y = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 116 * y ** (1 / 3) - 16


def test_the_colours_of_states_are_told_apart_in_grey():
    names = "complete|pruned|failed|infeasible|running|paused|waiting|chosen"
    colours = re.findall(rf"--({names}): (#[0-9a-f]{{6}});", pages._asset(pages.STYLE))
    assert len(colours) == 3 * 8  # of light, dark and paper
    for scheme in (colours[:8], colours[8:16], colours[16:]):
        ranked = sorted(lightness(colour) for _, colour in scheme)
        assert min(b - a for a, b in pairwise(ranked)) >= 4.5
