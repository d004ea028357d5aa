"""The live pages in a real browser, from a real server: what comes, what goes, what users have written."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import browsing
import evil_study
import pytest
from browsing import CHROMIUM, NEEDED, chromium, grave_faults
from crafted import change_trial, open_crafted, put_trial
from served import port_of, served
from sqlalchemy import delete, insert

from bench import many_trials
from hpo.analysis.serve import channel, live_study
from hpo.analysis.serve.server import Server
from hpo.ledger import Ledger
from hpo.ledger.database import tables
from hpo.storage.home import Home

pytestmark = [
    pytest.mark.whole,
    pytest.mark.usefixtures("process"),
    pytest.mark.skipif(CHROMIUM is None, reason=NEEDED),
]
SCHEMES = ["light", pytest.param("dark", marks=pytest.mark.slow)]
ROWS = "[...document.querySelectorAll('[data-table] tbody tr')].map(r => [...r.cells].map(c => c.innerText))"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(channel, "PAUSE", 0.05)
    monkeypatch.setattr(live_study, "SOON", 0.5)


def at(server: Server, path: str) -> str:
    base, _, query = server.address.partition("?")
    return f"{base}{path}?{query}"


@contextmanager
def opened(browser: Any, server: Server, path: str, **how: Any) -> Iterator[Any]:
    with browsing.opened(browser, at(server, path), **how) as shown:
        shown.wait_for_selector("html[data-ready]", timeout=60_000)
        live(shown)
        yield shown


def live(shown: Any) -> None:
    until(shown, "document.querySelector('[data-state]').textContent === 'live'")


def until(shown: Any, condition: str) -> None:
    """Asks from outside: the policy of the pages lets nobody evaluate a text within."""
    deadline = time.monotonic() + 60
    while not shown.evaluate(condition):
        assert time.monotonic() < deadline, (condition, shown.inner_text("body")[:2000])
        shown.wait_for_timeout(50)


@pytest.fixture
def crafted(tmp_path) -> Iterator[tuple[Home, Ledger]]:
    ledger = open_crafted(tmp_path / "ledger.db")
    put_trial(ledger, 0, "complete", (0.5, 0.6))
    put_trial(ledger, 1, "running", (0.2,), revision=1)
    yield Home.at(tmp_path), ledger
    ledger.close()


def report_again(ledger: Ledger, number: int, epoch: int, value: float, **columns: Any) -> None:
    with ledger.write() as connection:
        mine = tables.trials.c.number == number
        id_ = connection.execute(tables.trials.select().where(mine)).mappings().one()["id"]
        point = {"trial_id": id_, "step": 10 * epoch, "key": "val/accuracy", "fold": 0, "epoch": epoch, "value": value}
        connection.execute(insert(tables.reports).values(**point, fence=1, revision=epoch, at=float(epoch)))
    change_trial(ledger, number, epoch=epoch, step=10 * epoch, revision=epoch, **columns)


def row(shown: Any, number: int) -> list[str]:
    return next(one for one in shown.evaluate(ROWS) if one[1] == str(number))


def at_rest(shown: Any, selector: str) -> Any:
    """It in sight, and no figure near it left to draw, which would move it."""
    found = shown.locator(selector)
    found.evaluate("element => element.scrollIntoView()")  # at once: the page may draw the row anew meanwhile
    until(shown, "Report.pages[0].plots.every((one) => !one.stale || !one.near)")
    return found


def test_rows_and_curves_come_and_what_was_chosen_stays(browser, crafted):
    home, ledger = crafted
    with served(home) as server, opened(browser, server, "study/crafted/") as shown:
        assert row(shown, 1)[2] == "running"
        at_rest(shown, "[aria-label='mark trial 0']")
        shown.check("[aria-label='mark trial 0']")
        shown.locator("[data-figure=curves]").scroll_into_view_if_needed()
        report_again(ledger, 1, 2, 0.7)
        put_trial(ledger, 2, "waiting", revision=1)
        until(shown, f"{ROWS}.some(r => r[1] === '2' && r[2] === 'waiting')")
        until(shown, "document.querySelector('[data-figure=curves] .plot').data?.some(t => t.y.includes(0.7))")
        shown.uncheck("[name=state][value=waiting]")
        report_again(ledger, 1, 3, 0.9, state="complete", values=[0.9], ended_at=3.0)
        until(shown, f"{ROWS}.some(r => r[1] === '1' && r[2] === 'complete')")
        until(shown, "document.querySelector('[data-part=answer]').innerText.includes('Trial 1 is the best')")
        assert {one[1] for one in shown.evaluate(ROWS)} == {"0", "1"}  # the filter holds
        assert shown.is_checked("[aria-label='mark trial 0']") and not shown.is_checked("[value=waiting]")
        assert "2 of 10 trials ended" in shown.inner_text("[data-status]")
        with ledger.write() as connection:
            for table in ("reports", "attempts", "asks", "trials", "studies"):
                connection.execute(delete(getattr(tables, table)))
        until(shown, "document.querySelector('[data-state]').textContent.startsWith('This is in the ledger no more')")


def test_a_click_that_a_new_row_comes_into_is_not_lost(browser, crafted):
    home, ledger = crafted
    path = "study/crafted/"
    with served(home) as server, opened(browser, server, path) as shown, opened(browser, server, path) as other:
        box = at_rest(shown, "[aria-label='mark trial 0']")
        box.hover()
        shown.mouse.down()
        put_trial(ledger, 2, "waiting", revision=1)
        until(other, f"{ROWS}.some(r => r[1] === '2')")
        time.sleep(0.5)  # both pages are told within one look at the ledger
        shown.mouse.up()
        until(shown, f"{ROWS}.some(r => r[1] === '2')")
        assert box.is_checked()


def test_a_server_that_was_away_loses_and_doubles_nothing(browser, crafted):
    home, ledger = crafted
    with served(home) as server:
        port = port_of(server)
        context = browsing.opened(browser, at(server, "study/crafted/"), away=True)
        shown = context.__enter__()
        shown.wait_for_selector("html[data-ready]")
        live(shown)
    until(shown, "document.querySelector('[data-state]').textContent.startsWith('The server does not answer')")
    report_again(ledger, 1, 2, 0.7)
    put_trial(ledger, 2, "running", (0.3,), revision=1)
    with served(home, port):
        live(shown)
        until(shown, f"{ROWS}.some(r => r[1] === '2')")
        until(shown, "Report.pages[0].report.curves.lines['val/accuracy'][1][1].length === 2")
        assert sorted(one[1] for one in shown.evaluate(ROWS)) == ["0", "1", "2"]
        context.__exit__(None, None, None)


def test_the_pages_of_the_home_and_of_a_trial_follow_too(browser, crafted):
    home, ledger = crafted
    log = home.root / "logs" / "crafted.19700101T000000-1.worker-0.log"
    log.parent.mkdir()
    log.write_text("<b>epoch 1</b>\n")
    with ledger.write() as connection:
        run = {"tracker": "http://127.0.0.1:5000", "study_id": 1, "number": 1, "run_id": "abc", "revision": 1}
        connection.execute(insert(tables.mirrors).values(run))
    with served(home) as server, opened(browser, server, "study/crafted/trial/1/") as shown:
        assert shown.get_attribute("header a", "href") == "http://127.0.0.1:5000/#/runs/abc"
        assert "<b>epoch 1</b>" in shown.inner_text("[data-part=logs]")
        report_again(ledger, 1, 2, 0.7)
        until(shown, "document.querySelector('[data-part=head]').innerText.includes('epoch 2')")
        until(shown, "document.querySelector('.plot').data[0].y.includes(0.7)")
        shown.select_option("[name=along]", "time")
        assert (
            shown.evaluate("document.querySelector('.plot').layout.xaxis.title.text") == "seconds since the trial began"
        )
    with served(home) as server, browsing.opened(browser, at(server, "")) as shown:
        shown.wait_for_selector("[data-part=studies]")
        live(shown)
        assert "1 running, 1 complete" in shown.inner_text("[data-part=studies]")
        change_trial(ledger, 1, state="failed", revision=9)
        until(shown, "document.querySelector('main').innerText.includes('1 failed')")
        shown.click("main a")
        shown.wait_for_selector("html[data-ready]")
        assert shown.url.endswith("/study/crafted/")


def test_a_trial_opens_with_its_objective_and_several_curves(browser, tmp_path):
    ledger = open_crafted(tmp_path / "ledger.db")
    metrics = {"val/loss": (0.9, 0.7), "train/loss": (0.8, 0.5), "train/lr": (0.1, 0.05)}
    metrics |= {"system/memory_mb": (300.0, 310.0), "time/epoch_seconds": (1.5, 1.4)}
    for number in range(3):
        put_trial(ledger, number, "complete", (0.5, 0.6), metrics=metrics, params={"lr": 0.1})
    ledger.close()
    with served(Home.at(tmp_path)) as server, opened(browser, server, "study/crafted/trial/1/") as shown:
        plot = "document.querySelector('[data-figure=trial] .plot')"
        assert "val/accuracy 0.6" in shown.inner_text(".headline")
        assert shown.evaluate(f"{plot}.data.map(t => t.name)") == ["val/accuracy", "val/loss", "train/loss"]
        assert shown.evaluate(f"{plot}.data.map(t => t.yaxis)") == ["y", "y2", "y2"], "losses share a panel"
        shown.check("[name=metric][value=lr]")
        assert shown.evaluate(f"{plot}.data.at(-1).name") == "train/lr"
        heads = shown.locator("main h2").all_inner_texts()
        assert heads[:3] == ["Curves", "Parameters", "Logs"] and heads[-1] == "System figures"
        system = shown.locator("[data-figure=system]")
        assert not system.is_visible()
        shown.click("#system summary >> nth=0")
        until(shown, "document.querySelector('[data-figure=system] .plot').data?.length === 2")
        shown.click("text=next trial")
        shown.wait_for_selector("html[data-ready]")
        assert shown.url.endswith("/trial/2/") and "Trial 2" in shown.inner_text("h1")
        shown.click(".bar a >> text=studies")
        shown.wait_for_selector("[data-part=studies]")
        assert shown.locator(".studies progress").get_attribute("value") == "3"
        assert shown.locator("svg.line").get_attribute("aria-label").startswith("The best so far of crafted, from 0.6")


def test_any_metric_and_time_are_fetched_when_they_are_asked_for(browser, tmp_path):
    ledger = open_crafted(tmp_path / "ledger.db")
    metrics = {f"val/m{i}": (0.1 * i, 0.2 * i) for i in range(1, 8)}
    put_trial(ledger, 0, "complete", (0.5, 0.6), metrics=metrics)
    put_trial(ledger, 1, "complete", (0.5, 0.7), metrics=metrics)
    ledger.close()
    with served(Home.at(tmp_path)) as server, opened(browser, server, "study/crafted/") as shown:
        shown.locator("[data-figure=curves]").scroll_into_view_if_needed()
        plot = "document.querySelector('[data-figure=curves] .plot')"
        shown.select_option("[data-figure=curves] [name=metric]", "val/m7")
        until(shown, f"{plot}.data?.[0]?.y.includes(1.4) && {plot}.layout.yaxis.title.text === 'val/m7'")
        shown.select_option("[data-figure=curves] [name=along]", "time")
        until(shown, f"{plot}.layout?.xaxis.title.text === 'seconds since the trial began'")
        assert shown.evaluate(f"{plot}.data[0].y") == 2 * [0.7, 1.4, None], "the same values along another axis"


def test_what_users_have_written_is_text_in_live_pages_too(browser, tmp_path):
    evil_study.read(tmp_path)
    with served(Home.at(tmp_path)) as server:
        with opened(browser, server, "study/crafted/") as shown:
            shown.evaluate("Report.redrawAll(true)")
            assert evil_study.EVIL[0] in shown.inner_text("[data-table]")
            assert not shown.query_selector_all("img, svg a, svg script, main script")
        for number in (4, len(evil_study.EVIL)):  # of a mark of direction, and of an error
            with opened(browser, server, f"study/crafted/trial/{number}/") as shown:
                for box in shown.locator("[name=metric]").all():
                    box.check()
                assert not shown.query_selector_all("img, svg a, svg script, main script")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_axe_finds_no_serious_fault_in_a_live_page(scheme, browser, tmp_path):
    home = Home.at(tmp_path)
    many_trials.write(home, 10).close()
    with served(home) as server:
        for path in ("study/many/", "study/many/trial/1/"):
            with opened(browser, server, path, scheme=scheme) as shown:
                shown.evaluate("Report.redrawAll(true)")
                assert grave_faults(shown) == []
        with browsing.opened(browser, at(server, ""), scheme=scheme) as shown:
            shown.wait_for_selector("[data-part=studies]")
            live(shown)
            assert grave_faults(shown) == []
        for path in ("", "study/many/"):
            with browsing.opened(browser, at(server, path), width=360) as shown:
                shown.wait_for_selector("[data-part]")
                live(shown)
                assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")
        with opened(browser, server, "study/many/trial/1/", width=360) as shown:
            assert shown.evaluate("document.documentElement.scrollWidth <= innerWidth")
            shown.emulate_media(media="print", color_scheme="dark")
            assert shown.evaluate("getComputedStyle(document.querySelector('nav')).display") == "none"
