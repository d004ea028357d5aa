"""What a report and a live page cost: to make, to hold and to look at in Debian's Chromium.

python bench/report.py [--trials 10 1000 10000]

For each number of trials a line of the report's file, and one of the same study as `hpo serve` shows it.

make     processor time of reading the study from the ledger and of writing the page, and the page's size
paint    milliseconds from the navigation to the first contentful paint, by the browser's own clock
curves   milliseconds in which the figure of learning curves, of at most 500, is drawn
filter   milliseconds from a filter's input to the table that answers it, and to the figures in sight
memory   megabytes of the page's JavaScript heap after every figure was drawn
Of a live page `make` is the processor time in which the server has read the study, all parts of it, and these besides:
server   megabytes of the server's memory
watched  per cent of a processor that the server takes for one tab, while a trial reports twice a second
five     the same of five tabs
late     milliseconds from a report's commit until the page has it
Each study is one of bench/many_trials.py: trials of up to 50 reports of two metrics.
"""

from __future__ import annotations

import argparse
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.machine import machine
from hpo.analysis.report.importances import LATER
from hpo.text import aligned

TIMES, SECONDS = 5, 10
NEWEST = "Report.pages[0].report.curves.lines['val/loss'][0][1].at(-1)"
BEGAN = time.time()  # a value of a page has six digits
CURVES = """() => { const plot = Report.pages[0].plots.find(p => p.node.dataset.figure === 'curves');
  plot.stale = true; const begin = performance.now(); plot.refresh(true); return performance.now() - begin; }"""
FILTER = """() => new Promise(resolve => { const begin = performance.now();
  document.querySelector('[name=state]').click(); const table = performance.now() - begin;
  const look = () => Report.pages[0].plots.some(p => p.stale && p.seen) ? setTimeout(look)
    : resolve([table, performance.now() - begin]);
  look(); })"""
WHOLE = """later => typeof Report !== 'undefined' && Report.pages.length
  && Object.values(Report.pages[0].report.importances.lacking).every(why => why !== later)"""
PAINT = "performance.getEntriesByName('first-contentful-paint')[0].startTime"


def made(directory: Path, trials: int) -> tuple[Path, float]:
    """The page of a study of so many trials, and the processor time that it took."""
    from bench import many_trials
    from hpo.analysis.report import data, page
    from hpo.storage.home import Home

    home = Home.at(directory / f"home-{trials}")
    ledger = many_trials.write(home, trials)
    begin = time.process_time()
    file = page.write([data.read(ledger, home, "many")], directory / f"{trials}.html")
    took = time.process_time() - begin
    ledger.close()
    return file, took


def looked_at(browser: Any, address: str, cookies: list[Any]) -> dict[str, float]:
    """Medians of TIMES looks at the page."""
    found: dict[str, list[float]] = {"paint": [], "curves": [], "table": [], "figures": [], "memory": []}
    for _ in range(TIMES):
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        context.add_cookies(cookies)
        shown = context.new_page()
        shown.goto(address)
        shown.wait_for_selector("html[data-ready]")
        found["paint"].append(shown.evaluate(PAINT))
        found["curves"].append(shown.evaluate(CURVES))
        shown.locator("[data-filter]").scroll_into_view_if_needed()
        shown.wait_for_timeout(1000)
        table_after, figures_after = shown.evaluate(FILTER)
        found["table"].append(table_after)
        found["figures"].append(figures_after)
        shown.evaluate("Report.redrawAll(true)")
        found["memory"].append(shown.evaluate("performance.memory.usedJSHeapSize") / 1e6)
        context.close()
    return {name: median(values) for name, values in found.items()}


@contextmanager
def served(home: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The address of the pages of a home, and the process that serves them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "hpo", "serve", "--home", str(home), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().split()[-4], psutil.Process(process.pid)
        process.terminate()


def live(browser: Any, directory: Path, trials: int) -> dict[str, float]:
    """What the live page of the study costs, whose trial 0 is made to run again."""
    home = directory / f"home-{trials}"
    with reporting(home), served(home) as (address, server):
        context = browser.new_context()
        first = context.new_page()
        first.goto(address)
        first.wait_for_selector("[data-part=studies]")
        begin = sum(server.cpu_times()[:2])
        page = f"{address.partition('?')[0]}study/many/"
        first.goto(page)
        first.wait_for_function(WHOLE, arg=LATER, timeout=60_000)
        found = {"make": sum(server.cpu_times()[:2]) - begin} | looked_at(browser, page, context.cookies())
        found |= {"server": server.memory_info().rss / 1e6}
        found["watched"] = busy(server)
        for _ in range(4):
            context.new_page().goto(page)
        first.wait_for_timeout(2000)
        found["five"] = busy(server)
        first.bring_to_front()
        found["late"] = median(late(first) for _ in range(TIMES))
        context.close()
    return found


def busy(server: psutil.Process) -> float:
    """Per cent of a processor over SECONDS."""
    server.cpu_percent()
    time.sleep(SECONDS)
    return server.cpu_percent()


def late(page: Any) -> float:
    """Milliseconds by which the newest value on the page is behind its own time, when it appears."""
    before = page.evaluate(NEWEST)
    page.wait_for_function(f"before => {NEWEST} !== before", arg=before, polling=10, timeout=60_000)
    return 1000 * (time.time() - BEGAN - page.evaluate(NEWEST))


@contextmanager
def reporting(home: Path) -> Iterator[None]:
    """Trial 0 runs, and reports twice a second how long this has run."""
    from sqlalchemy import insert, update

    from hpo.ledger import Ledger
    from hpo.ledger.database import tables
    from hpo.storage.home import Home

    stop, ledger = threading.Event(), Ledger(Home.at(home).storage)

    def report() -> None:
        step = 10_000
        while not stop.wait(0.5):
            step, now = step + 1, time.time()
            with ledger.write() as connection:
                point = {"trial_id": 1, "step": step, "key": "val/loss", "fold": 0, "epoch": step, "value": now - BEGAN}
                connection.execute(insert(tables.reports).values(**point, fence=1, revision=step, at=now))
                row = {"state": "running", "revision": step, "step": step, "epoch": step}
                connection.execute(update(tables.trials).where(tables.trials.c.id == 1).values(**row))

    with ledger.write() as connection:
        connection.execute(update(tables.trials).where(tables.trials.c.id == 1).values(state="running"))
    thread = threading.Thread(target=report)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        ledger.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what a report and a live page cost.")
    parser.add_argument("--trials", type=int, nargs="+", default=[10, 1000, 10_000])
    given = parser.parse_args()
    import optuna  # noqa: F401  # its import is no cost of the report
    from playwright.sync_api import sync_playwright

    print(machine())
    heads = ["trials", "page", "make, s", "size, MB", "paint", "curves", "table", "figures", "heap, MB"]
    rows: list[list[str]] = [[*heads, "server, MB", "watched, %", "five, %", "late"]]
    with tempfile.TemporaryDirectory() as directory, sync_playwright() as playwright:
        chromium = shutil.which("chromium")
        flags = ["--no-sandbox", "--enable-precise-memory-info"]
        browser = playwright.chromium.launch(executable_path=chromium, args=flags)
        for trials in given.trials:
            file, took = made(Path(directory), trials)
            seen = looked_at(browser, file.as_uri(), [])
            cells = [f"{took:.1f}", f"{file.stat().st_size / 1e6:.2f}", *(f"{seen[name]:.0f}" for name in seen)]
            rows.append([str(trials), "file", *cells, "", "", "", ""])
            found = live(browser, Path(directory), trials)
            cells = [f"{found.pop('make'):.1f}", "", *(f"{value:.0f}" for value in found.values())]
            rows.append([str(trials), "live", *cells])
        browser.close()
    print("\n".join(aligned(rows)))


if __name__ == "__main__":
    main()
