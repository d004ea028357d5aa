"""A report in a real browser: all figures, what a user does with them, and what may not happen meanwhile."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import browsing
import evil_study
import pytest
from browsing import CHROMIUM, NEEDED, chromium, grave_faults
from crafted import change_trial, open_crafted, put_trial

from bench import many_trials
from hpo.analysis.report import data, page
from hpo.ledger import tags
from hpo.ledger.database import tables
from hpo.storage.home import Home

pytestmark = [
    pytest.mark.whole,
    pytest.mark.usefixtures("process"),
    pytest.mark.skipif(CHROMIUM is None, reason=NEEDED),
]
DRAWN = "[...document.querySelectorAll('[data-figure]')].map(f => [f.dataset.figure, !!f.querySelector('.main-svg')])"
OVERLAPS = """[...document.querySelectorAll('[data-figure]')].filter(figure => {
  const [bar, legend] = ['.modebar', '.legend'].map(name => figure.querySelector(name)?.getBoundingClientRect());
  const beside = bar && legend && (bar.left >= legend.right || legend.left >= bar.right);
  return bar && legend && !beside && bar.top < legend.bottom && legend.top < bar.bottom;
}).map(figure => figure.dataset.figure)"""
SCHEMES = ["light", pytest.param("dark", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def report_of(tmp_path_factory) -> Callable[[int], Path]:
    """The page of a study of so many trials of up to fifty reports."""
    made: dict[int, Path] = {}

    def of(count: int) -> Path:
        if count not in made:
            home = Home.at(tmp_path_factory.mktemp("many") / "home")
            ledger = many_trials.write(home, count)
            made[count] = page.write([data.read(ledger, home, "many")], home.root / "report.html")
            ledger.close()
        return made[count]

    return of


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@contextmanager
def opened(browser: Any, file: Path, every: bool = True, **how: Any) -> Iterator[Any]:
    """The page, with every figure drawn, or as it comes into sight."""
    with browsing.opened(browser, file.as_uri(), **how) as shown:
        shown.wait_for_selector("html[data-ready]", timeout=120_000)
        if every:
            shown.evaluate("Report.redrawAll(true)")
        yield shown


def rows(shown: Any) -> list[list[str]]:
    cells = "r => [...r.cells].map(c => c.innerText)"
    return shown.evaluate(f"[...document.querySelectorAll('[data-table] tbody tr')].map({cells})")


def of_plot(shown: Any, kind: str, words: str) -> Any:
    """What an expression says of the plotly figure of a kind."""
    return shown.evaluate(f"document.querySelector('[data-figure={kind}] .plot').{words}")


@pytest.mark.parametrize("count", [10, 1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_all_figures_are_drawn_and_the_page_stays_small(count, browser, report_of):
    with opened(browser, report_of(count)) as shown:
        drawn = dict(shown.evaluate(DRAWN))
        lacking = {kind for kind, there in drawn.items() if not there} - {"chosen"}  # nothing is marked yet
        assert lacking <= ({"contour"} if count == 10 else set())  # which takes three complete trials
        assert all(shown.inner_text(f"[data-figure={kind}] .plot").startswith("Not drawn: it") for kind in lacking)
        assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")
        assert len(rows(shown)) == min(count, 100)
        assert not shown.locator("[data-attr=sendChartToCloud], [data-title^=Share]").count()
        assert shown.locator(".modebar-btn").count()
    assert report_of(count).stat().st_size < 8e6


def test_five_hundred_curves_are_a_few_traces(browser, report_of):
    """One trace a curve would take plotly many seconds."""
    with opened(browser, report_of(1000), every=False) as shown:
        shown.locator("[data-figure=curves]").scroll_into_view_if_needed()
        shown.wait_for_selector("[data-figure=curves] .main-svg")
        trials = {*of_plot(shown, "curves", "data.flatMap(t => t.text)")} - {""}
        assert len(trials) == 500 and of_plot(shown, "curves", "data.length") < 12
        assert "500 of" in shown.inner_text("[data-figure=curves] figcaption")


def test_filters_marks_and_choices_show_what_was_asked_for(browser, report_of):
    with opened(browser, report_of(1000), every=False) as shown:
        shown.uncheck("[name=state][value=complete]")
        assert {row[2] for row in rows(shown)} == {"failed", "infeasible", "pruned"}
        shown.check("[name=state][value=complete]")
        shown.select_option("[name=column]", label="train.optim.lr")
        shown.fill("[name=from]", "0.001")
        shown.fill("[name=to]", "0.01")
        column = shown.inner_text("[data-table] thead").split("\t").index("lr")
        values = [float(row[column]) for row in rows(shown)]
        assert len(values) == 100 and all(0.001 <= value <= 0.01 for value in values)
        shown.fill("[name=from]", "one")
        assert not rows(shown) and shown.query_selector("[name=from]:invalid"), "no number of a column of numbers"
        shown.fill("[name=from]", "0.001")
        boxes = shown.query_selector_all("[data-table] tbody input")
        boxes[1].check()
        head = shown.locator("[data-differences] thead th").all_inner_texts()
        best = shown.evaluate("Report.pages[0].report.answer.best[0].number")
        assert head[2:] == [f"trial {best}, the answer"], "one mark alone is compared with the answer"
        boxes[0].check()
        differences = shown.inner_text("[data-differences]")
        assert "train.optim.lr" in differences and "val/loss" in differences
        shown.locator("[data-figure=chosen]").scroll_into_view_if_needed()
        shown.wait_for_selector("[data-figure=chosen] .main-svg")
        shown.locator("[data-figure=groups]").scroll_into_view_if_needed()
        shown.select_option("[data-figure=groups] [name=group]", "train.optim.name")
        names = of_plot(shown, "groups", "data.map(t => t.name).filter(n => n)")
        assert [name.partition(" (n = ")[0] for name in names] == ["adamw", "sgd"]
        shown.locator("[data-figure=history]").scroll_into_view_if_needed()
        shown.select_option("[data-figure=history] [name=along]", "time")
        title = of_plot(shown, "history", "layout.xaxis.title.text")
        assert title == "hours since the first trial began"


def test_a_group_shows_mean_and_deviation(browser, report_of):
    """Against the mean over the trials of the report's own data."""
    with opened(browser, report_of(10)) as shown:
        shown.select_option("[data-figure=groups] [name=group]", "state")
        [x, y] = of_plot(
            shown, "groups", "data.filter(t => t.name?.startsWith('complete (n = ')).flatMap(t => [t.x, t.y])"
        )
        report = shown.evaluate("JSON.parse(document.getElementById('report-data').textContent)[0]")
        lines, state = report["curves"]["lines"]["val/loss"], report["trials"]["state"]
        own = [line[1] for number, line in lines.items() if state[int(number)] == "complete"]
        assert x == list(range(1, 51))
        assert y == pytest.approx([sum(points) / len(points) for points in zip(*own, strict=True)])


def test_the_first_screen_has_the_answer_beside_its_pictures(browser, report_of):
    with opened(browser, report_of(1000), every=False) as shown:
        shown.wait_for_selector("[data-figure=curves] .main-svg")
        answer, history, lines = (
            shown.locator(one).bounding_box() for one in (".headline", "[data-figure=history]", "[data-figure=curves]")
        )
        assert answer["x"] + answer["width"] < history["x"] and answer["y"] < 300
        assert history["y"] + history["height"] < lines["y"] + 300 < 900
        best = shown.evaluate("Report.pages[0].report.answer.best[0].number")
        names = of_plot(shown, "history", "data.map(t => t.name)")
        assert names[-1] == f"the answer, trial {best}"
        assert f"the answer, trial {best}" in of_plot(shown, "curves", "data.map(t => t.name)")
        assert of_plot(shown, "history", "layout.font.family") == shown.evaluate(
            "getComputedStyle(document.body).fontFamily"
        )


@pytest.mark.parametrize("width", [1280, 600])
def test_no_legend_stands_below_the_toolbar_of_its_figure(width, browser, report_of):
    with opened(browser, report_of(10), width=width) as shown:
        legends = shown.evaluate("document.querySelectorAll('[data-figure] .legend').length")
        bars = shown.evaluate("document.querySelectorAll('[data-figure] .modebar-btn').length")
        assert legends >= 4 and bars > legends
        assert shown.evaluate(OVERLAPS) == []


def test_the_table_of_contents_leads_to_each_part(browser, report_of):
    with opened(browser, report_of(10), every=False) as shown:
        for link in shown.locator(".contents a").all():
            link.click()
            top = shown.evaluate("document.querySelector(location.hash).getBoundingClientRect().top")
            end = shown.evaluate("scrollY + innerHeight >= document.documentElement.scrollHeight - 2")
            assert 0 <= top < 80 or end


def test_a_reason_is_read_in_full_on_demand(browser, report_of):
    with opened(browser, report_of(10), every=False) as shown:
        shown.evaluate(
            """() => { const study = Report.pages[0], { trials } = study.report;
            trials.why[0] = "rank 9 of 10 at rung 0, ".repeat(9); study.changed(); }"""
        )
        button = shown.locator("button.why").first
        narrow = button.bounding_box()["height"]
        button.click()
        assert button.get_attribute("aria-expanded") == "true" and button.bounding_box()["height"] > 1.8 * narrow
        shown.evaluate("Report.pages[0].changed()")
        assert shown.locator("button.why").first.get_attribute("aria-expanded") == "true", "news leave it open"
        shown.locator("button.why").first.click()
        assert shown.locator("button.why").first.bounding_box()["height"] == narrow


def test_numbers_of_a_column_stand_below_each_other(browser, report_of):
    with opened(browser, report_of(1000), every=False) as shown:
        heads = shown.inner_text("[data-table] thead").split("\t")
        for name, form in (("val/loss", r"\d+\.\d{4}"), ("lr", r"\d\.\d\de[+-]\d")):
            cells = [row[heads.index(name)] for row in rows(shown)]
            assert [cell for cell in cells if not re.fullmatch(form, cell)] == []
        written = "Figures.written([0.2677, 0.28512, 1.4], 0.0088)"
        assert shown.evaluate(f"[0.2677, 0.28512, 1.4].map({written})") == ["0.2677", "0.2851", "1.4000"]
        assert shown.evaluate("[1, 20, null].map(Figures.written([1, 20, null]))") == ["1", "20", ""]


def test_time_leaves_out_pauses_and_groups_have_three_bands(browser, tmp_path):
    home = Home.at(tmp_path / "home").create()
    ledger = open_crafted(home.root / "ledger.db")
    for number in range(12):
        trial = put_trial(ledger, number, "complete", (0.5, 0.6), params={"lr": 0.01 * (number + 1)})
        begun = 10.0 * number + (5000.0 if number > 5 else 0.0)
        with ledger.write() as connection:
            mine = tables.attempts.c.trial_id == trial
            connection.execute(
                tables.attempts.update().where(mine).values(started_at=begun, ended_at=begun + 10, outcome="complete")
            )
        change_trial(ledger, number, started_at=begun, ended_at=begun + 10)
    written = page.write([data.read(ledger, home, "crafted")], tmp_path / "pauses.html")
    ledger.close()
    with opened(browser, written) as shown:
        assert max(x for x in of_plot(shown, "timeline", "data[0].x") if x is not None) == 120.0
        assert "A pause of 83 minutes, in which no trial ran, is left out." in shown.inner_text(
            "[data-figure=timeline]"
        )
        shown.select_option("[data-figure=history] [name=along]", "time")
        assert of_plot(shown, "history", "data[0].x")[-1] == 120.0
        assert (
            of_plot(shown, "history", "layout.xaxis.title.text")
            == "seconds since the first trial began, without pauses"
        )
        assert len(of_plot(shown, "groups", "data.filter(t => t.fill === 'toself')")) == 3


@pytest.mark.parametrize("scheme", SCHEMES)
def test_axe_finds_no_serious_fault(scheme, browser, report_of):
    with opened(browser, report_of(10), scheme=scheme) as shown:
        shown.query_selector_all("[data-table] tbody input")[0].check()
        assert grave_faults(shown) == []


def test_a_narrow_screen_and_paper_hold_all_of_it(browser, report_of, tmp_path):
    with opened(browser, report_of(10), width=360) as shown:
        assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")
        shown.emulate_media(media="print", color_scheme="dark")
        assert shown.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        paper = "document.querySelector('[data-figure=history] .plot').layout.paper_bgcolor"
        shown.wait_for_function(f"{paper} === '#ffffff'")
        assert shown.evaluate("getComputedStyle(document.querySelector('[data-filter]')).display") == "none"
        assert len(shown.pdf()) > 20_000


def test_what_users_have_written_is_text_in_the_browser_too(browser, tmp_path):
    file = page.write([evil_study.read(tmp_path)], tmp_path / "evil.html")
    with opened(browser, file) as shown:
        for box in shown.query_selector_all("[data-table] tbody input")[:3]:
            box.check()
        selects = shown.locator("[data-figure] select")
        for place in range(selects.count()):  # what one of them is set to may change another's options
            for value in selects.nth(place).evaluate("s => [...s.options].map(o => o.value)"):
                selects.nth(place).select_option(value)
        assert not shown.query_selector_all("img, svg a, svg script")
        assert evil_study.EVIL[0] in shown.inner_text("[data-table]") and evil_study.EVIL[0] in shown.inner_text(
            "[data-differences]"
        )


def test_studies_side_by_side_are_one_page(browser, tmp_path):
    home = Home.at(tmp_path / "home")
    many_trials.write(home, 12, "first").close()
    ledger = many_trials.write(home, 8, "second", seed=1)
    reports = [data.read(ledger, home, name) for name in ("first", "second")]
    ledger.close()
    with opened(browser, page.write(reports, tmp_path / "two.html")) as shown:
        assert shown.evaluate("document.querySelector('[data-figure=studies] .plot').data.map(t => t.name)") == [
            "first",
            "second",
        ]
        assert len(shown.query_selector_all("article")) == 2
        assert all(there for kind, there in shown.evaluate(DRAWN) if kind != "chosen")


@pytest.fixture(scope="module")
def side_by_side(tmp_path_factory) -> Callable[..., Path]:
    """The page of two studies of one metric, of which each has its direction; the second one's trials have tags."""

    def of(*directions: str) -> Path:
        reports = []
        for place, direction in enumerate(directions):
            home = Home.at(tmp_path_factory.mktemp("side") / "home").create()
            objectives = [{"metric": "val/accuracy", "direction": direction, "select": "last"}]
            ledger = open_crafted(home.root / "ledger.db", (f"study{place}",), objectives=objectives)
            for number in range(4):
                put_trial(ledger, number, "complete", (0.5 + number / 10,) * 2)
                given = {"team": ("vision", "speech")[number % 2]} if place and number < 3 else {}
                ledger.transact(lambda connection, n=number, g=given: tags.put(connection, 1, n, g))
            reports.append(data.read(ledger, home, f"study{place}"))
            ledger.close()
        return page.write(reports, tmp_path_factory.mktemp("page") / "report.html")

    return of


@pytest.mark.parametrize(
    ("directions", "title", "warned"),
    [
        (("minimize", "minimize"), "val/accuracy (less is better)", False),
        (("minimize", "maximize"), "value", True),
    ],
)
def test_studies_of_two_directions_are_not_drawn_on_one_scale(browser, side_by_side, directions, title, warned):
    with opened(browser, side_by_side(*directions)) as shown:
        assert of_plot(shown, "studies", "layout.yaxis.title.text") == title
        caption = shown.inner_text("[data-figure=studies] figcaption")
        said = "They are judged differently, val/accuracy (less is better), val/accuracy (more is better): the curves"
        assert (said in caption) is warned
        assert of_plot(shown, "studies", "data.map(t => t.name)") == ["study0", "study1"]


def test_trials_are_grouped_by_their_tags(browser, side_by_side):
    with opened(browser, side_by_side("maximize", "maximize")) as shown:
        groups = shown.locator("[data-figure=groups]").nth(1)
        groups.scroll_into_view_if_needed()
        groups.locator("[name=group]").select_option("tag:team")
        names = "document.querySelectorAll('[data-figure=groups] .plot')[1].data.map(t => t.name).filter(n => n)"
        assert sorted(shown.evaluate(names)) == ["speech (n = 1)", "vision (n = 2)", "without it (n = 1)"]
        assert "by tag team" in groups.locator("figcaption").inner_text()
